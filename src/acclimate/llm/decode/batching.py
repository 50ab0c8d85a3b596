"""Continuous batching: steps of several threads' texts are taken together, so that weights are read once.

Texts come and go. Their keys and values stay in one cache as long as the same texts take part; when one joins
or leaves, they are copied into another cache.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from acclimate.llm.decode.cache import ROOM, StepCache
from acclimate.llm.decode.native import NativeDecoder, NativeStep

_PATIENCE_S = 0.005
"""How long a step waits for a text that took part in the last one, and at least as long as that took."""

_is_shared: ContextVar[bool] = ContextVar("is_shared", default=False)


@contextlib.contextmanager
def batched_with_others() -> Iterator[None]:
    """Lets texts that this thread generates in the ``with`` block take their steps with other threads' texts.

    A text's logits are those that it gets alone, to the last bit: no sum depends on the other texts.
    """
    token = _is_shared.set(True)
    try:
        yield
    finally:
        _is_shared.reset(token)


class Slot:
    """The place of one text among others: a step for a single sequence.

    Args:
        batcher: what takes its steps together with those of others.
        step: what computes the text alone.
    """

    def __init__(self, batcher: Batcher, step: NativeStep) -> None:
        self._batcher, self.step = batcher, step
        self.token: Tensor | None = None  # waits for its step
        self.wants_logits = False
        self.made: Any = None  # its logits or token, or the error of its step

    @property
    def cache(self) -> StepCache:
        """The keys and values, once the text has ended; before, as far as they were computed alone."""
        return self.step.cache

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns 1 x vocabulary logits."""
        return self._batcher.take_step(self, tokens, wants_logits=True)

    def likeliest(self, tokens: Tensor) -> Tensor:
        """Returns the token with the largest logit."""
        return self._batcher.take_step(self, tokens, wants_logits=False)


class Batcher:
    """Takes the steps of several texts on one decoder together."""

    def __init__(self, native: NativeDecoder) -> None:
        self._native = native
        self._changed = threading.Condition()
        self._slots: list[Slot] = []
        self._together: list[Slot] = []  # whose keys and values are in the cache of `_step`, by row
        self._step: Any = None  # a NativeStep of all of them
        self._starts: list[int] = []
        self._is_busy = False
        self._readers = 0
        self._is_steps_turn = False  # a part of a prompt has been read since the last step
        self._ended_at = self._took = 0.0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Reads a part of a prompt in the ``with`` block. Parts and steps take turns.

        Native code runs one call after the other. Without this, a thread that steps could keep others waiting
        until its text ends, and a long prompt would hold up all texts.
        """
        with self._changed:
            self._readers += 1
            self._changed.wait_for(lambda: not self._is_busy and not self._step_is_due())
            self._is_busy = True
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._is_busy = False
                self._is_steps_turn = True
                self._ended_at = time.perf_counter()
                self._changed.notify_all()

    def _step_is_due(self) -> bool:
        return self._is_steps_turn and any(slot.token is not None for slot in self._slots)

    def join(self, step: NativeStep) -> Slot:
        """Returns a slot for a text whose prompt has been read."""
        slot = Slot(self, step)
        with self._changed:
            self._slots.append(slot)
        return slot

    def leave(self, slot: Slot, *, keeps_cache: bool) -> None:
        """Ends a text's part.

        Args:
            slot: that of the text.
            keeps_cache: whether its keys and values are needed later.
        """
        if keeps_cache:
            with self.reading():  # no step changes what is copied
                if len(self._together) > 1 and slot in self._together:
                    slot.step = self._copied([self._part(slot)])
        with self._changed:
            self._slots.remove(slot)
            if not self._slots:
                self._together, self._starts, self._step = [], [], None
            self._changed.notify_all()

    def take_step(self, slot: Slot, token: Tensor, *, wants_logits: bool) -> Tensor:
        """Waits for the others' tokens, and returns what follows a slot's token."""
        with self._changed:
            slot.token, slot.wants_logits = token, wants_logits
            self._changed.notify_all()
            while slot.made is None and not self._may_start():
                self._changed.wait(self._patience() if self._is_free() else None)
            if slot.made is None:
                self._is_busy = True
                batch = [other for other in self._slots if other.token is not None]
        if slot.made is None:
            self._run(batch)
        made: Any = slot.made
        slot.made = None
        if isinstance(made, BaseException):
            raise made
        found: Tensor = made
        return found

    def _is_free(self) -> bool:
        return not self._is_busy and (self._readers == 0 or self._is_steps_turn)

    def _may_start(self) -> bool:
        if not self._is_free():
            return False
        # A text that misses a step is not waited for until it is back.
        awaited = any(slot.token is None and slot in self._together for slot in self._slots)
        return not awaited or time.perf_counter() - self._ended_at > self._patience()

    def _patience(self) -> float:
        return max(_PATIENCE_S, self._took)

    def _run(self, batch: list[Slot]) -> None:
        """Computes the next step of some texts, in the thread of one of them."""
        began = time.perf_counter()
        answers: list[Tensor | BaseException]
        try:
            if batch != self._together:
                self._gather(batch)
            answers = list(_answers(self._step, batch))
        except BaseException as error:  # noqa: BLE001 - each of the threads raises it
            answers = [error] * len(batch)
            if len(batch) > 1 and isinstance(error, Exception):
                answers = [self._alone(slot) for slot in batch]
                self._together, self._starts, self._step = [], [], None
        with self._changed:
            for slot, answer in zip(batch, answers, strict=True):
                slot.token, slot.made = None, answer
            self._is_busy = self._is_steps_turn = False
            self._ended_at = time.perf_counter()
            self._took = self._ended_at - began
            self._changed.notify_all()

    def _alone(self, slot: Slot) -> Tensor | BaseException:
        """Computes one text's part of a step that failed for all: most of the texts are sound."""
        try:
            slot.step = self._copied([self._part(slot)])
            return _answers(slot.step, [slot])[0]
        except BaseException as error:  # noqa: BLE001 - its thread raises it
            return error

    def _gather(self, batch: list[Slot]) -> None:
        """Copies the keys and values of some texts into one cache; of the others, back into their own."""
        before = self._together
        for slot in before if len(before) > 1 else ():
            if slot in self._slots and (slot not in batch or len(batch) == 1):
                slot.step = self._copied([self._part(slot)])
        if len(batch) == 1:
            self._step = batch[0].step
        else:
            self._step = self._copied([self._part(slot) for slot in batch])
        self._together, self._starts = batch, self._step.starts.tolist()

    def _part(self, slot: Slot) -> tuple[StepCache, int, int]:
        """Returns the cache that holds a text, its row there, and its first place."""
        if slot in self._together:
            row = self._together.index(slot)
            return self._step.cache, row, self._starts[row]
        return slot.step.cache, 0, int(slot.step.starts[0])

    def _copied(self, parts: list[tuple[StepCache, int, int]]) -> NativeStep:
        """Returns a step with a copy of sequences, each from a row of a cache and from its first place."""
        length = max(cache.length - start for cache, _, start in parts)
        made = StepCache(
            self._native.decoder, len(parts), torch.device("cpu"), length + ROOM, length=length,
            values_by_column=True, dtype=parts[0][0].dtype,
        )  # fmt: skip
        for own, (cache, row, start) in enumerate(parts):
            made.copy_row(own, cache, row, start)
        starts = [length - (cache.length - start) for cache, _, start in parts]
        return NativeStep(self._native, made, torch.tensor(starts))


def _answers(step: NativeStep, batch: list[Slot]) -> list[Tensor]:
    """Returns the logits of each text, or its token. After an error the step can be computed again."""
    tokens = torch.cat([slot.token for slot in batch if slot.token is not None])
    length = step.cache.length
    try:
        if not any(slot.wants_logits for slot in batch):
            return list(step.likeliest(tokens).split(1))
        logits = step(tokens).split(1)
    except Exception:
        step.cache.length = length
        raise
    return [row if slot.wants_logits else row.argmax(-1) for slot, row in zip(batch, logits, strict=True)]


_lock = threading.Lock()


@contextlib.contextmanager
def in_slot(step: NativeStep, native: NativeDecoder, *, keeps_cache: bool) -> Iterator[NativeStep | Slot]:
    """Yields a slot for the rest of a text, if this thread's texts are batched; else the step itself.

    Args:
        step: what computes the text alone.
        native: its decoder.
        keeps_cache: whether the slot's cache holds the whole text after the ``with`` block.
    """
    batcher = _batcher_of(native)
    if batcher is None or len(step.starts) != 1:
        yield step
        return
    slot = batcher.join(step)
    try:
        yield slot
    finally:
        batcher.leave(slot, keeps_cache=keeps_cache)


def reading(native: NativeDecoder | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which to read a part of a prompt: between others' steps, if this thread's texts
    are batched."""
    batcher = None if native is None else _batcher_of(native)
    return contextlib.nullcontext() if batcher is None else batcher.reading()


def _batcher_of(native: NativeDecoder) -> Batcher | None:
    if not _is_shared.get() or native.decoder.share is not None:
        return None
    with _lock:
        if native.batcher is None:
            native.batcher = Batcher(native)
        batcher: Batcher = native.batcher
        return batcher
