"""Odd input for the launcher raises nothing but errors of ours, hangs nowhere and fills no memory."""

from __future__ import annotations

import pytest
from fuzz_launcher import KINDS, fuzz


@pytest.mark.parametrize("kind", KINDS)
def test_odd_input_is_an_error_of_ours_or_taken(kind: str) -> None:
    assert fuzz(kind, 20) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_much_odd_input_is_an_error_of_ours_or_taken(kind: str) -> None:
    assert fuzz(kind, 500) == []
