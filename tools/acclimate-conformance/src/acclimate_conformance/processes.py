"""Functions about processes that the worker and the checks' children share; imports no torch."""

from __future__ import annotations

import os
import sys
from typing import IO, TextIO


def own_channel() -> TextIO:
    """Returns standard output, and redirects all other output from now on to standard error."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def tail(file: IO[bytes], lines: int) -> str:
    """The last lines of a file."""
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - 8192))
    return "\n".join(file.read().decode(errors="replace").strip().splitlines()[-lines:])


def inherited_path() -> str:
    """A ``PYTHONPATH`` on which a child finds all modules that this process finds."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)
