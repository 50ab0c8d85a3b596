"""A descriptor that becomes readable when a time has passed, for whoever waits on descriptors only."""

from __future__ import annotations

import ctypes
import os
import time


class Timer:
    """Linux's timerfd, which Python itself has from 3.13 on."""

    def __init__(self, after_s: float) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._after_s = after_s
        self._descriptor = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self.restart()

    def fileno(self) -> int:
        """Readable when the time has passed."""
        return int(self._descriptor)

    def restart(self) -> None:
        """The time begins anew."""
        self._set(self._after_s)

    def pause(self) -> None:
        """The time never passes, until it is restarted."""
        self._set(0)

    def _set(self, seconds: float) -> None:
        whole = int(seconds)
        # struct itimerspec: how often again (never), then when.
        times = (ctypes.c_long * 4)(0, 0, whole, int((seconds - whole) * 1e9))
        if self._libc.timerfd_settime(self._descriptor, 0, ctypes.byref(times), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")
