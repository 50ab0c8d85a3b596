"""Asks before each text whether anything has changed that a captured program depends on.

The question is whether the same Python code would run on the same modules: their attributes, their classes,
the functions of the files that define them, their configurations, and the switches of torch that act on every
module. Weights are not asked about: the native step reads them in place, and copies the small ones anew.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.llm.decode.description import NotRepresentedError
from acclimate.llm.decode.modules import packed_stacks
from acclimate.llm.decode.users_code import Read, code_of, variables_read
from acclimate.llm.split.layers.changes import is_forward_of_split
from acclimate.llm.split.tracing.linear_modules import linear_is_replaced

_OWN = {
    "_view", "_view_of", "packing", "model_ranks", "whole", "_shared_call", "mapped_files",
    "_acclimate_outside",
}  # fmt: skip
"""Attributes that this package changes, and no program reads."""
_FILES = (
    "torch", "torch.nn.functional", "transformers.masking_utils", "transformers.activations",
    "transformers.modeling_rope_utils", "transformers.integrations.sdpa_attention",
    "transformers.integrations.moe",
    "transformers.cache_utils",
)  # fmt: skip
"""Python modules, besides those of a model's classes, whose functions a model's program calls."""


_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_CONTAINERS = (list, dict, set, tuple)
_PLAIN = (bool, int, float, str)
"""Types of the constants of a file that count."""


class Snapshot:
    """What a model's program depends on, at one moment.

    Args:
        model: the model.
        constants: tensors of one element whose values the program was matched with.
    """

    def __init__(self, model: nn.Module, constants: tuple[Tensor, ...]) -> None:
        # Not the model itself, so that it is freed when nobody else needs it.
        self._modules = {part: attributes_of(part) for part in model.modules() if part is not model}
        self._own = attributes_of(model)
        self._types = {module: type(module) for module in self._modules}
        self._own_type = type(model)
        configs = configs_of(model.modules())
        self._configs = [(config, copy.deepcopy(vars(config))) for config in configs]
        used = {type(module) for module in (model, *self._modules)} | {Tensor, *_caches()}
        classes = {base for kind in used for base in kind.__mro__ if base is not object}
        self._classes = [(kind, _content_of(kind)) for kind in classes]
        files = {kind.__module__ for kind in classes} | set(_FILES)
        self._files = [
            (vars(file), {n: v for n, v in vars(file).items() if callable(v) or isinstance(v, _PLAIN)})
            for file in (sys.modules.get(name) for name in sorted(files))
            if file is not None
        ]
        self._codes = [
            (value, code_of(value))
            for content in (*(c for _, c in self._classes), *(f for _, f in self._files))
            for value in content.values()
            if isinstance(value, types.FunctionType)
        ]
        self._constants = [(tensor, tensor.detach().clone()) for tensor in constants]
        self._functions = named_functions(configs)
        # What the weights hold may change: steps read them in place, or copy them anew.
        self._places = [(held, name, own, _place(own)) for held, name, own in _tensors(model)]
        self._packed = [(data, _place(data)) for data in _packed_data(model)]
        self._dtype = torch.get_default_dtype()
        self.refusal = ""
        """Why the model has no program, if its code reads what may change without notice."""
        self._reads: list[Read] = []
        try:
            self._reads = variables_read(model)
        except NotRepresentedError as refusal:
            self.refusal = str(refusal)

    def is_current(self, model: nn.Module) -> bool:
        """Whether the program is still what the model computes."""
        try:
            return (
                type(model) is self._own_type
                and all(type(module) is own for module, own in self._types.items())
                and changed_attribute(self._own, model) is None
                and all(changed_attribute(content, m) is None for m, content in self._modules.items())
                # The modules are the same, and hold the same tensors: the model need not be walked.
                and all(held.get(n) is own and _place(own) == place for held, n, own, place in self._places)
                and all(_place(data) == place for data, place in self._packed)
                and all(is_same_config(vars(config), content) for config, content in self._configs)
                and all(_content_of(kind) == content for kind, content in self._classes)
                and all(content.items() <= now.items() for now, content in self._files)
                and all(code_of(function) == code for function, code in self._codes)
                and all(torch.equal(tensor, value) for tensor, value in self._constants)
                and all(read.is_current for read in self._reads)
                and torch.get_default_dtype() == self._dtype
                and named_functions(config for config, _ in self._configs) == self._functions
            )
        except (RuntimeError, ValueError, TypeError):  # two different tensors or arrays were compared
            return False


def _content_of(kind: type) -> dict[str, Any]:
    """Returns what a class defines, without the names of slots, which Python notes there when an object of it
    is copied or pickled for the first time."""
    return {name: value for name, value in vars(kind).items() if name != "__slotnames__"}


def _tensors(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yields where a model's modules hold tensors: a mapping, the name there, and the tensor."""
    for module in model.modules():
        mappings: tuple[Any, ...] = vars(module), module._parameters, module._buffers
        for held in mappings:
            for name, value in held.items():
                if isinstance(value, Tensor) and name not in _OWN:
                    yield held, name, value


def _packed_data(model: nn.Module) -> list[Tensor]:
    packed = [vars(m)["packed"].data for m in model.modules() if "packed" in vars(m)]
    return [*packed, *(stack.data for m in model.modules() for stack in packed_stacks(m).values())]


def _place(weight: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return weight.data_ptr(), weight.shape, weight.dtype


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Returns a module's attributes, with copies of what can change in place."""
    return {name: _copied(value) for name, value in vars(module).items()}


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        made = value.copy()
        made.update((name, _copied(item)) for name, item in value.items() if isinstance(item, _CONTAINERS))
        return made
    if isinstance(value, set):
        return value.copy()
    if isinstance(value, (list, tuple)) and any(isinstance(item, _CONTAINERS) for item in value):
        return type(value)(map(_copied, value)) if type(value) in (list, tuple) else copy.copy(value)
    return value.copy() if isinstance(value, list) else value


def changed_attribute(before: dict[str, Any], module: nn.Module) -> str | None:
    """Returns the name of an attribute that is not as before, besides those that this package keeps there."""
    now = vars(module)
    # Two different tensors cannot be compared in this way; they may be in an attribute of this package.
    with contextlib.suppress(RuntimeError, ValueError):
        if now == before:
            return None
    for name in (before.keys() | now.keys()).difference(_OWN):
        try:
            if name not in before or name not in now:
                return name
            if before[name] is not now[name] and before[name] != now[name]:
                return name
        except (RuntimeError, ValueError):  # two different tensors or arrays were compared
            return name
    return None


def is_observed() -> bool:
    """Whether something outside the model acts on each operator or module call of this thread."""
    from torch.nn.modules import module

    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.is_autocast_enabled("cpu")
        or linear_is_replaced()
        or torch.nn.functional.scaled_dot_product_attention is not _ATTENTION
        or module._global_forward_hooks
        or module._global_forward_pre_hooks
    )


def own_hooks(model: nn.Module) -> frozenset[int]:
    """Returns the identities of the hooks that a model's modules have now."""
    return frozenset(
        id(hook)
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


def has_hooks(model: nn.Module, own: frozenset[int]) -> bool:
    """Whether code runs around or in place of a module's ``forward``, besides that of a split."""
    forwards = (vars(module)["forward"] for module in model.modules() if "forward" in vars(module))
    return not own_hooks(model) <= own or not all(map(is_forward_of_split, forwards))


def _caches() -> list[type]:
    """Returns the classes of which ``generate`` makes a cache."""
    from transformers import cache_utils

    return [kind for kind in vars(cache_utils).values() if isinstance(kind, type)]


def named_functions(configs: Iterable[Any]) -> list[tuple[str, Any]]:
    """Returns the functions that configurations name, each with what it computes."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registries = (
        ("attention", ALL_ATTENTION_FUNCTIONS, "_attn_implementation"),
        ("masks", ALL_MASK_ATTENTION_FUNCTIONS, "_attn_implementation"),
        ("experts", ALL_EXPERTS_FUNCTIONS, "_experts_implementation"),
    )
    named = [(what, all_, getattr(c, name, None)) for c in configs for what, all_, name in registries]
    return [(what, all_[name]) for what, all_, name in named if name in all_]


def is_same_config(one: Any, other: Any) -> bool:
    """Whether two values of configurations are equal.

    Comparing two configurations with ``==`` reads their attributes, and some raise (Gemma 4's ``head_dim``).
    """
    from transformers import PretrainedConfig

    if isinstance(one, PretrainedConfig):
        return type(one) is type(other) and is_same_config(vars(one), vars(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            is_same_config(value, other[key]) for key, value in one.items()
        )
    return bool(one == other)


def configs_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Returns the configurations of modules, one of each."""
    from transformers import PretrainedConfig

    found = (value for m in modules for value in vars(m).values() if isinstance(value, PretrainedConfig))
    return list({id(config): config for config in found}.values())
