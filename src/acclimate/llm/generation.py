"""Generates text from a prompt, token by token, and measures the run."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from acclimate.errors import (
    AcclimateError,
    CorruptModelError,
    GenerationOptionError,
    PromptError,
    UnsupportedModelError,
    excerpt,
)
from acclimate.llm.loading.load import load_model
from acclimate.llm.loading.loaded_model import LoadedModel, is_panic, memory_errors
from acclimate.llm.quiet import quiet_transformers, why_unusable
from acclimate.llm.ranks import is_lost_rank
from acclimate.llm.shared_interrupt import shared_interrupt
from acclimate.llm.text.tokenizers import TextStream

logger = logging.getLogger("acclimate.llm")

_DEFAULT_MAX_NEW_TOKENS = 100
LOWEST_TEMPERATURE = 1e-4
"""Scores are divided by the temperature in float32; much lower ones give infinities, which break sampling."""


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
    """``end`` (the model wrote an end token), ``length``, ``context`` (it is full) or ``interrupted``."""
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


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during generation; ``partial`` holds the text so far."""

    def __init__(self, partial: Generation) -> None:
        super().__init__()
        self.partial = partial


def generate(
    prompt: str,
    *,
    model: str | os.PathLike[str] | LoadedModel | None = None,
    max_new_tokens: int = _DEFAULT_MAX_NEW_TOKENS,
    dtype: str = "auto",
    quantize: str | None = None,
    temperature: float = 0.0,
    seed: int | None = None,
    repetition_penalty: float | None = None,
    trust_remote_code: bool = False,
    ignore_extra: Iterable[str] = (),
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Continues a prompt with a language model on this process's accelerator.

    No chat template is applied to the prompt.

    Args:
        prompt: the text to continue.
        model: a folder, a ``.gguf`` file, the id of a model on the Hugging Face hub, a model loaded by
            :func:`acclimate.llm.load_model`, or ``None`` for the demo model.
        max_new_tokens: the most tokens to generate. If the model's context has room for fewer, generation
            stops there, with a warning.
        dtype: ``bfloat16``, ``float16``, ``float32``, or ``auto``: the first of these that the accelerator
            supports. With ``auto``, a GGUF file runs from its own quantised blocks. Ignored for a loaded
            model.
        quantize: ``int8`` or ``int4``: the format in which the weights of linear modules and embeddings are
            stored. Ignored for a loaded model.
        temperature: 0 always takes the most probable token, like ``model.generate(do_sample=False)``; above
            0, tokens are sampled within the model's own top-k and top-p, if it sets them.
        seed: makes sampling repeatable; seeds torch's generators of the accelerator and of the CPU.
        repetition_penalty: above 1, makes repeated tokens less probable, as in transformers;
            ``None`` uses the model's own setting.
        trust_remote_code: whether Python code that comes with the model may run.
        ignore_extra: patterns, such as ``v_head.*``, of tensors in the files that the model does not use.
            Ignored for a loaded model.
        on_text: called with each piece of text as soon as it is final; a piece contains whole characters.

    Raises:
        PromptError: the prompt is empty, is not valid text, or does not fit into the model's context.
        GenerationOptionError: a number is out of range.
        GenerationInterrupted: Ctrl-C was pressed; holds the text so far.
        DeviceMemoryError: the accelerator is out of memory.
        AcclimateError: the errors of :func:`acclimate.llm.load_model`.
    """
    _check_options(max_new_tokens, temperature, seed, repetition_penalty)
    _check_prompt(prompt)
    loaded = (
        model
        if isinstance(model, LoadedModel)
        else load_model(
            model,
            dtype=dtype,
            quantize=quantize,
            trust_remote_code=trust_remote_code,
            ignore_extra=ignore_extra,
        )
    )
    tokens = _encode(loaded, prompt)
    limit = _new_token_limit(loaded, tokens, max_new_tokens)
    failures: list[BaseException] = []  # errors raised by on_text, which reach the caller unchanged

    def deliver(piece: str) -> None:
        try:
            if on_text is not None:
                on_text(piece)
        except BaseException as error:
            failures.append(error)
            raise

    recorder = _TokenRecorder(TextStream(loaded.tokenizer, tokens, deliver))
    reason = "context" if limit < max_new_tokens else "length"
    try:
        with (
            memory_errors(loaded.accelerator, f"generating {limit} tokens"),
            shared_interrupt(loaded.ranks, loaded.accelerator) as recorder.check_interrupt,
        ):
            ends = _run(loaded, tokens, limit, temperature, seed, repetition_penalty, recorder)
    except KeyboardInterrupt:
        raise GenerationInterrupted(_result(loaded, tokens, recorder, "interrupted")) from None
    except AcclimateError:
        raise
    except Exception as error:  # any type: transformers does not check a model's settings
        if error in failures or is_lost_rank(error):
            raise
        raise UnsupportedModelError(
            f"the model in {loaded.folder} cannot generate with its settings: {why_unusable(error)}"
        ) from error
    if recorder.tokens and recorder.tokens[-1] in ends:
        reason = "end"
    return _result(loaded, tokens, recorder, reason)


@dataclass
class _TokenRecorder:
    """Receives each token from transformers, whose ``generate`` calls ``put`` and ``end``."""

    stream: TextStream
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


def _run(
    loaded: LoadedModel,
    tokens: list[int],
    limit: int,
    temperature: float,
    seed: int | None,
    repetition_penalty: float | None,
    recorder: _TokenRecorder,
) -> frozenset[int]:
    """Runs the model and returns its end tokens.

    Uses transformers' own loop, which supports each model's cache, penalties and end tokens. Its cost is too
    small to measure (``benchmarks/generate.py`` compares it with a bare loop).
    """
    import torch

    device = loaded.accelerator.current_device_name()
    end_list = _end_tokens(loaded)
    options: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": limit, "num_beams": 1}
    # Drafting tokens with the model's first layers does not change the text, and never terminates if the
    # model's settings ask for 0 or 10**9 layers.
    options["assistant_early_exit"] = None
    if temperature > 0:
        options["temperature"] = temperature
    if repetition_penalty is not None:
        options["repetition_penalty"] = repetition_penalty
    if end_list:
        options["eos_token_id"] = end_list
        options["pad_token_id"] = end_list[0]
    if seed is not None:
        torch.manual_seed(seed)  # the host's generator, which some models use
        loaded.accelerator.manual_seed_all(seed)
    ids = torch.tensor([tokens], device=device)
    recorder.started = time.perf_counter()
    try:
        with torch.inference_mode(), quiet_transformers():
            loaded.module.generate(ids, attention_mask=torch.ones_like(ids), streamer=recorder, **options)
    finally:
        recorder.stream.end()
    loaded.accelerator.synchronize()
    return frozenset(end_list)


def _end_tokens(loaded: LoadedModel) -> list[int]:
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


def _encode(loaded: LoadedModel, prompt: str) -> list[int]:
    try:
        return loaded.tokenizer.encode(prompt)
    except BaseException as error:  # a panic of the tokenizers library is not an Exception
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise CorruptModelError(
            f"the tokenizer in {loaded.folder} cannot read the prompt: {why_unusable(error)}"
        ) from error


def _check_options(
    max_new_tokens: int, temperature: float, seed: int | None, repetition_penalty: float | None
) -> None:
    if not 0 < max_new_tokens < 2**31:
        raise GenerationOptionError(f"max_new_tokens must be from 1 to 2^31 - 1; it is {max_new_tokens}")
    if not (math.isfinite(temperature) and (temperature == 0 or temperature >= LOWEST_TEMPERATURE)):
        raise GenerationOptionError(
            f"temperature must be 0, which always takes the likeliest token, or at least "
            f"{LOWEST_TEMPERATURE}; it is {temperature}"
        )
    if repetition_penalty is not None and not 0.1 <= repetition_penalty <= 10:
        raise GenerationOptionError(f"repetition_penalty must be from 0.1 to 10; it is {repetition_penalty}")
    if seed is not None and not 0 <= seed < 2**63:
        raise GenerationOptionError(f"seed must be from 0 to 2^63 - 1; it is {seed}")


def _check_prompt(prompt: str) -> None:
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


def _result(loaded: LoadedModel, prompt: list[int], recorder: _TokenRecorder, reason: str) -> Generation:
    count, span = len(recorder.tokens), recorder.last_at - recorder.first_at
    return Generation(
        text=recorder.stream.text,
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
    )
