"""Makes the modules of this folder importable for the tests in the folders below."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def private_cache() -> None:
    """These tests need no cache of their own, which the tests of language models above get."""
