"""A lock that a fork waits for, so that a child never inherits another thread's unfinished work."""

from __future__ import annotations

import os
import threading

_LONGEST_WAIT_S = 60.0


class ForkSafeLock:
    """A reentrant lock for work that a process does once, such as an import; it lives as long as the process.

    A thread that forks waits until the lock is free, since the child has no thread to finish the work:
    modules would stay half imported, and their locks locked. The wait ends after 60 s, since the holder may
    be waiting for the thread that forks.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held_for_fork = False
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(
                before=self._wait_and_acquire,
                after_in_parent=self._release,
                after_in_child=self._release_or_replace,
            )

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _wait_and_acquire(self) -> None:
        self._held_for_fork = self._lock.acquire(timeout=_LONGEST_WAIT_S)

    def _release(self) -> None:
        if self._held_for_fork:
            self._held_for_fork = False
            self._lock.release()

    def _release_or_replace(self) -> None:
        if self._held_for_fork:
            self._release()
        else:  # another thread of the parent still holds it
            self._lock = threading.RLock()
