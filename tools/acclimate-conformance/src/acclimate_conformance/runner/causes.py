"""What failures have in common, and which method is most likely at fault."""

from __future__ import annotations

from acclimate_conformance.result import Result


def ranked(results: list[Result]) -> list[Result]:
    """The results, each failure with its likeliest cause first."""
    return results
