"""Tensors that are computed only when, and only where, their values are needed.

A deferred tensor starts as a tensor in a file. Operators on deferred tensors compute only shapes and are
recorded, so that code for whole checkpoints, such as transformers' conversions of old ones, runs unchanged
and reads nothing. :func:`read` then reads one region of a result: slicing, concatenating, stacking and
transposing read only the needed region of their inputs. The inputs of any other operator are read whole, so
an unknown operator costs memory but never gives a wrong value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_map

from acclimate.host import huge_pages
from acclimate.llm.files.regions import Region, regroup

logger = logging.getLogger("acclimate.llm")

_TEMPORARY_BYTES = 8 << 20
"""The most bytes of another dtype that are read before they are converted."""
_REGION_BYTES = 2 << 20
"""What is read at a time, and then used while it is in the cache."""


class Source(Protocol):
    """A tensor in a file."""

    @property
    def name(self) -> str:
        """The tensor's name in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        """Reads a region into a CPU tensor of the region's shape, which may have any strides."""


class DeferredTensor(torch.Tensor):
    """A tensor whose values are read by :func:`read`.

    It reports contiguous memory on the host, since strides mean nothing before it is read.
    """

    source: Source | None
    operator: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    output: int | None
    """Which of the operator's outputs this is, if it has several."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype) -> DeferredTensor:
        """Makes a tensor without memory."""
        made: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device("cpu"), requires_grad=False
        )
        made.source, made.operator, made.arguments, made.options, made.output = None, None, (), {}, None
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        told = self.source.name if self.source is not None else str(self.operator)
        return f"DeferredTensor({told}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _record(func, args, kwargs or {})


def deferred(source: Source) -> DeferredTensor:
    """Returns a tensor of a file as a deferred tensor."""
    made = DeferredTensor(source.shape, source.dtype)
    made.source = source
    return made


def sources(tensor: torch.Tensor) -> Iterator[Source]:
    """Yields the files' tensors from which a tensor is computed; may yield a tensor several times."""
    if isinstance(tensor, DeferredTensor):
        if tensor.source is not None:
            yield tensor.source
        for leaf in tree_flatten((tensor.arguments, tensor.options))[0]:
            if isinstance(leaf, torch.Tensor):
                yield from sources(leaf)


def operator_arguments(tensor: DeferredTensor) -> tuple[Any, ...]:
    """Returns an operator's arguments by position, with defaults for omitted ones."""
    given = dict(
        zip((argument.name for argument in tensor.operator._schema.arguments), tensor.arguments, strict=False)
    )
    given |= tensor.options
    return tuple(
        given.get(argument.name, argument.default_value) for argument in tensor.operator._schema.arguments
    )


# -- recording ---------------------------------------------------------------------------------------

_aten = torch.ops.aten
_EMPTY = (_aten.empty_like.default, _aten.new_empty.default)


def _record(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if func is _aten.equal.default:
        return _equal(args[0], args[1])
    if func in _EMPTY:
        return func(*tree_map(_host, args), **{"device": "cpu", **options})
    # A tensor's device is decided when it is read.
    recorded = {
        name: option for name, option in options.items() if name not in ("device", "pin_memory", "layout")
    }
    if func._schema.is_mutable:
        raise NotImplementedError(f"{func} would change a deferred tensor in place; read it first")
    results = func(*tree_map(_on_meta, args), **tree_map(_on_meta, recorded))

    def wrap(result: torch.Tensor, output: int | None) -> DeferredTensor:
        made = DeferredTensor(result.shape, result.dtype)
        made.operator, made.arguments, made.options, made.output = func, args, recorded, output
        return made

    if isinstance(results, torch.Tensor):
        return wrap(results, None)
    if isinstance(results, (list, tuple)) and all(isinstance(output, torch.Tensor) for output in results):
        return type(results)(wrap(output, index) for index, output in enumerate(results))
    return func(*tree_map(_whole, args), **tree_map(_whole, options))


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value


def _host(value: Any) -> Any:
    """Returns a CPU tensor of the same shape and dtype, which takes no memory until it is written."""
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, DeferredTensor) else value


def _whole(value: Any) -> Any:
    return read(value) if isinstance(value, DeferredTensor) else value


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compares in pieces, because both may be large: a file can hold tied weights twice."""
    if first.shape != second.shape:
        return False
    if set(map(id, sources(first))) == set(map(id, sources(second))) and first is second:
        return True
    region = whole_region(first)
    return all(
        torch.equal(read(first, piece), read(second, piece))
        for piece in _pieces(region, max(first.dtype.itemsize, second.dtype.itemsize))
    )


# -- reading -----------------------------------------------------------------------------------------


def whole_region(tensor: torch.Tensor) -> Region:
    """Returns the region of all elements."""
    return tuple((0, size) for size in tensor.shape)


def read(tensor: torch.Tensor, region: Region | None = None) -> torch.Tensor:
    """Returns a region of a tensor, on the host, and contiguous."""
    region = whole_region(tensor) if region is None else region
    out = torch.empty(_shape(region), dtype=tensor.dtype)
    huge_pages.request(out)
    read_into(tensor, region, out)
    return out


def regions(tensor: torch.Tensor) -> list[Region]:
    """Divides a tensor into regions of a few megabytes to read one by one; one, if that took longer."""
    whole, origin = whole_region(tensor), same_values(tensor)
    source = origin.source if isinstance(origin, DeferredTensor) else None
    if source is None or not getattr(source, "has_rows", False):
        return [whole]
    return list(_pieces(whole, tensor.dtype.itemsize, _REGION_BYTES))


def same_values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the deferred tensor whose values a deferred tensor has, perhaps in another dtype."""
    while isinstance(tensor, DeferredTensor) and _READERS.get(tensor.operator) in (
        _read_same,
        _read_converted,
    ):
        tensor = tensor.arguments[0]
    return tensor


def read_into(tensor: torch.Tensor, region: Region, out: torch.Tensor) -> None:
    """Writes a region of a tensor to a tensor of the region's shape and the tensor's dtype."""
    if out.numel() == 0:
        return
    if not isinstance(tensor, DeferredTensor):
        out.copy_(cut(tensor, region))
    elif tensor.source is not None:
        tensor.source.read_into(region, out)
    else:
        _READERS.get(tensor.operator, _read_all_inputs)(tensor, region, out)


def _shape(region: Region) -> list[int]:
    return [stop - start for start, stop in region]


def cut(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Returns a region of a tensor that is in memory, as a view."""
    for dim, (start, stop) in enumerate(region):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _pieces(region: Region, item_bytes: int, most_bytes: int = _TEMPORARY_BYTES) -> Iterator[Region]:
    """Divides a region along its longest dimensions into pieces of a few megabytes."""
    if prod(_shape(region)) * item_bytes <= most_bytes or not region:
        yield region
        return
    dim = next(index for index, (start, stop) in enumerate(region) if stop - start > 1)
    start, stop = region[dim]
    rows = max(1, (stop - start) * most_bytes // (prod(_shape(region)) * item_bytes))
    for first in range(start, stop, rows):
        piece = (*region[:dim], (first, min(first + rows, stop)), *region[dim + 1 :])
        if rows == 1:
            yield from _pieces(piece, item_bytes, most_bytes)
        else:
            yield piece


def _replaced(region: Region, dim: int, bounds: tuple[int, int]) -> Region:
    return (*region[:dim], bounds, *region[dim + 1 :])


def _read_same(tensor: DeferredTensor, region: Region, out: torch.Tensor) -> None:
    read_into(tensor.arguments[0], region, out)


def _read_converted(tensor: DeferredTensor, region: Region, out: torch.Tensor) -> None:
    origin = tensor.arguments[0]
    if origin.dtype == tensor.dtype:
        read_into(origin, region, out)
        return
    for piece in _pieces(region, origin.dtype.itemsize):
        inside = tuple((at - first, end - first) for (at, end), (first, _) in zip(piece, region, strict=True))
        cut(out, inside).copy_(read(origin, piece))


def _read_joined(tensor: DeferredTensor, region: Region, out: torch.Tensor) -> None:
    parts = [
        part for part in tensor.arguments[0] if part.dim() == tensor.dim()
    ]  # torch.cat ignores empty vectors
    dim = operator_arguments(tensor)[1] % tensor.dim()
    (start, stop), offset = region[dim], 0
    for part in parts:
        size = part.shape[dim]
        first, last = max(start, offset), min(stop, offset + size)
        if first < last:
            inside = _replaced(region, dim, (first - offset, last - offset))
            _converted_into(part, inside, out.narrow(dim, first - start, last - first))
        offset += size


def _converted_into(part: torch.Tensor, region: Region, out: torch.Tensor) -> None:
    if part.dtype == out.dtype:
        read_into(part, region, out)
    else:
        out.copy_(read(part, region))


def _read_stacked(tensor: DeferredTensor, region: Region, out: torch.Tensor) -> None:
    dim = operator_arguments(tensor)[1] % tensor.dim()
    start, stop = region[dim]
    inside = (*region[:dim], *region[dim + 1 :])
    for index in range(start, stop):
        _converted_into(tensor.arguments[0][index], inside, out.select(dim, index - start))


def _read_sliced(tensor: DeferredTensor, region: Region, out: torch.Tensor) -> None:
    origin, dim, first, last, step = operator_arguments(tensor)
    dim %= origin.dim()
    begin, _, _ = slice(first, last).indices(origin.shape[dim])
    start, stop = region[dim]
    if step == 1:
        read_into(origin, _replaced(region, dim, (begin + start, begin + stop)), out)
        return
    covering = _replaced(region, dim, (begin + start * step, begin + (stop - 1) * step + 1))
    out.copy_(read(origin, covering)[(*[slice(None)] * dim, slice(None, None, step))])


def _read_split(tensor: DeferredTensor, region: Region, out: torch.Tensor) -> None:
    origin, sizes, dim = operator_arguments(tensor)
    dim, index = dim % origin.dim(), tensor.output or 0
    offset = index * sizes if isinstance(sizes, int) else sum(sizes[:index])
    start, stop = region[dim]
    read_into(origin, _replaced(region, dim, (offset + start, offset + stop)), out)


def _read_row(origin: torch.Tensor, dim: int, index: int, region: Region, out: torch.Tensor) -> None:
    dim, index = dim % origin.dim(), index % origin.shape[dim % origin.dim()]
    read_into(origin, (*region[:dim], (index, index + 1), *region[dim:]), out.unsqueeze(dim))


def _read_selected(tensor: DeferredTensor, region: Region, out: torch.Tensor) -> None:
    origin, dim, index = operator_arguments(tensor)
    _read_row(origin, dim, index, region, out)


def _read_unbound(tensor: DeferredTensor, region: Region, out: torch.Tensor) -> None:
    origin, dim = operator_arguments(tensor)
    _read_row(origin, dim, tensor.output or 0, region, out)


def _read_permuted(tensor: DeferredTensor, region: Region, out: torch.Tensor) -> None:
    origin, rank = tensor.arguments[0], tensor.dim()
    if tensor.operator is _aten.permute.default:
        order = [int(dim) % rank for dim in tensor.arguments[1]]
    elif tensor.operator is _aten.t.default:
        order = list(range(rank))[::-1]
    else:
        order = list(range(rank))
        first, second = (int(dim) % rank for dim in tensor.arguments[1:3])
        order[first], order[second] = order[second], order[first]
    back = [order.index(dim) for dim in range(rank)]
    read_into(origin, tuple(region[dim] for dim in back), out.permute(back))


def _read_reshaped(tensor: DeferredTensor, region: Region, out: torch.Tensor) -> None:
    """Reads the region of the original shape that covers the wanted region; the element order is the same."""
    origin = tensor.arguments[0]
    plan = regroup(tuple(origin.shape), tuple(tensor.shape), region)
    if plan.is_exact and out.is_contiguous():
        read_into(origin, plan.covering, out.view(_shape(plan.covering)))
        return
    values = read(origin, plan.covering).reshape(plan.grouped)
    for dim, (start, stop) in enumerate(plan.within):
        values = values.narrow(dim, start, stop - start)
    out.copy_(cut(values.reshape(plan.opened), plan.inside))


def _read_all_inputs(tensor: DeferredTensor, region: Region, out: torch.Tensor) -> None:
    names = ", ".join(sorted({source.name for source in sources(tensor)})[:3])
    logger.info("reading all of %s: %s cannot be applied to a part", names, tensor.operator)
    result = tensor.operator(*tree_map(_whole, tensor.arguments), **tree_map(_whole, tensor.options))
    out.copy_(cut(result if tensor.output is None else result[tensor.output], region))


_READERS: dict[Any, Callable[[DeferredTensor, Region, torch.Tensor], None]] = {
    _aten.detach.default: _read_same,
    _aten.alias.default: _read_same,
    _aten.clone.default: _read_same,
    _aten.lift_fresh.default: _read_same,
    _aten._to_copy.default: _read_converted,
    _aten.cat.default: _read_joined,
    _aten.stack.default: _read_stacked,
    _aten.slice.Tensor: _read_sliced,
    _aten.split.Tensor: _read_split,
    _aten.split_with_sizes.default: _read_split,
    _aten.select.int: _read_selected,
    _aten.unbind.int: _read_unbound,
    _aten.transpose.int: _read_permuted,
    _aten.permute.default: _read_permuted,
    _aten.t.default: _read_permuted,
    _aten.view.default: _read_reshaped,
    _aten._unsafe_view.default: _read_reshaped,
    _aten._reshape_alias.default: _read_reshaped,
    _aten.squeeze.default: _read_reshaped,
    _aten.squeeze.dim: _read_reshaped,
    _aten.squeeze.dims: _read_reshaped,
    _aten.unsqueeze.default: _read_reshaped,
}
