"""Runs a model once on a few tokens, and records each module's input and output, and each attention.

Attention is recorded through transformers' attention registry. During the run the model uses an
implementation from this module, which gets the final queries, keys and values, and the scale, window, softcap
and mask rule.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.inference.decode.description import NotRepresentedError, Share
from acclimate.inference.decode.modules import embedding_rows

_NAME = "acclimate_recorded"
_lock = threading.Lock()


@dataclass(eq=False)
class Call:
    """One call of a module."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    length: int
    """The number of tokens of the run."""

    @property
    def given(self) -> Tensor | None:
        """The first tensor among the arguments."""
        values = (*self.args, *self.kwargs.values())
        return self._batched(next((each for each in values if isinstance(each, Tensor)), None))

    @property
    def output(self) -> Tensor | None:
        """The result, or the first of several."""
        first = self.result[0] if isinstance(self.result, (tuple, list)) and self.result else self.result
        return self._batched(first if isinstance(first, Tensor) else None)

    def _batched(self, value: Tensor | None) -> Tensor | None:
        """Restores the batch dimension, because some models flatten batch and tokens into one dimension."""
        is_flat = value is not None and value.dim() == 2 and value.shape[0] == self.length
        return value[None] if is_flat and value is not None else value


@dataclass
class AttentionCall:
    """One call of the attention function."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    mask_rule: Callable[..., Any] | None
    result: Tensor
    """batch x tokens x heads x size"""
    after: int
    """The number of module calls that ended before it."""


@dataclass
class Recording:
    """The calls and values of one run."""

    tokens: Tensor
    calls: list[Call] = field(default_factory=list)
    attentions: list[AttentionCall] = field(default_factory=list)
    logits: Tensor | None = None
    rows: Tensor | None = None
    """The tokens' rows of the embedding."""
    share: Share | None = None


# Other arguments that transformers passes, which do not change the result of one causal attention.
_HARMLESS = {
    "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "position_embeddings", "past_key_values", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k", "num_items_in_batch", "return_dict", "logits_to_keep", "dropout",
    "layer_idx",
}  # fmt: skip


class _Recorder:
    """Gets the calls of the run in progress."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.rules: dict[int, tuple[Tensor, Callable[..., Any]]] = {}

    def mask(self, *args: Any, **kwargs: Any) -> Tensor:
        from transformers.masking_utils import causal_mask_function, sdpa_mask

        kwargs["allow_is_causal_skip"] = False
        made = sdpa_mask(*args, **kwargs)
        if not isinstance(made, Tensor):
            raise NotRepresentedError("transformers made no mask")
        self.rules[id(made)] = made, kwargs.get("mask_function", causal_mask_function)
        return made

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        for name, given in others.items():
            if given is not None and given is not False and name not in _HARMLESS:
                raise NotRepresentedError(f"attention takes {name}")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        rule = self.rules.get(id(attention_mask), (None, None))[1] if attention_mask is not None else None
        groups = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query @ keys.transpose(2, 3)).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, float("-inf"))
        if s_aux is not None:
            column = s_aux.float().reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
            weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        result = (weights.to(query.dtype) @ values).transpose(1, 2).contiguous()
        self.recording.attentions.append(
            AttentionCall(
                module, query, key, value, scale, sliding_window, softcap, s_aux, rule, result,
                len(self.recording.calls),
            )
        )  # fmt: skip
        return result, None


class _Active(threading.local):
    """The recorder of this thread's run; other threads may run the model meanwhile."""

    recorder: _Recorder | None = None


_active = _Active()


def _attention(*args: Any, **kwargs: Any) -> Any:
    if _active.recorder is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(*args, **kwargs)
    return _active.recorder.attention(*args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    if _active.recorder is None:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(*args, **kwargs)
    return _active.recorder.mask(*args, **kwargs)


@contextlib.contextmanager
def _attention_of(model: Any, name: str) -> Iterator[None]:
    """Lets a model use another attention implementation; then restores its configurations exactly.

    transformers sets a configuration's implementation for the configurations inside it too, so all are kept
    before the first one is changed.
    """
    before = [(config, dict(vars(config))) for config in _configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, values in before:
            own = vars(config)
            own.update(values)
            for added in own.keys() - values.keys():
                del own[added]


def _configs(model: Any) -> list[Any]:
    """Returns the configurations of a model's modules, and those inside them."""
    from transformers import PreTrainedConfig

    found: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += vars(config).values()
    return list(found.values())


def record(model: Any, tokens: Tensor, share: Share | None = None) -> Recording:
    """Runs the model on tokens (1 x their number) without a cache; all ranks of a split one together.

    Raises:
        NotRepresentedError: the model has its own attention code, or passes attention an unknown argument.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    recording = Recording(tokens, share=share)
    names = {id(module): name for name, module in model.named_modules()}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        # Code may change a tensor in place after the call, so the values are copied.
        recording.calls.append(
            Call(names[id(module)], module, _copied(args), {n: _copied(v) for n, v in kwargs.items()},
                 _copied(result), tokens.shape[1])
        )  # fmt: skip

    with _lock, contextlib.ExitStack() as stack:
        AttentionInterface.register(_NAME, _attention)
        AttentionMaskInterface.register(_NAME, _mask)
        for module in model.modules():
            if module is not model:
                stack.callback(module.register_forward_hook(keep, with_kwargs=True, always_call=False).remove)
        stack.enter_context(_attention_of(model, _NAME))
        _active.recorder = _Recorder(recording)
        try:
            with torch.no_grad():
                recording.rows = embedding_rows(model.get_input_embeddings(), tokens, share)
                recording.logits = model(input_ids=tokens, use_cache=False, return_dict=True).logits
        finally:
            _active.recorder = None
    return recording


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() < 1 << 22 else value.detach()
    if isinstance(value, (tuple, list)):
        return type(value)(_copied(each) for each in value) if type(value) in (tuple, list) else value
    if type(value) is dict:
        return {name: _copied(each) for name, each in value.items()}
    return value
