"""A loop of callbacks for descriptors and times."""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable

_LONGEST_WAIT_S = 1e6
"""poll() takes no more than 2^31 ms."""


class EventLoop:
    """The loop in which a launcher, a supervisor, a guard and an elastic agent's main thread wait.

    Only one thread may use it. A deadline that is set once is a timer. One that each message moves is the end
    of :meth:`wait`, in ``supervise/supervisor.py`` and ``remote/coordinator.py``.
    """

    def __init__(self) -> None:
        # Not epoll: forked guards would share it, and it refuses regular files, which stdin may be.
        self._selector = selectors.PollSelector()
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def watch(self, descriptor: int, react: Callable[[], object], events: int = selectors.EVENT_READ) -> None:
        """Calls back whenever a descriptor is readable."""
        self._selector.register(descriptor, events, react)

    def forget(self, descriptor: int) -> None:
        """Ends :meth:`watch`."""
        self._selector.unregister(descriptor)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Calls back once, after a time."""
        self._timers.append((time.monotonic() + seconds, act))

    def wait(self, until: float) -> None:
        """Waits for the next event, at most until a time of the monotonic clock, and calls back."""
        next_at = min([until, *(at for at, _ in self._timers)])
        left_s = max(0.0, next_at - time.monotonic())
        timeout_s = None if math.isinf(next_at) else min(left_s, _LONGEST_WAIT_S)
        for key, _ in self._selector.select(timeout_s):
            # An earlier callback may have ended this watch, or reused the descriptor for another.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = time.monotonic()
        due = [act for at, act in self._timers if at <= now]
        self._timers = [(at, act) for at, act in self._timers if at > now]
        for act in due:
            act()

    def close(self) -> None:
        """Stops watching all descriptors."""
        self._selector.close()
