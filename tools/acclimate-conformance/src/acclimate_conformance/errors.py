"""The errors that a user of acclimate-conformance can cause."""

from __future__ import annotations

from acclimate import AcclimateError


class ConformanceError(AcclimateError, RuntimeError):
    """An accelerator cannot be checked: it does not load, or there is no such check."""
