"""The code of each of several communicating processes, one function for each topic."""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import torch
from torch import distributed

from acclimate_conformance.checks.assertions import is_host, short
from acclimate_conformance.checks.communication import buffers, handles, options, training, walks
from acclimate_conformance.checks.communication.observer import Observer
from acclimate_conformance.checks.dtypes.exactness import extremes, same_bits

_LARGE = 1_300_001
_AGAIN_S = 15
_COMPLETED_S = 20


def collectives(here: Observer) -> None:
    for dtype in (torch.float32, *here.accelerator.supported_dtypes(), torch.int64):
        of = f"of {short(dtype)}"
        total = float(sum(r + 1 for r in here.ranks))
        reduced = here.tensor(here.number + 1, 2, dtype=dtype)
        distributed.all_reduce(reduced)
        here.same(reduced, [total, 2.0 * here.count], f"all_reduce {of}")
        highest = here.tensor(here.number + 1, dtype=dtype)
        distributed.all_reduce(highest, op=distributed.ReduceOp.MAX)
        here.same(highest, [float(here.count)], f"all_reduce with MAX {of}")
        later = here.tensor(here.number + 1, dtype=dtype)
        distributed.all_reduce(later, async_op=True).wait()
        here.same(later, [total], f"all_reduce with async_op {of}")
        sent = here.tensor(here.number + 5, dtype=dtype)
        distributed.broadcast(sent, 0)
        here.same(sent, [5.0], f"broadcast {of}")
        gathered = [here.tensor(0, dtype=dtype) for _ in here.ranks]
        distributed.all_gather(gathered, here.tensor(here.number + 1, dtype=dtype))
        here.same(torch.cat(gathered), [float(r + 1) for r in here.ranks], f"all_gather {of}")
    distributed.barrier()


def exact_numbers(here: Observer) -> None:
    operations = distributed.ReduceOp
    large: dict[torch.dtype, float] = {
        torch.int32: 2**24 + 1,
        torch.int64: 2**60 + 3,
        torch.float32: 1 + 2.0**-20,
    }
    if torch.float64 in here.accelerator.supported_dtypes():
        large[torch.float64] = 1 + 2.0**-48
    for dtype, number in large.items():
        of = f"of {short(dtype)} with all its digits"
        # Each rank has other values, of both signs.
        rows = [[number + r, -number - 2 * r, number * (1 - 2 * r)] for r in here.ranks]
        columns = list(zip(*rows, strict=True))
        for operation, reduction in ((operations.SUM, sum), (operations.MIN, min), (operations.MAX, max)):
            reduced = here.tensor(*rows[here.number], dtype=dtype)
            distributed.all_reduce(reduced, op=operation)
            here.same(reduced, list(map(reduction, columns)), f"all_reduce with {operation} {of}")
        sent = here.tensor(*rows[here.number], dtype=dtype)
        distributed.broadcast(sent, here.count - 1)
        here.same(sent, rows[-1], f"broadcast {of}")
        gathered = [here.tensor(0, 0, 0, dtype=dtype) for _ in here.ranks]
        distributed.all_gather(gathered, here.tensor(*rows[here.number], dtype=dtype))
        for r in here.ranks:
            here.same(gathered[r], rows[r], f"part {r} of an all_gather {of}")


def values_moved(here: Observer) -> None:
    device = here.accelerator.current_device_name()
    for dtype in (*here.accelerator.supported_dtypes(), torch.int64, torch.int32, torch.uint8):
        parts = [_extremes_of(dtype, r) for r in here.ranks]
        for root in here.ranks:
            sent = parts[here.number].clone().to(device)
            distributed.broadcast(sent, root)
            here.holds(
                same_bits(sent, parts[root]),
                f"broadcast of {short(dtype)} from rank {root} turns {parts[root].tolist()} into "
                f"{sent.tolist()}",
            )
        gathered = [torch.zeros_like(parts[0], device=device) for _ in here.ranks]
        distributed.all_gather(gathered, parts[here.number].to(device))
        for found, wanted in zip(gathered, parts, strict=True):
            here.holds(
                same_bits(found, wanted),
                f"all_gather of {short(dtype)} turns {wanted.tolist()} into {found.tolist()}",
            )


def _extremes_of(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """A dtype's extremes, in another order on each rank."""
    return torch.tensor(extremes(dtype), dtype=dtype).roll(rank)


def reductions(here: Observer) -> None:
    operations = distributed.ReduceOp
    values = [[2.0 + r, 5.0 - r, -3.0 * (r + 1), 4.0] for r in here.ranks]
    columns = list(zip(*values, strict=True))
    product = [1.0] * 4
    for row in values:
        product = [a * b for a, b in zip(product, row, strict=True)]
    expected = {
        operations.SUM: [sum(column) for column in columns],
        operations.MIN: [min(column) for column in columns],
        operations.MAX: [max(column) for column in columns],
        operations.PRODUCT: product,
    }
    for operation, wanted in expected.items():
        for dtype in (torch.float32, torch.int32):
            reduced = here.tensor(*values[here.number], dtype=dtype)
            distributed.all_reduce(reduced, op=operation)
            here.same(reduced, wanted, f"all_reduce with {operation} of {short(dtype)}")

    def average() -> None:
        reduced = here.tensor(*values[here.number])
        distributed.all_reduce(reduced, op=operations.AVG)
        here.same(reduced, [sum(column) / here.count for column in columns], "all_reduce with AVG")

    here.optional("AVG", average)

    def whole() -> None:
        for dtype in (torch.int64, torch.int32):
            options.average(here, 7, dtype, f"all_reduce with AVG of {short(dtype)}")

    here.optional("AVG of integers", whole)
    _rounded(here)
    _of_bits(here)


def _rounded(here: Observer) -> None:
    """Sums of 16 bits are the nearest number, as torch.add gives it, and halves are rounded to even."""
    if here.count != 2:  # the sum of more depends on their order
        return
    for dtype in (d for d in (torch.bfloat16, torch.float16) if d in here.accelerator.supported_dtypes()):
        rows = [
            torch.randn(257, generator=torch.Generator().manual_seed(r + 1)).to(dtype) for r in here.ranks
        ]
        eps = torch.finfo(dtype).eps
        for r, hard in enumerate(
            ([1.0, 1.0, -1.0, 1 + eps, 2.0], [eps * 0.75, eps / 2, -eps * 0.75, eps / 2, eps])
        ):
            rows[r][: len(hard)] = torch.tensor(hard).to(dtype)
        reduced = rows[here.number].to(here.accelerator.current_device_name())
        distributed.all_reduce(reduced)
        here.same(reduced, rows[0] + rows[1], f"all_reduce, rounded, of {short(dtype)}")


def _of_bits(here: Observer) -> None:
    numbers = [[12 + r, 7, 255 - r, 1 << r] for r in here.ranks]
    columns = list(zip(*numbers, strict=True))
    operations = distributed.ReduceOp
    for operation, bitwise in ((operations.BAND, operator.and_), (operations.BOR, operator.or_),
                               (operations.BXOR, operator.xor)):  # fmt: skip

        def reduce(operation: Any = operation, bitwise: Callable[[int, int], int] = bitwise) -> None:
            reduced = here.tensor(*numbers[here.number], dtype=torch.int64)
            distributed.all_reduce(reduced, op=operation)
            wanted = [float(functools.reduce(bitwise, column)) for column in columns]
            here.same(reduced, wanted, f"all_reduce with {operation}")

        here.optional(str(operation), reduce)


def tensors_of_any_shape(here: Observer) -> None:
    total = sum(r + 1 for r in here.ranks)
    ramp = torch.arange(_LARGE, dtype=torch.float32) % 1000
    large = (ramp * (here.number + 1)).to(here.accelerator.current_device_name())
    distributed.all_reduce(large)
    here.same(large, ramp * total, "all_reduce of 5 MB")
    sent = (ramp + here.number).to(here.accelerator.current_device_name())
    distributed.broadcast(sent, 0)
    here.same(sent, ramp, "broadcast of 5 MB")
    parts = [here.full(_LARGE // 4, 0) for _ in here.ranks]
    distributed.all_gather(parts, here.full(_LARGE // 4, here.number + 1))
    for other in here.ranks:
        here.same(parts[other], torch.full((_LARGE // 4,), other + 1.0), f"part {other} of an all_gather")
    matrix = here.full(24, here.number + 1).view(2, 3, 4)
    distributed.all_reduce(matrix)
    here.same(matrix, torch.full((2, 3, 4), float(total)), "all_reduce of a batch of matrices")
    single = here.full(1, here.number + 1)[0]
    distributed.all_reduce(single)
    here.same(single, torch.tensor(float(total)), "all_reduce of a single number")
    part = here.full(10, here.number + 1)
    distributed.all_reduce(part[3:7])
    around = torch.full((10,), here.number + 1.0)
    around[3:7] = total
    here.same(part, around, "all_reduce of a part of a tensor")
    here.runs("broadcast or all_gather of parts of tensors", lambda: _moved_into_parts(here))
    for what, collective in _OTHERS_INTO_PARTS.items():
        here.optional(f"{what} of parts of tensors", lambda c=collective, w=what: _into_part(here, w, c))  # type: ignore[misc]

    def transposed() -> None:  # dense, though not in order; torch's own backends ignore gaps in tensors
        numbers = torch.arange(24.0)
        whole = (numbers * (here.number + 1)).to(here.accelerator.current_device_name())
        distributed.all_reduce(whole.view(4, 6).t())
        here.same(whole, numbers * total, "all_reduce of a transposed matrix")
        whole = (numbers + 100 * here.number).to(here.accelerator.current_device_name())
        distributed.broadcast(whole.view(4, 6).t(), 0)
        here.same(whole, numbers, "broadcast of a transposed matrix")

    def gathered_transposed() -> None:
        matrix = torch.arange(6.0).view(2, 3) + 10 * here.number
        gathered = [here.full(6, 0).view(3, 2) for _ in here.ranks]
        distributed.all_gather(gathered, matrix.to(here.accelerator.current_device_name()).t())
        for other in here.ranks:
            wanted = (torch.arange(6.0).view(2, 3) + 10 * other).t()
            here.same(gathered[other], wanted, f"part {other} of an all_gather of a transposed matrix")

    def to_and_from_one() -> None:
        device = here.accelerator.current_device_name()
        matrices = [torch.arange(6.0).view(2, 3) + 10 * r for r in here.ranks]
        mine = matrices[here.number]
        for root in here.ranks:
            is_root = here.number == root
            reduced = mine.to(device, copy=True).t()
            distributed.reduce(reduced, root)
            if is_root:
                wanted = torch.stack(matrices).sum(0).t()
                here.same(reduced, wanted, f"reduce of a transposed matrix to rank {root}")
            parts = [here.full(6, 0).view(2, 3).t() for _ in here.ranks]
            distributed.gather(mine.to(device).t(), parts if is_root else None, root)
            for r in here.ranks if is_root else ():
                here.same(parts[r], matrices[r].t(), f"part {r} of a gather of transposed matrices")
            received = here.full(6, 0).view(2, 3).t()
            given = [matrix.to(device).t() for matrix in matrices]
            distributed.scatter(received, given if is_root else None, root)
            here.same(received, mine.t(), f"scatter of transposed matrices from rank {root}")

    here.optional("collectives of transposed matrices", transposed)
    here.optional("reduce, gather or scatter of transposed matrices", to_and_from_one)
    here.optional("all_gather of a transposed matrix", gathered_transposed)


def _moved_into_parts(here: Observer) -> None:
    """What is received into a part of a tensor changes that part and nothing beside it."""
    for root in here.ranks:
        whole = here.full(10, here.number + 1)
        distributed.broadcast(whole[3:7], root)
        wanted = torch.full((10,), here.number + 1.0)
        wanted[3:7] = root + 1
        here.same(whole, wanted, f"broadcast from rank {root} into a part of a tensor")
    whole = here.full(4 * here.count + 3, -1)
    parts = [whole[4 * place + 2 :][:3] for place in range(here.count)]
    distributed.all_gather(parts, here.full(6, here.number + 1)[2:5])
    wanted = torch.full((len(whole),), -1.0)
    for place, r in enumerate(here.ranks):
        wanted[4 * place + 2 :][:3] = r + 1
    here.same(whole, wanted, "all_gather into parts of a tensor")


_IntoPart = Callable[[Observer, torch.Tensor, torch.Tensor], "list[float] | None"]
"""A collective that receives one number for each rank into a part of a tensor, from a part of another.

It returns what the part holds afterwards, if this rank receives anything.
"""


def _gathered_into_part(here: Observer, part: torch.Tensor, given: torch.Tensor) -> list[float] | None:
    is_root = here.number == here.ranks[-1]
    parts = list(part.split(1)) if is_root else None
    distributed.gather(given[here.number :][:1], parts, here.ranks[-1])
    return [r + 1.0 + r for r in here.ranks] if is_root else None


def _scattered_into_part(here: Observer, part: torch.Tensor, given: torch.Tensor) -> list[float]:
    parts = list(given.split(1)) if here.number == here.ranks[-1] else None
    distributed.scatter(part[:1], parts, here.ranks[-1])
    return [here.count + here.number, *[-1.0] * (here.count - 1)]


def _reduced_into_part(here: Observer, part: torch.Tensor, given: torch.Tensor) -> list[float] | None:
    part.copy_(given)
    distributed.reduce(part, here.ranks[-1])
    return _sums(here) if here.number == here.ranks[-1] else None


def _gathered_at_once_into_part(here: Observer, part: torch.Tensor, given: torch.Tensor) -> list[float]:
    distributed.all_gather_into_tensor(part, given[here.number :][:1])
    return [r + 1.0 + r for r in here.ranks]


def _reduced_and_scattered_into_part(here: Observer, part: torch.Tensor, given: torch.Tensor) -> list[float]:
    distributed.reduce_scatter_tensor(part[1:2], given)
    return [-1.0, _sums(here)[here.number], *[-1.0] * (here.count - 2)]


def _exchanged_into_part(here: Observer, part: torch.Tensor, given: torch.Tensor) -> list[float]:
    distributed.all_to_all_single(part, given)
    return [r + 1.0 + here.number for r in here.ranks]


def _sums(here: Observer) -> list[float]:
    return [sum(r + 1.0 + place for r in here.ranks) for place in here.ranks]


_OTHERS_INTO_PARTS: dict[str, _IntoPart] = {
    "gather": _gathered_into_part,
    "scatter": _scattered_into_part,
    "reduce": _reduced_into_part,
    "all_gather_into_tensor": _gathered_at_once_into_part,
    "reduce_scatter_tensor": _reduced_and_scattered_into_part,
    "all_to_all_single": _exchanged_into_part,
}


def _into_part(here: Observer, what: str, collective: _IntoPart) -> None:
    """Runs a collective from a part of a tensor into a part of another, and looks at all of both."""
    if here.count < 2:
        return
    length = here.count + 5
    whole, source = here.full(length, -1), here.full(length, -2)
    numbers = torch.arange(here.count) + here.number + 1.0
    source[2:-3] = numbers.to(source.device)
    held = collective(here, whole[3:-2], source[2:-3])
    if held is not None:
        here.same(whole, [-1.0, -1.0, -1.0, *held, -1.0, -1.0], f"{what} into a part of a tensor")
    here.same(source, [-2.0, -2.0, *numbers.tolist(), -2.0, -2.0, -2.0], f"what {what} is given")


_TAILS = (1, 3, 5, 7, 17, 33, 65, 1003, 70_001, 500_003)
"""Numbers of elements that are no multiple of a vector or a block."""


def tails(here: Observer) -> None:
    device = here.accelerator.current_device_name()
    operations = distributed.ReduceOp
    for dtype in (*here.accelerator.supported_dtypes()[:2], torch.int64):
        for length in _TAILS:
            of = f"of {length} elements of {short(dtype)}"
            rows = [((torch.arange(length) * (r + 2) + r) % 13).to(dtype) for r in here.ranks]
            stacked = torch.stack(rows)
            mine = rows[here.number].to(device)
            for name, operation, wanted in (
                ("SUM", operations.SUM, stacked.sum(0)), ("MAX", operations.MAX, stacked.amax(0)),
                ("MIN", operations.MIN, stacked.amin(0)),
            ):  # fmt: skip
                around = torch.full((length + 2,), 3, dtype=dtype, device=device)
                part = around[1:-1] if name == "SUM" else around.new_empty(length)
                part.copy_(mine)
                distributed.all_reduce(part, op=operation)
                here.same(part, wanted, f"all_reduce with {name} {of}")
                here.same(
                    around[[0, -1]], torch.full((2,), 3, dtype=dtype), f"what is beside an all_reduce {of}"
                )
            sent = mine.clone()
            distributed.broadcast(sent, here.count - 1)
            here.same(sent, rows[-1], f"broadcast {of}")
            gathered = [torch.zeros_like(mine) for _ in here.ranks]
            distributed.all_gather(gathered, mine)
            here.same(torch.cat(gathered), torch.cat(rows), f"all_gather {of}")

    def others() -> None:
        kinds = (*here.accelerator.supported_dtypes()[:2], torch.int64)
        for length, dtype in product(_TAILS[:-2], kinds):
            ramp, of = torch.arange(length * here.count) % 13, f"of {length} elements of {short(dtype)}"
            ramp = ramp.to(dtype)
            given = (ramp * (here.number + 1)).to(device)
            whole = torch.zeros_like(given)
            distributed.all_gather_into_tensor(whole, given[:length].contiguous())
            wanted = torch.cat([ramp[:length] * (r + 1) for r in here.ranks])
            here.same(whole, wanted, f"all_gather_into_tensor {of}")
            part = torch.zeros(length, dtype=dtype, device=device)
            distributed.reduce_scatter_tensor(part, given)
            mine = ramp[here.number * length :][:length]
            here.same(part, mine * sum(r + 1 for r in here.ranks), f"reduce_scatter_tensor {of}")
            received = torch.zeros_like(given)
            distributed.all_to_all_single(received, given)
            wanted = torch.cat([mine * (r + 1) for r in here.ranks])
            here.same(received, wanted, f"all_to_all_single {of}")

    def of_bytes() -> None:
        for length in (1, 3, 7, 33, 100_003):
            mine = (torch.arange(length, device=device) + 5 * here.number + 1).to(torch.uint8)
            parts = [torch.zeros_like(mine) for _ in here.ranks]
            distributed.all_gather(parts, mine)
            for r in here.ranks:
                wanted = (torch.arange(length) + 5 * r + 1).to(torch.uint8)
                here.same(parts[r], wanted, f"part {r} of an all_gather of {length} bytes")
            whole = torch.zeros(length * here.count, dtype=torch.uint8, device=device)
            distributed.all_gather_into_tensor(whole, mine)
            rows = [torch.arange(length) + 5 * r + 1 for r in here.ranks]
            here.same(whole, torch.cat(rows).to(torch.uint8), f"all_gather_into_tensor of {length} bytes")

    def nothing() -> None:
        none = torch.zeros(0, device=device)
        distributed.all_reduce(none)
        distributed.broadcast(none, 0)
        distributed.all_gather([torch.zeros(0, device=device) for _ in here.ranks], none)

    here.optional("all_gather_into_tensor, reduce_scatter_tensor or all_to_all_single", others)
    here.optional("all_gather_into_tensor", of_bytes)
    here.runs("all_reduce, broadcast or all_gather of an empty tensor", nothing)


def other_dtypes(here: Observer) -> None:
    operations = distributed.ReduceOp
    patterns = [[r % 2, 1, 0, 1 - r % 2, 1] for r in here.ranks]
    columns = list(zip(*patterns, strict=True))
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
        of = f"of {short(dtype)}"

        def moved(dtype: torch.dtype = dtype, of: str = of) -> None:
            for root in here.ranks:
                sent = here.tensor(*patterns[here.number], dtype=dtype)
                distributed.broadcast(sent, root)
                here.same(sent, patterns[root], f"broadcast {of} from rank {root}")
            gathered = [here.tensor(0, 0, 0, 0, 0, dtype=dtype) for _ in here.ranks]
            distributed.all_gather(gathered, here.tensor(*patterns[here.number], dtype=dtype))
            for r in here.ranks:
                here.same(gathered[r], patterns[r], f"part {r} of an all_gather {of}")

        def into_tensors(dtype: torch.dtype = dtype, of: str = of) -> None:
            mine = here.tensor(*patterns[here.number], dtype=dtype)
            rows = mine.new_zeros(5 * here.count)
            distributed.all_gather_into_tensor(rows, mine)
            here.same(rows, [value for row in patterns for value in row], f"all_gather_into_tensor {of}")
            received = mine.new_zeros(5 * here.count)
            distributed.all_to_all_single(received, torch.cat([mine.roll(r) for r in here.ranks]))
            turned = [torch.tensor(row).roll(here.number) for row in patterns]
            here.same(received, torch.cat(turned), f"all_to_all_single {of}")

        def reduced_into_tensors(dtype: torch.dtype = dtype, of: str = of) -> None:
            mine = here.tensor(*patterns[here.number], dtype=dtype)
            reductions: dict[Any, Callable[[Any], float]] = {
                operations.SUM: sum, operations.MAX: max, operations.MIN: min
            }  # fmt: skip
            for operation, reduction in reductions.items():
                part = mine.new_zeros(5)
                distributed.reduce_scatter_tensor(
                    part, torch.cat([mine.roll(r) for r in here.ranks]), op=operation
                )
                wanted = torch.tensor([reduction(column) for column in columns]).roll(here.number)
                wanted = wanted.clamp(max=1) if dtype is torch.bool else wanted
                here.same(part, wanted, f"reduce_scatter_tensor with {operation} {of}")

        def reduced(dtype: torch.dtype = dtype, of: str = of) -> None:
            for operation, reduction in ((operations.MAX, max), (operations.MIN, min)):
                if dtype is not torch.bool:  # to the ends of the type, of both signs
                    ends = torch.tensor(extremes(dtype), dtype=dtype)
                    rows = torch.stack([ends.roll(r) for r in here.ranks])
                    mine = rows[here.number].to(here.accelerator.current_device_name(), copy=True)
                    distributed.all_reduce(mine, op=operation)
                    furthest = rows.amax(0) if operation == operations.MAX else rows.amin(0)
                    here.same(mine, furthest, f"all_reduce with {operation} of the extremes {of}")
                found = here.tensor(*patterns[here.number], dtype=dtype)
                distributed.all_reduce(found, op=operation)
                here.same(found, list(map(reduction, columns)), f"all_reduce with {operation} {of}")
            found = here.tensor(*patterns[here.number], dtype=dtype)
            distributed.all_reduce(found)
            wanted = [sum(column) for column in columns]
            here.same(
                found, [min(1, s) for s in wanted] if dtype is torch.bool else wanted, f"all_reduce {of}"
            )

        here.optional(f"broadcast or all_gather {of}", moved)
        here.optional(f"all_gather_into_tensor or all_to_all_single {of}", into_tensors)
        here.optional(f"reduce_scatter_tensor {of}", reduced_into_tensors)
        here.optional(f"all_reduce {of}", reduced)


def roots(here: Observer) -> None:
    total = float(sum(r + 1 for r in here.ranks))
    for root in here.ranks:
        sent = here.tensor(here.number + 5, here.number)
        distributed.broadcast(sent, root)
        here.same(sent, [root + 5.0, float(root)], f"broadcast from rank {root}")

        def reduce(root: int = root) -> None:
            reduced = here.tensor(here.number + 1)
            distributed.reduce(reduced, root)
            if here.number == root:
                here.same(reduced, [total], f"reduce to rank {root}")

        def gather(root: int = root) -> None:
            parts = [here.tensor(0) for _ in here.ranks] if here.number == root else None
            distributed.gather(here.tensor(here.number + 1), parts, root)
            if parts is not None:
                here.same(torch.cat(parts), [r + 1.0 for r in here.ranks], f"gather to rank {root}")

        def scatter(root: int = root) -> None:
            received = here.tensor(0)
            parts = [here.tensor(10 * root + r) for r in here.ranks] if here.number == root else None
            distributed.scatter(received, parts, root)
            here.same(received, [10.0 * root + here.number], f"scatter from rank {root}")

        for collective in (reduce, gather, scatter):
            here.optional(collective.__name__, collective)


def groups(here: Observer) -> None:
    everyone = distributed.new_group(list(here.ranks))
    alone = [distributed.new_group([r]) for r in here.ranks]
    own = alone[here.number]
    here.holds(distributed.get_world_size(own) == 1, "a group of one rank has another size")
    here.holds(distributed.get_world_size() == here.count, "a new group changes the size of all ranks")
    total = float(sum(r + 1 for r in here.ranks))
    for _ in range(2):
        kept = here.tensor(here.number + 7)
        distributed.all_reduce(kept, group=own)
        here.same(kept, [here.number + 7.0], "all_reduce in a group of one rank")
        if here.number == 0:  # the others take no part in it
            distributed.broadcast(kept, 0, group=own)
        reduced = here.tensor(here.number + 1)
        distributed.all_reduce(reduced, group=everyone)
        here.same(reduced, [total], "all_reduce in a second group of all ranks")
        reduced = here.tensor(here.number + 1)
        distributed.all_reduce(reduced)
        here.same(reduced, [total], "all_reduce of all ranks beside other groups")
    for root in here.ranks:
        for dtype in (torch.float32, torch.int64):
            for shape in ((4,), (2, 3), (2, 1, 3, 2), ()):
                sent = (torch.arange(48)[: math.prod(shape)].reshape(shape) + 100 * here.number).to(dtype)
                sent = sent.to(here.accelerator.current_device_name())
                wanted = (torch.arange(48)[: math.prod(shape)].reshape(shape) + 100 * root).to(dtype)
                for group, of in ((everyone, "in a second group"), (None, "")):
                    moved = sent.clone()
                    distributed.broadcast(moved, root, group=group)
                    what = f"broadcast of {short(dtype)} of shape {shape} from rank {root} {of}"
                    here.same(moved, wanted, what)
    _groups_of_some(here)
    distributed.barrier(group=everyone)
    distributed.destroy_process_group(everyone)
    reduced = here.tensor(here.number + 1)
    distributed.all_reduce(reduced)
    here.same(reduced, [total], "all_reduce after another group was destroyed")


def _groups_of_some(here: Observer) -> None:
    """Groups that leave one rank out; with two ranks there is none of several."""
    if here.count < 3:
        return
    for left_out in here.ranks:
        members = [r for r in here.ranks if r != left_out]
        group = distributed.new_group(members)
        if here.number == left_out:
            continue
        options.in_a_group(here, group, members, f"in a group of the ranks {members}")


def barrier(here: Observer) -> None:
    for slow in here.ranks:
        arrived = here.folder / f"rank {slow} reached the barrier"
        if here.number == slow:
            time.sleep(options.SLOW_RANK_S)
            arrived.touch()
        distributed.barrier()
        here.accelerator.synchronize()
        here.holds(arrived.exists(), f"barrier() returns before rank {slow} reached it")
    distributed.barrier()
    if not is_host(here.accelerator):
        here.optional("barrier(device_ids=…)", lambda: _barrier_of_devices(here))


def _barrier_of_devices(here: Observer) -> None:
    """A barrier that is told the device goes through the device's own backend, and may be another one."""
    index = here.accelerator.current_device()
    for slow in here.ranks:
        arrived = here.folder / f"rank {slow} reached the barrier of devices"
        if here.number == slow:
            time.sleep(options.SLOW_RANK_S)
            arrived.touch()
        what = f"barrier(device_ids=[{index}])"
        if slow == here.ranks[-1]:
            what = f"wait() of {what} with async_op"
            work = distributed.barrier(device_ids=[index], async_op=True)
            if work is not None:
                work.wait()
        else:
            distributed.barrier(device_ids=[index])
        here.accelerator.synchronize()
        here.holds(arrived.exists(), f"{what} returns before rank {slow} reached it")


def asynchronous_collectives(here: Observer) -> None:
    total = float(sum(r + 1 for r in here.ranks))
    tensors = [here.full(1000 * (n + 1), (here.number + 1) * (n + 1)) for n in range(4)]
    works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
    sent = here.tensor(here.number + 3)
    works.append(distributed.broadcast(sent, 0, async_op=True))
    gathered = [here.tensor(0) for _ in here.ranks]
    works.append(distributed.all_gather(gathered, here.tensor(here.number + 1), async_op=True))
    for work in reversed(works):
        here.holds(work is not None, "a collective with async_op=True returns nothing to wait for")
        if work is not None:
            work.wait()
    here.accelerator.synchronize()
    for n, tensor in enumerate(tensors):
        wanted = torch.full((1000 * (n + 1),), total * (n + 1))
        here.same(tensor, wanted, f"all_reduce {n + 1} of several in flight")
    here.same(sent, [3.0], "broadcast with async_op")
    here.same(torch.cat(gathered), [r + 1.0 for r in here.ranks], "all_gather with async_op")
    here.holds(all(w.is_completed() for w in works if w is not None), "work is not complete after its wait()")
    for name in ("all_reduce", "broadcast"):
        found = here.full(1003, here.number + 1)
        if name == "all_reduce":
            begun = distributed.all_reduce(found, async_op=True)
        else:
            begun = distributed.broadcast(found, 0, async_op=True)
        until = time.monotonic() + _COMPLETED_S
        while not begun.is_completed() and time.monotonic() < until:
            time.sleep(0.001)
        here.holds(begun.is_completed(), f"{name} is not complete after {_COMPLETED_S} s without a wait()")
        wanted = torch.full((1003,), total if name == "all_reduce" else 1.0)
        here.same(found, wanted, f"{name} whose is_completed() is True")
        begun.wait()
    plain = distributed.all_reduce(here.tensor(1))
    here.holds(plain is None, "a collective without async_op returns work to wait for")


def point_to_point(here: Observer) -> None:
    if here.count < 2 or here.number > 1:
        return
    other = 1 - here.number

    def in_order() -> None:
        for sender in (0, 1):
            for turn in range(3):
                message = here.full(500 + turn, 10 * sender + turn)
                if here.number == sender:
                    distributed.send(message, other)
                else:
                    received = torch.zeros_like(message)
                    distributed.recv(received, sender)
                    here.same(received, message, f"recv of message {turn + 1} from rank {sender}")

    def into_a_part() -> None:
        for sender in (0, 1):
            whole = here.full(60, -1)
            if here.number == sender:
                distributed.send(here.full(20, sender + 7), other)
            else:
                distributed.recv(whole[30:50], sender)
                wanted = torch.full((60,), -1.0)
                wanted[30:50] = sender + 7
                here.same(whole, wanted, f"recv from rank {sender} into a part of a tensor")

    def at_once() -> None:
        received = here.full(300, 0)
        operations = [
            distributed.P2POp(distributed.isend, here.full(300, here.number + 1), other),
            distributed.P2POp(distributed.irecv, received, other),
        ]
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
        here.accelerator.synchronize()
        here.same(received, torch.full((300,), other + 1.0), "batch_isend_irecv")

    def by_tag() -> None:
        for sender in (0, 1):
            messages = {tag: here.full(400, 100 * sender + tag) for tag in (1, 2, 3)}
            if here.number == sender:
                sent = [distributed.isend(message, other, tag=tag) for tag, message in messages.items()]
                for work in sent:
                    if work is not None:
                        work.wait()
                continue
            received = {tag: torch.zeros_like(message) for tag, message in messages.items()}
            for tag in (3, 2, 1):
                distributed.recv(received[tag], sender, tag=tag)
            here.accelerator.synchronize()
            swapped = all(torch.equal(received[tag], messages[4 - tag]) for tag in messages)
            if swapped and here.is_of_a_vendor:
                here.lacking.append("tags of send and recv")
                continue
            for tag, message in messages.items():
                here.same(received[tag], message, f"recv from rank {sender} with the tag {tag}")

    def from_any() -> None:
        for sender in (0, 1):
            message = here.full(300, 7 + sender)
            if here.number == sender:
                distributed.send(message, other)
            else:
                received = torch.zeros_like(message)
                told = distributed.recv(received)
                here.holds(told == sender, f"recv from any rank says that rank {told} sent, not {sender}")
                here.same(received, message, "recv from any rank")

    here.optional("send and recv", in_order)
    here.optional("send and recv of a part", into_a_part)
    here.optional("send and recv with tags", by_tag)
    here.optional("batch_isend_irecv", at_once)
    if not here.is_of_a_vendor:  # a refused recv would leave a message on its way
        here.optional("recv from any rank", from_any)


def other_collectives(here: Observer) -> None:
    ranks, number, count = here.ranks, here.number, here.count

    def all_gather_into_tensor() -> None:
        whole = here.tensor(*[0.0] * 2 * count)
        distributed.all_gather_into_tensor(whole, here.tensor(number + 1, -number))
        here.same(whole, [float(v) for r in ranks for v in (r + 1, -r)], "all_gather_into_tensor")

    def reduce_scatter_tensor() -> None:
        part = here.tensor(0, 0)
        distributed.reduce_scatter_tensor(part, here.tensor(*[float(v) for v in range(2 * count)]))
        here.same(part, [count * (2.0 * number), count * (2.0 * number + 1)], "reduce_scatter_tensor")

    def reduce_scatter() -> None:
        part = here.tensor(0)
        distributed.reduce_scatter(part, [here.tensor(r + 1 + number) for r in ranks])
        here.same(part, [float(sum(number + 1 + r for r in ranks))], "reduce_scatter")

    def all_to_all_single() -> None:
        received = here.tensor(*[0.0] * count)
        distributed.all_to_all_single(received, here.tensor(*[float(10 * number + r) for r in ranks]))
        here.same(received, [float(10 * r + number) for r in ranks], "all_to_all_single")

    def all_to_all_single_uneven() -> None:
        given = [r + 1 for r in ranks]  # to rank r go r + 1 elements
        sent = here.tensor(*[float(100 * number + r) for r in ranks for _ in range(given[r])])
        received = here.tensor(*[0.0] * count * (number + 1))
        distributed.all_to_all_single(received, sent, [number + 1] * count, given)
        wanted = [float(100 * r + number) for r in ranks for _ in range(number + 1)]
        here.same(received, wanted, "all_to_all_single with parts of different sizes")
        # The ranks give and receive as much, and as if the parts were of one size.
        parts = [[1 + 2 * ((a + b) % count) for b in ranks] for a in ranks]
        mine, theirs = parts[number], [row[number] for row in parts]
        sent = here.tensor(*[float(100 * number + r) for r in ranks for _ in range(mine[r])])
        received = here.tensor(*[0.0] * sum(theirs))
        distributed.all_to_all_single(received, sent, theirs, mine)
        wanted = [float(100 * r + number) for r in ranks for _ in range(theirs[r])]
        here.same(received, wanted, "all_to_all_single with parts of different sizes and equal sums")

    def all_to_all() -> None:
        received = [here.tensor(0, 0) for _ in ranks]
        distributed.all_to_all(received, [here.tensor(10 * number + r, r) for r in ranks])
        here.same(
            torch.cat(received), [float(v) for r in ranks for v in (10 * r + number, number)], "all_to_all"
        )

    def all_reduce_coalesced() -> None:
        tensors = [here.full(n + 1, number + n + 1) for n in range(5)]
        distributed.all_reduce_coalesced(tensors)
        for n, tensor in enumerate(tensors):
            wanted = torch.full((n + 1,), float(sum(r + n + 1 for r in ranks)))
            here.same(tensor, wanted, f"tensor {n + 1} of an all_reduce_coalesced")

    for collective in (all_reduce_coalesced, all_gather_into_tensor, reduce_scatter_tensor, reduce_scatter,
                       all_to_all_single, all_to_all_single_uneven, all_to_all):  # fmt: skip
        here.optional(collective.__name__, collective)
    lacks = [text.partition(" ")[0] for text in here.lacking]
    here.holds(
        "all_to_all_single" in lacks or "all_to_all_single_uneven" not in lacks,
        "all_to_all_single takes no parts of different sizes",
    )


def objects(here: Observer) -> None:
    def broadcast() -> None:
        for root in here.ranks:
            things: list[Any] = [{"rank": here.number, "text": "é" * 300}, here.number]
            distributed.broadcast_object_list(things, root)
            wanted = [{"rank": root, "text": "é" * 300}, root]
            here.holds(things == wanted, f"broadcast_object_list from rank {root} gives {things!r:.80}")

    def gather() -> None:
        things: list[Any] = [None] * here.count
        distributed.all_gather_object(things, ("of rank", here.number, "x" * 50 * (here.number + 1)))
        wanted = [("of rank", r, "x" * 50 * (r + 1)) for r in here.ranks]
        here.holds(things == wanted, f"all_gather_object gives {things!r:.80}")

    here.optional("broadcast_object_list", broadcast)
    here.optional("all_gather_object", gather)


def group_made_again(here: Observer) -> None:
    _made_again(here, 1)
    if not is_host(here.accelerator):
        device = torch.device(here.accelerator.current_device_name())
        here.optional("init_process_group(device_id=…)", lambda: _made_again(here, 2, device_id=device))
    _made_again(here, 3)


def _made_again(here: Observer, turn: int, **options: Any) -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()
    name = here.accelerator.communication_backend_name()
    distributed.init_process_group(
        name,
        init_method=f"file://{here.folder / f'store {turn}'}",
        rank=here.number,
        world_size=here.count,
        timeout=timedelta(seconds=_AGAIN_S),
        **options,
    )
    told = f"process group {turn + 1}{' with ' * bool(options)}{'and '.join(options)}"
    backend = distributed.get_backend()
    here.holds(backend == name, f'get_backend() of {told} is "{backend}", not "{name}"')
    reduced, gathered = here.tensor(here.number + 1), here.tensor(*[0.0] * here.count)
    distributed.all_reduce(reduced)
    here.same(reduced, [float(sum(r + 1 for r in here.ranks))], f"all_reduce in {told}")
    distributed.barrier()
    here.optional(
        "all_gather_into_tensor",
        lambda: distributed.all_gather_into_tensor(gathered, here.tensor(here.number + 1)),
    )
    if "all_gather_into_tensor" not in "".join(here.lacking):
        here.same(gathered, [r + 1.0 for r in here.ranks], f"all_gather_into_tensor in {told}")


TOPICS: dict[Callable[[Observer], None], str] = {
    collectives: "Several processes reduce, broadcast and gather tensors of every dtype on their devices.",
    exact_numbers: "Collectives keep every digit of large integers and of floating-point numbers.",
    values_moved: "Moved data arrives unchanged, bit by bit: each dtype's largest, smallest and special "
    "values.",
    reductions: "all_reduce computes the sum, product, minimum and maximum; a backend may lack AVG.",
    tensors_of_any_shape: "Collectives are right for megabytes, slices, batches and scalars, and change "
    "nothing beside a slice; transposed tensors may be refused.",
    tails: "Collectives treat every element of tensors of any length.",
    other_dtypes: "bool and small integers are moved and reduced right, or refused.",
    roots: "Any rank can be the root of a broadcast, and of a reduce, gather or scatter if the "
    "backend has them.",
    groups: "Groups of some of the ranks, and several groups of all ranks, do not interfere.",
    barrier: "No process leaves a barrier before every process has reached it.",
    asynchronous_collectives: "Several collectives can run at once; each is complete when its wait() "
    "returns, in any order.",
    point_to_point: "Messages between two ranks arrive complete and in order, if the backend has send and "
    "recv.",
    other_collectives: "all_gather_into_tensor, reduce_scatter and all_to_all are right if the backend has "
    "them.",
    objects: "Python objects are broadcast and gathered unchanged.",
    options.every_collective_in_every_dtype: "reduce, gather, scatter, reduce_scatter_tensor, "
    "all_gather_into_tensor, all_to_all_single and batch_isend_irecv are right in each dtype, to and from "
    "each rank.",
    options.collectives_that_wait_later: "Each collective with async_op returns work, and its result is "
    "complete after wait(), in any thread.",
    options.groups_of_every_size: "Each collective, in each of its forms, is right in groups of one rank, of "
    "some and of all.",
    options.many_collectives: "Each of many collectives in a row gives the right numbers.",
    handles.works_keep_apart: "Works of one size are told apart, go on if they are dropped, complete their "
    "futures, and can be put together.",
    handles.inputs_stay_as_they_are: "Collectives and torch's functional ones change nothing that they only "
    "read; parts of lists may begin anywhere, and all_gather_into_tensor may work in place.",
    buffers.same_tensors_again: "Each collective gives the present numbers when it is called again on the "
    "same tensors.",
    buffers.results_into_columns: "Collectives that fill lists of tensors fill those with gaps between their "
    "elements, or refuse them.",
    handles.complex_numbers_move: "Both parts of complex numbers are moved and added up, if the backend "
    "takes "
    "them.",
    handles.messages_of_any_size: "Several messages at once, of unequal sizes, arrive in their order.",
    handles.calls_that_are_refused: "A call whose arguments do not fit raises, and leaves the group as it "
    "was.",
    handles.collectives_follow_the_queue: "Collectives come after what is queued before them, on any stream, "
    "whichever device is current.",
    options.groups_by_their_ranks: "A group orders its ranks, counts them from 0, and takes a root by its "
    "rank in the group.",
    options.objects_of_every_kind: "Objects and tensors in them are gathered to one rank, and scattered.",
    options.models_are_trained_together: "DistributedDataParallel averages gradients, sends buffers of "
    "rank 0, and obeys no_sync.",
    options.meshes_and_sharded_tensors: "Sharded tensors of torch.distributed.tensor are put together, "
    "redistributed and multiplied.",
    training.models_of_every_kind_train: "Models of several dtypes, with hooks, batch norms of all ranks, "
    "sharded parameters and optimizers train as in one process, where these are offered.",
    training.messages_one_by_one: "isend and irecv, messages with tags and from any rank arrive where they "
    "belong, where these are offered.",
    walks.collectives_in_any_order: "Any sequence of collectives, in several groups at once and waited "
    "for in any order, gives the right numbers, and changes nothing else.",
    options.shared_memory: "On a host, acclimate's shm backend and the op of ShareMemCommBuilder are right "
    "on tensors of any strides.",
    options.time_limits_of_groups: "A collective that another rank does not join raises after the time-out "
    "of its group.",
    group_made_again: "After destroy_process_group a process makes its process group again, and it "
    "communicates.",
    options.ranks_that_end: "If a rank ends in the middle of a collective, those of the others raise, and "
    "their devices still compute.",
}
"""In the order in which the ranks run them, each with the promise that it checks."""
