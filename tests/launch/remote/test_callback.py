"""An agent calls the launcher, and checks that it is the launcher."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from acclimate.errors import HostUnreachableError, LaunchProtocolError
from acclimate.launch.remote import callback
from acclimate.launch.remote.callback import call_launcher
from acclimate.launch.remote.protocol import Call, proof_of
from acclimate.launch.wire import decode

KEY = "0123456789abcdef"


@contextmanager
def whoever_answers(serve: Callable[[socket.socket], object], address: str = "127.0.0.1") -> Iterator[int]:
    """A server for one caller; yields its port."""
    with socket.create_server((address, 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection, suppress(ConnectionError):
                connection.settimeout(30)
                serve(connection)

        thread = threading.Thread(target=answer)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


class RealLauncher:
    """Answers as the launcher does, and remembers what it heard."""

    def __call__(self, connection: socket.socket) -> None:
        with connection.makefile("rwb") as stream:
            self.first = stream.readline()
            call = decode(self.first, {"call": Call})["call"]
            nonce = "never used before"
            answer = {"nonce": nonce, "proof": proof_of(KEY, "launcher", call, nonce)}
            stream.write(json.dumps({"answer": answer}).encode())
            stream.flush()
            stream.write(b"\n")  # in two pieces
            stream.flush()
            self.second = stream.readline()
            proof = decode(self.second, {"hello": str})["hello"]
            self.is_convinced = proof == proof_of(KEY, "caller", call, nonce)
            self.name = call.name


def test_both_sides_prove_that_they_have_the_key_and_nobody_sends_it() -> None:
    launcher = RealLauncher()
    with whoever_answers(launcher) as port:
        call_launcher(f"{KEY}@127.0.0.2,127.0.0.1:{port}", "3").close()
    assert (launcher.name, launcher.is_convinced) == ("3", True)
    assert KEY.encode() not in launcher.first + launcher.second


@pytest.mark.parametrize(
    "said",
    [
        b'{"answer": {"nonce": "n", "proof": "p"}}\n',
        b'{"answer": {"nonce": "n", "proof": "\\ud800\xc3\xa9"}}\n',
        b'{"answer": 5}\n',
        b'{"assignment": {}}\n',
        b"[" * 200_000 + b"\n",
        b"x" * 200_000,
        b'{"answer"',
        b"",
    ],
)
def test_a_stranger_who_answers_is_not_believed_and_does_not_get_the_proof(said: bytes) -> None:
    heard = b""

    def stranger(connection: socket.socket) -> None:
        nonlocal heard
        heard = connection.recv(1000)
        connection.sendall(said)
        with suppress(OSError):  # the caller hung up already
            connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(1000):
            heard += piece

    with (
        whoever_answers(stranger) as port,
        pytest.raises(HostUnreachableError, match="the program that answers is not this job's launcher"),
    ):
        call_launcher(f"{KEY}@127.0.0.1:{port}", "3")
    assert b"hello" not in heard
    assert KEY.encode() not in heard


def test_a_stranger_who_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback, "_LAUNCHER_ANSWER_S", 0.2)
    with (
        whoever_answers(lambda connection: connection.recv(1000) and connection.recv(1000)) as port,
        pytest.raises(HostUnreachableError, match=r"no answer within 0 s"),
    ):
        call_launcher(f"{KEY}@127.0.0.1:{port}", "3")


def test_the_next_address_is_tried_after_a_stranger_answered() -> None:
    launcher = RealLauncher()
    with socket.create_server(("127.0.0.2", 0)) as stranger:
        port = stranger.getsockname()[1]
        with socket.create_server(("127.0.0.1", port)) as server:

            def answer() -> None:
                stranger.accept()[0].close()
                with server.accept()[0] as connection:
                    launcher(connection)

            thread = threading.Thread(target=answer)
            thread.start()
            call_launcher(f"{KEY}@127.0.0.2,127.0.0.1:{port}", "3").close()
            thread.join()
    assert launcher.is_convinced


@pytest.mark.parametrize(
    "where",
    ["", "key", "key@", "key@host:port", "key@:1", "@host:1", "k@host:1234567", "k@host:70000", "k@h:٣"],
)
def test_an_address_that_is_none_is_refused(where: str) -> None:
    with pytest.raises(LaunchProtocolError, match="is not the address of a launcher"):
        call_launcher(where, "3")


def test_an_address_that_cannot_be_one_is_named() -> None:
    with pytest.raises(HostUnreachableError, match="xx: "):
        call_launcher(f"key@{'x' * 300}:80", "3")
