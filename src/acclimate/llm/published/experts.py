"""Experts that are quantised in their files: MXFP4, which has all of a layer's in one tensor, and others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from acclimate.errors import CorruptModelError
from acclimate.llm.files.deferred_tensors import Source
from acclimate.llm.files.matrix_parts import MatrixPart, matrix_parts
from acclimate.llm.files.regions import Region
from acclimate.llm.kernels import PackedStack
from acclimate.llm.kernels.formats import BLOCK_COLUMNS
from acclimate.llm.published.numbers import read, require_dtype, require_shape
from acclimate.llm.published.packing import Packed, pack_part, quantised_parts

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BYTES = BLOCK_COLUMNS // 2


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

    If ``is_turned``, they are experts x inputs x outputs.

    Returns:
        The packed weights, and the largest relative error of an expert's values. ``None`` if the weights are
        something else, or if the experts need different weight formats.
    """
    if is_turned:
        parts = matrix_parts(tensor, lambda source: isinstance(source, MXFP4Experts), is_turned=True)
        return None if parts is None else _pack_mxfp4(parts)
    found: list[Packed] = []
    for number, part in enumerate(quantised_parts(tensor) or ()):
        found.append(pack_part(part, f"{name}[{number}]", where))
        if found[-1].weight.format != found[0].weight.format:
            return None
    if not found:
        return None
    data = torch.stack([packed.weight.data for packed in found])
    stack = PackedStack(found[0].weight.format, data, found[0].weight.shape)
    return stack, max(packed.error for packed in found)


def _pack_mxfp4(experts: list[MatrixPart]) -> tuple[PackedStack, float] | None:
    """Packs outputs and inputs of experts; ``None``: the inputs are no whole blocks."""
    cuts = (place for part in experts for columns in part.columns for place in columns)
    if not experts or any(place % BLOCK_COLUMNS for place in cuts):
        return None
    read_parts = [_read_mxfp4(part) for part in experts]
    blocks, scales = (torch.cat(tensors) for tensors in zip(*read_parts, strict=True))
    return PackedStack.from_mxfp4(blocks, scales, is_turned=True), 0.0


def _read_mxfp4(part: MatrixPart) -> tuple[Tensor, Tensor]:
    """Returns the blocks and the scales of an expert's outputs and inputs."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    groups = [(start // BLOCK_COLUMNS, stop // BLOCK_COLUMNS) for start, stop in part.columns]
    for source, first, last in part.rows:
        own = cast(MXFP4Experts, source)
        expert, begin = divmod(first, own.shape[2])
        rows = (expert, expert + 1), (begin, begin + last - first)
        found[0].append(torch.cat([read(own.blocks, (*rows, some, (0, _BYTES))) for some in groups], 2))
        found[1].append(torch.cat([read(own.scales, (*rows, some)) for some in groups], 2))
    return torch.cat(found[0], 1), torch.cat(found[1], 1)
