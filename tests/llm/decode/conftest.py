"""What tests of decoding share."""

from __future__ import annotations

from typing import Any

import pytest

from acclimate.llm.decode import loop


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of ``generate`` took our loop."""
    calls: list[bool] = []
    original = loop.lean_sample

    def watched(*args: Any, **kwargs: Any) -> Any:
        tokens = original(*args, **kwargs)
        calls.append(tokens is not None)
        return tokens

    monkeypatch.setattr(loop, "lean_sample", watched)
    return calls
