"""Damaged model files: each is refused in one line, or loaded exactly as it says; none crashes or hangs."""

from __future__ import annotations

import pytest
from fuzz_models import GOOD, fuzz
from warm_processes import WarmProcesses


def assert_no_findings(warm: WarmProcesses, first: int, last: int) -> None:
    verdicts = fuzz(warm, first, last)
    assert [verdict["seed"] for verdict in verdicts] == list(range(first, last))
    assert [verdict for verdict in verdicts if verdict["verdict"] not in GOOD] == []
    assert {verdict["verdict"] for verdict in verdicts} == set(GOOD)  # some damage is none


def test_damaged_models_are_refused_or_loaded_as_they_say(warm: WarmProcesses) -> None:
    assert_no_findings(warm, 0, 12)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(12, 1512, 250))
def test_many_more_damaged_models_are_refused_or_loaded_as_they_say(warm: WarmProcesses, first: int) -> None:
    assert_no_findings(warm, first, first + 250)
