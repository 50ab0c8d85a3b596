"""Weights of every format for tests, with their values."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from acclimate.llm.kernels import GGUF_FORMATS, PackedWeight
from acclimate.llm.kernels.formats import OWN_FORMATS, WEIGHT_FORMATS

DENSE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMATS = (*DENSE, *OWN_FORMATS, *GGUF_FORMATS)


def block_size(name: str) -> tuple[int, int]:
    """The values and bytes of a block of a GGUF file."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    return values, size


def gguf_blocks(name: str, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random blocks with scales of a usual size, and their values by gguf's own code."""
    values, size = block_size(name)
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (n, k // values, size), dtype=np.uint8)
    halves = WEIGHT_FORMATS[name].gguf_scales
    for at in range(halves.start, halves.stop, 2):
        scales = (random.random((n, k // values, 1)) * 0.01 + 0.001).astype(np.float16)
        blocks[:, :, at : at + 2] = scales.view(np.uint8)
    if WEIGHT_FORMATS[name].scales == "exponent":
        blocks[:, :, 0] = random.integers(118, 124, (n, k // values))
    rows = blocks.reshape(n, -1)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name.upper()])
    return torch.from_numpy(rows), torch.from_numpy(expected).reshape(n, k)


def make(kind: str, n: int, k: int, seed: int = 0) -> tuple[PackedWeight, Tensor]:
    """A weight and its values; a format of GGUF needs whole blocks."""
    if kind in GGUF_FORMATS:
        blocks, expected = gguf_blocks(kind, n, k, seed)
        return PackedWeight.from_gguf(blocks, kind, (n, k)), expected
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05
    if kind in DENSE:
        weight = weight.to(DENSE[kind])
        return PackedWeight.dense(weight), weight.float()
    packed = PackedWeight.quantize(weight, kind)
    return packed, packed.dequantize()


def whole_columns(kind: str, k: int) -> int:
    """The columns of whole blocks that are at least ``k``."""
    values = block_size(kind)[0] if kind in GGUF_FORMATS else 1
    return -(-k // values) * values
