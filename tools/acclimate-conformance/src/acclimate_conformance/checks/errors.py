"""The error that checks raise within a block of the accelerator."""

from __future__ import annotations


class DeliberateError(RuntimeError, ValueError, TypeError, KeyError):
    """Raised within a block, to see what state the block leaves.

    It is of several types at once, so that a block which suppresses errors of one of them shows.
    """
