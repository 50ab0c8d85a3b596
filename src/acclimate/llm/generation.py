"""Generates text from a prompt, token by token, and measures the run.

Ctrl-C stops all ranks that share a model at the same token. If one rank stopped earlier, the others would
wait for it in a collective, where they cannot handle Ctrl-C.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from acclimate.accelerator import Accelerator
from acclimate.errors import (
    AcclimateError,
    CorruptModelError,
    GenerationOptionError,
    PromptError,
    UnsupportedModelError,
    excerpt,
)
from acclimate.llm.deferred_sigint import interrupts_deferred
from acclimate.llm.loading.load import load_model
from acclimate.llm.loading.loaded_model import LoadedModel, is_panic, memory_errors
from acclimate.llm.quiet import first_line, quiet_transformers, why_unusable
from acclimate.llm.ranks import ModelRanks, is_lost_rank
from acclimate.llm.text.tokenizers import Message, NoTemplateError, StopTexts, TextStream
from acclimate.llm.text_options import CHAT_TEMPERATURE, DEFAULT_MAX_NEW_TOKENS, TextOptions

logger = logging.getLogger("acclimate.llm")


@dataclass(frozen=True)
class Generation:
    """A generated text and the figures of the run."""

    text: str
    """The continuation, without the prompt."""
    prompt_tokens: int
    generated_tokens: int
    """Includes the end token, which has no text."""
    tokens: tuple[int, ...]
    finish_reason: str
    """``end`` (the model wrote an end token), ``stop`` (a stop text), ``length``, ``context`` (it is full) or
    ``interrupted``."""
    model: str
    """The model's name: that of its folder, its GGUF file or its id on the hub."""
    accelerator: str
    device: str
    dtype: str
    """What the model computes in."""
    weights: str
    """The format of the weights: ``int8``, ``int4``, llama.cpp's, such as ``Q4_K_M``, or the dtype."""
    parameters: int
    ranks: int
    """The number of processes that share the model."""
    load_seconds: float
    """From the call until the model is ready, with imports and any conversion or download, and without
    :attr:`compile_seconds`."""
    compile_seconds: float
    """The time for compiling kernels before that, which happens once on a machine."""
    time_to_first_token_seconds: float | None
    """From the ready model to the first token; ``None`` if there was no token."""
    tokens_per_second: float | None
    """After the first token; ``None`` for fewer than two tokens."""
    peak_memory_bytes: int
    """The accelerator's peak allocation since loading began, on this rank."""
    cached_tokens: int = 0
    """The first of the prompt's tokens, which an earlier turn of the conversation has read."""


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during generation; ``partial`` holds the text so far."""

    def __init__(self, partial: Generation) -> None:
        super().__init__()
        self.partial = partial


def generate(
    prompt: str,
    *,
    model: str | os.PathLike[str] | LoadedModel | None = None,
    chat: bool = False,
    system: str | None = None,
    chat_template: str | None = None,
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    dtype: str = "auto",
    quantize: str | None = None,
    kv_cache_dtype: str = "auto",
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    repetition_penalty: float | None = None,
    stop: Iterable[str] = (),
    trust_remote_code: bool = False,
    ignore_extra: Iterable[str] = (),
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Continues a prompt with a language model on this process's accelerator.

    Args:
        prompt: the text to continue; with ``chat``, a message to answer.
        model: a folder, a ``.gguf`` file, the id of a model on the Hugging Face hub, a model loaded by
            :func:`acclimate.llm.load_model`, or ``None`` for the demo model.
        chat: whether the model answers the prompt, which is put into its chat template. Without it, no
            template is applied.
        system: with ``chat``: instructions to the model, which come before the message.
        chat_template: with ``chat``: a Jinja template in place of the model's own.
        max_new_tokens: the most tokens to generate. If the model's context has room for fewer, generation
            stops there, with a warning.
        dtype: ``bfloat16``, ``float16``, ``float32``, or ``auto``: the first of these that the accelerator
            supports. With ``auto``, a GGUF file runs from its own quantised blocks. Ignored for a loaded
            model.
        quantize: ``int8`` or ``int4``: the format in which the weights of linear modules and embeddings are
            stored. Ignored for a loaded model.
        kv_cache_dtype: ``int8`` or ``auto``: the ``kv_cache_dtype`` argument of
            :func:`acclimate.init_inference`. Ignored for a loaded model.
        temperature: 0 always takes the most probable token, like ``model.generate(do_sample=False)``; above
            0, tokens are sampled. ``None``: 0, or with ``top_p``, ``top_k`` or ``min_p`` the model's own, or
            0.8 if it has none.
        top_p: samples only from the most probable tokens whose probabilities sum to this; ``None``: the
            model's own setting.
        top_k: samples only from this many of the most probable tokens, 0 from all; ``None``: the model's own.
        min_p: samples only from tokens that have at least this share of the largest probability; ``None``:
            the model's own.
        seed: makes sampling repeatable; seeds torch's generators of the accelerator and of the CPU.
        repetition_penalty: above 1, makes repeated tokens less probable, as in transformers;
            ``None`` uses the model's own setting.
        stop: texts before which the generated text ends.
        trust_remote_code: whether Python code that comes with the model may run.
        ignore_extra: patterns, such as ``v_head.*``, of tensors in the files that the model does not use.
            Ignored for a loaded model.
        on_text: called with each piece of text as soon as it is final; a piece contains whole characters.

    Raises:
        PromptError: the prompt is empty, is not valid text, or does not fit into the model's context; or the
            model has no chat template.
        GenerationOptionError: an option is out of range.
        GenerationInterrupted: Ctrl-C was pressed; holds the text so far.
        DeviceMemoryError: the accelerator is out of memory.
        AcclimateError: the errors of :func:`acclimate.llm.load_model`.
    """
    if temperature is None and (top_p, top_k, min_p) == (None, None, None):
        temperature = 0.0
    options = TextOptions(
        max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, tuple(stop)
    )
    options.check()
    check_text(prompt)
    if system is not None and not chat:
        raise GenerationOptionError(
            "system needs chat: without a chat template the model gets only the prompt"
        )
    loaded = (
        model
        if isinstance(model, LoadedModel)
        else load_model(
            model,
            dtype=dtype,
            quantize=quantize,
            kv_cache_dtype=kv_cache_dtype,
            trust_remote_code=trust_remote_code,
            ignore_extra=ignore_extra,
        )
    )
    if chat:
        instructions = [] if system is None else [{"role": "system", "content": system}]
        text = rendered(loaded, [*instructions, {"role": "user", "content": prompt}], chat_template)
        tokens = encoded(loaded, text, is_whole=False)
    else:
        tokens = encoded(loaded, prompt)
    return write_text(loaded, tokens, options, on_text)


def write_text(
    loaded: LoadedModel,
    tokens: list[int],
    options: TextOptions,
    on_text: Callable[[str], None] | None = None,
    cache: Any = None,
    is_stopped: Callable[[], bool] | None = None,
) -> Generation:
    """Continues tokens; the errors are those of :func:`generate`.

    Args:
        loaded: the model.
        tokens: the prompt.
        options: how to continue it; they have been checked.
        on_text: called with each piece of text.
        cache: a ``DynamicCache`` of transformers that may hold the first tokens of the prompt. At the end it
            also holds the others and the new ones, except the last.
        is_stopped: asked after each token whether the text must end here.
    """
    limit = _new_token_limit(loaded, tokens, options.max_new_tokens)
    cached = 0 if cache is None else int(cache.get_seq_length())
    failures: list[BaseException] = []  # errors raised by on_text, which reach the caller unchanged

    def deliver(piece: str) -> None:
        try:
            if on_text is not None:
                on_text(piece)
        except BaseException as error:
            failures.append(error)
            raise

    stops = StopTexts(options.stop, deliver)
    recorder = _TokenRecorder(TextStream(loaded.tokenizer, tokens, stops.put), stops, is_stopped)
    reason = "context" if limit < options.max_new_tokens else "length"
    try:
        with (
            memory_errors(loaded.accelerator, f"generating {limit} tokens"),
            shared_interrupt(loaded.ranks, loaded.accelerator) as recorder.check_interrupt,
        ):
            ends = _run(loaded, tokens, limit, options, recorder, cache)
    except KeyboardInterrupt:
        raise GenerationInterrupted(_result(loaded, tokens, cached, recorder, "interrupted")) from None
    except AcclimateError:
        raise
    except Exception as error:  # any type: transformers does not check a model's settings
        if error in failures or is_lost_rank(error):
            raise
        raise UnsupportedModelError(
            f"the model in {loaded.folder} cannot generate with its settings: {why_unusable(error)}"
        ) from error
    if stops.found is not None:
        reason = "stop"
    elif recorder.tokens and recorder.tokens[-1] in ends:
        reason = "end"
    elif recorder.was_stopped:
        reason = "interrupted"
    return _result(loaded, tokens, cached, recorder, reason)


@dataclass
class _TokenRecorder:
    """Receives each token from transformers, whose ``generate`` calls ``put`` and ``end``."""

    stream: TextStream
    stops: StopTexts
    is_stopped: Callable[[], bool] | None
    was_stopped: bool = False
    tokens: list[int] = field(default_factory=list)
    started: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    check_interrupt: Callable[[], None] = lambda: None
    """Raises KeyboardInterrupt on all ranks if one of them received SIGINT."""
    _prompt_seen: bool = False

    def put(self, value: Any) -> None:
        if not self._prompt_seen:  # the first call passes the prompt
            self._prompt_seen = True
            return
        for token in value.reshape(-1).tolist():
            self.last_at = time.perf_counter()
            self.first_at = self.first_at or self.last_at
            self.tokens.append(token)
            self.stream.put(token)
        self.check_interrupt()

    def end(self) -> None:
        """Does nothing: the caller ends the stream, even if transformers does not get this far."""

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        """Whether the text must end here: this object is also the stopping criterion of ``generate``.

        The loop over tokens knows its type, and does not look after each token whether it changed the model.
        """
        import torch

        if self.is_stopped is not None and self.is_stopped():
            self.was_stopped = True
        ends = self.was_stopped or self.stops.found is not None
        return torch.full((len(input_ids),), ends, dtype=torch.bool, device=input_ids.device)


def _run(
    loaded: LoadedModel,
    tokens: list[int],
    limit: int,
    options: TextOptions,
    recorder: _TokenRecorder,
    cache: Any,
) -> frozenset[int]:
    """Runs the model and returns its end tokens.

    Uses transformers' own ``generate``, which supports each model's cache, penalties and end tokens.
    """
    import torch

    end_list = end_tokens(loaded)
    named = _sampling(options, loaded.module.generation_config.temperature)
    named |= {"max_new_tokens": limit, "num_beams": 1}
    # Drafting tokens with the model's first layers does not change the text, and never terminates if the
    # model's settings ask for 0 or 10**9 layers.
    named["assistant_early_exit"] = None
    if end_list:
        named["eos_token_id"] = end_list
        named["pad_token_id"] = end_list[0]
    if cache is not None:
        named["past_key_values"] = cache
    if options.stop or recorder.is_stopped is not None:  # with one, the loop asks all of them with tensors
        named["stopping_criteria"] = [recorder]
    if options.seed is not None:
        torch.manual_seed(options.seed)  # the host's generator, which some models use
        loaded.accelerator.manual_seed_all(options.seed)
    ids = torch.tensor([tokens], device=loaded.accelerator.current_device_name())
    recorder.started = time.perf_counter()
    try:
        with torch.inference_mode(), quiet_transformers():
            loaded.module.generate(ids, attention_mask=torch.ones_like(ids), streamer=recorder, **named)
    finally:
        recorder.stream.end()
        recorder.stops.end()
    loaded.accelerator.synchronize()
    return frozenset(end_list)


def _sampling(options: TextOptions, own_temperature: float | None) -> dict[str, Any]:
    """Returns the arguments of ``generate`` that say how a token is chosen."""
    heat = options.temperature
    if heat is None:
        heat = CHAT_TEMPERATURE if own_temperature is None else own_temperature
    named: dict[str, Any] = {"do_sample": heat > 0}
    if heat > 0:
        named["temperature"] = heat
        given = {name: getattr(options, name) for name in ("top_p", "top_k", "min_p")}
        named |= {name: value for name, value in given.items() if value is not None}
        if options.top_p == 0:  # only the most probable token; transformers refuses 0
            named["top_p"] = sys.float_info.min
    if options.repetition_penalty is not None:
        named["repetition_penalty"] = options.repetition_penalty
    return named


def end_tokens(loaded: LoadedModel) -> list[int]:
    """Returns the tokens that end a text: the model's own, or else the tokenizer's.

    Raises:
        CorruptModelError: the model's settings name something else than tokens.
    """
    own = loaded.module.generation_config.eos_token_id
    ends = own if own is not None else loaded.tokenizer.end_token
    found = [] if ends is None else ends if isinstance(ends, (list, tuple)) else [ends]
    if any(isinstance(end, bool) or not isinstance(end, int) for end in found):
        raise CorruptModelError(
            f"the settings in {loaded.folder} are corrupt: eos_token_id must be a token's number or a list "
            f"of them; it is {excerpt(repr(ends))}"
        )
    rows = loaded.tokens
    known = [end for end in found if 0 <= end < rows]
    if len(known) < len(found):
        logger.warning("ignoring eos_token_id %s of %s: it has only %d tokens", ends, loaded.name, rows)
    return known


def rendered(loaded: LoadedModel, messages: Sequence[Message], template: str | None = None) -> str:
    """Returns a conversation in the model's chat template or another, up to where its answer begins.

    Raises:
        PromptError: the model has no chat template, or the template refuses these messages.
    """
    from jinja2.exceptions import TemplateError

    try:
        return loaded.tokenizer.render(messages, template)
    except NoTemplateError as error:
        raise PromptError(
            f"{loaded.name} has no chat template, so nothing says how a question and its answer are written. "
            "Continue a text with acclimate generate, without --chat, or choose a template with "
            "--chat_template FILE"
        ) from error
    except TemplateError as error:
        raise PromptError(
            f"the chat template for {loaded.name} refuses this conversation: {first_line(error)}"
        ) from error
    except Exception as error:  # any type: a template is a program from the model's files
        raise CorruptModelError(
            f"the chat template for {loaded.name} cannot be used: {first_line(error)}"
        ) from error


def encoded(loaded: LoadedModel, text: str, *, is_whole: bool = True) -> list[int]:
    """Returns the tokens of a prompt.

    Raises:
        CorruptModelError: the tokenizer cannot read it.
    """
    try:
        return loaded.tokenizer.encode(text, is_whole=is_whole)
    except BaseException as error:  # a panic of the tokenizers library is not an Exception
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise CorruptModelError(
            f"the tokenizer in {loaded.folder} cannot read the prompt: {why_unusable(error)}"
        ) from error


def check_text(prompt: str) -> None:
    """Raises :class:`PromptError` unless a prompt is text that a model can read."""
    if not prompt.strip():
        raise PromptError("the prompt is empty; give the model some text to continue")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # Python decodes such command-line bytes to lone surrogates
        raise PromptError("the prompt is not valid text: it contains bytes that are not UTF-8") from error


def _new_token_limit(loaded: LoadedModel, tokens: list[int], max_new_tokens: int) -> int:
    """Returns how many tokens to generate: ``max_new_tokens``, or fewer if the context is too short."""
    if not tokens:
        raise PromptError("the model's tokenizer produces no tokens for this prompt; choose another prompt")
    rows = loaded.tokens
    if min(tokens) < 0 or max(tokens) >= rows:
        raise CorruptModelError(
            f"the tokenizer in {loaded.folder} does not belong to its model: it gives the token "
            f"{max(tokens)}, and the model has {rows}"
        )
    context = loaded.context_length
    if context is None:
        return max_new_tokens
    room = context - len(tokens)
    if room < 1:
        raise PromptError(
            f"the prompt has {len(tokens)} tokens and the model's context is {context}, which leaves "
            "no room for new tokens; shorten the prompt"
        )
    if room < max_new_tokens:
        logger.warning(
            "the prompt has %d tokens, so the model's context of %d has room for only %d of %d new tokens",
            len(tokens),
            context,
            room,
            max_new_tokens,
        )
    return min(room, max_new_tokens)


def _result(
    loaded: LoadedModel, prompt: list[int], cached: int, recorder: _TokenRecorder, reason: str
) -> Generation:
    count, span = len(recorder.tokens), recorder.last_at - recorder.first_at
    return Generation(
        text=recorder.stops.text,
        prompt_tokens=len(prompt),
        generated_tokens=count,
        tokens=tuple(recorder.tokens),
        finish_reason=reason,
        model=loaded.name,
        accelerator=loaded.accelerator.name,
        device=loaded.accelerator.current_device_name(),
        dtype=str(loaded.dtype).removeprefix("torch."),
        weights=loaded.weights,
        parameters=loaded.parameters,
        ranks=loaded.ranks.size,
        load_seconds=loaded.load_seconds,
        compile_seconds=loaded.compile_seconds,
        time_to_first_token_seconds=recorder.first_at - recorder.started if count else None,
        tokens_per_second=(count - 1) / span if count > 1 and span > 0 else None,
        peak_memory_bytes=loaded.accelerator.max_memory_allocated(),
        cached_tokens=cached,
    )


@contextlib.contextmanager
def shared_interrupt(ranks: ModelRanks, accelerator: Accelerator) -> Iterator[Callable[[], None]]:
    """Defers SIGINT in the ``with`` block; yields a function that all ranks call to raise it together.

    SIGINT is then handled by the program's own handler; if that raises nothing, the ranks continue. A second
    SIGINT is handled immediately. Nothing is deferred with one rank, or if SIGINT has no handler in Python.
    """
    if ranks.size == 1:
        yield lambda: None
        return
    with interrupts_deferred(most=1) as handle_received:
        if handle_received is None:
            yield lambda: None
            return
        import torch
        import torch.distributed as dist

        told = torch.zeros(1, device=accelerator.current_device_name())

        def check() -> None:
            raised: BaseException | None = None
            try:
                handle_received()
            except BaseException as error:  # noqa: BLE001 - raised below, once the other ranks know
                raised = error
            told.fill_(raised is not None)
            dist.all_reduce(told, group=ranks.group)
            if raised is not None:
                raise raised
            if told.item():
                raise KeyboardInterrupt

        yield check
