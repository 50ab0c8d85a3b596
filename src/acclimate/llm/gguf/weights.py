"""Finds the tensors of a GGUF file that hold each parameter of a transformers model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize

from acclimate.errors import CorruptModelError, UnsupportedModelError, some_of
from acclimate.host.install_hints import pip_install
from acclimate.llm.gguf.config import Architecture
from acclimate.llm.gguf.header import GGUFHeader, TensorEntry, element_count

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TensorRows:
    """Some rows of one tensor in the file."""

    source: TensorEntry
    first: int
    count: int


@dataclass(frozen=True)
class Placement:
    """The parts of the file that hold the values of one parameter, in the order of its rows."""

    parameter: str
    shape: tuple[int, ...]
    parts: tuple[TensorRows, ...]
    is_turned: bool = False
    """Whether the parameter is experts x inputs x outputs; the file has a row of inputs for each output."""
    takes_turns: bool = False
    """Whether an expert's outputs take turns between two parts."""


def stored_bytes(path: Path, tensor: TensorEntry) -> tuple[int, GGMLQuantizationType]:
    """Returns how many bytes a tensor occupies in the file, and its type.

    Raises:
        CorruptModelError: there is no such type, or a row is not a whole number of blocks.
    """
    try:
        kind = GGMLQuantizationType(tensor.ggml_type)
    except ValueError as error:
        raise CorruptModelError(
            f"{path}: tensor {tensor.name!r} has the unknown ggml type {tensor.ggml_type}; the file is "
            f"corrupt, or newer than the installed gguf package: try {pip_install('-U gguf')}"
        ) from error
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    if not tensor.shape or tensor.shape[-1] % block_values:
        raise CorruptModelError(f"{path} is corrupt: tensor {tensor.name!r} has the shape {tensor.shape}")
    return element_count(tensor) // block_values * block_bytes, kind


def check_tensors(header: GGUFHeader, file_bytes: int) -> None:
    """Checks that the file holds the data of all its tensors, in quantisations that can be unpacked.

    Raises:
        CorruptModelError: the file is shorter than its header says, or two tensors overlap.
        UnsupportedModelError: the gguf package cannot unpack a tensor's quantisation.
    """
    if not header.tensors:
        raise CorruptModelError(f"{header.path} holds no tensors")
    end, last, kinds = 0, "", set()
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        size, kind = stored_bytes(header.path, tensor)
        kinds.add(kind)
        if tensor.offset < end:
            raise CorruptModelError(f"{header.path} is corrupt: tensors {last!r} and {tensor.name!r} overlap")
        end, last = tensor.offset + size, tensor.name
    needed = header.data_start + end
    if needed > file_bytes:
        raise CorruptModelError(
            f"{header.path} is truncated: it has {file_bytes:,} bytes, its header describes {needed:,}"
        )
    if unreadable := sorted(kind.name for kind in kinds if not _can_unpack(kind)):
        raise UnsupportedModelError(
            f"{header.path} holds {', '.join(unreadable)} tensors, which the gguf package cannot unpack"
        )


def _can_unpack(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def place_tensors(header: GGUFHeader, architecture: Architecture, model: torch.nn.Module) -> list[Placement]:
    """Finds the tensors of each parameter of a model, which may be on the meta device.

    Raises:
        CorruptModelError: the file lacks a tensor or has it in another shape.
        UnsupportedModelError: the file has tensors that the model does not use.
    """
    config: Any = model.config
    kinds = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[header.architecture], config.num_hidden_layers)
    available = {tensor.name: tensor for tensor in header.tensors}
    unused = {name for name in available if not name.startswith(_READ_INTO_THE_CONFIG)}
    placements = []
    for parameter, value in model.named_parameters():  # tied ones once
        shape = tuple(value.shape)
        wanted = _sources(parameter, names)
        sources = []
        for name in wanted:
            if name not in available:
                raise CorruptModelError(f"{header.path} lacks {name}, which its model needs")
            sources.append(available[name])
        unused -= set(wanted)
        turned = architecture.turned_experts and len(shape) == 3
        expected = shape[::-1] if is_transposed(architecture, sources[0]) else shape
        expected = (shape[0], shape[2], shape[1]) if turned else expected
        takes_turns = architecture.turned_experts and len(sources) > 1
        parts = (_turns if takes_turns else _parts)(header, parameter, expected, sources)
        placements.append(Placement(parameter, shape, parts, turned, takes_turns))
    if unused:
        raise UnsupportedModelError(
            f"{header.path} holds tensors that transformers' {config.model_type} model does not have a place "
            f"for: {some_of(unused)}"
        )
    return placements


# Scaling factors of the rotary embedding, which belong in transformers' config.
_READ_INTO_THE_CONFIG = ("rope_freqs.", "rope_factors_")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_HEAD_NORM = re.compile(r"\.([qk])_layernorm\.norms\.(\d+)\.weight$")
_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(_bias)?$")
_PARTS_OF_EXPERTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


def _sources(parameter: str, names: Any) -> list[str]:
    """Returns the names of the file's tensors that hold a parameter."""
    layer = _LAYER.search(parameter)
    if layer is not None and (experts := _EXPERTS.search(parameter)):
        kind, parts = ("bias" if experts[2] else "weight"), _PARTS_OF_EXPERTS[experts[1]]
        return [f"blk.{layer[1]}.ffn_{part}_exps.{kind}" for part in parts]
    if layer is not None and (norm := _HEAD_NORM.search(parameter)):
        return [f"blk.{layer[1]}.attn_{norm[1]}_norm.weight"]
    name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise UnsupportedModelError(f"llama.cpp has no name for the parameter {parameter!r}")
    return [name if name.endswith((".weight", ".bias")) else f"{name}.weight"]


def _parts(
    header: GGUFHeader, parameter: str, shape: tuple[int, ...], sources: list[TensorEntry]
) -> tuple[TensorRows, ...]:
    rows = [prod(source.shape[:-1]) for source in sources]
    if norm := _HEAD_NORM.search(parameter):  # all heads' norms are one tensor
        head = int(norm[2])
        _require_shape(header, sources[0], head < rows[0] and sources[0].shape[1:] == shape, shape)
        return (TensorRows(sources[0], head, 1),)
    if len(sources) == 1:
        fits = _without_ones(sources[0].shape) == _without_ones(shape)
        _require_shape(header, sources[0], fits, shape)
        return (TensorRows(sources[0], 0, rows[0]),)
    experts, both, width = shape  # gate and up of each expert are one matrix
    rows_of_source = both // len(sources)
    for source in sources:
        _require_shape(
            header, source, source.shape == (experts, rows_of_source, width), (experts, rows_of_source, width)
        )
    return tuple(
        TensorRows(source, expert * rows_of_source, rows_of_source)
        for expert in range(experts)
        for source in sources
    )


def _turns(
    header: GGUFHeader, _parameter: str, shape: tuple[int, ...], sources: list[TensorEntry]
) -> tuple[TensorRows, ...]:
    experts, both, *inputs = shape
    half = (experts, both // len(sources), *inputs)
    for source in sources:
        _require_shape(header, source, source.shape == half, half)
    return tuple(TensorRows(source, 0, prod(half[:-1])) for source in sources)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _require_shape(header: GGUFHeader, tensor: TensorEntry, fits: bool, shape: tuple[int, ...]) -> None:
    if not fits:
        raise CorruptModelError(
            f"{header.path}: tensor {tensor.name!r} has the shape {tensor.shape}, its model needs {shape}"
        )


def is_transposed(architecture: Architecture, tensor: TensorEntry) -> bool:
    """Whether transformers stores a weight as (inputs, outputs), and the file as (outputs, inputs)."""
    part, _, kind = tensor.name.rpartition(".")
    return kind == "weight" and part.rpartition(".")[2] in architecture.transposed


def rotary_order(architecture: Architecture, tensor: TensorEntry, heads: Mapping[str, int]) -> Array | None:
    """Returns the stored output for each output of transformers' tensor; ``None``: the same order."""
    if not architecture.rotary_rows_interleaved:
        return None
    outputs = tensor.shape[0]
    for name, count in ((".attn_q.", heads["query"]), (".attn_k.", heads["key"])):
        if name in tensor.name:
            if outputs % (2 * count):
                raise CorruptModelError(
                    f"tensor {tensor.name!r} has {outputs} rows, which cannot be divided among {count} heads"
                )
            return np.arange(outputs).reshape(count, outputs // count // 2, 2).swapaxes(1, 2).reshape(-1)
    return None
