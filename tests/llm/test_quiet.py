"""transformers is silent while acclimate uses it, and speaks as before afterwards."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

from acclimate.llm.quiet import quiet_transformers

logging = pytest.importorskip("transformers.utils.logging", reason="transformers is not installed")


def settings() -> tuple[Any, ...]:
    return logging.get_verbosity(), logging.is_progress_bar_enabled(), warnings.filters.copy()


def test_transformers_is_silent_in_the_block_only_also_after_an_error() -> None:
    before = settings()
    inside = []

    def fail_in_the_block() -> None:
        with quiet_transformers():
            inside.extend(settings()[:2])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_block()
    assert (inside, settings()) == ([logging.ERROR, False], before)


def test_threads_that_silence_it_at_the_same_time_leave_its_settings_as_they_were() -> None:
    second_is_in, first_has_left = threading.Event(), threading.Event()
    after_the_first = []

    def silence_second() -> None:
        with quiet_transformers():
            second_is_in.set()
            first_has_left.wait(10)
            after_the_first.extend(settings()[:2])

    before = settings()
    second = threading.Thread(target=silence_second)
    with quiet_transformers():
        second.start()
        assert second_is_in.wait(10)
    first_has_left.set()
    second.join()
    assert after_the_first == [logging.ERROR, False]
    assert settings() == before
