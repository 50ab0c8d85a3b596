"""Text from a prompt, token by token, with the figures of the run."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from acclimate.errors import (
    AcclimateError,
    CorruptModelError,
    GenerationOptionError,
    PromptError,
    UnsupportedModelError,
)
from acclimate.inference.loading import LoadedModel, is_panic, load_model, memory_errors
from acclimate.inference.quiet import quiet_transformers, why_unusable
from acclimate.inference.text import TextStream

logger = logging.getLogger("acclimate.inference")

DEFAULT_MAX_NEW_TOKENS = 100
LOWEST_TEMPERATURE = 1e-4
"""Scores are divided by it in float32: much less than this gives infinities, which cannot be drawn from."""


@dataclass(frozen=True)
class Generation:
    """A text that a model wrote, and how it went."""

    text: str
    """The continuation, without the prompt."""
    prompt_tokens: int
    generated_tokens: int
    """Also counts the token that ends the text, which has no text of its own."""
    tokens: tuple[int, ...]
    finish_reason: str
    """``end`` (the model ended its text), ``length``, ``context`` (it is full) or ``interrupted``."""
    model: str
    """The name of the folder the model was loaded from."""
    accelerator: str
    device: str
    dtype: str
    parameters: int
    load_seconds: float
    """From the call to the model being ready, imports and any conversion or download included."""
    time_to_first_token_seconds: float | None
    """From the model being ready to the first token; ``None`` if there was none."""
    tokens_per_second: float | None
    """After the first token; ``None`` for fewer than two tokens."""
    peak_memory_bytes: int
    """The accelerator's high-water mark since loading began."""


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C while a model was writing; ``partial`` holds what it wrote until then."""

    def __init__(self, partial: Generation) -> None:
        super().__init__()
        self.partial = partial


def generate(
    prompt: str,
    *,
    model: str | os.PathLike[str] | LoadedModel | None = None,
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    dtype: str = "auto",
    temperature: float = 0.0,
    seed: int | None = None,
    repetition_penalty: float | None = None,
    trust_remote_code: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Lets a language model continue a prompt on this process's accelerator.

    The prompt is continued as it stands; no chat template is applied.

    Args:
        prompt: The text to continue.
        model: A folder, a ``.gguf`` file, the id of a model on the Hugging Face hub, what
            :func:`acclimate.inference.load_model` returned, or ``None`` for the demo model.
        max_new_tokens: When to stop at the latest. A prompt that leaves less room in the model's context
            stops there, with a warning.
        dtype: ``bfloat16``, ``float16``, ``float32``, or ``auto``: the first of these that the accelerator
            supports. A loaded model keeps its own.
        temperature: 0 always takes the likeliest token, as ``model.generate(do_sample=False)`` does; above
            0 tokens are drawn, with the model's own limits (top-k, top-p) where it states some.
        seed: Makes drawing repeatable; seeds torch's generators of the accelerator and of the host.
        repetition_penalty: Above 1, makes tokens that are in the text already less likely, as in
            transformers; ``None`` leaves it to the model.
        trust_remote_code: Whether Python code that the model brings with it may run.
        on_text: Called with each piece of text as soon as it is certain; a piece never holds half a
            character.

    Raises:
        PromptError: the prompt is empty, is no valid text, or does not fit the model's context.
        GenerationOptionError: a number that is out of range.
        GenerationInterrupted: Ctrl-C; holds what was generated until then.
        DeviceMemoryError: the accelerator is out of memory.
        AcclimateError: what :func:`acclimate.inference.load_model` raises.
    """
    _check_options(max_new_tokens, temperature, seed, repetition_penalty)
    _check_prompt(prompt)
    loaded = (
        model
        if isinstance(model, LoadedModel)
        else load_model(model, dtype=dtype, trust_remote_code=trust_remote_code)
    )
    tokens = _encode(loaded, prompt)
    limit = _new_token_limit(loaded, tokens, max_new_tokens)
    failures: list[BaseException] = []  # of the caller's own function, which go to the caller as they are

    def deliver(piece: str) -> None:
        try:
            if on_text is not None:
                on_text(piece)
        except BaseException as error:
            failures.append(error)
            raise

    recorder = _Recorder(TextStream(loaded.tokenizer, tokens, deliver))
    reason = "context" if limit < max_new_tokens else "length"
    try:
        with memory_errors(loaded.accelerator, f"generating {limit} tokens"):
            ends = _run(loaded, tokens, limit, temperature, seed, repetition_penalty, recorder)
    except KeyboardInterrupt:
        raise GenerationInterrupted(_result(loaded, tokens, recorder, "interrupted")) from None
    except AcclimateError:
        raise
    except Exception as error:  # of any type: a model's settings are used as they are
        if error in failures:
            raise
        raise UnsupportedModelError(
            f"the model in {loaded.folder} cannot generate with its settings: {why_unusable(error)}"
        ) from error
    if recorder.tokens and recorder.tokens[-1] in ends:
        reason = "end"
    return _result(loaded, tokens, recorder, reason)


@dataclass
class _Recorder:
    """Takes tokens as transformers makes them: its ``generate`` calls ``put`` and ``end``."""

    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    started: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    _prompt_seen: bool = False

    def put(self, value: Any) -> None:
        if not self._prompt_seen:  # the first call hands over the prompt
            self._prompt_seen = True
            return
        for token in value.reshape(-1).tolist():
            self.last_at = time.perf_counter()
            self.first_at = self.first_at or self.last_at
            self.tokens.append(token)
            self.stream.put(token)

    def end(self) -> None:
        """Nothing to do: the caller ends the stream, also when transformers does not get here."""


def _run(
    loaded: LoadedModel,
    tokens: list[int],
    limit: int,
    temperature: float,
    seed: int | None,
    repetition_penalty: float | None,
    recorder: _Recorder,
) -> frozenset[int]:
    """Runs the model; returns the tokens that end a text.

    transformers' own loop is used: it knows each model's cache, penalties and end tokens, and costs
    nothing measurable beside the model (``benchmarks/generate.py`` holds it against a bare loop).
    """
    import torch

    device = loaded.accelerator.current_device_name()
    end_list = _end_tokens(loaded)
    options: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": limit, "num_beams": 1}
    # Guessing tokens with the model's first layers gives the same text, and never ends with numbers such as
    # 0 or 10**9 in the model's settings.
    options["assistant_early_exit"] = None
    if temperature > 0:
        options["temperature"] = temperature
    if repetition_penalty is not None:
        options["repetition_penalty"] = repetition_penalty
    if end_list:
        options["eos_token_id"] = end_list
        options["pad_token_id"] = end_list[0]
    if seed is not None:
        torch.manual_seed(seed)  # the host's, which some models draw from
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
        raise CorruptModelError(f"the settings in {loaded.folder} give no token as eos_token_id: {ends!r}")
    rows = loaded.module.get_input_embeddings().weight.shape[0]
    known = [end for end in found if 0 <= end < rows]
    if len(known) < len(found):
        logger.warning("eos_token_id %s of %s is none of its %d tokens", ends, loaded.folder.name, rows)
    return known


def _encode(loaded: LoadedModel, prompt: str) -> list[int]:
    try:
        return loaded.tokenizer.encode(prompt)
    except BaseException as error:  # a panic of the tokenizers library is no Exception
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
    except UnicodeEncodeError as error:  # bytes of the command line that are not UTF-8 arrive like this
        raise PromptError("the prompt is not valid text: it holds bytes that are not UTF-8") from error


def _new_token_limit(loaded: LoadedModel, tokens: list[int], max_new_tokens: int) -> int:
    """How many tokens may be generated: what was asked for, or what the context has room for."""
    if not tokens:
        raise PromptError("the model's tokenizer makes no tokens of this prompt")
    rows = loaded.module.get_input_embeddings().weight.shape[0]
    if min(tokens) < 0 or max(tokens) >= rows:
        raise CorruptModelError(
            f"the tokenizer in {loaded.folder} does not belong to its model: token {max(tokens)} of {rows}"
        )
    context = loaded.context_length
    if context is None:
        return max_new_tokens
    room = context - len(tokens)
    if room < 1:
        raise PromptError(
            f"the prompt has {len(tokens)} tokens, the model's context is {context}, "
            "of which one at least is for the answer; shorten the prompt"
        )
    if room < max_new_tokens:
        logger.warning(
            "the prompt has %d tokens, so the model's context of %d has room for %d new ones, not %d",
            len(tokens),
            context,
            room,
            max_new_tokens,
        )
    return min(room, max_new_tokens)


def _result(loaded: LoadedModel, prompt: list[int], recorder: _Recorder, reason: str) -> Generation:
    count, span = len(recorder.tokens), recorder.last_at - recorder.first_at
    return Generation(
        text=recorder.stream.text,
        prompt_tokens=len(prompt),
        generated_tokens=count,
        tokens=tuple(recorder.tokens),
        finish_reason=reason,
        model=loaded.folder.name,
        accelerator=loaded.accelerator.name,
        device=loaded.accelerator.current_device_name(),
        dtype=str(loaded.dtype).removeprefix("torch."),
        parameters=loaded.parameters,
        load_seconds=loaded.load_seconds,
        time_to_first_token_seconds=recorder.first_at - recorder.started if count else None,
        tokens_per_second=(count - 1) / span if count > 1 and span > 0 else None,
        peak_memory_bytes=loaded.accelerator.max_memory_allocated(),
    )
