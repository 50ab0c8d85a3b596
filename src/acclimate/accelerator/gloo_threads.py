"""Lets Gloo's threads finish before Python ends, which would abort the process."""

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress

from acclimate.process_status import stat_fields

_NAME = b"pt_gloo_runloop"
"""What torch calls the threads that run a group's collectives, as the kernel shows it."""
_LONGEST_S = 1.0
_QUIET_LOOKS = 3
_BETWEEN_LOOKS_S = 0.001


def settle_at_exit() -> None:
    """Calls :func:`settle` when Python ends; later calls do nothing."""
    atexit.unregister(settle)
    atexit.register(settle)


def settle() -> None:
    """Waits, at most a second, until no thread of Gloo runs.

    After a collective has ended for its caller, Gloo's thread still frees its tensors. For that it takes
    Python's lock, and a thread that asks for the lock while Python ends is ended by Python, so that C++ calls
    ``std::terminate``. On a busy machine this ended one in ten jobs with SIGABRT after their last line.
    """
    until = time.monotonic() + _LONGEST_S
    quiet_looks = 0
    while quiet_looks < _QUIET_LOOKS and time.monotonic() < until:
        states = _states()
        if not states:
            return
        quiet_looks = 0 if set(states) - {b"S"} else quiet_looks + 1
        time.sleep(_BETWEEN_LOOKS_S)  # without Python's lock, for which such a thread may wait


def _states() -> list[bytes]:
    """Returns the kernel's state of each thread of Gloo in this process, such as b"S" for one that waits."""
    states = []
    for thread in _threads():
        with suppress(OSError, IndexError):  # it has ended
            name, fields = stat_fields(f"self/task/{thread}")
            if name == _NAME:
                states.append(fields[0])
    return states


def _threads() -> list[str]:
    try:
        return os.listdir("/proc/self/task")
    except OSError:  # this system is not Linux
        return []
