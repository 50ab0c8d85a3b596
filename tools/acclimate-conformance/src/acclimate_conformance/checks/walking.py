"""Walks: random sequences of calls, with a model of what must be true after each of them.

A walk is a class whose methods marked with :func:`move` make one call with options drawn at random, in one of
two threads, and note in the model what it must change. After each move everything that can be asked is
compared with the model. The seeds are fixed, so a walk repeats. A move that does not apply to the state does
nothing, so that a walk without some of its moves is a walk too: one that fails is shortened to what matters.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

from acclimate.accelerator import Accelerator
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    device_names,
    require,
)
from acclimate_conformance.checks.calls import BEFORE_IT

_Move = TypeVar("_Move", bound=Callable[..., None])
_SHORTENING_S = 15.0
_REPEATS = 60
"""How often a walk that fails is tried with fewer moves, at most."""
_ELSEWHERE = 0.3
"""The share of the moves that are made in the second thread."""


def move(weight: int = 1) -> Callable[[_Move], _Move]:
    """Marks a method as a move, which is drawn the more often the higher its weight is."""

    def mark(method: _Move) -> _Move:
        method.move_weight = weight  # type: ignore[attr-defined]
        return method

    return mark


class Walk:
    """The state of one walk: the model, and the objects that the moves made.

    Args:
        accelerator: the accelerator that is walked on.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.names = device_names(accelerator)
        self.actor = 0
        """The thread of the present move: 0 for the one that walks, 1 for the second."""
        self.told = ""
        """What the present move does, as text; empty if it does not apply."""
        self._second = ThreadPoolExecutor(1)

    def look(self) -> None:
        """Compares what does not depend on the thread with the model."""

    def look_here(self) -> None:
        """Compares what depends on the thread with the model; called in both threads."""

    def end(self) -> None:
        """Ends what the moves began, whatever state they left; called in the thread that walks."""

    def end_here(self) -> None:
        """Ends what the moves began in a thread; called in both."""

    def surrounding(self, choose: random.Random) -> AbstractContextManager[object]:
        """A block in which the next move is made, and which must not change what it does."""
        return nullcontext()

    def say(self, text: str) -> None:
        """Tells what the present move does: called before it does so."""
        self.told = f"{text} in a second thread" if self.actor else text

    def ask(self, name: str, *args: Any) -> Any:
        """Calls a method that only tells something, without its being recorded, which takes longer."""
        return getattr(type(self.accelerator), name)(self.accelerator, *args)

    def in_actor(self, actor: int, function: Callable[[], Any]) -> Any:
        """Calls a function in one of the threads."""
        before, self.actor = self.actor, actor
        try:
            return self._second.submit(function).result() if actor else function()
        finally:
            self.actor = before

    def renew_second_thread(self) -> None:
        """Ends the second thread, and starts a new one."""
        self._second.shutdown()
        self._second = ThreadPoolExecutor(1)

    def step(self, name: str, seed: int) -> None:
        """Makes one move, and compares everything with the model."""
        choose = random.Random(seed)
        self.told = ""
        actor = int(choose.random() < _ELSEWHERE)

        def make() -> None:
            with self.surrounding(choose):
                getattr(self, name)(choose)

        self.in_actor(actor, make)
        if self.told:
            self.look()
            for thread in (0, 1):
                self.in_actor(thread, self.look_here)

    def close(self) -> None:
        """Ends the walk; what goes wrong then is not told, since the walk has told it."""
        for actor in (1, 0):
            with suppress(Exception):
                self.in_actor(actor, self.end_here)
        with suppress(Exception):
            self.end()
        self._second.shutdown()


def walk(
    accelerator: Accelerator, kind: Callable[[Accelerator], Walk], walks: int, moves: int, seed: int = 61
) -> None:
    """Fails the check if a walk finds something that the model does not say.

    Args:
        accelerator: the accelerator.
        kind: the class of the walk.
        walks: how many walks.
        moves: how many moves each has.
        seed: of all random choices.
    """
    weights = {
        name: method.move_weight
        for name in dir(kind)
        if hasattr(method := getattr(kind, name), "move_weight")
    }
    choose = random.Random(seed)
    for _ in range(walks):
        names = choose.choices(list(weights), list(weights.values()), k=moves)
        steps = [(name, choose.randrange(1 << 30)) for name in names]
        seen, made = _made(accelerator, kind, steps)
        if seen:
            seen, made = _shortened(accelerator, kind, steps[: len(made)], seen, made)
            told = [text for text in made if text]
            before = f"{BEFORE_IT}{', '.join(told[:-1])}" if len(told) > 1 else ""
            figure, _, _ = seen.partition("(")
            figures: Mapping[str, str] = getattr(kind, "figures", {})
            # A figure that a call has just set is the call's.
            is_told_wrongly = figure in figures and not told[-1].startswith(figures[figure])
            text = f"{seen}, after {told[-1]}" if is_told_wrongly else f"after {told[-1]} {seen}"
            raise BrokenPromiseError(f"{text}{before}")
        require(True, "")


def _made(
    accelerator: Accelerator, kind: Callable[[Accelerator], Walk], steps: Sequence[tuple[str, int]]
) -> tuple[str, list[str]]:
    """Walks: what differs from the model, empty if nothing does, and what each move did up to there."""
    made: list[str] = []
    world = kind(accelerator)
    try:
        for name, seed in steps:
            try:
                world.step(name, seed)
            except NotOfferedError:
                raise
            except BrokenPromiseError as broken:
                return str(broken), [*made, world.told]
            except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
                return f"there is {describe(error, whole=True)}", [*made, world.told or name]
            made.append(world.told)
        return "", made
    finally:
        world.close()
        del world
        gc.collect()


def _shortened(
    accelerator: Accelerator,
    kind: Callable[[Accelerator], Walk],
    steps: Sequence[tuple[str, int]],
    seen: str,
    made: list[str],
) -> tuple[str, list[str]]:
    """The same fault with fewer moves: halves, quarters and so on are left out as long as it still shows."""
    kept = [step for step, told in zip(steps, made, strict=True) if told]
    deadline, tries, length = time.monotonic() + _SHORTENING_S, 0, max(1, len(kept) // 2)
    while True:
        start = 0
        while start < len(kept) - 1:
            if tries >= _REPEATS or time.monotonic() > deadline:
                return seen, made
            fewer = [*kept[:start], *kept[min(start + length, len(kept) - 1) :]]
            tries += 1
            found, told = _made(accelerator, kind, fewer)
            if found:
                seen, made, kept = found, told, fewer[: len(told)]
            else:
                start += length
        if length == 1:
            return seen, made
        length //= 2
