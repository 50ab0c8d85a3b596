"""Collectives of drawn tensors, run by the ranks on shared memory, on gloo, and in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

INTEGERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
DTYPES = (torch.bool, *INTEGERS, *FLOATS, *FLOAT8, *COMPLEX)

ARITHMETIC = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
MOVING = (
    "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all",
    "all_to_all_single",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One collective."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    ranks: int
    root: int
    op: str
    seed: int
    is_async: bool


def reductions_of(dtype: torch.dtype) -> tuple[str, ...]:
    """The reductions that a dtype has."""
    if dtype == torch.bool:
        return ("SUM", "PRODUCT", "MIN", "MAX", *BITWISE)
    if dtype in COMPLEX:
        return ("SUM", "AVG")  # torch.distributed refuses the others itself
    return ARITHMETIC + (BITWISE if dtype in INTEGERS else ())


@st.composite
def cases(draw: Callable[..., Any], most_ranks: int = 4) -> Case:
    """Any collective of any dtype, shape, layout and number of ranks."""
    kind = draw(st.sampled_from(REDUCING + MOVING))
    dtype = draw(st.sampled_from(DTYPES))
    ranks = draw(st.integers(2, most_ranks))
    big = st.sampled_from([(70_001,), (3, 40_000), (1 << 18,)])
    shape = draw(st.one_of(st.lists(st.integers(0, 9), max_size=3).map(tuple), big))
    return Case(
        kind=kind,
        dtype=dtype,
        shape=shape,
        layout=draw(st.sampled_from(["dense", "transposed", "strided", "offset"])),
        ranks=ranks,
        root=draw(st.integers(0, ranks - 1)),
        op=draw(st.sampled_from(reductions_of(dtype))),
        seed=draw(st.integers(0, 2**20)),
        is_async=draw(st.booleans()),
    )


def numbers(case: Case, rank: int, part: int = 0) -> torch.Tensor:
    """A rank's input, which every rank can compute."""
    generator = torch.Generator().manual_seed(case.seed * 1000 + rank * 50 + part)
    if case.dtype == torch.bool:
        return torch.randint(0, 2, case.shape, generator=generator).bool()
    if case.dtype in INTEGERS:
        return torch.randint(0, 120, case.shape, generator=generator).to(case.dtype)
    if case.dtype in COMPLEX:
        wide = torch.randn((*case.shape, 2), generator=generator, dtype=torch.float64)
        return torch.view_as_complex(wide).to(case.dtype)
    return torch.randn(case.shape, generator=generator, dtype=torch.float64).to(case.dtype)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in another order in memory."""
    if layout == "transposed" and tensor.dim() > 1:
        made = torch.empty(tensor.shape[::-1], dtype=tensor.dtype).permute(*reversed(range(tensor.dim())))
    elif layout == "strided" and tensor.dim() > 0:
        made = torch.empty((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)[..., ::2]
    elif layout == "offset":
        made = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].reshape(tensor.shape)
    else:
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
    made.copy_(tensor)
    return made


def reduced(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction in the order of the ranks; of short floats in fp32, rounded once."""
    dtype = tensors[0].dtype
    if dtype == torch.bool:
        combine = {"SUM": "logical_or", "MAX": "logical_or", "BOR": "logical_or", "BXOR": "logical_xor"}
        function = getattr(torch, combine.get(op, "logical_and"))
        return _fold(tensors, function)
    if dtype in INTEGERS:
        wide = [_as_int64(tensor) for tensor in tensors]
        total = _fold(wide, _FUNCTIONS[op])
        total = (
            torch.div(_as_int64(total.to(dtype)), len(tensors), rounding_mode="trunc")
            if op == "AVG"
            else total
        )
        return total.to(dtype)
    wide_dtype = torch.complex64 if dtype == torch.complex32 else dtype
    wide_dtype = torch.float32 if dtype in (*FLOAT8, torch.float16, torch.bfloat16) else wide_dtype
    wide = [tensor.to(wide_dtype) for tensor in tensors]
    total = _fold(wide, _FUNCTIONS[op])
    if op == "AVG" and total.is_complex():
        # torch divides complex numbers by complex ones, in ways that round differently.
        total = torch.view_as_complex(torch.view_as_real(total) / len(tensors))
    elif op == "AVG":
        total = total / len(tensors)
    return total.to(dtype)


def _as_int64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int64)


_FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _fold(
    tensors: list[torch.Tensor], function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = function(total, tensor)
    return total


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory, to compare numbers that compare with nothing."""
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
    dense.copy_(tensor.reshape(-1))
    return dense.view(torch.uint8)


def expected(case: Case, rank: int) -> list[torch.Tensor] | None:
    """What a rank has afterwards, by plain torch; ``None`` where that is not said."""
    every = [numbers(case, other) for other in range(case.ranks)]
    if case.kind == "all_reduce":
        return [reduced(every, case.op)]
    if case.kind == "reduce":
        return [reduced(every, case.op)] if rank == case.root else None
    if case.kind in ("reduce_scatter", "reduce_scatter_tensor"):
        return [reduced([numbers(case, other, rank) for other in range(case.ranks)], case.op)]
    if case.kind == "broadcast":
        return [numbers(case, case.root)]
    if case.kind in ("all_gather", "all_gather_into_tensor"):
        return every
    if case.kind == "gather":
        return every if rank == case.root else None
    if case.kind == "scatter":
        return [numbers(case, case.root, rank)]
    return [numbers(case, other, rank) for other in range(case.ranks)]


def run(case: Case, rank: int, group: Any) -> list[torch.Tensor]:
    """What a rank has after the collective."""
    options: dict[str, Any] = {"group": group, "async_op": case.is_async}
    reduction = {"op": getattr(dist.ReduceOp, case.op)}
    own = laid_out(numbers(case, rank), case.layout)
    parts = [laid_out(numbers(case, rank, part), case.layout) for part in range(case.ranks)]
    blank = [laid_out(torch.zeros(case.shape).to(case.dtype), case.layout) for _ in range(case.ranks)]
    is_root = rank == case.root
    root = dist.get_global_rank(group, case.root)
    result = [own]
    if case.kind == "all_reduce":
        work = dist.all_reduce(own, **reduction, **options)
    elif case.kind == "reduce":
        work = dist.reduce(own, root, **reduction, **options)
    elif case.kind == "broadcast":
        work = dist.broadcast(own, root, **options)
    elif case.kind == "reduce_scatter":
        result = blank[:1]
        work = dist.reduce_scatter(result[0], parts, **reduction, **options)
    elif case.kind == "reduce_scatter_tensor":
        result = blank[:1]
        work = dist.reduce_scatter_tensor(
            result[0], torch.stack(parts).reshape(_rows(case)), **reduction, **options
        )
    elif case.kind == "all_gather":
        result = blank
        work = dist.all_gather(result, own, **options)
    elif case.kind == "all_gather_into_tensor":
        whole = torch.empty(_rows(case), dtype=case.dtype)
        work = dist.all_gather_into_tensor(whole, own, **options)
        result = [part.reshape(case.shape) for part in _chunks(whole, case)]
    elif case.kind == "gather":
        result = blank
        work = dist.gather(own, result if is_root else None, root, **options)
    elif case.kind == "scatter":
        result = blank[:1]
        work = dist.scatter(result[0], parts if is_root else None, root, **options)
    elif case.kind == "all_to_all":
        result = blank
        work = dist.all_to_all(result, parts, **options)
    else:
        whole = torch.empty((case.ranks, *case.shape), dtype=case.dtype)
        work = dist.all_to_all_single(whole, torch.stack(parts), **options)
        result = list(whole.unbind())
    if work is not None:
        work.wait()
    return result


def _rows(case: Case) -> tuple[int, ...]:
    return (case.ranks * case.shape[0], *case.shape[1:]) if case.shape else (case.ranks,)


def _chunks(whole: torch.Tensor, case: Case) -> list[torch.Tensor]:
    return (
        list(whole.reshape(case.ranks, -1).unbind())
        if whole.numel()
        else [whole.reshape(case.shape)] * case.ranks
    )


def difference(case: Case, rank: int, got: list[torch.Tensor]) -> str:
    """How a rank's result differs from plain torch's; empty where it does not."""
    wanted = expected(case, rank)
    if wanted is None:
        return ""
    for number, (result, right) in enumerate(zip(got, wanted, strict=True)):
        if not torch.equal(bits(result), bits(right)):
            return (
                f"rank {rank}, tensor {number}: {result.flatten()[:6]} where {right.flatten()[:6]} is right"
            )
    return ""


def as_gloo_takes_it(case: Case) -> Case:
    """The same collective of dense tensors with elements. gloo ends the process for an output without
    dimensions."""
    return replace(case, layout="dense", shape=tuple(max(1, size) for size in case.shape) or (1,))
