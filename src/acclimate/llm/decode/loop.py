"""A faster token loop for ``generate``, with transformers' tokens but without its loop and modules.

transformers' ``generate`` prepares the run, and its ``_sample`` then computes token after token. A model of
``init_inference`` replaces ``_sample`` by this loop if the loop supports all options of the call.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.errors import ModelChangedError
from acclimate.imports import ForkSafeLock
from acclimate.llm.decode.batching import in_slot, reading
from acclimate.llm.decode.cache import ROOM
from acclimate.llm.decode.description import Attention, Decoder, DeltaRule
from acclimate.llm.decode.finite_logits import check_logits, without_check
from acclimate.llm.decode.lean import LeanDecoder, Step
from acclimate.llm.decode.native import NativeStep
from acclimate.llm.decode.proof import describe
from acclimate.llm.decode.staleness import Snapshot, is_observed
from acclimate.llm.kernels.torch_threads import one_thread
from acclimate.llm.ranks import ModelRanks

LARGEST_BATCH = 16
"""The largest batch of this loop; for more sequences, torch's matrix products are faster."""

_INPUTS = "LinearAttentionLayer"
"""The layer of a cache that holds the last inputs of a convolution, or a recurrent state."""
_WHOLE_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer", _INPUTS)
"""The layers of a cache that the step can continue and add to; a window's layer holds the last tokens, and a
dummy one nothing, since its keys and values are another layer's."""

_KNOWN_INPUTS = {
    "attention_mask", "past_key_values", "use_cache", "position_ids", "logits_to_keep",
}  # fmt: skip


_PARTS_OF_THE_LOOP = (
    "_sample", "_prefill", "_update_model_kwargs_for_generation", "_has_unfinished_sequences",
    "_optimize_model_for_decode", "get_compiled_call",
)  # fmt: skip
"""The methods of a model that transformers' loop calls, besides the forward and what prepares its inputs."""


_found: weakref.WeakKeyDictionary[Any, tuple[LeanDecoder | None, Snapshot]] = weakref.WeakKeyDictionary()
"""Each model's description, ``None`` if it has none, and what that depends on."""
_lock = ForkSafeLock()


def lean_decoder(model: Any) -> LeanDecoder | None:
    """Returns the description of a model, derived at the first call and after changes; ``None`` if it cannot
    be described."""
    ranks = getattr(model, "model_ranks", None) or ModelRanks()
    # Later texts write to tensors that this makes, and may be outside of a caller's inference mode.
    with _lock, torch.inference_mode(False), torch.no_grad():
        lean, snapshot = _found.get(model, (None, None))
        # All ranks derive a description together.
        if not all(ranks.exchange(snapshot is not None and snapshot.is_current(model))):
            lean = describe(model, ranks)
            _found[model] = lean, Snapshot(model, () if lean is None else lean.decoder.constants)
        return lean


def cache_dtype(model: Any) -> torch.dtype | None:
    """Returns the dtype of a model's keys and values; ``None``: the model's own."""
    return torch.int8 if getattr(model, "kv_cache_dtype", "auto") == "int8" else None


def step_kind(model: Any) -> str:
    """Returns which code computes a model's tokens: ``native``, ``graph``, ``plain`` or ``transformers``."""
    return _kind_of(lean_decoder(model), model.device)


def _kind_of(lean: LeanDecoder | None, device: torch.device) -> str:
    if lean is None:
        return "transformers"
    if lean.native is not None:
        return "native"
    if lean.is_graph:
        return "graph"
    # Started one by one, the kernels of a plain step take longer than those of the model's own modules.
    return "plain" if device.type == "cpu" else "transformers"


def lean_sample(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    tokenizer: Any = None,  # of stop strings; what uses it is among the criteria already
    **inputs: Any,
) -> Tensor | None:
    """Replaces transformers' ``_sample``; returns ``None`` without doing anything if it cannot."""
    processors = without_check(logits_processor)  # steps check their logits
    if processors is None or not _is_plain(model, input_ids, generation_config, synced_gpus, inputs):
        return None
    if _run_modules(logits_processor):
        return None
    starts = _starts(inputs.get("attention_mask"), input_ids)
    if starts is None or not _are_usual(inputs.get("position_ids"), starts, input_ids.shape[1]):
        return None
    lean = lean_decoder(model)
    if lean is None or (lean.native is None and model._compiled_call_impl is not None):
        return None
    dtype = cache_dtype(model)
    if dtype is None and _kind_of(lean, input_ids.device) == "transformers":
        return None
    if not _fits(lean.decoder.limit, stopping_criteria):
        return None
    if not _has_inputs(inputs["past_key_values"], inputs.get("attention_mask"), lean.decoder):
        return None
    watch = _Watch(model, lean) if _is_users((*processors, *stopping_criteria, streamer)) else None
    chooser = _Chooser(processors, generation_config.do_sample, lean.native is not None)
    ends = _Ends(stopping_criteria, generation_config, len(input_ids))
    tokens = _Tokens(input_ids)
    room = ends.at_most(input_ids.shape[1] + ROOM)
    given = inputs["past_key_values"]
    is_callers = getattr(given, "_is_user_defined", False)
    options: dict[str, Any] = {"gives_back": is_callers, "dtype": dtype}
    with contextlib.ExitStack() as at_the_end:
        with reading(lean.native):
            reader = lean.begin(starts, room, given, **options)
            if reader is not None:
                step: Step = reader
            else:
                outputs = model._prefill(input_ids, generation_config, inputs, is_first_iteration=True)
                step = lean.go_on(outputs.past_key_values, starts, input_ids.shape[1], room, **options)
                logits: Tensor = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
                del outputs, inputs
                check_logits(logits.amax(-1), model.dtype)
                chosen = chooser.choose(tokens, logits)
        if is_callers:  # it gets the text's keys and values, however the text ends
            at_the_end.callback(lambda: step.cache.give(given))
        if reader is not None:
            found = reader.read(
                input_ids[:, reader.cache.length :],
                likeliest=chooser.takes_likeliest,
                turn=functools.partial(reading, lean.native),
            )
            chosen = found if chooser.takes_likeliest else chooser.choose(tokens, found)
        if isinstance(step, NativeStep) and lean.native is not None:
            step = at_the_end.enter_context(in_slot(step, lean.native, keeps_cache=is_callers))
        _write(step, chosen, tokens, chooser, ends, streamer, watch)
    if streamer is not None:
        streamer.end()
    return tokens.all


def _write(
    step: Step,
    chosen: Tensor,
    tokens: _Tokens,
    chooser: _Chooser,
    ends: _Ends,
    streamer: Any,
    watch: _Watch | None,
) -> None:
    """Adds tokens to a text until it ends; ``chosen`` are the first."""
    while True:
        chosen = ends.padded(chosen)
        tokens.append(chosen)
        if streamer is not None:  # before the criteria, as in transformers: they may ask the streamer
            streamer.put(chosen.cpu())
        if ends.after(tokens):
            break
        if watch is not None:
            watch.check()
            chosen = tokens.all[:, -1]  # a criterion may have changed it
        if chooser.takes_likeliest:
            chosen = step.likeliest(chosen)
        else:
            chosen = chooser.choose(tokens, step(chosen).float())


def _run_modules(processors: Any) -> bool:
    """Whether a logits processor runs a model between the steps, on torch's threads."""
    return any(isinstance(held, nn.Module) for processor in processors for held in _held(processor))


def _is_own(thing: Any) -> bool:
    """Whether a function or class is transformers' own or this package's."""
    return str(getattr(thing, "__module__", "")).startswith(("transformers.", "acclimate."))


def _is_users(callbacks: Iterable[Any]) -> bool:
    """Whether some code that runs after each token is neither transformers' own nor this package's.

    A function of the user's may be an attribute of an object of transformers' (``prefix_allowed_tokens_fn``).
    This package's objects hold functions, too, such as a server's question whether to stop, and know them.
    """
    others = [one for one in callbacks if not (one is None or type(one).__module__.startswith("acclimate."))]
    return any(
        not _is_own(one) or any(callable(held) and not _is_own(held) for held in _held(one)) for one in others
    )


def _held(thing: Any) -> Iterable[Any]:
    """Returns what an object's attributes hold."""
    return getattr(thing, "__dict__", {}).values()


def _has_users_loop(model: Any) -> bool:
    """Whether a class of the user's, or the model itself, has another part of the loop over tokens."""
    held = [vars(kind) for kind in type(model).__mro__] + [vars(model)]
    return any(name in own and not _is_own(own[name]) for own in held for name in _PARTS_OF_THE_LOOP)


class _Watch:
    """Looks after a model while code of the user's runs between its tokens."""

    def __init__(self, model: Any, lean: LeanDecoder) -> None:
        self._model, self._native = model, lean.native
        self._snapshot = _found[model][1]
        functions = [*lean.decoder.factors, *(f for t in lean.decoder.tables for f in (t.cos, t.sin))]
        own = {id(tensor): tensor for function in functions for tensor in function.tensors}
        # Steps compute angles once for many positions.
        self._of_positions = [(tensor, tensor.detach().clone()) for tensor in own.values()]

    def check(self) -> None:
        """Copies small weights anew, which may have changed.

        Raises:
            ModelChangedError: what the model computes has changed.
        """
        are_same = all(torch.equal(tensor, value) for tensor, value in self._of_positions)
        if not are_same or not self._snapshot.is_current(self._model):
            raise ModelChangedError(
                "the model was changed while it generated a text, by a logits processor, a stopping "
                "criterion, a streamer or another thread; change it between texts, or generate with "
                "return_dict_in_generate=True, which runs transformers' own loop"
            )
        if self._native is not None:
            self._native.copy_small_weights()


def _is_plain(
    model: Any, input_ids: Tensor, generation_config: Any, synced_gpus: bool, inputs: dict[str, Any]
) -> bool:
    """Whether this loop supports all options of the call."""
    cache = inputs.get("past_key_values")
    return (
        not synced_gpus
        and not is_observed()
        and not model.training
        and not generation_config.return_dict_in_generate
        and not getattr(generation_config, "is_assistant", False)
        and generation_config.use_cache is True
        and inputs.get("use_cache", True)
        and generation_config.compile_config is None
        and input_ids.dim() == 2
        and input_ids.dtype in (torch.int64, torch.int32)
        and 0 < len(input_ids) <= LARGEST_BATCH
        and input_ids.shape[1] > 0
        and all(name in _KNOWN_INPUTS or _is_nothing(value) for name, value in inputs.items())
        and _is_usual_cache(cache, input_ids.shape[1])
        and hasattr(model, "_prefill")
        and not _has_users_loop(model)
    )


def _is_nothing(value: Any) -> bool:
    """Whether an input is left out; transformers gives a model of images ``{}`` for a text without any."""
    return value is None or (isinstance(value, dict) and not value)


def _is_usual_cache(cache: Any, length: int) -> bool:
    """Whether the cache keeps keys and values whole, and ends before the last token of a prompt.

    transformers has made it for this call, or it is the caller's and holds the first tokens of the prompt.
    """
    from transformers import DynamicCache

    return (
        type(cache) is DynamicCache
        and not getattr(cache, "offloading", False)
        and all(type(layer).__name__ in _WHOLE_LAYERS for layer in cache.layers)
        and 0 <= cache.get_seq_length() < length
    )


def _has_inputs(cache: Any, mask: Tensor | None, decoder: Decoder) -> bool:
    """Whether a cache holds what the convolutions of a decoder have read, and recurrent states, in the dtypes
    in which a step keeps them; padding must be zeros in the mask, and other tokens ones."""
    layers = cache.layers
    keeping = {i: mixer for i, mixer in enumerate(decoder.own_mixers) if not isinstance(mixer, Attention)}
    if {i for i, layer in enumerate(layers) if type(layer).__name__ == _INPUTS} != set(keeping):
        return False
    if keeping and mask is not None and bool(((mask != 0) & (mask != 1)).any()):  # they are multiplied by it
        return False
    is_begun = bool(cache.get_seq_length())
    for index, mixer in keeping.items():
        layer = layers[index]
        if layer.record_past or layer.number_of_states != 1 or layer.has_previous_state[0] is not is_begun:
            return False
        if is_begun and layer.conv_states[0].shape[-1] != mixer.width:
            return False
        if is_begun and layer.is_recurrent_states_initialized[0] is not isinstance(mixer, DeltaRule):
            return False
        # transformers rounds what a layer keeps to the dtype of its tensors, which stay after a reset too.
        if layer.is_conv_states_initialized[0] and layer.conv_states[0].dtype != decoder.dtype:
            return False
        if layer.is_recurrent_states_initialized[0] and layer.recurrent_states[0].dtype != torch.float32:
            return False
    return True


def _starts(mask: Tensor | None, input_ids: Tensor) -> Tensor | None:
    """Returns each sequence's start after left padding; ``None`` if the mask is not left padding."""
    batch, length = input_ids.shape
    if mask is None:
        return torch.zeros(batch, dtype=torch.long, device=input_ids.device)
    if mask.shape != input_ids.shape:
        return None
    seen = mask != 0  # as transformers reads it
    starts = length - seen.sum(-1)
    expected = torch.arange(length, device=mask.device)[None] >= starts[:, None]
    if not torch.equal(seen, expected) or bool((starts >= length).any()):
        return None
    return starts


def _are_usual(positions: Tensor | None, starts: Tensor, length: int) -> bool:
    """Whether each token's position is its place after the padding."""
    if positions is None:  # the model may count padding then
        return not bool(starts.any())
    places = torch.arange(length, device=starts.device)[None] - starts[:, None]
    # Models of images get several positions of each token, which differ for images only.
    if positions.dim() not in (2, 3) or positions.shape[-1] != length:
        return False
    if positions.shape[-2] not in (1, len(starts)):
        return False
    # The positions of padding have no effect, unless one is the largest.
    return bool(((positions == places) | ((places < 0) & (positions < length))).all())


def _fits(limit: int | None, criteria: Any) -> bool:
    """Whether no text gets longer than a limit."""
    if limit is None:
        return True
    return any(
        getattr(criterion, "max_length", None) is not None and criterion.max_length <= limit
        for criterion in criteria
    )


class _Tokens:
    """The tokens so far, in a tensor of their own after each token, as in transformers: callbacks may keep or
    change it."""

    def __init__(self, prompt: Tensor) -> None:
        self.all = prompt.clone()

    def append(self, tokens: Tensor) -> None:
        self.all = torch.cat((self.all, tokens[:, None]), 1)

    @property
    def length(self) -> int:
        return self.all.shape[1]


class _Chooser:
    """Chooses the next token of each sequence, as transformers does."""

    def __init__(self, processors: Any, samples: bool, has_native_step: bool) -> None:
        self._processors, self._samples, self._has_native_step = processors, samples, has_native_step
        self.takes_likeliest = not samples and not len(processors)

    def choose(self, tokens: _Tokens, logits: Tensor) -> Tensor:
        """Returns the next tokens."""
        # OpenMP's threads spin for milliseconds after their work, on cores that the native step needs.
        with one_thread() if self._has_native_step else contextlib.nullcontext():
            return self._chosen(tokens, logits)

    def _chosen(self, tokens: _Tokens, logits: Tensor) -> Tensor:
        scores: Tensor = self._processors(tokens.all, logits)
        if self._samples:
            return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
        return scores.argmax(-1)


class _Ends:
    """Ends sequences like transformers' stopping criteria; checks the two common ones without tensors."""

    def __init__(self, criteria: Any, generation_config: Any, batch: int) -> None:
        from transformers import EosTokenCriteria, MaxLengthCriteria

        self._criteria = criteria
        self._going = [True] * batch
        self._are_common = all(type(one) in (EosTokenCriteria, MaxLengthCriteria) for one in criteria)
        self._longest = min(
            (one.max_length for one in criteria if type(one) is MaxLengthCriteria), default=None
        )
        ends = [one.eos_token_id for one in criteria if type(one) is EosTokenCriteria]
        self._end_tokens = {token for end in ends for token in end.reshape(-1).tolist()}
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._pad: Tensor | None = generation_config._pad_token_tensor if pads else None

    def at_most(self, length: int) -> int:
        """Returns a length, or that of the longest text if it is less."""
        return length if self._longest is None else min(length, self._longest)

    def padded(self, tokens: Tensor) -> Tensor:
        """Replaces the tokens of sequences that have ended."""
        if self._pad is None or all(self._going):
            return tokens
        return torch.where(torch.tensor(self._going, device=tokens.device), tokens, self._pad)

    def after(self, tokens: _Tokens) -> bool:
        """Whether all sequences have ended."""
        ended = self._ended(tokens)
        self._going = [was and not now for was, now in zip(self._going, ended, strict=True)]
        return not any(self._going)

    def _ended(self, tokens: _Tokens) -> list[bool]:
        if not self._are_common:
            ended: list[bool] = self._criteria(tokens.all, None).tolist()
            return ended
        if self._longest is not None and tokens.length >= self._longest:
            return [True] * len(self._going)
        return [token in self._end_tokens for token in tokens.all[:, -1].tolist()]
