"""A launcher's port in this process, with strangers and agents that call it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict

from acclimate.launch.event_loop import EventLoop
from acclimate.launch.remote.callback import CallbackServer
from acclimate.launch.remote.protocol import Answer, Call, SocketChannel, proof_of
from acclimate.launch.wire import Message, decode

KEY = "0123456789abcdef"


class Port:
    """A server for two agents, and what it told.

    Args:
        wants: told each message; returns whether the agent is still wanted.
    """

    def __init__(self, wants: Callable[[str, Message], bool] = lambda name, message: True) -> None:
        self.wants = wants
        self.loop = EventLoop()
        self.answered: dict[str, SocketChannel] = {}
        self.heard: list[tuple[str, Message]] = []
        self.ended: list[tuple[str, str]] = []
        self.hindered: list[str] = []
        self.server = CallbackServer(
            self.loop,
            KEY,
            ["0", "1"],
            answered=self.answered.__setitem__,
            on_message=self._hear,
            ended=lambda name, reason: self.ended.append((name, reason)),
            hindered=self.hindered.append,
        )
        self.number = self.server.port
        self._callers: list[socket.socket] = []

    def _hear(self, name: str, message: Message) -> bool:
        self.heard.append((name, message))
        return self.wants(name, message)

    def connect(self) -> socket.socket:
        caller = socket.create_connection(("127.0.0.1", self.number))
        self._callers.append(caller)
        return caller

    def agent(self, name: str) -> socket.socket:
        """An agent that has proved that it has the key."""
        caller = self.connect()
        call = Call(name, "nonce")
        self.say(caller, json.dumps({"call": asdict(call)}).encode() + b"\n")
        answer = decode(self.receive(caller), {"answer": Answer})["answer"]
        proof = {"hello": proof_of(KEY, "caller", call, answer.nonce)}
        self.say(caller, json.dumps(proof).encode() + b"\n")
        assert self.until(lambda: name in self.answered)
        return caller

    def say(self, caller: socket.socket, data: bytes) -> None:
        """Sends, and lets the server take it in."""
        caller.setblocking(False)
        give_up = time.monotonic() + 120
        while data and time.monotonic() < give_up:
            try:
                data = data[caller.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                return  # the server has hung up
            self.loop.wait(time.monotonic() + 0.01)

    def receive(self, caller: socket.socket) -> bytes:
        """A line from the server; what there is where it hangs up."""
        received = bytearray()

        def is_whole() -> bool:
            try:
                piece = caller.recv(1 << 16)
            except BlockingIOError:
                return False
            except ConnectionError:
                return True
            received.extend(piece)
            return not piece or received.endswith(b"\n")

        caller.setblocking(False)
        assert self.until(is_whole)
        return bytes(received)

    def hangs_up(self, caller: socket.socket) -> bool:
        """Whether the server ends a connection."""

        def is_ended() -> bool:
            try:
                return not caller.recv(1 << 16)
            except BlockingIOError:
                return False
            except ConnectionError:
                return True

        caller.setblocking(False)
        return self.until(is_ended)

    def until(self, holds: Callable[[], bool], within_s: float = 120) -> bool:
        give_up = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > give_up:
                return False
            self.loop.wait(time.monotonic() + 0.01)
        return True

    def close(self) -> None:
        for caller in self._callers:
            caller.close()
        self.server.close()
        self.loop.close()
