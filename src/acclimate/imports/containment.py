"""Keeps to itself whatever a vendor's code raises or prints."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_LONGEST = 1000


class VendorCodeError(Exception):
    """A vendor's code failed; the message says how, in one line."""


def describe(error: BaseException, whole: bool = False) -> str:
    """An exception on one line: its type and the first line of its message.

    Args:
        error: the exception.
        whole: with all lines of the message, one after the other, to 1,000 characters.
    """
    try:
        message = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:  # noqa: BLE001 - an exception of a vendor's may fail to say what it is
        message = []
    if not message:
        return type(error).__name__
    text = " ".join(message) if whole else message[0]
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + '…'}"


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Turns whatever a vendor's code raises into :class:`VendorCodeError`, except Ctrl-C."""
    try:
        yield
    except (KeyboardInterrupt, VendorCodeError):
        raise
    except BaseException as error:
        raise VendorCodeError(describe(error)) from error


@contextlib.contextmanager
def output_to_stderr() -> Iterator[None]:
    """What a package prints at import must not get into a program's output, such as JSON."""
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
