"""Captures a decoder's program: the operators that transformers' ``generate`` runs, without weights.

A shadow of the model (the same modules, with fake tensors) is called as ``generate`` calls the model, once
for a prompt and once for a step, with symbolic numbers of sequences, tokens and earlier tokens. A dispatch
mode of this thread notes each operator. Nothing in the model is called or changed, and no other thread
notices.

Three things of the shadow stand for what the native step has of its own: attention is one operator
(transformers' attention registry), the cache's keys and values are one each (a cache of our own class), and
so is each linear module, whatever form its weight has.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import random
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

from acclimate.llm.decode.description import NotRepresentedError
from acclimate.llm.decode.modules import packed_weight
from acclimate.llm.decode.program import Program, Role, Value
from acclimate.llm.decode.staleness import (
    Snapshot,
    attributes_of,
    changed_attribute,
    configs_of,
    named_functions,
)
from acclimate.llm.split.tracing.linear_modules import linear_dims

_NAME = "acclimate_capture"
_BATCH, _LENGTH = 3, 7
"""Example sizes; no guard may depend on them."""


_OVERWRITTEN = Value("overwritten", None, (), {}, 0, (), torch.float32, 0)

# -- operators of the shadow ---------------------------------------------------------------------------


@functools.cache
def _operators() -> Any:
    """Defines the operators that stand for attention, the cache, linear modules and packed embeddings."""
    library = torch.library.Library(_NAME, "DEF")
    library.define(
        "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float? scale, float? softcap, "
        "Tensor? sinks) -> Tensor"
    )
    library.define("past(Tensor new, SymInt earlier, int layer, bool is_key) -> Tensor")
    library.define("linear(Tensor input, int module, int width) -> Tensor")
    library.define("rows(Tensor tokens, int module, int width, ScalarType dtype) -> Tensor")

    def attention(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))

    def past(new: Tensor, earlier: int, layer: int, is_key: bool) -> Tensor:
        return new.new_empty((*new.shape[:2], new.shape[2] + earlier, new.shape[3]))

    def linear(input: Tensor, module: int, width: int) -> Tensor:
        return input.new_empty((*input.shape[:-1], width))

    def rows(tokens: Tensor, module: int, width: int, dtype: torch.dtype) -> Tensor:
        return tokens.new_empty((*tokens.shape, width), dtype=dtype)

    for fake in (attention, past, linear, rows):
        torch.library.register_fake(f"{_NAME}::{fake.__name__}", fake, lib=library)
    _register_interfaces()
    return library


# Other arguments that transformers passes, which do not change the result of causal attention with this mask.
_HARMLESS = {
    "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "position_embeddings", "past_key_values", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "num_items_in_batch", "return_dict", "logits_to_keep", "layer_idx",
    "sliding_window",  # the mask has it
}  # fmt: skip


def _register_interfaces() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        if dropout:
            raise NotRepresentedError("attention drops weights at random")
        own = getattr(module, "is_causal", True)
        if not (own if others.get("is_causal") is None else others["is_causal"]):
            # transformers leaves out the mask of a prompt without padding, and asks this instead.
            raise NotRepresentedError("attention is not causal where it has no mask")
        for name, given in others.items():
            if given is not None and given is not False and name not in _HARMLESS:
                raise NotRepresentedError(f"attention takes {name}")
        call = torch.ops.acclimate_capture.attention
        return call(query, key, value, attention_mask, scaling, softcap, s_aux), None

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=False)
        made: Tensor | None = sdpa_mask(*args, **kwargs)
        return made

    def experts(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        # Of transformers' ways to compute experts, the one whose operators do not depend on values.
        found: Tensor = batched_mm_experts_forward(module, *args, **kwargs)
        return found

    AttentionInterface.register(_NAME, attention)
    ExpertsInterface.register(_NAME, experts)
    AttentionMaskInterface.register(_NAME, mask)


def _check_functions(model: nn.Module) -> None:
    """Raises unless the functions that operators of the shadow stand for are those of transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    configs = configs_of(model.modules())
    used = named_functions(configs)
    if {getattr(config, "_attn_implementation", None) for config in configs} & {"eager", None}:
        files = {base.__module__ for m in model.modules() for base in type(m).__mro__}
        eager = (getattr(sys.modules.get(file), "eager_attention_forward", None) for file in files)
        used += [("attention", function) for function in eager if function is not None]
    for module in model.modules():
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            name = getattr(module.config, "_experts_implementation", None)
            used += [] if name in ALL_EXPERTS_FUNCTIONS else [("experts", type(module).forward)]
    for what, function in used:
        if not getattr(function, "__module__", "").startswith(("transformers.", "acclimate.")):
            raise NotRepresentedError(f"its {what} are computed by a function of another package")


def _cache(layers: int, earlier: Any) -> Any:
    """Returns a cache of ``earlier`` tokens whose keys and values are one operator each."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class Layer(CacheLayerMixin):  # type: ignore[misc]
        is_sliding = False
        is_compileable = False

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            pass

        def update(
            self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            call = torch.ops.acclimate_capture.past
            return (
                call(key_states, earlier, self.index, True),
                call(value_states, earlier, self.index, False),
            )

        def get_mask_sizes(self, query_length: int) -> tuple[Any, int]:
            return earlier + query_length, 0

        def get_seq_length(self) -> Any:
            return earlier

        def get_max_length(self) -> int:
            return -1

        get_max_cache_shape = get_max_length

    return Cache(layers=[Layer(index) for index in range(layers)])


# -- the shadow ----------------------------------------------------------------------------------------


class _Linear(nn.Module):
    def __init__(self, number: int, width: int, weight: Any, bias: Any) -> None:
        super().__init__()
        self.number, self.width = number, width
        self.weight, self.bias = weight, bias

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = torch.ops.acclimate_capture.linear(input, self.number, self.width)
        return found


class _Rows:
    def __init__(self, number: int, shape: tuple[int, int]) -> None:
        self.number, self.shape = number, shape

    def rows(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        found: Tensor = torch.ops.acclimate_capture.rows(tokens, self.number, self.shape[1], dtype)
        return found


class _Shadow:
    """Builds a model's shadow.

    Args:
        mode: makes the fake tensors.
        widths: the number of columns of a split model's linear modules, where it is not that of the weight.
    """

    def __init__(self, mode: FakeTensorMode, widths: dict[nn.Module, int]) -> None:
        self.mode, self.widths = mode, widths
        self.modules: list[nn.Module] = []
        self.origins: dict[int, Tensor] = {}
        self._made: dict[int, Any] = {}
        self._copies: list[tuple[nn.Module, dict[str, Any]]] = []

    def tensor(self, original: Tensor) -> Tensor:
        """Returns the fake that stands for a tensor; equal objects get one."""
        if type(original) not in (Tensor, nn.Parameter):
            raise NotRepresentedError(f"a tensor is a {type(original).__name__}, which may compute otherwise")
        if id(original) not in self._made:
            fake: Any = self.mode.from_tensor(original.detach(), static_shapes=True)
            if isinstance(original, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=False)
            self._made[id(original)] = fake
            self.origins[id(fake)] = original
        found: Tensor = self._made[id(original)]
        return found

    def config(self, original: Any) -> Any:
        """Returns a copy of a configuration, whose attention and experts are the shadow's."""
        if id(original) not in self._made:
            self._made[id(original)] = made = copy.deepcopy(original)
            for config in (made, *(getattr(made, name) for name in made.sub_configs)):
                if config is not None:
                    config._attn_implementation = config._experts_implementation = _NAME
        return self._made[id(original)]

    def module(self, original: nn.Module) -> nn.Module:
        """Returns the module that stands for one of the model's."""
        if id(original) not in self._made:
            self._made[id(original)] = (
                self._linear(original) if _is_linear(original) else self._copy(original)
            )
        found: nn.Module = self._made[id(original)]
        return found

    def _number(self, original: nn.Module) -> int:
        self.modules.append(original)
        return len(self.modules) - 1

    def _linear(self, original: nn.Module) -> nn.Module:
        packed = packed_weight(original)
        bias = original._parameters.get("bias")
        if packed is not None:
            width, weight = packed.shape[0], None
        else:
            dims = linear_dims(original)
            if dims is None:
                raise NotRepresentedError("a linear module's weight is of an unknown layout")
            width, weight = original.weight.shape[dims[0]], self.tensor(original.weight)  # type: ignore
        return _Linear(
            self._number(original),
            self.widths.get(original, int(width)),
            weight,
            None if bias is None else self.tensor(bias),
        )

    def _copy(self, original: nn.Module) -> nn.Module:
        # Packed experts are captured as those of the model's own class, whose weights are tensors.
        stand_ins = vars(original).get("stand_ins", {})
        made: nn.Module = object.__new__(type(original).__bases__[1] if stand_ins else type(original))
        self._made[id(original)] = made
        own = vars(made)
        later = ("_parameters", "_buffers", "_modules")
        own.update((name, self._attribute(v)) for name, v in vars(original).items() if name not in later)
        for kind in ("_parameters", "_buffers"):
            held = vars(original)[kind].items()
            own[kind] = {name: None if tensor is None else self.tensor(tensor) for name, tensor in held}
        for name, stand_in in stand_ins.items():
            own["_parameters"][name] = self._shown(original, stand_in)
        packed = packed_weight(original)
        if packed is not None:  # an embedding
            own["packed"] = _Rows(self._number(original), packed.shape)
        children = original._modules.items()
        own["_modules"] = {name: None if child is None else self.module(child) for name, child in children}
        # The hooks of a split model, which sum over ranks: a model with others is not captured.
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            own[kind] = type(vars(original)[kind])()
        self._copies.append((made, attributes_of(made)))
        return made

    def _shown(self, module: nn.Module, stand_in: Tensor) -> Tensor:
        """Returns the fake of a tensor without content, which stands for packed weights."""
        device: Any = module.compute.device
        with self.mode:
            fake = nn.Parameter(torch.empty(stand_in.shape, dtype=stand_in.dtype, device=device), False)
        self._made[id(stand_in)] = fake
        self.origins[id(fake)] = stand_in
        return fake

    def _attribute(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value)
        if type(value) is tuple:
            return tuple(map(self._attribute, value))
        if isinstance(value, (list, dict, set)):
            if id(value) not in self._made:
                made: Any = copy.copy(value)
                self._made[id(value)] = made
                if isinstance(value, dict):
                    made.update((name, self._attribute(item)) for name, item in value.items())
                elif isinstance(value, list):
                    made[:] = map(self._attribute, value)
            return self._made[id(value)]
        return self.config(value) if _is_config(value) else value

    def check_unchanged(self) -> None:
        """Raises if the program changed an attribute: another call may compute something else."""
        for module, before in self._copies:
            name = changed_attribute(before, module)
            if name is not None:
                raise NotRepresentedError(f"{type(module).__name__} changes its attribute {name}")


# -- what is not captured, or captured as one operator ---------------------------------------------------

_OF_A_PRODUCT = {
    "t", "transpose", "permute", "view", "_unsafe_view", "reshape", "expand", "clone", "detach", "alias",
    "squeeze", "unsqueeze", "mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "add",
    "device",  # asks for it
}  # fmt: skip


def _is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by a weight and adds a bias, and does nothing else."""
    own = type(module)
    if own.__call__ is not nn.Module.__call__ or own._call_impl is not nn.Module._call_impl:
        return False
    if own.__getattr__ is not nn.Module.__getattr__ or own.__getattribute__ is not object.__getattribute__:
        return False
    if hasattr(module, "packed"):
        # A class that somebody derived may do more.
        return isinstance(module, nn.Linear) and own.__module__.startswith("acclimate.")
    dims = linear_dims(module)
    if dims is None or hasattr(own, "weight") or hasattr(own, "bias"):  # a property, in place of a parameter
        return False
    return own.forward is nn.Linear.forward or _only_multiplies(module, dims)


def _only_multiplies(module: nn.Module, dims: tuple[int, int]) -> bool:
    """Whether a module's own forward runs operators of a product only, for inputs of any size and value.

    Its results were compared for one input. A limit beyond that input's values, or a branch, would be missed.
    """
    environment, mode = _fake_tensors()
    shadow = _Shadow(mode, {})
    weight: Any = module.weight
    shape = (_BATCH, _LENGTH, weight.shape[dims[1]])
    given = _example(mode, torch.empty(shape, dtype=weight.dtype, device=weight.device))
    made, recorder = copy.copy(module), _Recorder(mode, shadow.origins)
    parameters: Any = {n: None if p is None else shadow.tensor(p) for n, p in module._parameters.items()}
    made._parameters = parameters
    recorder.name(given, _input(given, Role.TOKENS))
    before = attributes_of(made)
    try:
        with torch.no_grad(), mode, recorder:
            made.forward(given)
    except Exception:  # noqa: BLE001 - a forward may raise anything
        return False
    is_free = not environment.guards and not environment.replacements
    values = list(recorder.values.values())
    operators = {value.op for value in values} - {"input", "constant"}
    adds_numbers = any(value.op == "add" and not isinstance(value.args[1], Value) for value in values)
    own = {id(parameter) for parameter in module._parameters.values()}
    others = any(value.tensor is not None and id(value.tensor) not in own for value in values)
    is_product = operators <= _OF_A_PRODUCT and not adds_numbers and not others
    return is_free and changed_attribute(before, made) is None and is_product


def _is_config(value: Any) -> bool:
    from transformers import PretrainedConfig

    return isinstance(value, PretrainedConfig)


# -- the capture ---------------------------------------------------------------------------------------

# Operators that return their argument's elements in order; where shape and dtype stay too, the argument.
_SAME = {
    "clone", "alias", "detach", "lift_fresh", "_to_copy", "view", "_unsafe_view", "reshape", "expand",
    "slice", "squeeze", "unsqueeze",
}  # fmt: skip


class _Recorder(TorchDispatchMode):
    """Notes each operator of this thread."""

    def __init__(self, mode: FakeTensorMode, origins: dict[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode, self.origins = mode, origins
        self.values: dict[int, Value] = {}
        self._kept: list[Tensor] = []
        self._computed: dict[Any, Value] = {}
        self._calls = _Calls(mode)

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """The constants of one element."""
        found = (value.tensor for value in self.values.values())
        return tuple(tensor for tensor in found if tensor is not None and tensor.numel() == 1)

    def name(self, tensor: Tensor, value: Value) -> None:
        self.values[id(tensor)] = value
        self._kept.append(tensor)  # else another tensor could get its id

    def value(self, tensor: Tensor) -> Value:
        known = self.values.get(id(tensor))
        if known is _OVERWRITTEN:
            raise NotRepresentedError("a tensor is used after it was changed through another one")
        if known is None:
            origin = self.origins.get(id(tensor))
            if origin is None and not isinstance(tensor, FakeTensor):
                origin = tensor  # a tensor that a module keeps elsewhere than in its attributes
            if origin is None:
                raise NotRepresentedError("a tensor of unknown origin is used")
            known = Value(
                "constant", None, (), {}, 0, tuple(tensor.shape), tensor.dtype,
                Role.WEIGHTS if isinstance(origin, nn.Parameter) else 0, origin,
            )  # fmt: skip
            self.name(tensor, known)
        return known

    def _changed(self, op: str, args: tuple[Any, ...], result: Any) -> str:
        """Forgets what a change in place overwrites; returns the name of the operator without it."""
        target = args[0] if args else None
        own = None if target is None else self.values.get(id(target))
        if (
            target is None
            or own is None
            or result is not target
            or own.op in ("input", "constant")
            or not op.endswith("_")
        ):
            raise NotRepresentedError(f"{op} changes a tensor in place")
        # Other tensors in the same memory have other values from now on.
        for other in self._kept:
            if self._calls.share_memory(other, target):
                self.values[id(other)] = _OVERWRITTEN
        return op.removesuffix("_")

    def _is_written(self, target: Tensor, source: Any) -> bool:
        """Notes a write to a part of a tensor that was made for it; returns whether it is such a part."""
        part = self.values.get(id(target))
        if part is None or part.op != "slice" or part.kwargs:
            return False
        if part.args[0].op not in ("new_empty", "slice_scatter"):
            return False
        if not isinstance(source, Value) or source.shape != part.shape or source.dtype != part.dtype:
            return False
        whole, *where = part.args
        made = Value(
            "slice_scatter", torch.ops.aten.slice_scatter.default, (whole, source, *where), {}, 0,
            whole.shape, whole.dtype, whole.roles | source.roles,
        )  # fmt: skip
        for other in self._kept:
            if self._calls.share_memory(other, target):
                self.values[id(other)] = made if self.values[id(other)] is whole else _OVERWRITTEN
        return True

    def _convert(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            return self.value(given)
        if isinstance(given, torch.SymInt):
            return given.node.expr
        if isinstance(given, (torch.SymFloat, torch.SymBool)):
            raise NotRepresentedError("it computes with the number of tokens")
        if isinstance(given, (list, tuple)):
            return tuple(self._convert(item) for item in given)
        return given

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = _name_of(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRepresentedError(f"{op} is random")
        converted = tuple(self._convert(argument) for argument in args)
        named = {key: self._convert(argument) for key, argument in kwargs.items()}
        result = self._calls.result(func, args, kwargs)
        results = result if isinstance(result, (list, tuple)) else [result]
        if func._schema.is_mutable:
            if op == "copy_" and result is args[0] and self._is_written(args[0], converted[1]):
                return result
            op = self._changed(op, args, result)
        op += _option_of(op, args, kwargs)
        if op in _SAME:
            source = converted[0]
            if source.dtype == results[0].dtype and source.shape == _shape(results[0]):
                self.name(results[0], source)
                return result
        roles = _joined((*converted, *named.values()))
        for index, tensor in enumerate(results):
            if isinstance(tensor, Tensor):
                # The same operator on the same values is the same value.
                key = func, _exactly(converted), _exactly(tuple(named.items())), index
                if key not in self._computed:
                    made = Value(op, func, converted, named, index, _shape(tensor), tensor.dtype, roles)
                    self._computed[key] = made
                self.name(tensor, self._computed[key])
        return result


_NUMBERS = {"linear": (1,), "rows": (1,), "past": (2, 3)}
"""Arguments of the shadow's operators that only name a module or a layer, by their places."""


class _Calls:
    """Results of operators on fake tensors; those of a call like an earlier one are copies of its results.

    A model's layers make the same calls. To copy a fake tensor takes 0.02 ms, and to compute its symbolic
    sizes 0.4 to 7 ms. All tensors of a call must be kept, since they are known by their ids.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._results: dict[Any, tuple[Any, list[int | None]]] = {}
        """By call: the results, and for each the operand whose memory it has."""
        self._memory: dict[int, Any] = {}
        """By tensor: what tensors in the same memory have in common."""

    def share_memory(self, first: Tensor, second: Tensor) -> bool:
        """Whether a change of one tensor in place may change the other."""
        return bool(self._memory_of(first) == self._memory_of(second))

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what an operator returns."""
        if func._schema.is_mutable:
            return func(*args, **kwargs)
        numbers = _NUMBERS.get(func._schema.name.removeprefix(f"{_NAME}::"), ())
        operands: list[Tensor] = []
        given = [item for place, item in enumerate(args) if place not in numbers]
        call = func, self._like(given, operands), self._like(tuple(kwargs.items()), operands)
        if call in self._results:
            known, sources = self._results[call]
            result = self._copied(known)
        else:
            result = _polar(*args) if func is torch.ops.aten.polar.default else func(*args, **kwargs)
            sources = [_source(tensor, operands) for tensor in _tensors(result)]
            if all(isinstance(one, FakeTensor) and one.constant is None for one in _tensors(result)):
                # A copy, as a later operator may change the result's own sizes.
                self._results[call] = self._copied(result), sources
        for tensor, source in zip(_tensors(result), sources, strict=True):
            self._memory[id(tensor)] = object() if source is None else self._memory_of(operands[source])
        return result

    def _copied(self, result: Any) -> Any:
        if isinstance(result, FakeTensor):
            return fast_detach(self._mode, result)
        if isinstance(result, (list, tuple)):
            return type(result)(self._copied(item) for item in result)
        return result

    def _memory_of(self, tensor: Tensor) -> Any:
        return self._memory.get(id(tensor), tensor.untyped_storage()._cdata)

    def _like(self, given: Any, operands: list[Tensor]) -> Any:
        """Returns what is equal for arguments of which an operator makes the same; notes the tensors."""
        if isinstance(given, Tensor):
            operands.append(given)
            if not isinstance(given, FakeTensor) or given.constant is not None:
                return object()  # the result may depend on its value
            sizes = (*given.shape, *given.stride(), given.storage_offset())
            flags = given.dtype, given.device, given.is_conj(), given.is_neg()
            return tuple(map(_expression, sizes)), flags
        if isinstance(given, (list, tuple)):
            return type(given), tuple(self._like(item, operands) for item in given)
        return type(given), _expression(given)


def _name_of(func: Any) -> str:
    """Returns an operator's name without its overload, and without ``aten``; others keep their namespace."""
    whole: str = func._schema.name
    space, _, name = whole.partition("::")
    return name if space in ("aten", _NAME) else whole


def _option_of(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns what a name must say of an option that makes the operator compute something else."""
    if op in ("add", "sub", "rsub") and (len(args) > 2 or kwargs.get("alpha", 1) != 1):
        return " with alpha"
    return " with a rounding mode" if op == "div" and kwargs.get("rounding_mode") is not None else ""


def _exactly(given: Any) -> Any:
    """Returns arguments with the types of numbers, as 1, 1.0 and True are equal."""
    if isinstance(given, tuple):
        return tuple(_exactly(item) for item in given)
    return given if isinstance(given, Value) else (type(given), given)


def _tensors(result: Any) -> list[Tensor]:
    results = result if isinstance(result, (list, tuple)) else [result]
    return [item for item in results if isinstance(item, Tensor)]


def _source(tensor: Tensor, operands: list[Tensor]) -> int | None:
    """Returns which operand a tensor has the memory of."""
    memory = tensor.untyped_storage()._cdata
    found = (n for n, operand in enumerate(operands) if operand.untyped_storage()._cdata == memory)
    return next(found, None)


def _polar(size: Tensor, angle: Tensor) -> Tensor:
    """Returns the fake result of ``torch.polar``; torch's own one makes numbers of symbolic sizes."""
    if size.shape != angle.shape:
        raise NotRepresentedError("polar computes with tensors of several shapes")
    return angle.new_empty(angle.shape, dtype=torch.promote_types(angle.dtype, torch.complex64))


def _joined(given: Iterable[Any]) -> int:
    roles = 0
    for item in given:
        if isinstance(item, Value):
            roles |= item.roles
        elif isinstance(item, tuple):
            roles |= _joined(item)
    return roles


def capture(model: Any, widths: dict[nn.Module, int], layers: int) -> tuple[Program, Program]:
    """Returns the programs of a prompt without earlier tokens, and of one token after some.

    Args:
        model: a transformers model, on the CPU or another device.
        widths: the number of columns of linear modules where it is not that of their weight.
        layers: the number of layers of the cache.

    Raises:
        NotRepresentedError: the program depends on the values of its inputs or on their sizes, or changes
            tensors in place.
    """
    before = Snapshot(model, ())
    if before.refusal:
        raise NotRepresentedError(before.refusal)
    _operators()
    _check_functions(model)
    environment, mode = _fake_tensors()
    shadow = _Shadow(mode, widths)
    with torch.inference_mode(False):
        sizes = _example(mode, torch.empty((_BATCH, _LENGTH))).shape
    prompt, step = (_captured(model, shadow, sizes, layers, is_step) for is_step in (False, True))
    if not before.is_current(model):
        raise NotRepresentedError("its code changes variables, classes or attributes")
    limit = _limit(environment, *map(_expression, sizes))
    return replace(prompt, limit=limit), replace(step, limit=limit)


def _captured(model: Any, shadow: _Shadow, sizes: Any, layers: int, is_step: bool) -> Program:
    """Returns a program, for which limits are not yet known."""
    batch, length = sizes
    made: Any = shadow.module(model)
    device = model.get_input_embeddings().weight.device
    recorder = _Recorder(shadow.mode, shadow.origins)
    drawn = random.getstate()
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        warnings.catch_warnings(),
        torch.autocast(device.type, enabled=False),
        _unlogged(),
        shadow.mode,
    ):
        count = 1 if is_step else length
        tokens = torch.zeros((batch, count), dtype=torch.long, device=device)
        positions, mask = (
            torch.zeros_like(tokens),
            torch.ones((batch, length), dtype=torch.long, device=device),
        )
        for tensor, role in ((tokens, Role.TOKENS), (positions, Role.POSITIONS), (mask, Role.MASK)):
            recorder.name(tensor, _input(tensor, role))
        earlier = length - 1 if is_step else 0
        with recorder:
            try:
                inputs = made.prepare_inputs_for_generation(
                    tokens,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=_cache(layers, earlier),
                    use_cache=True,
                    is_first_iteration=not is_step,
                )
                found = made(**inputs, return_dict=True).logits
            except NotRepresentedError:
                raise
            except Exception as error:
                raise NotRepresentedError(f"its program cannot be captured: {_first_line(error)}") from error
            logits = recorder.value(found)
    shadow.check_unchanged()
    if random.getstate() != drawn:
        random.setstate(drawn)
        raise NotRepresentedError("its code draws random numbers")
    symbols = _expression(batch), _expression(length)
    past = symbols[1] - 1 if is_step else 0
    count = 1 if is_step else symbols[1]
    return Program(logits, symbols[0], count, past, shadow.modules, None, recorder.constants)


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Drops torch's logs of this thread about operators that fake tensors cannot have: the error says it."""
    own = threading.get_ident()
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def is_anothers(record: logging.LogRecord) -> bool:
        return record.thread != own

    logger.addFilter(is_anothers)
    try:
        yield
    finally:
        logger.removeFilter(is_anothers)


def _fake_tensors() -> tuple[ShapeEnv, FakeTensorMode]:
    environment = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # its keys cost more than what is computed once
    return environment, mode


def _example(mode: FakeTensorMode, tensor: Tensor) -> FakeTensor:
    """Returns the fake of a tensor whose first two sizes are symbols."""
    sizes = [DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (tensor.dim() - 2)]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource("input"))


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(map(_expression, tensor.shape))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _input(tensor: Tensor, role: int) -> Value:
    return Value("input", None, (), {}, 0, _shape(tensor), tensor.dtype, role)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _limit(environment: ShapeEnv, batch: Any, length: Any) -> int | None:
    """Returns the largest number of tokens for which all guards hold that the capture left.

    Raises:
        NotRepresentedError: the program holds for some numbers of sequences or tokens only, and these are not
            all up to a limit.
    """
    limit: int | None = None
    for symbol in (batch, length):
        if symbol in environment.replacements or not symbol.is_Symbol:
            raise NotRepresentedError("its program holds for one size only")
    for guard in environment.guards:
        most = _most(guard.expr, length)
        if most is not None:
            limit = most if limit is None else min(limit, most)
    return limit


def _most(relation: Any, length: Any) -> int | None:
    """Returns the largest length for which a guard holds; ``None``: it holds for all lengths.

    Raises:
        NotRepresentedError: it is no upper limit of the length.
    """
    import sympy

    if isinstance(relation, sympy.Ne) and relation.lhs == length and relation.rhs.is_Integer:
        return int(relation.rhs) - 1
    if isinstance(relation, (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)):
        is_greater = isinstance(relation, (sympy.Gt, sympy.Ge))
        is_strict = isinstance(relation, (sympy.Gt, sympy.Lt))
        gap = (relation.lhs - relation.rhs) * (-1 if is_greater else 1)
        slope = gap.diff(length)
        if gap.free_symbols == {length} and slope.is_Integer and slope != 0:
            # slope * length + rest <= 0
            rest = gap.subs(length, 0) + (1 if is_strict else 0)
            if slope > 0:
                return int(-rest // slope)  # not a number of sympy, which saved.py would take for a size
            if math.ceil(rest / -slope) <= 1:
                return None
    raise NotRepresentedError(f"its program depends on sizes: {relation}")
