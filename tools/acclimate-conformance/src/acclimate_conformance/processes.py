"""Functions about processes that the worker and the checks' children share; imports no torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import IO, TextIO

import psutil

_KILLING_S = 5  # how long a killed process may take to end


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


def end_group(group: int) -> None:
    """Kills the processes of a group and waits until they have ended, which takes a moment."""
    deadline = time.monotonic() + _KILLING_S
    with suppress(ProcessLookupError, PermissionError):  # there is none
        os.killpg(group, signal.SIGKILL)
        while _runs(group) and time.monotonic() < deadline:
            time.sleep(0.01)
            os.killpg(group, signal.SIGKILL)


def _runs(group: int) -> bool:
    """Whether a process of a group is alive; a zombie is not."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
