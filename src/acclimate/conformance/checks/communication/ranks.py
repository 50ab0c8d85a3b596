"""Two processes that communicate with the accelerator's backend, and tell what they saw by topic."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from acclimate.accelerator import Accelerator
from acclimate.conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    device_names,
    require,
    short,
)
from acclimate.conformance.checks.children import Child
from acclimate.conformance.checks.target import Subject, load
from acclimate.imports import describe

_TIMEOUT_S = 150
_SLOW_RANK_S = 0.3
# What a program can do without, told by backends that lack it with one of these types.
_LACKING = (NotImplementedError, RuntimeError, ValueError)
_LARGE = 1_300_001
_Told = dict[str, dict[str, list[str]]]


def require_topic(subject: Subject, topic: str) -> str | None:
    """Fails the check where a process saw something wrong in a topic; a note of what the backend lacks."""
    if not distributed.is_available():
        raise NotOfferedError("this torch is built without torch.distributed")
    told, refusal = _told(subject)
    if refusal:
        raise NotOfferedError(refusal)
    broken, lacking = told[topic]["broken"], told[topic]["lacking"]
    require(not broken, "; ".join(broken[:3]))
    return f"its backend lacks {', '.join(lacking)}" if lacking else None


@functools.lru_cache(maxsize=1)
def _outcome(subject: Subject) -> tuple[_Told, str, str]:
    """What the processes told; why it is not offered; how they failed."""
    try:
        return _on_ranks(subject, 2), "", ""
    except BrokenPromiseError as broken:
        if len(device_names(subject.accelerator)) > 1 or _is_host(subject):
            return {}, "", str(broken)
        why = str(broken)
    # Many backends refuse two ranks on one device; one rank shows at least that the backend is there.
    try:
        _on_ranks(subject, 1)
    except BrokenPromiseError as broken:
        return {}, "", str(broken)
    return {}, f"there is one device here, which two ranks cannot share: {why}", ""


def _told(subject: Subject) -> tuple[_Told, str]:
    told, refusal, failure = _outcome(subject)
    require(not failure, failure)
    return told, refusal


def _is_host(subject: Subject) -> bool:
    return torch.zeros(1).device.type == subject.accelerator.device_type


def _on_ranks(subject: Subject, count: int) -> _Told:
    """Runs :func:`rank` in so many processes, and joins what they tell."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for number in range(count):
            told = {"RANK": number, "WORLD_SIZE": count, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": count}
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            environment.update({name: str(value) for name, value in told.items()})
            arguments = {"number": number, "count": count, "folder": folder}
            ranks.append(Child(f"{__name__}:rank", subject.source, arguments, environment))
        try:
            results: list[_Told] = [process.result(_TIMEOUT_S) for process in ranks]
        finally:
            for process in ranks:
                process.stop()
    return {
        topic: {
            "broken": [
                f"rank {number}: {text}"
                for number, result in enumerate(results)
                for text in result[topic]["broken"]
            ],
            "lacking": results[0][topic]["lacking"],
        }
        for topic in results[0]
    }


def rank(source: str, number: int, count: int, folder: str) -> _Told:
    """What one of the processes does."""
    accelerator = load(source).accelerator
    accelerator.set_device(number % len(device_names(accelerator)))
    distributed.init_process_group(
        accelerator.communication_backend_name(),
        init_method=f"file://{Path(folder) / 'store'}",
        rank=number,
        world_size=count,
        timeout=timedelta(seconds=_TIMEOUT_S - 20),
    )
    told: _Told = {}
    try:
        for topic in (_every_dtype, _reductions, _any_shape, _roots, _groups, _barrier, _asynchronous,
                      _point_to_point, _optional, _objects):  # fmt: skip
            here = Observer(accelerator, number, count, Path(folder))
            topic(here)
            told[topic.__name__.removeprefix("_")] = {"broken": here.broken, "lacking": here.lacking}
    finally:
        distributed.destroy_process_group()
    return told


class Observer:
    """One rank: what it communicates, and what it saw.

    Nothing is raised between collectives, as the other rank would then wait for this one.
    """

    def __init__(self, accelerator: Accelerator, number: int, count: int, folder: Path) -> None:
        self.accelerator = accelerator
        self.number, self.count = number, count
        self.ranks = range(count)
        self.folder = folder
        self.broken: list[str] = []
        self.lacking: list[str] = []

    def tensor(self, *values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor on this rank's device."""
        return torch.tensor(values, dtype=dtype).to(self.accelerator.current_device_name())

    def full(self, length: int, value: float) -> torch.Tensor:
        """A long tensor on this rank's device."""
        return torch.full((length,), float(value), device=self.accelerator.current_device_name())

    def same(self, found: torch.Tensor, expected: torch.Tensor | list[float], what: str) -> None:
        """Notes a result that is not the expected one."""
        actual = found.detach().cpu().double()
        wanted = torch.as_tensor(expected).detach().cpu().double()
        if actual.shape != wanted.shape:
            self.broken.append(f"{what} gives the shape {tuple(actual.shape)}, not {tuple(wanted.shape)}")
        elif not torch.equal(actual, wanted):
            place = int((actual != wanted).flatten().nonzero()[0])
            many = f" of {actual.numel()} elements, at {place}," if actual.numel() > 8 else ""
            seen, want = (t.flatten()[place].item() if many else t.tolist() for t in (actual, wanted))
            self.broken.append(f"{what} on {self.count} ranks gives{many} {seen}, not {want}")

    def holds(self, condition: bool, seen: str) -> None:
        """Notes ``seen`` unless a condition holds."""
        if not condition:
            self.broken.append(seen)

    def optional(self, name: str, collective: Callable[[], None]) -> None:
        """A collective that a backend may lack, which all ranks then learn at once."""
        try:
            collective()
        except _LACKING as error:
            self.lacking.append(f"{name} ({describe(error, whole=True)})")


def _every_dtype(here: Observer) -> None:
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


def _reductions(here: Observer) -> None:
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


def _any_shape(here: Observer) -> None:
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

    def transposed() -> (
        None
    ):  # dense, if not in order; of tensors with gaps torch's own backends do not take care
        numbers = torch.arange(24.0)
        whole = (numbers * (here.number + 1)).to(here.accelerator.current_device_name())
        distributed.all_reduce(whole.view(4, 6).t())
        here.same(whole, numbers * total, "all_reduce of a transposed matrix")
        whole = (numbers + 100 * here.number).to(here.accelerator.current_device_name())
        distributed.broadcast(whole.view(4, 6).t(), 0)
        here.same(whole, numbers, "broadcast of a transposed matrix")

    here.optional("collectives of transposed matrices", transposed)


def _roots(here: Observer) -> None:
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


def _groups(here: Observer) -> None:
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
    distributed.barrier(group=everyone)
    distributed.destroy_process_group(everyone)
    reduced = here.tensor(here.number + 1)
    distributed.all_reduce(reduced)
    here.same(reduced, [total], "all_reduce after another group was destroyed")


def _barrier(here: Observer) -> None:
    for slow in here.ranks:
        arrived = here.folder / f"rank {slow} reached the barrier"
        if here.number == slow:
            time.sleep(_SLOW_RANK_S)
            arrived.touch()
        distributed.barrier()
        here.accelerator.synchronize()
        here.holds(arrived.exists(), f"barrier() returns before rank {slow} reached it")
    distributed.barrier()


def _asynchronous(here: Observer) -> None:
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
        here.same(tensor, wanted, f"all_reduce {n + 1} of several under way")
    here.same(sent, [3.0], "broadcast with async_op")
    here.same(torch.cat(gathered), [r + 1.0 for r in here.ranks], "all_gather with async_op")
    here.holds(all(w.is_completed() for w in works if w is not None), "work is not complete after its wait()")
    plain = distributed.all_reduce(here.tensor(1))
    here.holds(plain is None, "a collective without async_op returns work to wait for")


def _point_to_point(here: Observer) -> None:
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
                    here.same(received, message, f"message {turn + 1} from rank {sender}")

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

    here.optional("send and recv", in_order)
    here.optional("batch_isend_irecv", at_once)


def _optional(here: Observer) -> None:
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

    def all_to_all() -> None:
        received = [here.tensor(0, 0) for _ in ranks]
        distributed.all_to_all(received, [here.tensor(10 * number + r, r) for r in ranks])
        here.same(
            torch.cat(received), [float(v) for r in ranks for v in (10 * r + number, number)], "all_to_all"
        )

    for collective in (all_gather_into_tensor, reduce_scatter_tensor, reduce_scatter, all_to_all_single,
                       all_to_all_single_uneven, all_to_all):  # fmt: skip
        here.optional(collective.__name__, collective)


def _objects(here: Observer) -> None:
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
