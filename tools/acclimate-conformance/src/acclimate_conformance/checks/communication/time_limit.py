"""Ends a rank that hangs, or waits for one that has ended, and says in which call."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAITED = "waited for"
"""How the account of a rank begins that only waited for another one."""

LOOK_S = 0.2  # how often it looks whether another rank has ended
_ALONE_S = 5.0  # how long a rank goes on after that: its collective may be over already


@contextmanager
def limited(
    seconds: float, file: str, give_up: Callable[[str], None], ended: Callable[[], str] = str
) -> Iterator[None]:
    """A block that ends its process if it takes too long.

    Args:
        seconds: how long the block may take.
        file: the source file whose innermost line says where the block was.
        give_up: called before the process ends, from another thread, with what happened.
        ended: returns the name of another rank that has ended, or nothing; the block then ends soon.
    """
    thread = threading.get_ident()
    done = threading.Event()

    def watch() -> None:
        deadline, why = time.monotonic() + seconds, f"did not end within {seconds:g} s"
        absent = ""
        while not done.wait(min(LOOK_S, max(deadline - time.monotonic(), 0.0))):
            if not absent and (absent := ended()):
                deadline, why = (
                    min(deadline, time.monotonic() + _ALONE_S),
                    f"{WAITED} {absent}, which had ended",
                )
            if time.monotonic() >= deadline:
                break
        else:
            return
        try:
            give_up(f"{why}, and was in {_line(thread, file)}")
        finally:
            os._exit(1)  # a collective that waits cannot be interrupted

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _line(thread: int, file: str) -> str:
    """The innermost line of a file that a thread is in."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return linecache.getline(file, frame.f_lineno).strip() if frame is not None else "another file"
