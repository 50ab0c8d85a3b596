"""An agent's output arrives at the launcher whole and in order, and waits for the launcher's reader."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from acclimate.launch.event_loop import EventLoop
from acclimate.launch.remote.protocol import Channel
from acclimate.launch.remote.remote_writer import WINDOW_BYTES, RemoteWriter


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
    seen = []
    writer.watch(EventLoop(), lambda: (seen.append(writer.waiting), writer.drain()))
    writer.taken(1000)
    assert launcher.received == data[: WINDOW_BYTES + 1000]
    writer.taken(2 * WINDOW_BYTES)
    assert (launcher.received, writer.waiting, len(seen)) == (data, 0, 2)


@given(st.lists(st.binary(max_size=300) | st.integers(1, 400), max_size=30))
def test_nothing_is_lost_or_reordered_however_room_comes(steps: list[bytes | int]) -> None:
    writer, launcher = make_writer()
    writer._room = 100
    writer.watch(EventLoop(), writer.drain)
    written, room = b"", 100
    for step in steps:
        if isinstance(step, bytes):
            writer.write(step)
            written += step
        else:
            writer.taken(step)
            room += step
        assert launcher.received == written[:room]
        assert writer.waiting == max(0, len(written) - room)


def test_output_for_a_launcher_that_has_gone_is_dropped() -> None:
    writer, launcher = make_writer()
    writer.write(bytes(2 * WINDOW_BYTES))
    writer.fail(BrokenPipeError())
    writer.write(b"more")
    writer.taken(WINDOW_BYTES)
    assert writer.waiting == 0
    assert isinstance(writer.error, BrokenPipeError)
    assert len(launcher.received) == WINDOW_BYTES
