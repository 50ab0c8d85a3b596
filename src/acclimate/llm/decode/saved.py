"""Saves verified descriptions in the user's cache, so that later starts skip capture and verification.

A description depends on the model's code and configuration, and on its constants of one element; its
verification also depends on the kernels and the processor. Its cache key is a digest of all of these: the
content of a plan's key (``split/saved_plans.py``), those constants, the files of steps, packed modules and
kernels, and the settings that select kernels. Weights are not part of it, because steps read them in place. A
model with hooks, or one that was not loaded from files, is captured and verified at each start.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import reduce
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.cache.texts import TextCache, source_files
from acclimate.llm.decode import description
from acclimate.llm.decode.description import Decoder, NotRepresentedError
from acclimate.llm.decode.modules import packed_stacks, packed_weight
from acclimate.llm.decode.program import Value
from acclimate.llm.decode.tables import OPERATORS, PositionColumns
from acclimate.llm.decode.users_code import variables_read
from acclimate.llm.kernels.builder import kernels_chosen
from acclimate.llm.split.saved_plans import plan_key

_DECODERS = TextCache(
    "decoders",
    "decoder.json",
    "the description of a decoder",
    "it is derived and verified again",
    logging.getLogger("acclimate.llm"),
)
_CLASSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in vars(description).values()
    if isinstance(kind, type) and is_dataclass(kind)
}
_CLASSES[PositionColumns.__name__] = PositionColumns
_LLM = Path(__file__).parents[1]
_CODE = (_LLM / "decode", _LLM / "loading", _LLM / "kernels", _LLM.parent / "ops" / "csrc")
"""The folders of the steps, of the modules with packed weights, and of the kernels."""


class _NotSavableError(Exception):
    """A description refers to a module or tensor that has no name in the model."""


def load_decoder(key: str, model: nn.Module) -> Decoder | None:
    """Returns the description saved under a key, with this model's modules; ``None`` if there is none."""

    def read(text: str) -> Decoder:
        whole = json.loads(text)
        made = _Reader(model, whole["values"]).value(whole["decoder"])
        if not isinstance(made, Decoder):
            raise TypeError("it is not a description")
        return made

    return _DECODERS.load(key, read)


def save_decoder(key: str, decoder: Decoder, model: nn.Module) -> None:
    """Saves a verified description, unless it refers to modules or tensors without a name."""
    try:
        writer = _Writer(model)
        made = writer.value(decoder)
        text = json.dumps({"values": writer.values, "decoder": made})
    except _NotSavableError:
        return
    _DECODERS.save(key, text)


def decoder_key(model: Any) -> str | None:
    """Returns a digest of everything that a description and its verification depend on; ``None``: no key."""
    whole = getattr(model, "whole", None)
    if whole is None or whole.folder is None:
        return None
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return None
    tensors = _tensors(model)
    if any(tensor.device.type != "cpu" for tensor in tensors.values()):
        return None
    try:
        read = [(one.name, one.value) for one in variables_read(model)]
    except NotRepresentedError:  # the model is captured, which says it again
        return None
    content = hashlib.sha256(plan_key(model, 1, None, read).encode())
    for folder in _CODE:
        for name, source in source_files(folder):
            content.update(f"{name} {hashlib.sha256(source).hexdigest()}\0".encode())
    settings = (
        torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
    )  # fmt: skip
    content.update(f"{kernels_chosen()} {settings} {torch.__config__.show()}".encode())
    for name, tensor in tensors.items():
        constant = tensor.detach().tolist() if tensor.numel() == 1 else ""
        content.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {constant}\0".encode())
    return content.hexdigest()[:32]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    found = _named_tensors(model)
    for name, module in model.named_modules():
        packed = packed_weight(module)
        if packed is not None:
            found[f"{name} {packed.format}"] = packed.data
        for leaf, stack in packed_stacks(module).items():
            found[f"{name}.{leaf} {stack.format}"] = stack.data
    return found


# -- the file ----------------------------------------------------------------------------------------


class _Writer:
    """Converts a description to JSON values; modules and tensors become their names."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._tensors = {_place(tensor): name for name, tensor in _named_tensors(model).items()}
        self._numbers: dict[int, int] = {}
        self.values: list[Any] = []
        """The values of captured programs, each after those that it is computed of."""

    def value(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, tuple):
            return [self.value(part) for part in value]
        if isinstance(value, dict):
            return {"options": {name: self.value(option) for name, option in value.items()}}
        if isinstance(value, nn.Module):
            return {"module": self._name(self._modules, id(value))}
        if isinstance(value, Tensor):
            return {"tensor": self._name(self._tensors, _place(value))}
        if isinstance(value, (torch.dtype, torch.device)):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if isinstance(value, torch._ops.OpOverload):
            return value._overloadname
        if hasattr(value, "free_symbols"):
            return {"size": str(value)}
        if isinstance(value, Value):
            if id(value) not in self._numbers:
                made = self._fields(value)
                self._numbers[id(value)] = len(self.values)
                self.values.append(made)
            return {"value": self._numbers[id(value)]}
        if type(value).__name__ in _CLASSES:
            return {"class": [type(value).__name__, self._fields(value)]}
        raise _NotSavableError(type(value).__name__)

    def _fields(self, value: Any) -> dict[str, Any]:
        return {field.name: self.value(getattr(value, field.name)) for field in fields(value)}

    def _name(self, names: Mapping[Any, str], key: Any) -> str:
        if key not in names:
            raise _NotSavableError("it has no name")
        return names[key]


class _Reader:
    """The reverse of :class:`_Writer`.

    Raises a ValueError, LookupError, AttributeError or TypeError for a text that :class:`_Writer` never
    wrote.
    """

    def __init__(self, model: nn.Module, values: list[Any]) -> None:
        self._modules = dict(model.named_modules())
        self._tensors = _named_tensors(model)
        self._values: list[Value] = []
        for value in values:
            made = self._fields(value)
            op, overload = made["op"], made["overload"]
            if overload is not None:
                if op not in OPERATORS:
                    raise ValueError(f"{op} is not an operator of angles")
                made["overload"] = getattr(getattr(torch.ops.aten, op), overload)
            self._values.append(Value(**made))

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(self.value(part) for part in value)
        if not isinstance(value, dict):
            return value
        ((kind, given),) = value.items()
        if kind == "options":
            return self._fields(given)
        if kind == "class":
            return _CLASSES[given[0]](**self._fields(given[1]))
        known: dict[str, Any] = {"module": self._modules, "tensor": self._tensors, "value": self._values}
        if kind in known:
            return known[kind][given]
        return {"size": _Size, "dtype": _dtype, "device": torch.device}[kind](given)

    def _fields(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: self.value(tensor) for name, tensor in given.items()}


class _Size:
    """A symbolic size that was read from text: a sum of products of symbols and numbers (``2*s3 - 1``).

    It has what this module uses of sympy's expressions, whose import takes longer than reading a description.
    """

    def __init__(self, text: str) -> None:
        terms = text.replace(" - ", " + -1*").split(" + ")
        self._terms = [term.split("*") for term in terms]
        parts = [part for term in self._terms for part in term]
        if not all(part.isidentifier() or part.removeprefix("-").isdecimal() for part in parts):
            raise ValueError(f"{text} is not a size")
        self.text = text
        self.free_symbols = {part for part in parts if part.isidentifier()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Size) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text

    def subs(self, sizes: dict[Any, int]) -> int:
        """Returns the number for given sizes."""
        known = {size.text: number for size, number in sizes.items()}
        return sum(
            reduce(mul, (known[part] if part in known else int(part) for part in term))
            for term in self._terms
        )


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return found
