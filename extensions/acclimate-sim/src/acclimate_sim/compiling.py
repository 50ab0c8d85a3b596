"""``torch.compile`` on sim: runs what it traced as it is, and says so once."""

from __future__ import annotations


def register() -> None:
    """Makes ``torch.compile`` fall back."""
