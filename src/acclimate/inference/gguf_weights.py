"""GGUF tensors to safetensors, a few rows at a time, with the numbers transformers' own loader gives.

The values come from ``gguf.quants.dequantize``, as transformers' do; two things differ, neither of which
changes a bit of the result. Rows are unpacked in blocks that stay in the processor's cache (0.6 s instead of
4.3 s for a 262,144 × 640 table), and each block is written at once, so that the memory needed does not grow
with the model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize

from acclimate.errors import CorruptModelError, UnsupportedModelError
from acclimate.inference.gguf_header import GGUFHeader, TensorEntry, element_count

logger = logging.getLogger("acclimate.inference")

Array = npt.NDArray[Any]

# Architectures whose tensors differ from those of transformers only in name and in what `_values` undoes;
# each is held to its loader by a test. The others take the general path.
DIRECT_ARCHITECTURES = frozenset({"gemma2", "gemma3", "llama", "qwen2", "qwen3"})
_NORMS_OFF_BY_ONE = frozenset({"gemma2", "gemma3"})
_ROTARY_ROWS_INTERLEAVED = frozenset({"llama"})

# Values unpacked at a time: small enough to stay in the second-level cache with the intermediates.
_CHUNK_VALUES = 1 << 20

_SAFETENSORS_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class Placement:
    """Where one parameter of the model comes from."""

    parameter: str
    shape: tuple[int, ...]
    source: TensorEntry


def stored_bytes(path: Path, tensor: TensorEntry) -> tuple[int, GGMLQuantizationType]:
    """The bytes a tensor occupies in the file, and its type.

    Raises:
        CorruptModelError: no such type, or rows that are no whole number of blocks.
    """
    try:
        kind = GGMLQuantizationType(tensor.ggml_type)
    except ValueError as error:
        raise CorruptModelError(
            f"{path}: tensor {tensor.name!r} has the unknown ggml type {tensor.ggml_type}; the file is "
            "corrupt, or newer than the installed gguf package (pip install -U gguf)"
        ) from error
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    if not tensor.shape or tensor.shape[-1] % block_values:
        raise CorruptModelError(f"{path} is corrupt: tensor {tensor.name!r} has the shape {tensor.shape}")
    return element_count(tensor) // block_values * block_bytes, kind


def check_size(header: GGUFHeader, file_bytes: int) -> None:
    """Raises :class:`CorruptModelError` if the file is shorter than its header says."""
    needed = max(
        (header.data_start + t.offset + stored_bytes(header.path, t)[0] for t in header.tensors), default=0
    )
    if needed > file_bytes:
        raise CorruptModelError(
            f"{header.path} is truncated: it has {file_bytes:,} bytes, its header describes {needed:,}"
        )
    if not header.tensors:
        raise CorruptModelError(f"{header.path} holds no tensors")


def place_tensors(header: GGUFHeader, model: torch.nn.Module) -> list[Placement]:
    """Says for each parameter of a model (which may be on the meta device) which tensor fills it.

    Raises:
        CorruptModelError: the file lacks a tensor or has it in another shape.
    """
    architectures = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(architectures[header.architecture], _layers(header))
    available = {tensor.name: tensor for tensor in header.tensors}
    placements = []
    for parameter, value in model.named_parameters():  # names tied ones once
        name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        source = available.pop(name, None) if name is not None else None
        if source is None:
            raise CorruptModelError(f"{header.path} lacks {name or parameter!r}, which its model needs")
        shape = tuple(value.shape)
        if source.shape != shape:
            raise CorruptModelError(
                f"{header.path}: tensor {source.name!r} has the shape {source.shape}, its model needs {shape}"
            )
        placements.append(Placement(parameter, shape, source))
    if available:
        logger.warning(
            "%s holds tensors that transformers' model has no place for: %s",
            header.path.name,
            ", ".join(sorted(available)),
        )
    return placements


def _layers(header: GGUFHeader) -> int:
    layers = header.value(f"{header.architecture}.block_count")
    if not isinstance(layers, int) or layers < 1:
        raise CorruptModelError(f"{header.path} does not say how many layers its model has")
    return layers


def write_safetensors(
    header: GGUFHeader,
    placements: list[Placement],
    heads: Mapping[str, int],
    dtype: torch.dtype,
    target: Path,
    advance: Callable[[int], None],
) -> None:
    """Writes all parameters into one safetensors file.

    Args:
        header: The GGUF file, whose size has been checked.
        placements: Which tensor fills which parameter.
        heads: ``query`` and ``key``: the attention's head counts.
        dtype: What to store; values are unpacked to float32 and rounded to it once.
        target: The file to write.
        advance: Called with the number of bytes written since the last call.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for placement in placements:
        start, end = end, end + prod(placement.shape) * dtype.itemsize
        table[placement.parameter] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": list(placement.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for data aligned to 8 bytes
    content = np.memmap(header.path, mode="r", dtype=np.uint8)
    with target.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for placement in placements:
            for values in _values(header, content, placement.source, heads):
                _write(file, torch.from_numpy(values).to(dtype), advance)


def _write(file: BinaryIO, values: torch.Tensor, advance: Callable[[int], None]) -> None:
    data = values.contiguous().view(torch.uint8).numpy()  # numpy has no bfloat16: as bytes
    file.write(data.data)
    advance(data.nbytes)


def _values(
    header: GGUFHeader, content: Array, tensor: TensorEntry, heads: Mapping[str, int]
) -> Iterator[Array]:
    """A tensor's values in float32, in the order transformers has them, in blocks of rows."""
    size, kind = stored_bytes(header.path, tensor)
    start = header.data_start + tensor.offset
    rows = content[start : start + size].reshape(prod(tensor.shape[:-1]), -1)
    order = _row_order(header.architecture, tensor, rows.shape[0], heads)
    per_chunk = max(1, _CHUNK_VALUES // tensor.shape[-1])
    for first in range(0, rows.shape[0], per_chunk):
        chosen = slice(first, first + per_chunk) if order is None else order[first : first + per_chunk]
        try:
            # A copy, for torch refuses to wrap the read-only map that a float32 tensor would be a view of.
            values: Array = np.array(dequantize(np.ascontiguousarray(rows[chosen]), kind), dtype=np.float32)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{header.path} holds {kind.name} tensors, which the gguf package cannot unpack"
            ) from error
        if header.architecture in _NORMS_OFF_BY_ONE and tensor.name.endswith("norm.weight"):
            values -= 1  # llama.cpp stores 1 + weight
        yield values


def _row_order(architecture: str, tensor: TensorEntry, rows: int, heads: Mapping[str, int]) -> Array | None:
    """Which stored row each row of transformers' tensor is; ``None`` if they are in the same order.

    llama.cpp keeps the two halves of each head that rotary embedding mixes next to each other.
    """
    if architecture not in _ROTARY_ROWS_INTERLEAVED:
        return None
    for part, count in ((".attn_q.", heads["query"]), (".attn_k.", heads["key"])):
        if part in tensor.name:
            if rows % (2 * count):
                raise CorruptModelError(f"{tensor.name!r} has {rows} rows, which {count} heads cannot share")
            return np.arange(rows).reshape(count, rows // count // 2, 2).swapaxes(1, 2).reshape(-1)
    return None
