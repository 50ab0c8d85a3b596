"""What stands in a shadow for attention, the cache, linear modules and packed embeddings: one operator each.

Attention and experts come in through transformers' registries, and the cache is of a class of our own.
"""

from __future__ import annotations

import functools
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.llm.decode.description import NotRepresentedError
from acclimate.llm.decode.staleness import configs_of, named_functions
from acclimate.llm.decode.users_code import is_known

NAME = "acclimate_capture"
"""The namespace of the operators, and the name of the shadow's functions in transformers' registries."""


class ShadowName(str):
    """The shadow's name in a registry, in place of that of the model's own function.

    Code of the user that compares it would go another way than in the model.

    Args:
        own: the model's.
    """

    own: Any

    def __new__(cls, own: Any) -> ShadowName:
        """Returns a text that is the shadow's name."""
        made = super().__new__(cls, NAME)
        made.own = own
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return ShadowName, (self.own,)

    def _equals(self, other: object, asks: types.FrameType) -> bool:
        found = str.__eq__(self, other) is True
        asks_known = asks.f_globals.get("__name__", "").partition(".")[0] in ("transformers", "acclimate")
        if not asks_known and found != (self.own == other):
            raise NotRepresentedError("its code asks how attention or experts are computed")
        return found

    def __eq__(self, other: object) -> bool:
        return self._equals(other, sys._getframe(1))

    def __ne__(self, other: object) -> bool:
        return not self._equals(other, sys._getframe(1))

    __hash__ = str.__hash__


@functools.cache
def define_operators() -> Any:
    """Defines the operators that stand for attention, the cache, linear modules and packed embeddings."""
    library = torch.library.Library(NAME, "DEF")
    library.define(
        "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float? scale, float? softcap, "
        "Tensor? sinks) -> Tensor"
    )
    library.define("past(Tensor new, SymInt earlier, int layer, bool is_key) -> Tensor")
    library.define("inputs(Tensor new, SymInt earlier, int layer, int kept) -> Tensor")
    library.define(
        "kept_inputs(SymInt batch, int channels, int kept, int layer, ScalarType dtype, Device device) "
        "-> Tensor"
    )
    library.define("state(SymInt batch, int[] sizes, int layer, ScalarType dtype, Device device) -> Tensor")
    library.define("linear(Tensor input, int module, int width) -> Tensor")
    library.define("rows(Tensor tokens, int module, int width, ScalarType dtype) -> Tensor")

    def attention(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))

    def past(new: Tensor, earlier: int, layer: int, is_key: bool) -> Tensor:
        return new.new_empty((*new.shape[:2], new.shape[2] + earlier, new.shape[3]))

    def inputs(new: Tensor, earlier: int, layer: int, kept: int) -> Tensor:
        return new.new_empty((*new.shape[:2], new.shape[2] + earlier))

    def kept_inputs(
        batch: int, channels: int, kept: int, layer: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty((batch, channels, kept), dtype=dtype, device=device)

    def state(batch: int, sizes: list[int], layer: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty((batch, *sizes), dtype=dtype, device=device)

    def linear(input: Tensor, module: int, width: int) -> Tensor:
        return input.new_empty((*input.shape[:-1], width))

    def rows(tokens: Tensor, module: int, width: int, dtype: torch.dtype) -> Tensor:
        return tokens.new_empty((*tokens.shape, width), dtype=dtype)

    for fake in (attention, past, inputs, kept_inputs, state, linear, rows):
        torch.library.register_fake(f"{NAME}::{fake.__name__}", fake, lib=library)
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

    AttentionInterface.register(NAME, attention)
    ExpertsInterface.register(NAME, experts)
    AttentionMaskInterface.register(NAME, mask)


def check_functions(model: nn.Module) -> None:
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
        if not _is_transformers(function):
            raise NotRepresentedError(f"its {what} are computed by a function of another package")


def _is_transformers(function: Any) -> bool:
    """Whether a function, and all that it is a decorated form of, are transformers' or this package's."""
    while isinstance(function, types.FunctionType) and is_known(function):
        if not hasattr(function, "__wrapped__"):
            # Not by what a function says of itself, which a decorator copies.
            return bool(function.__globals__["__name__"].startswith(("transformers.", "acclimate.")))
        function = function.__wrapped__
    return False


class RecurrentStateError(NotRepresentedError):
    """A prompt of any length makes a recurrent state, with operators that depend on the length."""


@dataclass
class KeptStates:
    """What layers keep in place of keys and values. A prompt's call notes it."""

    convolutions: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """For each layer that keeps the inputs of a convolution: the number of channels and of inputs, dtype and
    device."""
    recurrent: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """For each layer with a recurrent state: its sizes after the number of sequences, dtype and device."""


def shadow_cache(layers: int, earlier: Any, batch: Any, kept: KeptStates) -> Any:
    """Returns a cache of ``earlier`` tokens whose keys and values are one operator each.

    Args:
        layers: the number of layers.
        earlier: the number of tokens; 0 or a symbol.
        batch: the number of sequences, or its symbol.
        kept: what else layers keep.

    Raises:
        RecurrentStateError: when a prompt of any length asks for a recurrent state.
    """
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

    class Layer(CacheLayerMixin):  # type: ignore[misc]
        is_sliding = False
        is_compileable = False

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index
            # What the model's own cache holds at a call is not known.
            del self.keys, self.values, self.is_initialized

        def __getattr__(self, name: str) -> Any:
            if name in ("keys", "values", "is_initialized"):
                raise NotRepresentedError(f"its code reads the {name} of a layer of the cache")
            raise AttributeError(name)

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

    def check_size(layer: int) -> None:
        if isinstance(earlier, int) and not isinstance(batch, int):
            raise RecurrentStateError(f"layer {layer} keeps a recurrent state")

    class ShadowCache(DynamicCache):  # type: ignore[misc]  # as generate's
        """Has what :class:`Layer` has, the inputs of convolutions, and recurrent states."""

        def __init__(self) -> None:
            Cache.__init__(self, layers=[Layer(index) for index in range(layers)])
            self.states: dict[int, Tensor] = {}
            """The inputs that the call has read, which it may change."""
            self.read: dict[int, Tensor] = {}
            """The recurrent states that the call has read."""
            self.recurrent: dict[int, Tensor] = {}
            """What the call has made of them."""

        def update_conv_state(
            self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
        ) -> Tensor:
            width = options.get("conv_kernel_size")
            if state_idx != 0 or type(width) is not int or options.keys() > {"conv_kernel_size"}:
                raise NotRepresentedError(
                    f"layer {layer_idx} keeps the inputs of a convolution in an unknown way"
                )
            kind = conv_states.shape[1], width, conv_states.dtype, conv_states.device
            if kept.convolutions.setdefault(layer_idx, kind) != kind:
                raise NotRepresentedError(f"layer {layer_idx} has several convolutions")
            found: Tensor = torch.ops.acclimate_capture.inputs(conv_states, earlier, layer_idx, width)
            return found

        def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
            if isinstance(earlier, int) or state_idx != 0 or layer_idx not in kept.convolutions:
                return None
            if layer_idx not in self.states:
                channels, width, dtype, device = kept.convolutions[layer_idx]
                call = torch.ops.acclimate_capture.kept_inputs
                self.states[layer_idx] = call(batch, channels, width, layer_idx, dtype, device)
            return self.states[layer_idx]

        def update_recurrent_state(
            self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
        ) -> Tensor:
            check_size(layer_idx)
            if state_idx != 0 or options or layer_idx in self.recurrent:
                raise NotRepresentedError(f"layer {layer_idx} keeps a recurrent state in an unknown way")
            sizes = tuple(recurrent_states.shape[1:])
            if not all(type(size) is int for size in sizes):
                raise NotRepresentedError(f"layer {layer_idx} has a recurrent state that grows")
            kind = sizes, recurrent_states.dtype, recurrent_states.device
            if kept.recurrent.setdefault(layer_idx, kind) != kind:
                raise NotRepresentedError(f"layer {layer_idx} has several recurrent states")
            self.recurrent[layer_idx] = recurrent_states
            return recurrent_states

        def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
            check_size(layer_idx)
            if isinstance(earlier, int) or state_idx != 0 or layer_idx not in kept.recurrent:
                return None
            if layer_idx in self.recurrent:
                raise NotRepresentedError(f"layer {layer_idx} reads its recurrent state after it has changed")
            if layer_idx not in self.read:
                sizes, dtype, device = kept.recurrent[layer_idx]
                call = torch.ops.acclimate_capture.state
                self.read[layer_idx] = call(batch, sizes, layer_idx, dtype, device)
            return self.read[layer_idx]

    return ShadowCache()
