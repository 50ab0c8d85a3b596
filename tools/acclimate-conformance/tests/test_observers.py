"""The processes that observe operators go ahead of the checks, and a crash of one is tried again."""

from __future__ import annotations

from typing import Any

import pytest

from acclimate_conformance.checks.assertions import BrokenPromiseError
from acclimate_conformance.checks.dtypes.sampled.child import _Observers


class _Noted(_Observers):
    """Observes nothing: it notes what it is asked for."""

    def __init__(self, crashes: dict[str, int]) -> None:
        self.seen: list[str] = []
        self._crashes = crashes
        super().__init__("no source")

    def _observe(self, number: int, topic: str) -> dict[str, Any]:
        self.seen.append(topic)
        if self._crashes.get(topic, 0) >= self.seen.count(topic):
            raise BrokenPromiseError(f"{topic} crashed")
        return {"topic": topic}


def test_what_was_begun_is_observed_once() -> None:
    observers = _Noted({})
    observers.begin(["a", "b", "c"])
    assert [observers.ask(topic) for topic in "abc"] == [{"topic": topic} for topic in "abc"]
    assert sorted(observers.seen) == ["a", "b", "c"]


def test_what_was_not_begun_is_observed_when_it_is_asked_for() -> None:
    observers = _Noted({})
    assert observers.ask("d") == {"topic": "d"}
    assert observers.ask("d") == {"topic": "d"}
    assert observers.seen == ["d", "d"]


def test_a_process_that_crashes_ahead_is_asked_again() -> None:
    observers = _Noted({"a": 1})
    observers.begin(["a", "b"])
    assert observers.ask("a") == {"topic": "a"}
    assert observers.ask("b") == {"topic": "b"}


def test_a_process_that_crashes_each_time_is_told() -> None:
    observers = _Noted({"a": 9})
    observers.begin(["a"])
    with pytest.raises(BrokenPromiseError, match="a crashed"):
        observers.ask("a")
    assert observers.seen == ["a", "a"]
