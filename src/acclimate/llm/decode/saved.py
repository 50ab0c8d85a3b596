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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.cache.texts import TextCache, source_files
from acclimate.llm.decode import description
from acclimate.llm.decode.description import Decoder
from acclimate.llm.decode.modules import packed_stacks, packed_weight
from acclimate.llm.decode.tables import PositionColumns, columns_as_json, columns_from_json
from acclimate.llm.kernels.native import kernels_chosen
from acclimate.llm.split.saved_plans import plan_key

_DECODERS = TextCache(
    "decoders",
    "decoder.json",
    "the description of a decoder",
    "it is derived and verified again",
    logging.getLogger("acclimate.llm"),
)
_CLASSES = {
    name: each for name, each in vars(description).items() if is_dataclass(each) and isinstance(each, type)
}
_LLM = Path(__file__).parents[1]
_CODE = (_LLM / "decode", _LLM / "loading", _LLM / "kernels", _LLM.parent / "ops" / "csrc")
"""The folders of the steps, of the modules with packed weights, and of the kernels."""


class _NotSavableError(Exception):
    """A description refers to a module or tensor that has no name in the model."""


def load_decoder(key: str, model: nn.Module) -> Decoder | None:
    """Returns the description saved under a key, with this model's modules; ``None`` if there is none."""

    def read(text: str) -> Decoder:
        made = _Reader(model).value(json.loads(text))
        if not isinstance(made, Decoder):
            raise TypeError("it is not a description")
        return made

    return _DECODERS.load(key, read)


def save_decoder(key: str, decoder: Decoder, model: nn.Module) -> None:
    """Saves a verified description, unless it refers to modules or tensors without a name."""
    try:
        text = json.dumps(_Writer(model).value(decoder))
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
    content = hashlib.sha256(plan_key(model, 1, None).encode())
    for folder in _CODE:
        for name, source in source_files(folder):
            content.update(f"{name} {_sha256(source).hex()}\0".encode())
    settings = torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()
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


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


# -- the file ----------------------------------------------------------------------------------------


class _Writer:
    """Converts a description to JSON values; modules and tensors become their names."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._tensors = {_place(tensor): name for name, tensor in _named_tensors(model).items()}

    def value(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, tuple):
            return [self.value(each) for each in value]
        if isinstance(value, nn.Module):
            return {"module": self._name(self._modules, id(value))}
        if isinstance(value, Tensor):
            return {"tensor": self._name(self._tensors, _place(value))}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, PositionColumns):
            return {"function": columns_as_json(value, lambda t: self._name(self._tensors, _place(t)))}
        if type(value).__name__ in _CLASSES:
            given = {each.name: self.value(getattr(value, each.name)) for each in fields(value)}
            return {"class": type(value).__name__, "fields": given}
        raise _NotSavableError(type(value).__name__)

    def _name(self, names: Mapping[Any, str], key: Any) -> str:
        if key not in names:
            raise _NotSavableError("it has no name")
        return names[key]


class _Reader:
    """The reverse of :class:`_Writer`.

    Raises a ValueError, LookupError, AttributeError or TypeError for a text that :class:`_Writer` never
    wrote.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._tensors = _named_tensors(model)

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(self.value(each) for each in value)
        if not isinstance(value, dict):
            return value
        if "module" in value:
            return self._modules[value["module"]]
        if "tensor" in value:
            return self._tensors[value["tensor"]]
        if "dtype" in value:
            return _dtype(value["dtype"])
        if "function" in value:
            return columns_from_json(value["function"], self._tensors)
        return _CLASSES[value["class"]](**{name: self.value(each) for name, each in value["fields"].items()})


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return found
