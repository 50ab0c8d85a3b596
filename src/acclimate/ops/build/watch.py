"""Watches the builds of a block of code: how long they take, and their steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

from acclimate.ops.build.compile import Progress

Show: TypeAlias = Callable[[], AbstractContextManager[Progress]]
"""Opens what shows the steps of one build."""


@dataclass
class BuildWatch:
    """What was built in a ``with`` block."""

    show: Show | None
    seconds: float = 0.0
    """The time that the block waited for compilers, of this process or of another one."""


_watches: ContextVar[tuple[BuildWatch, ...]] = ContextVar("watches", default=())


@contextmanager
def watch_builds(show: Show | None = None) -> Iterator[BuildWatch]:
    """Yields the watch of all builds in the ``with`` block, also of those that an inner block watches.

    Args:
        show: shows the steps of each build that has no ``progress`` of its own.
    """
    watch = BuildWatch(show)
    token = _watches.set((*_watches.get(), watch))
    try:
        yield watch
    finally:
        _watches.reset(token)


@contextmanager
def watched(progress: Progress | None) -> Iterator[Progress | None]:
    """Counts the time of one build, and yields what shows its steps.

    Args:
        progress: the build's own, if it has one.
    """
    watches = _watches.get()
    show = next((watch.show for watch in reversed(watches) if watch.show is not None), None)
    started = time.monotonic()
    try:
        with nullcontext(progress) if progress is not None or show is None else show() as shown:
            yield shown
    finally:
        seconds = time.monotonic() - started
        for watch in watches:
            watch.seconds += seconds
