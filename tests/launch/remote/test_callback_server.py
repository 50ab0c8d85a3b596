"""The launcher's port accepts callers with the job's key, and no other caller can disturb the job."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator

import pytest
from callers import Port

from acclimate.launch.remote import callback
from acclimate.launch.remote.callback import MOST_UNAUTHENTICATED
from acclimate.launch.remote.protocol import LONGEST_FROM_HOST

JUNK = {
    "non-ASCII key": '{"hello": "ключ"}'.encode(),
    "half a character": b'{"hello": "\\ud800"}',
    "brackets": b"[" * 200_000,
    "braces": b'{"call":' * 20_000,
    "a huge number": b"9" * 3000,
    "an infinite number": b'{"call": {"name": 1e999, "nonce": "n"}}',
    "no object": b"[1]",
    "bytes": bytes(range(256)),
    "a list as call": b'{"call": []}',
    "unknown fields": b'{"call": {"name": "0", "nonce": "n", "more": 1}}',
    "an unknown name": b'{"call": {"name": "17", "nonce": "n"}}',
    "a web browser": b"GET / HTTP/1.1\r\nHost: launcher\r\n\r",
    "an empty line": b"",
    "what only agents say": b'{"outcome": {"code": 0, "failed": null, "reason": null}}',
    "hello without a call": b'{"hello": "p"}',
    "a wrong proof": b'{"call": {"name": "0", "nonce": "n"}}\n{"hello": "p"}',
    "a proof with other letters": '{"call": {"name": "0", "nonce": "n"}}\n{"hello": "é"}'.encode(),
    "a list as proof": b'{"call": {"name": "0", "nonce": "n"}}\n{"hello": ["p"]}',
    "two calls": b'{"call": {"name": "0", "nonce": "n"}}\n{"call": {"name": "1", "nonce": "n"}}',
}


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.close()


def test_agents_with_the_key_are_heard(port: Port) -> None:
    first = port.agent("0")
    port.agent("1")
    port.say(first, b'{"refused": "because"}\n{"added_later": 1}\n')
    assert port.until(lambda: len(port.heard) == 2)
    assert port.heard == [("0", {"refused": "because"}), ("0", {})]
    first.close()
    assert port.until(lambda: bool(port.ended))
    assert port.ended == [("0", "ended or was disconnected")]
    assert port.server.has_agents


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
def test_what_a_stranger_says_ends_only_its_own_connection(
    port: Port, junk: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback, "HELLO_S", 1000)  # so that it is for what was said
    stranger = port.connect()
    port.say(stranger, junk + b"\n")
    assert port.hangs_up(stranger)
    port.agent("0")
    port.agent("1")
    assert (port.heard, port.ended, port.hindered) == ([], [], [])


def test_a_line_of_a_stranger_is_cut_off_after_4_kib(port: Port) -> None:
    stranger = port.connect()
    stranger.setblocking(False)
    sent = 0

    def has_hung_up() -> bool:
        nonlocal sent
        try:
            sent += stranger.send(b"x" * 1024)
        except BlockingIOError:
            pass
        except ConnectionError:
            return True
        return False

    assert port.until(has_hung_up)
    assert sent < 1 << 20


def test_a_stranger_who_says_nothing_or_half_a_line_is_dropped_in_time(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback, "HELLO_S", 0.2)
    silent, slow = port.connect(), port.connect()
    port.say(slow, b'{"call"')
    assert port.hangs_up(silent)
    assert port.hangs_up(slow)
    later = port.connect()
    assert port.hangs_up(later)
    port.agent("0")
    assert not port.until(lambda: bool(port.ended), within_s=0.5)  # an agent may be silent


def test_no_more_than_some_strangers_are_kept_and_agents_get_through(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback, "HELLO_S", 1000)  # so that it is for their number
    strangers = [port.connect() for _ in range(MOST_UNAUTHENTICATED + 100)]
    assert port.until(lambda: len(port.server._unauthenticated) == MOST_UNAUTHENTICATED + 2)
    assert port.hangs_up(strangers[0])
    port.agent("0")
    port.agent("1")
    assert port.answered.keys() == {"0", "1"}


def test_the_port_is_closed_once_all_agents_have_called(port: Port) -> None:
    stranger, listening = port.connect(), port.server._socket.fileno()
    port.agent("0")
    port.agent("1")
    assert port.hangs_up(stranger)
    with pytest.raises(ConnectionRefusedError):
        port.connect()
    port.loop.watch(listening, lambda: None)  # nobody watches it any more
    port.loop.forget(listening)


def test_an_agent_calls_once(port: Port) -> None:
    port.agent("0")
    second = port.connect()
    port.say(second, b'{"call": {"name": "0", "nonce": "n"}}\n')
    assert port.hangs_up(second)
    assert port.ended == []


def test_of_two_callers_of_one_name_the_one_with_the_key_is_the_agent(port: Port) -> None:
    stranger = port.connect()
    port.say(stranger, b'{"call": {"name": "0", "nonce": "n"}}\n')
    port.receive(stranger)
    port.agent("0")
    port.say(stranger, b'{"hello": "p"}\n')
    assert port.hangs_up(stranger)
    assert port.ended == []


@pytest.mark.parametrize(
    "junk",
    [b"no JSON\n", b'{"ready": 1}\n', b"[" * 100_000 + b"\n", b"x" * (LONGEST_FROM_HOST + 1)],
    ids=["no JSON", "wrong type", "brackets", "a line without an end"],
)
def test_an_agent_that_sends_what_is_no_message_is_lost_and_the_other_is_not(port: Port, junk: bytes) -> None:
    first, second = port.agent("0"), port.agent("1")
    port.say(first, junk)
    assert port.until(lambda: bool(port.ended))
    assert [name for name, _ in port.ended] == ["0"]
    assert "sent an invalid message" in port.ended[0][1]
    port.say(second, b'{"refused": "because"}\n')
    assert port.until(lambda: bool(port.heard))


def test_a_message_of_an_agent_may_be_long(port: Port) -> None:
    agent = port.agent("0")
    words = "x" * (LONGEST_FROM_HOST // 2)
    port.say(agent, json.dumps({"refused": words}).encode() + b"\n")
    assert port.until(lambda: bool(port.heard))
    assert port.heard == [("0", {"refused": words})]
    assert port.ended == []


def test_an_agent_that_is_no_longer_wanted_is_hung_up_on(port: Port) -> None:
    agent = port.agent("0")
    port.wants = lambda name, message: False
    port.say(agent, b'{"refused": "because"}\n{"refused": "again"}\n')
    assert port.hangs_up(agent)
    assert len(port.heard) == 1
    assert port.ended == []


def test_agents_are_hung_up_on_when_the_job_is_over(port: Port) -> None:
    agents = [port.agent("0"), port.agent("1")]
    port.server.close()
    assert all(port.hangs_up(agent) for agent in agents)


def test_a_message_in_pieces_is_heard_whole(port: Port) -> None:
    agent = port.agent("0")
    for byte in b'{"refused": "because"}':
        port.say(agent, bytes([byte]))
    assert port.heard == []
    port.say(agent, b"\n")
    assert port.until(lambda: bool(port.heard))


class FullTable:
    """Stands for the listening socket of a process that has no descriptor left."""

    def __init__(self, real: socket.socket) -> None:
        self.real, self.failures, self.asked = real, 3, 0

    def accept(self) -> tuple[socket.socket, object]:
        self.asked += 1
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.real.accept()

    def fileno(self) -> int:
        return self.real.fileno()

    def close(self) -> None:
        self.real.close()


def test_without_a_descriptor_left_strangers_are_dropped_for_agents(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback, "HELLO_S", 1000)  # so that it is for want of descriptors
    strangers = [port.connect() for _ in range(5)]
    assert port.until(lambda: len(port.server._unauthenticated) == 5)
    monkeypatch.setattr(port.server, "_socket", FullTable(port.server._socket))
    port.agent("0")
    assert all(port.hangs_up(stranger) for stranger in strangers[:3])
    assert port.hindered == []


def test_without_a_descriptor_left_and_no_stranger_it_tries_again_later(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback, "_ACCEPT_AGAIN_S", 0.05)
    full = FullTable(port.server._socket)
    monkeypatch.setattr(port.server, "_socket", full)
    port.agent("0")
    assert full.asked == 4
    assert port.hindered[0] == "callers cannot be accepted: Too many open files."
