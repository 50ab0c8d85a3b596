"""A split model gives what the whole one gives."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from architectures import ARCHITECTURES
from splitting import compare

NAMED = ("llama", "gpt2", "mixtral", "olmo2")


@pytest.mark.parametrize(
    "name", [n if n in NAMED else pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES]
)
def test_a_split_model_gives_the_logits_text_and_weights_of_the_whole_one(name: str) -> None:
    found = compare(name, 2)
    assert found.error < 1e-4
    assert found.same_text
    assert found.same_weights
    assert found.largest_share <= 0.60
