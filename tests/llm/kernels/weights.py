"""Weights of every scheme for tests, with their values."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from acclimate.llm.kernels import GGUF_SCHEMES, PackedWeight

DENSE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTISED = ("int8", "int4", "int5")
SCHEMES = (*DENSE, *QUANTISED, *GGUF_SCHEMES)

# Where float16 numbers are in a block.
_HALVES = {"q6_k": (208,), **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2))}


def block_size(name: str) -> tuple[int, int]:
    """The values and bytes of a block of a GGUF file."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    return values, size


def gguf_blocks(name: str, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random blocks with scales of a usual size, and their values by gguf's own code."""
    values, size = block_size(name)
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (n, k // values, size), dtype=np.uint8)
    for at in _HALVES.get(name, (0,)):
        scales = (random.random((n, k // values, 1)) * 0.01 + 0.001).astype(np.float16)
        blocks[:, :, at : at + 2] = scales.view(np.uint8)
    rows = blocks.reshape(n, -1)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name.upper()])
    return torch.from_numpy(rows), torch.from_numpy(expected).reshape(n, k)


def make(scheme: str, n: int, k: int, seed: int = 0) -> tuple[PackedWeight, Tensor]:
    """A weight and its values; a scheme of GGUF needs whole blocks."""
    if scheme in GGUF_SCHEMES:
        blocks, expected = gguf_blocks(scheme, n, k, seed)
        return PackedWeight.from_gguf(blocks, scheme, (n, k)), expected
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05
    if scheme in DENSE:
        weight = weight.to(DENSE[scheme])
        return PackedWeight.dense(weight), weight.float()
    packed = PackedWeight.quantize(weight, scheme)
    return packed, packed.dequantize()


def whole_columns(scheme: str, k: int) -> int:
    """The columns of whole blocks that are at least ``k``."""
    values = block_size(scheme)[0] if scheme in GGUF_SCHEMES else 1
    return -(-k // values) * values
