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
from acclimate.llm.gguf.delta_heads import DeltaHeads, Ranges, delta_leaf
from acclimate.llm.gguf.header import GGUFHeader, TensorEntry, block_number, element_count

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
    columns: Ranges = ()
    """The ranges of a stored row in the parameter's order; empty: it is the same. A vector is a row."""
    is_buffer: bool = False
    """Whether it is a buffer of the model, which stays in float32."""


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
    layers = config.num_hidden_layers
    names = _tensor_names(header, layers)
    heads = DeltaHeads.of(config, is_tiled=architecture.tiled_value_heads)
    available = {tensor.name: tensor for tensor in header.tensors}
    unused = {name for name in available if not name.startswith(_READ_INTO_THE_CONFIG)}
    unused -= _keys_of_other_layers(config)
    if architecture.has_prediction_layers:  # they come after the layers that compute a text
        unused = {name for name in unused if (block_number(name) or 0) < layers}
    stored = set(model.state_dict())
    parameters = [*model.named_parameters(), *model.named_buffers()]  # tied ones once
    placements = []
    for parameter, value in parameters:
        if parameter not in stored:
            continue
        shape = tuple(value.shape)
        wanted = _sources(parameter, names, available, joined_experts=not architecture.turned_experts)
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
        leaf = delta_leaf(parameter)
        if heads is not None and leaf is not None:
            parts, columns = _delta_parts(header, heads, leaf, expected, sources)
        else:
            parts, columns = (_turns if takes_turns else _parts)(header, parameter, expected, sources), ()
        is_buffer = not isinstance(value, torch.nn.Parameter)
        placements.append(Placement(parameter, shape, parts, turned, takes_turns, columns, is_buffer))
    if unused:
        raise UnsupportedModelError(
            f"{header.path} holds tensors that transformers' {config.model_type} model does not have a place "
            f"for: {some_of(unused)}"
        )
    return placements


def _keys_of_other_layers(config: Any) -> set[str]:
    """Returns the tensors of layers that use other layers' keys and values; files have them without a use."""
    layers, shared = config.num_hidden_layers, getattr(config, "num_kv_shared_layers", 0)
    leaves = ("attn_k", "attn_v", "attn_k_norm")
    return {f"blk.{layer}.{leaf}.weight" for layer in range(layers - shared, layers) for leaf in leaves}


def _tensor_names(header: GGUFHeader, layers: int) -> Any:
    """Returns the gguf package's table of the names that a file's architecture gives to parameters."""
    kinds = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    if header.architecture not in kinds:
        raise UnsupportedModelError(
            f"{header.path} holds a model of the architecture {header.architecture!r}, which is newer than "
            f"the installed gguf package: try {pip_install('-U gguf')}"
        )
    return get_tensor_name_map(kinds[header.architecture], layers)


# Scaling factors of the rotary embedding, which belong in transformers' config.
_READ_INTO_THE_CONFIG = ("rope_freqs.", "rope_factors_")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_HEAD_NORM = re.compile(r"\.([qk])_layernorm\.norms\.(\d+)\.weight$")
_SCALE = re.compile(r"\.router\.(per_expert_)?scale$")
_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(_bias)?$")
# transformers' ends of names that llama.cpp changes before it looks them up.
_OTHER_NAMES = ((".dt_bias", ".dt_proj.bias"), (".expert_bias", ".expert_bias.bias"))
_SCALES = {".router.scale": "ffn_gate_inp.scale", ".router.per_expert_scale": "ffn_down_exps.scale"}
_PARTS_OF_EXPERTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


def _sources(
    parameter: str, names: Any, available: Mapping[str, TensorEntry], *, joined_experts: bool
) -> list[str]:
    """Returns the names of the file's tensors that hold a parameter.

    ``joined_experts`` says whether a file can have the gates and the rest of experts in one tensor.
    """
    layer = _LAYER.search(parameter)
    if layer is not None and (experts := _EXPERTS.search(parameter)):
        kind, parts = ("bias" if experts[2] else "weight"), _PARTS_OF_EXPERTS[experts[1]]
        joined = f"blk.{layer[1]}.ffn_gate_up_exps.{kind}"
        if joined_experts and len(parts) > 1 and joined in available:
            return [joined]
        return [f"blk.{layer[1]}.ffn_{part}_exps.{kind}" for part in parts]
    if layer is not None and (scale := _SCALE.search(parameter)):
        return [f"blk.{layer[1]}.{_SCALES[scale[0]]}"]
    if layer is not None and (norm := _HEAD_NORM.search(parameter)):
        return [f"blk.{layer[1]}.attn_{norm[1]}_norm.weight"]
    for ours, theirs in _OTHER_NAMES:
        parameter = parameter.removesuffix(ours) + theirs if parameter.endswith(ours) else parameter
    name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise UnsupportedModelError(f"llama.cpp has no name for the parameter {parameter!r}")
    name = name if name.endswith((".weight", ".bias", ".ssm_a")) else f"{name}.weight"
    if name.endswith(".ssm_in.weight") and name not in available:  # only older files of Qwen3-Next have it
        block = name.removesuffix(".ssm_in.weight")
        return [f"{block}.attn_qkv.weight", f"{block}.attn_gate.weight"]
    return [name]


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


def _delta_parts(
    header: GGUFHeader, heads: DeltaHeads, leaf: str, shape: tuple[int, ...], sources: list[TensorEntry]
) -> tuple[tuple[TensorRows, ...], Ranges]:
    """Returns the parts of a parameter of a gated delta rule, and the order of their columns."""
    if len(sources) > 1:
        for source, wanted in zip(sources, heads.joined_shapes(shape[-1]), strict=True):
            _require_shape(header, source, source.shape == wanted, wanted)
        return tuple(TensorRows(sources[at], *rows) for at, *rows in heads.joined_rows()), ()
    source = sources[0]
    _require_shape(header, source, _without_ones(source.shape) == _without_ones(shape), shape)
    rows = heads.rows(leaf) or ((0, prod(source.shape[:-1])),)
    return tuple(TensorRows(source, start, stop - start) for start, stop in rows), heads.columns(leaf)


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


def is_plus_one(architecture: Architecture, tensor: TensorEntry) -> bool:
    """Whether the file has 1 + weight for a norm's weight."""
    # The norm that follows a gated delta rule is of another kind.
    is_norm = tensor.name.endswith("norm.weight") and not tensor.name.endswith(".ssm_norm.weight")
    return architecture.norms_plus_one and is_norm


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
