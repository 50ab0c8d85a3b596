"""Messages between the launcher and its agents."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate.errors import LaunchProtocolError
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.remote import protocol
from acclimate.launch.remote.protocol import (
    FROM_HOST,
    FROM_LAUNCHER,
    LONGEST_FROM_HOST,
    Assignment,
    MessageDemux,
    PipeChannel,
    SocketChannel,
)
from acclimate.launch.wire import decode, encode

MARK = b"\x1e1234"
pieces = st.lists(st.binary(max_size=8) | st.sampled_from([b"\x1e", b"\x1e12", b"\n", MARK[:-1]]), max_size=6)


@given(st.lists(st.one_of(st.integers(), pieces.map(b"".join)), max_size=6), st.integers(1, 7))
def test_an_agents_words_are_told_from_what_ranks_write_however_they_are_cut(
    stream: list[int | bytes], cut: int
) -> None:
    """Whatever ranks write (they cannot know the mark), and wherever a read ends."""
    whole = b"".join(
        part if isinstance(part, bytes) else MARK + encode({"refused": str(part)}) for part in stream
    )
    written = b"".join(part for part in stream if isinstance(part, bytes))
    if MARK in written or whole.count(MARK) != sum(isinstance(part, int) for part in stream):
        return
    demux, shown, heard = MessageDemux(MARK), b"", []
    for start in range(0, len(whole), cut):
        piece, messages = demux.feed(whole[start : start + cut])
        shown += piece
        heard += [int(message["refused"]) for message in messages]
    assert heard == [part for part in stream if isinstance(part, int)]
    assert shown + demux.end() == written


def test_a_message_is_given_up_when_nobody_reads_or_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SILENCE_S", 0.1)
    monkeypatch.setattr(protocol, "_LOOK_AGAIN_MS", 10)
    (hears, speaks), (reads, writes) = os.pipe(), os.pipe()
    try:
        os.write(writes, bytes(1 << 16))
        agents = PipeChannel(hears, writes, waits_while_alive=True)
        agents.send({"failed": "x" * 10_000})  # returns
    finally:
        for descriptor in (hears, speaks, reads, writes):
            os.close(descriptor)


def seconds_to_read(data: bytes, size: int) -> float:
    demux = MessageDemux(MARK)
    began = time.process_time()
    for start in range(0, len(data), size):
        demux.feed(data[start : start + size])
    return time.process_time() - began


@pytest.mark.parametrize(
    "unit",
    [b"x" * 64, MARK + encode({}), b"\x1e12" * 16, b"\n" * 64],
    ids=["no mark", "messages", "beginnings of marks", "line ends"],
)
def test_output_takes_time_in_proportion_to_its_length(unit: bytes) -> None:
    """Eight times as much takes about eight times as long, not 64 times."""

    def is_in_proportion() -> bool:
        little = max(seconds_to_read(unit * 4000, 4096), 0.002)
        return seconds_to_read(unit * 32_000, 4096) < 24 * little

    # One time of five is enough: other work on the same core costs the caches, and so processor time.
    assert any(is_in_proportion() for _ in range(5))


def test_nothing_of_an_invalid_message_is_shown_as_a_ranks_output() -> None:
    demux = MessageDemux(MARK)
    with pytest.raises(LaunchProtocolError, match="not JSON"):
        demux.feed(b"out" + MARK + b"not json\n")
    assert demux.end() == b""


def test_a_message_without_an_end_is_not_kept_for_ever() -> None:
    demux = MessageDemux(MARK)
    demux.feed(MARK + b"x" * LONGEST_FROM_HOST)
    with pytest.raises(LaunchProtocolError, match="longer than"):
        demux.feed(b"x")


@pytest.mark.parametrize(
    "parts",
    [
        {"ready": {"address": "10.0.0.1\0", "port": 1}},
        {"ready": {"address": "$(reboot)", "port": 1}},
        {"ready": {"address": "10.0.0.1", "port": 70_000}},
        {"ready": {"address": None, "port": 0}},
        {"ready": {"address": None, "port": True}},
        {"failed": {"code": 1, "failed": None}},
        {"outcome": None},
        {"refused": ["x"]},
        {"output": {"stream": 0, "data": ""}},
        {"output": {"stream": 3, "data": ""}},
        {"output": {"stream": True, "data": ""}},
    ],
)
def test_what_no_agent_says_is_refused(parts: dict[str, object]) -> None:
    with pytest.raises(LaunchProtocolError):
        decode(encode(parts), FROM_HOST)


def test_an_assignment_to_a_host_that_the_job_lacks_is_refused() -> None:
    job = JobPlan((HostPlan("a", (0,)),), ("true",), {}, "/", "cpu")
    for node_rank in (-1, 1, 10**12):
        text = encode({"assignment": {**asdict(Assignment(job, 0)), "node_rank": node_rank}})
        with pytest.raises(LaunchProtocolError, match="has no host"):
            decode(text, FROM_LAUNCHER)


def test_room_for_a_stream_that_no_rank_has_is_refused() -> None:
    with pytest.raises(LaunchProtocolError, match="not 1 or 2"):
        decode(encode({"taken": {"stream": 3, "count": 1}}), FROM_LAUNCHER)


def test_a_reader_that_takes_nothing_does_not_keep_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SEND_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = SocketChannel(socket.create_connection(server.getsockname()), FROM_HOST)
        connection, _ = server.accept()
    with connection:
        here.send({"stop": "x" * 50_000_000})  # returns
        assert here.receive() is None
    here.close()


def test_what_the_launcher_writes_to_an_agents_pipe_is_received_until_it_ends() -> None:
    (reads, launcher), (hears, writes) = os.pipe(), os.pipe()
    agent = PipeChannel(reads, writes)
    PipeChannel(hears, launcher).send({"stop": "because"})
    assert agent.receive() == [{"stop": "because"}]
    os.close(launcher)
    assert agent.receive() is None
    for descriptor in (reads, hears, writes):
        os.close(descriptor)
