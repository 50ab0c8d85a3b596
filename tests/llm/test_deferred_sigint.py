"""A deferred Ctrl-C is neither lost nor handled too early."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from acclimate.llm.deferred_sigint import interrupts_deferred


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that the program's handler, which raises nothing, has got."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    yield seen
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_every_signal_waits_for_the_end_of_the_block(handled: list[int]) -> None:
    with interrupts_deferred():
        interrupt()
        interrupt()
        assert handled == []
    assert len(handled) == 2


def test_a_signal_beyond_those_that_may_wait_is_handled_immediately(handled: list[int]) -> None:
    with interrupts_deferred(most=1):
        interrupt()
        assert len(handled) == 0
        interrupt()
        assert len(handled) == 1
    assert len(handled) == 2


def test_a_signal_is_handled_in_the_block_when_asked_for_and_the_next_waits_again(handled: list[int]) -> None:
    with interrupts_deferred(most=1) as handle_received:
        assert handle_received is not None
        interrupt()
        handle_received()
        assert len(handled) == 1
        interrupt()
        assert len(handled) == 1
    assert len(handled) == 2


def test_two_signals_in_an_inner_block_are_two_for_the_outer_one(handled: list[int]) -> None:
    with interrupts_deferred(most=1):
        with interrupts_deferred():
            interrupt()
            interrupt()
        assert len(handled) == 1
    assert len(handled) == 2


def interrupt_and_fail() -> None:
    with interrupts_deferred():
        interrupt()
        raise ValueError("of the block")


def test_an_error_in_the_block_does_not_lose_the_signal() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            interrupt_and_fail()
        assert isinstance(raised.value.__context__, ValueError)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_nothing_is_deferred_where_python_handles_no_signal(handled: list[int]) -> None:
    found: list[object] = []

    def look() -> None:
        with interrupts_deferred() as handle_received:
            found.append(handle_received)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    look()
    assert found == [None, None]
