"""The weights of a layer's experts for one product, as the native kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acclimate.errors import WeightError
from acclimate.llm.kernels import builder
from acclimate.llm.kernels.formats import GROUP_ROWS, WEIGHT_FORMATS
from acclimate.llm.kernels.packed_weight import PackedWeight


@dataclass(frozen=True)
class PackedStack:
    """Quantised weights of several experts, each as :class:`PackedWeight` has it.

    The rows of each expert begin a group, so that a kernel reads an expert without the others.
    """

    format: str
    """A name in ``csrc/formats.def``."""
    data: Tensor
    """Experts x groups x bytes of a group."""
    rows: tuple[int, int]
    """The outputs and inputs of an expert."""
    is_turned: bool = False
    """Whether the tensor that it stands for is experts x inputs x outputs."""

    def __post_init__(self) -> None:
        builder.load(self.data.device.type)

    @staticmethod
    def quantize(weight: Tensor, weight_format: str, *, is_turned: bool = False) -> PackedStack:
        """Quantises a tensor of experts, one after the other.

        Raises:
            WeightError: see :meth:`PackedWeight.quantize`.
        """
        by_rows = weight.transpose(1, 2) if is_turned else weight
        _, n, k = by_rows.shape
        found = [PackedWeight.quantize(expert.contiguous(), weight_format).data for expert in by_rows]
        return PackedStack(weight_format, torch.stack(found), (n, k), is_turned)

    @staticmethod
    def from_gguf(
        blocks: Tensor, block_type: str, experts: int, rows: tuple[int, int], *, is_turned: bool = False
    ) -> PackedStack:
        """Packs the tensor of a GGUF file that has the rows of all experts, without loss.

        ``is_turned`` says whether the model's tensor is experts x inputs x outputs.

        Raises:
            WeightError: see :meth:`PackedWeight.from_gguf`.
        """
        n, k = rows
        if n % GROUP_ROWS == 0:
            data = PackedWeight.from_gguf(blocks, block_type, (experts * n, k)).data
            data = data.view(experts, n // GROUP_ROWS, -1)
        else:
            of_experts = blocks.reshape(experts, -1)
            data = torch.stack([PackedWeight.from_gguf(b, block_type, rows).data for b in of_experts])
        return PackedStack(block_type.lower(), data, rows, is_turned)

    @staticmethod
    def from_mxfp4(blocks: Tensor, scales: Tensor, *, is_turned: bool = False) -> PackedStack:
        """Packs the two tensors that safetensors files have for weights in MXFP4, without loss.

        Args:
            blocks: experts x outputs x blocks x 16 bytes, each of two codes that follow one another.
            scales: experts x outputs x blocks, the exponents.
            is_turned: whether the model's tensor is experts x inputs x outputs.
        """
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
        # GGUF's byte has codes that are 16 columns apart.
        stored = torch.cat((scales[..., None], codes[..., :16] | codes[..., 16:] << 4), dim=-1)
        experts, n, count, _ = blocks.shape
        return PackedStack.from_gguf(stored, "mxfp4", experts, (n, 32 * count), is_turned=is_turned)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the tensor that it stands for."""
        n, k = self.rows
        return (len(self.data), k, n) if self.is_turned else (len(self.data), n, k)

    @property
    def nbytes(self) -> int:
        """The bytes of all experts."""
        return self.data.numel()

    @property
    def device(self) -> torch.device:
        """The device that holds it."""
        return self.data.device

    @property
    def number(self) -> int:
        """The format's number in native code."""
        return WEIGHT_FORMATS[self.format].number

    def expert(self, number: int) -> PackedWeight:
        """Returns the weight of one expert, which shares memory.

        Raises:
            WeightError: there is no such expert.
        """
        if not 0 <= number < len(self.data):
            raise WeightError(f"There are {len(self.data)} experts, so none has the number {number}.")
        return PackedWeight(self.format, self.data[number], self.rows)

    def linear(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Multiplies rows of ``x``, [rows, inputs], each by the weight of the expert that ``chosen`` numbers.

        The host does not learn which experts these are, so that a graph can have it. Returns [rows, outputs].
        """
        return torch.ops.acclimate.packed_experts(x, self.data, chosen, self.number, *self.rows)  # type: ignore[no-any-return]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the values of the tensor that it stands for."""
        values = torch.stack([self.expert(i).dequantize(dtype=dtype) for i in range(len(self.data))])
        return values.transpose(1, 2).contiguous() if self.is_turned else values

    def to(self, device: torch.device | str) -> PackedStack:
        """Returns the weights on another device."""
        return PackedStack(self.format, self.data.to(device), self.rows, self.is_turned)
