"""Finds the quantised matrices among the tensors of a folder, and puts each in the place of its parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from acclimate.errors import CorruptModelError, UnsupportedModelError, excerpt
from acclimate.llm.files.deferred_tensors import Source
from acclimate.llm.published.experts import MXFP4Experts
from acclimate.llm.published.numbers import (
    FLOAT8,
    ColumnWords,
    Float8,
    QuantisedMatrix,
    Reader,
    RowWords,
    WholeNumbers,
    read,
)
from acclimate.llm.published.settings import whole_number

_ACTIVATIONS = re.compile(
    r"\.(?:(?:input|output|k|v|q|kv)_(?:global_)?scale(?:_ub)?|(?:input|output|k|v)_zero_point)$"
)
"""Scales of activations and of keys and values, which are not quantised here."""


def published_tensors(settings: Mapping[str, Any], tensors: Mapping[str, Source]) -> dict[str, Source]:
    """Returns a folder's tensors with each quantised matrix as one tensor, ``….weight``.

    ``settings`` are those of :func:`~acclimate.llm.published.settings.quantization_settings`.

    Raises:
        CorruptModelError: a part is missing, or has another shape or dtype than the others need.
        UnsupportedModelError: the settings ask for something that cannot be read.
    """
    finder = _FINDERS[settings["quant_method"]](settings)
    left = {name: source for name, source in tensors.items() if not _ACTIVATIONS.search(name)}
    for name in list(left):
        if name in left and (found := finder(name, left)) is not None:
            matrix, parts = found
            for part in parts:
                left.pop(part, None)
            left[matrix.name] = matrix
    return left


Finder = Callable[[str, Mapping[str, Source]], "tuple[Source, list[str]] | None"]
"""Takes a tensor's name and all tensors; returns the matrix of which it is the main part, and its parts."""


class _Parts:
    """The tensors of one module."""

    def __init__(self, tensors: Mapping[str, Source], module: str, method: str) -> None:
        self.tensors, self.module, self.method = tensors, module, method
        self.used: list[str] = []

    def find(self, *leaves: str) -> Source | None:
        for leaf in leaves:
            name = f"{self.module}.{leaf}"
            if name in self.tensors:
                self.used.append(name)
                return self.tensors[name]
        return None

    def need(self, *leaves: str) -> Source:
        """Returns the first of some tensors that is there.

        Raises:
            CorruptModelError: there is none.
        """
        found = self.find(*leaves)
        if found is None:
            raise CorruptModelError(
                f"the model lacks the tensor {self.module}.{leaves[0]}, which a weight of {self.method} needs"
            )
        return found

    def matrix(self, reader: Reader, bits: int | str) -> tuple[QuantisedMatrix, list[str]]:
        kind = f"{self.method} of {bits} bits" if isinstance(bits, int) else f"{self.method} in {bits}"
        return QuantisedMatrix(f"{self.module}.weight", reader, kind), self.used


def _gptq(settings: Mapping[str, Any]) -> Finder:
    bits = whole_number(settings, "bits", None, (2, 4, 8))
    group_size = whole_number(settings, "group_size", 128, ())
    form = settings.get("checkpoint_format", settings.get("format", "gptq"))
    if form not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(
            f"checkpoint_format in the model's quantization_config is {excerpt(str(form), 40)!r}, and "
            "acclimate reads gptq and gptq_v2; save the model in one of these with gptqmodel"
        )
    changed = [rule for rule in settings.get("dynamic") or {} if not str(rule).startswith("-:")]
    if changed:
        raise UnsupportedModelError(
            f"the model's quantization_config gives some modules other bits or groups (dynamic: "
            f"{excerpt(str(changed[0]), 60)}), which acclimate does not read; use a copy with one setting "
            "for all modules"
        )

    return _column_words("GPTQ", bits, group_size, is_awq=False, zero_offset=1 if form == "gptq" else 0)


def _awq(settings: Mapping[str, Any]) -> Finder:
    bits = whole_number(settings, "bits", settings.get("w_bit"), (4,))
    group_size = whole_number(settings, "group_size", settings.get("q_group_size", 128), ())
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedModelError(
            f"version in the model's quantization_config is {excerpt(version, 40)!r}, and acclimate reads "
            "gemm; use a copy in that"
        )

    return _column_words("AWQ", bits, group_size, is_awq=True, zero_offset=0)


def _column_words(method: str, bits: int, group_size: int, *, is_awq: bool, zero_offset: int) -> Finder:
    """Finds matrices whose codes stand in words along their columns; in AWQ they have no order of groups."""

    def find(name: str, tensors: Mapping[str, Source]) -> tuple[Source, list[str]] | None:
        module, _, leaf = name.rpartition(".")
        if leaf != "qweight":
            return None
        parts = _Parts(tensors, module, method)
        reader = ColumnWords(
            parts.need("qweight"), parts.need("qzeros"), parts.need("scales"),
            None if is_awq else parts.find("g_idx"), bits, group_size, is_awq=is_awq, zero_offset=zero_offset,
        )  # fmt: skip
        return parts.matrix(reader, bits)

    return find


def _fp8(settings: Mapping[str, Any]) -> Finder:
    size = settings.get("weight_block_size")
    block = None if size is None else _block(size, "weight_block_size")

    def find(name: str, tensors: Mapping[str, Source]) -> tuple[Source, list[str]] | None:
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or tensors[name].dtype not in FLOAT8:
            return None
        parts = _Parts(tensors, module, "FP8")
        reader = Float8(parts.need("weight"), parts.need("weight_scale_inv", "weight_scale"), block)
        return parts.matrix(reader, 8)

    return find


def _mxfp4(settings: Mapping[str, Any]) -> Finder:
    def find(name: str, tensors: Mapping[str, Source]) -> tuple[Source, list[str]] | None:
        parameter, _, ending = name.rpartition("_")
        if ending != "blocks":
            return None
        scales = f"{parameter}_scales"
        if scales not in tensors:
            raise CorruptModelError(f"the model lacks the tensor {scales}, which a weight of MXFP4 needs")
        return MXFP4Experts(parameter, tensors[name], tensors[scales]), [name, scales]

    return find


def _block(size: Any, name: str) -> tuple[int, int]:
    is_pair = isinstance(size, (list, tuple)) and len(size) == 2
    if not is_pair or not all(type(length) is int and length > 0 for length in size):
        raise CorruptModelError(
            f"{name} in the model's quantization_config must be two whole numbers, not "
            f"{excerpt(str(size), 40)}"
        )
    return size[0], size[1]


_PLAIN_FORMATS = (
    "dense", "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision"
)  # fmt: skip


def _compressed_tensors(settings: Mapping[str, Any]) -> Finder:
    groups = _groups(settings)

    def find(name: str, tensors: Mapping[str, Source]) -> tuple[Source, list[str]] | None:
        module, _, leaf = name.rpartition(".")
        parts = _Parts(tensors, module, "compressed-tensors")
        if leaf == "weight_packed":
            bits = whole_number(_weights_of(module, groups), "num_bits", None, (2, 4, 8))
            return parts.matrix(_row_words(parts, bits), bits)
        if leaf != "weight" or f"{module}.weight_scale" not in tensors:
            return None
        weight = parts.need("weight")
        if weight.dtype in FLOAT8:
            size = _weights_of(module, groups).get("block_structure")
            block = None if size is None else _block(size, "block_structure")
            return parts.matrix(Float8(weight, parts.need("weight_scale"), block), 8)
        if weight.dtype == torch.int8:
            bits = whole_number(_weights_of(module, groups), "num_bits", 8, (4, 8))
            zero = parts.find("weight_zero_point")
            return parts.matrix(WholeNumbers(weight, parts.need("weight_scale"), zero, bits), bits)
        return None

    return find


def _groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the groups of settings; refuses those that say what is not read here."""
    given = settings.get("config_groups")
    if not isinstance(given, dict) or not all(isinstance(group, dict) for group in given.values()):
        raise CorruptModelError(
            "config_groups in the model's quantization_config must be an object of objects, not "
            f"{excerpt(str(given), 40)}"
        )
    groups = list(given.values())
    for form in [settings.get("format"), *(group.get("format") for group in groups)]:
        if form is not None and form not in _PLAIN_FORMATS:
            raise UnsupportedModelError(
                f"format in the model's quantization_config is {excerpt(str(form), 40)!r}, and acclimate "
                f"reads {', '.join(_PLAIN_FORMATS[1:])}; use a copy in one of these"
            )
    sparsity = settings.get("sparsity_config") or {}
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise UnsupportedModelError(
            f"the model's weights are sparse (format {excerpt(str(sparsity.get('format')), 40)!r} of "
            "sparsity_config), and acclimate reads dense ones; use a copy without sparsity"
        )
    return groups


def _weights_of(module: str, groups: list[dict[str, Any]]) -> Mapping[str, Any]:
    """Returns the settings of a module's weights."""
    chosen = [group for group in groups if _is_target(module, group.get("targets"))]
    # A rule for the module's name counts more than one for its class, which no name shows.
    chosen += [group for group in groups if "Linear" in (group.get("targets") or ())]
    weights = (chosen or groups or [{}])[0].get("weights")
    if not isinstance(weights, dict):
        raise CorruptModelError(
            f"no group in the model's quantization_config describes the weights of {module}"
        )
    return weights


def _row_words(parts: _Parts, bits: int) -> Reader:
    packed, shape = parts.need("weight_packed"), read(parts.need("weight_shape")).flatten().tolist()
    if len(shape) != 2 or min(shape) < 0:
        raise CorruptModelError(f"the tensor {parts.module}.weight_shape holds {shape}, not rows and columns")
    return RowWords(
        packed, parts.need("weight_scale"), parts.find("weight_zero_point"), parts.find("weight_g_idx"), bits,
        (int(shape[0]), int(shape[1])),
    )  # fmt: skip


def _is_target(module: str, targets: Any) -> bool:
    if not isinstance(targets, list):
        return False
    return any(
        re.match(target[3:], module) is not None if target.startswith("re:") else target == module
        for target in targets
        if isinstance(target, str)
    )


_FINDERS: dict[str, Callable[[Mapping[str, Any]], Finder]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
}
