"""Ends a rank that hangs, and says in which call."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def limited(seconds: float, file: str, give_up: Callable[[str], None]) -> Iterator[None]:
    """A block that ends its process if it takes too long.

    Args:
        seconds: how long the block may take.
        file: the source file whose innermost line says where the block was.
        give_up: called before the process ends, from another thread, with what happened.
    """
    thread = threading.get_ident()

    def end() -> None:
        try:
            give_up(f"did not end within {seconds:g} s, and was in {_line(thread, file)}")
        finally:
            os._exit(1)  # a collective that waits cannot be interrupted

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _line(thread: int, file: str) -> str:
    """The innermost line of a file that a thread is in."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return linecache.getline(file, frame.f_lineno).strip() if frame is not None else "another file"
