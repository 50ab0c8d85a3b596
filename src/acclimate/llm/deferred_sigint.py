"""Defers Ctrl-C while it could be lost, or would leave other ranks waiting."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_deferred(most: int | None = None) -> Iterator[Callable[[], None] | None]:
    """Defers SIGINT until the ``with`` block has ended, and then calls the previous handler.

    Yields a function that handles the signals deferred so far; ``None`` if nothing is deferred, because
    SIGINT has no handler in Python, or because this is not the main thread, in which Python runs handlers.

    Args:
        most: the number of signals to defer; further ones are handled immediately. ``None``: all of them.
    """
    handle = signal.getsignal(signal.SIGINT)
    if not callable(handle) or threading.current_thread() is not threading.main_thread():
        yield None
        return
    received: list[FrameType | None] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if most is not None and len(received) >= most:
            handle(number, frame)
        else:
            received.append(frame)

    def handle_received() -> None:
        while received:
            handle(signal.SIGINT, received.pop(0))

    signal.signal(signal.SIGINT, receive)
    try:
        yield handle_received
    finally:
        signal.signal(signal.SIGINT, handle)
        handle_received()
