"""Experts that are quantised in their files: MXFP4, which has all of a layer's in one tensor, and others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from acclimate.errors import CorruptModelError
from acclimate.llm.files.deferred_tensors import DeferredTensor, Region, Source
from acclimate.llm.files.matrix_parts import MatrixPart, matrix_part, operator_arguments, same_values
from acclimate.llm.kernels import PackedStack
from acclimate.llm.kernels.formats import BLOCK_COLUMNS
from acclimate.llm.published.numbers import read, require_dtype, require_shape
from acclimate.llm.published.packing import Packed, pack_part, quantised_part

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BYTES = BLOCK_COLUMNS // 2

_aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class MXFP4Experts:
    """Experts x inputs x outputs, of which a file has blocks of 32 inputs and their exponents by outputs."""

    name: str
    blocks: Source
    """Experts x outputs x blocks x 16 bytes of two codes."""
    scales: Source
    """Experts x outputs x blocks: exponents, less 127."""
    kind: str = "MXFP4"
    stored_bits: float = 4.25
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        for source in (self.blocks, self.scales):
            require_dtype(source, lambda dtype: dtype == torch.uint8, "torch.uint8")
        shape = tuple(self.blocks.shape)
        if len(shape) != 4 or shape[3] != _BYTES:
            raise CorruptModelError(
                f"the tensor {self.blocks.name} is of shape {list(shape)}, not experts x outputs x blocks x "
                f"{_BYTES}"
            )
        require_shape(self.scales, shape[:3], f"its blocks are of shape {list(shape)}")
        object.__setattr__(self, "shape", (shape[0], shape[2] * BLOCK_COLUMNS, shape[1]))

    def read_into(self, region: Region, out: Tensor) -> None:
        """Unpacks a region."""
        experts, inputs, outputs = region
        groups = (inputs[0] // BLOCK_COLUMNS, -(-inputs[1] // BLOCK_COLUMNS))
        blocks = read(self.blocks, (experts, outputs, groups, (0, _BYTES)))
        exponents = read(self.scales, (experts, outputs, groups)).int() - 127
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
        values = torch.ldexp(torch.tensor(_FP4)[codes.long()], exponents.unsqueeze(-1)).flatten(-2)
        first = groups[0] * BLOCK_COLUMNS
        out.copy_(values[..., inputs[0] - first : inputs[1] - first].transpose(1, 2))


def pack_experts(
    tensor: Tensor, name: str, where: str, *, is_turned: bool
) -> tuple[PackedStack, float] | None:
    """Packs the deferred weights of experts that are quantised in their files.

    Args:
        tensor: the weights of all experts.
        name: the parameter's name, for messages.
        where: the folder, for messages.
        is_turned: whether it is experts x inputs x outputs.

    Returns:
        The packed weights, and the largest relative error of an expert's values. ``None`` if the weights are
        something else, or if the experts need different weight formats.
    """
    if is_turned:
        found_part = matrix_part(tensor, lambda s: isinstance(s, MXFP4Experts), row_dim=2, column_dim=1)
        return None if found_part is None else _pack_mxfp4(found_part)
    found: list[Packed] = []
    for number in range(tensor.shape[0]):
        matrix = _expert(tensor, number)
        part = None if matrix is None else quantised_part(matrix)
        if part is None:
            return None
        found.append(pack_part(part, f"{name}[{number}]", where))
        if found[-1].weight.format != found[0].weight.format:
            return None
    if not found:
        return None
    data = torch.stack([each.weight.data for each in found])
    stack = PackedStack(found[0].weight.format, data, found[0].weight.shape)
    return stack, max(each.error for each in found)


def _pack_mxfp4(part: MatrixPart) -> tuple[PackedStack, float] | None:
    """Packs outputs and inputs of experts; ``None``: the inputs are no whole blocks."""
    if any(place % BLOCK_COLUMNS for columns in part.columns for place in columns):
        return None
    ranges = [(start // BLOCK_COLUMNS, stop // BLOCK_COLUMNS) for start, stop in part.columns]

    def taken(of: Callable[[Any], Source], *rest: tuple[int, int]) -> Tensor:
        pieces = [
            torch.cat(
                [read(of(s), ((0, s.shape[0]), (start, stop), columns, *rest)) for columns in ranges], 2
            )
            for s, start, stop in part.rows
        ]
        return torch.cat(pieces, 1)

    blocks, scales = taken(lambda s: s.blocks, (0, _BYTES)), taken(lambda s: s.scales)
    return PackedStack.from_mxfp4(blocks, scales, is_turned=True), 0.0


def _expert(tensor: Tensor, number: int) -> Tensor | None:
    """Returns one matrix of a deferred stack, if it can be told from the others."""
    tensor = same_values(tensor)
    if not isinstance(tensor, DeferredTensor) or tensor.dim() != 3:
        return None
    arguments = operator_arguments(tensor) if tensor.operator is not None else ()
    if tensor.operator is _aten.stack.default and arguments[1] % 3 == 0:
        return arguments[0][number]  # type: ignore[no-any-return]
    if tensor.operator is _aten.cat.default and arguments[1] % 3 != 0:
        parts = [_expert(part, number) for part in arguments[0]]
        matrices = [part for part in parts if part is not None]
        return torch.cat(matrices, arguments[1] % 3 - 1) if len(matrices) == len(parts) else None
    if tensor.operator is _aten.slice.Tensor and arguments[1] % 3 != 0 and arguments[4] == 1:
        matrix = _expert(arguments[0], number)
        dim = arguments[1] % 3 - 1
        start, stop, _ = slice(arguments[2], arguments[3]).indices(arguments[0].shape[dim + 1])
        return None if matrix is None else matrix.narrow(dim, start, stop - start)
    return None
