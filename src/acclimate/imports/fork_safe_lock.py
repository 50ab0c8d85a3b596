"""A lock that a fork waits for, so that a child never inherits another thread's unfinished work."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

_LONGEST_WAIT_S = 60.0


class ForkSafeLock:
    """A reentrant lock for work that a process does once, such as an import.

    A thread that forks waits until the lock is free, since the child has no thread to finish the work:
    modules would stay half imported, and their locks locked. The wait ends after 60 s, since the holder may
    be waiting for the thread that forks.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held_for_fork = False
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def before_fork(self) -> None:
        """Waits for the lock and acquires it."""
        self._held_for_fork = self._lock.acquire(timeout=_LONGEST_WAIT_S)

    def after_fork_in_parent(self) -> None:
        """Releases the lock."""
        if self._held_for_fork:
            self._held_for_fork = False
            self._lock.release()

    def after_fork_in_child(self) -> None:
        """Releases the lock, or replaces it if another thread of the parent still held it."""
        if self._held_for_fork:
            self.after_fork_in_parent()
        else:
            self._lock = threading.RLock()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _for_all(step: str) -> Callable[[], None]:
    def call() -> None:
        for lock in _locks:
            getattr(lock, step)()

    return call


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_for_all("before_fork"),
        after_in_parent=_for_all("after_fork_in_parent"),
        after_in_child=_for_all("after_fork_in_child"),
    )
