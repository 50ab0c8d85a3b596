"""Verifies a description: its steps must give the model's own logits."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from acclimate.llm.decode.description import DeltaRule, NotRepresentedError, Share
from acclimate.llm.decode.graph_step import can_capture
from acclimate.llm.decode.lean import LeanDecoder, Step
from acclimate.llm.decode.native import native_decoder
from acclimate.llm.decode.saved import decoder_key, load_decoder, save_decoder
from acclimate.llm.decode.share import share_of
from acclimate.llm.decode.staleness import has_hooks
from acclimate.llm.decode.trace import Watched
from acclimate.llm.freed_memory import return_freed_memory
from acclimate.llm.ranks import ModelRanks, is_lost_rank

logger = logging.getLogger("acclimate.llm")

_TOKENS = 9
_STEPS = 2
# transformers reads a prompt of a delta rule in chunks of 64 tokens, with operators of which there is no
# capture. So many times _TOKENS are a chunk, whose state the next one gets, and a part of one.
_MORE_THAN_A_CHUNK = 8
# The largest accepted difference of logits, relative to the largest logit. Both computations round at the
# same points, so they usually differ far less; sums in another order can add up over many layers.
_LIMITS = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
# Kernels of quantised weights round their inputs to 8 bits, which can turn a difference in the last digit
# into one of 1 %; in the 18 layers of a small model it grew to 0.08. Wrong descriptions (positions off by
# two, or a missing layer) gave 0.36 and more.
_QUANTISED_LIMIT = 0.2


def describe(model: Any, ranks: ModelRanks | None = None) -> LeanDecoder | None:
    """Returns the verified description of a model; if there is none, logs the reason and returns ``None``.

    The ranks of a split model make this call together; either all get a description or none does.
    """
    ranks = ModelRanks() if ranks is None else ranks
    key = decoder_key(model) if ranks.size == 1 else None
    if key is not None:
        lean = _saved(key, model)
        if lean is not None:
            return lean
    # Their imports take half a second, which a start with a saved description need not wait for.
    from acclimate.llm.decode.capture import capture
    from acclimate.llm.decode.match import match

    try:
        with _together(ranks):
            device, share = example_tokens(model).device, share_of(model)
        with _together(ranks):
            if has_hooks(model, getattr(model, "hooks_of_split", frozenset())):
                raise NotRepresentedError("a module has a hook, or a forward of its own")
            layers = int(model.config.get_text_config().num_hidden_layers)
            decoder = match(model, capture(model, _widths(model, share), layers), share)
            native = native_decoder(decoder, device)
            devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
            lean = LeanDecoder(decoder, native, native is None and can_capture(decoder, devices))
        # Ranks may be on processors of several kinds.
        reads = all(ranks.exchange(lean.native is not None and lean.native.prefills))
        if lean.native is not None:
            lean.native.prefills = reads
        with _together(ranks), _uncompiled(model):
            prove(model, lean, example_tokens(model))
        if key is not None and lean.native is not None:
            save_decoder(key, decoder, model)
        del decoder
        return_freed_memory()
    except NotRepresentedError as error:
        logger.info("%s generates with transformers' own step: %s", type(model).__name__, error)
        return None
    return lean


def _saved(key: str, model: Any) -> LeanDecoder | None:
    """Returns the description that an earlier start verified and saved; ``None`` if there is none."""
    decoder = load_decoder(key, model)
    if decoder is None:
        return None
    try:
        native = native_decoder(decoder, torch.device("cpu"))
    except (RuntimeError, NotRepresentedError) as error:  # reported when the description is derived again
        logger.debug("the saved description cannot run: %s", error)
        return None
    return None if native is None else LeanDecoder(decoder, native)  # only the native step was verified


@contextlib.contextmanager
def _together(ranks: ModelRanks) -> Iterator[None]:
    """Raises :class:`NotRepresentedError` on all ranks where the ``with`` block raises on one."""
    reason: str | None = None
    try:
        yield
    except NotRepresentedError as error:
        reason = str(error)
    except Exception as error:
        if is_lost_rank(error):
            raise
        reason = f"{type(error).__name__}: {error}"
    reason = next((told for told in ranks.exchange(reason) if told is not None), None)
    if reason is not None:
        raise NotRepresentedError(reason)


def _uncompiled(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Keeps ``torch.compile`` from compiling the model for each length of the proof."""
    if all(module._compiled_call_impl is None for module in model.modules()):
        return contextlib.nullcontext()  # without torch's compiler, whose import takes a second
    eager: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


def prove(model: Any, lean: LeanDecoder, tokens: Tensor) -> None:
    """Compares a few steps with the model's own forward, on a cache: of two sequences, one with padding, and
    of one, and each layer's results (:mod:`acclimate.llm.decode.trace`).

    Raises:
        NotRepresentedError: the logits, a layer's results or a router's choices differ, or the description
            holds for shorter texts only.
    """
    limit = lean.decoder.limit
    if limit is not None and limit <= 2 * _TOKENS:
        raise NotRepresentedError(f"texts of more than {limit} tokens are computed otherwise")
    first, later = tokens[:, :_TOKENS], tokens[:, _TOKENS:]
    packing, largest = getattr(model, "packing", None), _LIMITS.get(lean.decoder.dtype, 1e-4)
    if packing is not None and packing.packed:
        largest = max(largest, _QUANTISED_LIMIT)
    watched = Watched(model, lean.decoder, largest)
    with torch.no_grad(), watched.noting():
        gaps = [*_of_two(model, lean, watched, first, later)]
        # A capture's symbols stand for two and more.
        prompts = [first.repeat(1, 2), first[:, :1]]
        if any(isinstance(layer.mixer, DeltaRule) for layer in lean.decoder.layers):
            prompts.append(first.repeat(1, _MORE_THAN_A_CHUNK))
        for prompt in prompts:
            gaps += _of_one(model, lean, watched, prompt, later[:, 0])
    fault = watched.fault()
    if fault is not None:
        raise NotRepresentedError(fault)
    gap = max(gaps)
    if not gap <= largest:
        raise NotRepresentedError(f"its logits differ from a step's by {gap:.2g}, relative to the largest")


def _of_one(
    model: Any, lean: LeanDecoder, watched: Watched, prompt: Tensor, later: Tensor
) -> Iterator[float]:
    """Yields the distances of logits for one sequence: of its prompt, if native code reads it, and a step."""
    count, start = prompt.shape[1], torch.zeros(1, dtype=torch.long, device=prompt.device)
    mask = torch.ones((1, count + 1), dtype=torch.long, device=prompt.device)
    places = torch.arange(count + 1, device=prompt.device)[None]
    begun = model(
        input_ids=prompt, attention_mask=mask[:, :count], position_ids=places[:, :count],
        use_cache=True, return_dict=True,
    )  # fmt: skip
    noted = watched.take()
    trace = watched.trace(count, noted, prompt.device)
    step: Step = lean.go_on(begun.past_key_values, start, count, count + 1, trace=trace)
    reader = lean.begin(start, count + 1, trace=trace)
    if reader is not None:
        with watched.followed(trace, noted, mask[:, :count]):
            found = reader.read(prompt, likeliest=False)
        yield distance(found.to(begun.logits.dtype), begun.logits[:, -1])
    expected = model(
        input_ids=later[:, None], attention_mask=mask, position_ids=places[:, count:],
        past_key_values=begun.past_key_values, use_cache=True, return_dict=True,
    ).logits[:, -1]  # fmt: skip
    with watched.followed(trace, watched.take(), mask[:, count:]):
        found = step(later)
    yield distance(found.to(expected.dtype), expected)


def _of_two(model: Any, lean: LeanDecoder, watched: Watched, first: Tensor, later: Tensor) -> Iterator[float]:
    """Yields the distances of logits for two sequences, one of which is padded."""
    both = torch.cat((first, first.roll(2, -1)))
    mask = torch.ones((2, _TOKENS + _STEPS), dtype=torch.long, device=first.device)
    mask[1, :2] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    starts = torch.tensor([0, 2], device=first.device)
    begun = model(
        input_ids=both, attention_mask=mask[:, :_TOKENS], position_ids=positions[:, :_TOKENS],
        use_cache=True, return_dict=True,
    )  # fmt: skip
    noted = watched.take()
    trace = watched.trace(both.numel(), noted, first.device)
    steps: list[Step] = [lean.go_on(begun.past_key_values, starts, _TOKENS, _TOKENS + 1, trace=trace)]
    reader = lean.begin(starts, _TOKENS + 1, trace=trace)
    if reader is not None:
        with watched.followed(trace, noted, mask[:, :_TOKENS]):
            found = reader.read(both, likeliest=False)
        yield distance(found.to(begun.logits.dtype), begun.logits[:, -1])
        steps.append(reader)
    for index in range(_STEPS):
        place = _TOKENS + index
        given = later[0, index].expand(2)
        expected = model(
            input_ids=given[:, None], attention_mask=mask[:, : place + 1],
            position_ids=positions[:, place : place + 1], past_key_values=begun.past_key_values,
            use_cache=True, return_dict=True,
        ).logits[:, -1]  # fmt: skip
        noted = watched.take()
        # Ranks make all steps together, so none may stop early.
        for step in steps:
            with watched.followed(trace, noted, mask[:, place : place + 1]):
                found = step(given)
            yield distance(found.to(expected.dtype), expected)


def example_tokens(model: Any, draw: int = 0) -> Tensor:
    """Returns random tokens, on the device of the model's embedding."""
    table = model.get_input_embeddings()
    random = torch.Generator().manual_seed(draw)
    count = int(table.weight.shape[0])
    return torch.randint(0, count, (1, _TOKENS + _STEPS), generator=random).to(table.weight.device)


def _widths(model: Any, share: Share | None) -> dict[torch.nn.Module, int]:
    """Returns the number of columns of the output head, if all ranks together compute them."""
    if share is None or share.head_widths is None:
        return {}
    return {model.get_output_embeddings(): sum(share.head_widths)}


def distance(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, relative to the largest expected value; infinity beside NaN."""
    if found.shape != expected.shape:
        return math.inf
    if torch.equal(found, expected):
        return 0.0
    gap = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30)
    return float(gap) if gap == gap else math.inf
