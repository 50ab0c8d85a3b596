"""An agent's output arrives at the launcher whole and in order, and waits for the launcher's reader."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from acclimate.launch.event_loop import EventLoop
from acclimate.launch.remote.agent import RemoteWriter
from acclimate.launch.remote.protocol import WINDOW_BYTES, Channel


class Launcher:
    """The launcher's end of a channel, which keeps what it was sent."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def send(self, message: Mapping[str, Any]) -> None:
        assert message["output"]["stream"] == 2
        self.pieces.append(base64.b64decode(message["output"]["data"]))

    @property
    def received(self) -> bytes:
        return b"".join(self.pieces)


def make_writer() -> tuple[RemoteWriter, Launcher]:
    launcher = Launcher()
    channel: Channel = launcher  # type: ignore[assignment]
    return RemoteWriter(channel, 2), launcher


def test_no_more_than_the_window_is_under_way() -> None:
    writer, launcher = make_writer()
    data = bytes(range(256)) * (3 * WINDOW_BYTES // 256)
    writer.write(data)
    assert launcher.received == data[:WINDOW_BYTES]
    assert writer.waiting == 2 * WINDOW_BYTES
    writer.watch(EventLoop(), writer.drain)
    writer.taken(WINDOW_BYTES // 2)
    assert launcher.received == data[: WINDOW_BYTES * 3 // 2]
    for _ in range(4):
        writer.taken(WINDOW_BYTES // 2)
    assert (launcher.received, writer.waiting) == (data, 0)


@given(st.lists(st.binary(max_size=9000) | st.floats(0, 1), max_size=30))
def test_nothing_is_lost_or_reordered_however_room_comes(steps: list[bytes | float]) -> None:
    writer, launcher = make_writer()
    writer.watch(EventLoop(), writer.drain)
    written, under_way = b"", 0
    for step in steps:
        if isinstance(step, bytes):
            writer.write(step)
            written += step
        else:
            taken = int(step * (len(launcher.received) - under_way))
            under_way += taken
            writer.taken(taken)
        assert written.startswith(launcher.received)
        assert len(launcher.received) - under_way <= WINDOW_BYTES
    while under_way < len(launcher.received):
        taken = len(launcher.received) - under_way
        under_way += taken
        writer.taken(taken)
    assert (launcher.received, writer.waiting) == (written, 0)


def test_a_backlog_goes_in_few_large_pieces_though_it_began_with_small_ones() -> None:
    writer, launcher = make_writer()
    for _ in range(2 * WINDOW_BYTES):
        writer.write(b".")
    taken = 0
    writer.watch(EventLoop(), writer.drain)
    while taken < len(launcher.received):
        more, taken = len(launcher.received) - taken, len(launcher.received)
        writer.taken(more)
    assert launcher.received == b"." * 2 * WINDOW_BYTES
    assert len(launcher.pieces) < 10


def test_output_for_a_launcher_that_has_gone_is_dropped() -> None:
    writer, launcher = make_writer()
    writer.write(bytes(2 * WINDOW_BYTES))
    writer.fail(BrokenPipeError())
    writer.write(b"more")
    writer.taken(WINDOW_BYTES)
    assert writer.waiting == 0
    assert isinstance(writer.error, BrokenPipeError)
    assert len(launcher.received) == WINDOW_BYTES
