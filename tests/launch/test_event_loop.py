"""The loop in which the processes of a job wait."""

from __future__ import annotations

import math
import os

from acclimate.launch.event_loop import EventLoop


def test_a_time_beyond_what_poll_takes_does_not_disturb_the_wait_for_a_descriptor() -> None:
    loop, called = EventLoop(), list[str]()
    reading, writing = os.pipe()
    loop.watch(reading, lambda: called.append("readable"))
    loop.after(1e9, lambda: called.append("due"))
    os.write(writing, b"x")
    loop.wait(math.inf)
    loop.close()
    os.close(reading)
    os.close(writing)
    assert called == ["readable"]
