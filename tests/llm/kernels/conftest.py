"""What differs from the tests of language models in the other folders."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def private_cache() -> None:
    """These tests need no cache of their own, which the tests of language models above get."""
