"""The address of a started `acclimate serve`, for tests that ask it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def told_address(process: Any) -> Iterator[str]:
    """Yields the address of a server that has been started, and ends it as a user does."""
    lines = []
    for line in process.stderr:
        lines.append(line.decode())
        if lines[-1].startswith("serving "):
            break
    else:
        raise AssertionError("".join(lines))
    drain = threading.Thread(target=process.stderr.read)
    drain.start()
    try:
        yield lines[-1].partition(" at ")[2].partition(";")[0]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 130
        drain.join()
