"""Waits for threads of torch before Python exits; otherwise one of them could abort the process."""

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress

from acclimate.host.process_status import stat_fields

_NAMES = (b"pt_gloo_runloop", b"pt_autograd_")
"""How the names of threads begin in which Gloo runs collectives, and autograd backward passes of a device;
torch tells the kernel."""
_LONGEST_S = 1.0
_QUIET_LOOKS = 3
_BETWEEN_LOOKS_S = 0.001


def settle_at_exit() -> None:
    """Registers :func:`settle` to run when Python exits; repeated calls do nothing."""
    atexit.unregister(settle)
    atexit.register(settle)


def settle() -> None:
    """Waits until no such thread is running, for at most a second.

    After a collective or a backward pass has returned to its caller, its thread still frees tensors and what
    it was given of Python, for which it needs the GIL. If a thread requests the GIL while Python exits,
    Python ends the thread, and C++ then calls ``std::terminate``. On a busy machine this ended one in ten
    jobs with SIGABRT after their last line.
    """
    until = time.monotonic() + _LONGEST_S
    quiet_looks = 0
    while quiet_looks < _QUIET_LOOKS and time.monotonic() < until:
        states = _states()
        if not states:
            return
        quiet_looks = 0 if set(states) - {b"S"} else quiet_looks + 1
        time.sleep(_BETWEEN_LOOKS_S)  # releases the GIL, for which such a thread may be waiting


def _states() -> list[bytes]:
    """Returns the kernel's state of each such thread in this process, such as b"S" for one that waits."""
    states = []
    for thread in _threads():
        with suppress(OSError, IndexError):  # it has ended
            name, fields = stat_fields(f"self/task/{thread}")
            if name.startswith(_NAMES):
                states.append(fields[0])
    return states


def _threads() -> list[str]:
    try:
        return os.listdir("/proc/self/task")
    except OSError:  # this system is not Linux
        return []
