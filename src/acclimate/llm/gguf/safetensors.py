"""Writes a GGUF file's tensors to a safetensors file, bit for bit as transformers' own loader reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch

from acclimate.llm.files.deferred_tensors import deferred, read
from acclimate.llm.gguf.tensors import GGUFTensor

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def write_safetensors(tensors: list[GGUFTensor], target: Path, advance: Callable[[int], None]) -> None:
    """Writes tensors to one safetensors file, a few rows at a time.

    Args:
        tensors: in the order of the file; each value is unpacked to float32 and rounded once.
        target: the file to write.
        advance: called with the number of bytes written since the last call.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + prod(tensor.shape) * tensor.dtype.itemsize
        table[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format requires data aligned to 8 bytes
    with target.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            whole = deferred(tensor)
            for region in tensor.pieces():
                data = read(whole, region).view(torch.uint8).numpy()  # as bytes: numpy has no bfloat16
                file.write(data.data)
                advance(data.nbytes)
