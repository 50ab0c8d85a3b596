"""Contains the exceptions and output of vendors' code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_LONGEST = 1000


class VendorCodeError(Exception):
    """A vendor's code failed; the message says how, in one line."""


def describe(error: BaseException, whole: bool = False) -> str:
    """Returns an exception's type and first line, or whole message, on one line that is not too long."""
    try:
        message = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:  # noqa: BLE001 - a vendor's __str__ may raise anything
        message = []
    if not message:
        return type(error).__name__
    text = " ".join(message) if whole else message[0]
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + '…'}"


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Turns any exception of a vendor's code, except Ctrl-C, into :class:`VendorCodeError`."""
    try:
        yield
    except (KeyboardInterrupt, VendorCodeError):
        raise
    except BaseException as error:
        raise VendorCodeError(describe(error)) from error


@contextlib.contextmanager
def output_to_stderr() -> Iterator[None]:
    """Sends output of a package's import to stderr, so that it does not spoil a program's output."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            if sys.__stdout__ is not None:
                sys.__stdout__.flush()
            kept = os.dup(1)
        except (OSError, ValueError):  # there is no standard output
            yield
            return
        try:
            os.dup2(2, 1)
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
