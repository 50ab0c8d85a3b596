"""Nodes that are started by hand: they connect before any rank starts, and tell each other how they end.

Node 0 listens at the master's address and port, and gives the port to the ranks once all nodes have
connected. The connections stay open: a node that fails sends a message, and the others notice the loss of a
node. The nodes share no key; neither do the ranks in their own rendezvous at the same port.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from acclimate.errors import HostUnreachableError, LaunchOptionError, LaunchProtocolError
from acclimate.launch.plan.outcome import Outcome, RankFailure
from acclimate.launch.remote.protocol import SocketChannel
from acclimate.launch.supervise.supervisor import StopRequest
from acclimate.launch.wire import Message

_REMIND_AFTER_S, _REMIND_EVERY_S = 5.0, 60.0
_RETRY_S = 0.5
_MOST_STRANGERS = 64
"""Callers that have not yet said which node they are."""
_LONGEST_REASON = 1000
_LOST = 1
"""The exit code after the loss of a node."""


@dataclass(frozen=True)
class Arrival:
    """A node's first message."""

    node: int
    nodes: int


_FIELDS = {
    "here": Arrival,
    "start": bool,  # all nodes are there
    "refused": str,
    "stop": str,  # why the ranks of all nodes must end
    "code": int,  # the exit code of the node that failed, beside "stop"
    "ended": bool,  # this node's ranks have succeeded
}


class Nodes:
    """This node's connections to the others: node 0 has one to each, and they have one to node 0.

    They wait for each other at node 0's address and port, for ``within_s`` seconds at most.
    """

    def __init__(self, node: int, count: int, address: str, port: int, within_s: float) -> None:
        self._node, self._count, self._place = node, count, (address, port)
        self._within_s = within_s
        self._others: dict[int, SocketChannel] = {}
        self._ended = set[int]()
        self._reason: str | None = None
        self._code = _LOST

    def meet(self) -> None:
        """Waits until all nodes are there."""
        (self._wait_for_the_others if self._node == 0 else self._go_to_the_first)()
        self._selector = selectors.DefaultSelector()
        for node, channel in self._others.items():
            self._selector.register(channel.fileno(), selectors.EVENT_READ, node)

    def stop_request(self) -> StopRequest:
        """Returns the connection over which nodes end each other's ranks."""
        return StopRequest(self._selector.fileno(), self._read, self._tell_failure, takes_stdin=False)

    def conclude(self, outcome: Outcome) -> Outcome:
        """Tells the other nodes how the ranks here ended; returns the outcome with the code of the job."""
        if outcome.code == 0:
            self._tell(self._others, ended=True)
        elif self._reason is None:
            self._stop_others(outcome.reason or "its ranks have failed.", outcome.exit_code())
        elif outcome.failed is None:
            outcome = replace(outcome, code=self._code)
        for channel in self._others.values():
            channel.close()
        return outcome

    # -- connecting ----------------------------------------------------------------------------------

    def _wait_for_the_others(self) -> None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        try:
            server = socket.create_server(
                ("", self._place[1]), family=family, backlog=128, dualstack_ipv6=family == socket.AF_INET6
            )
        except OSError as error:
            raise LaunchOptionError(
                f"port {self._place[1]}, at which the nodes meet, cannot be used: {error.strerror}. Give "
                "another --master_port on all nodes."
            ) from None
        strangers: list[SocketChannel] = []
        clock = _Patience(self._within_s, self._absence)
        with server, selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while len(self._others) < self._count - 1:
                for key, _ in selector.select(clock.left_s()):
                    if key.data is None:
                        channel = SocketChannel(server.accept()[0], _FIELDS)
                        selector.register(channel.fileno(), selectors.EVENT_READ, channel)
                        strangers.append(channel)
                        continue
                    stays = self._hear(key.data)
                    if key.data in strangers and (not stays or key.data in self._others.values()):
                        strangers.remove(key.data)
                    if not stays:
                        self._forget(key.data, selector)
                while len(strangers) > _MOST_STRANGERS:
                    self._forget(strangers.pop(0), selector)
        for channel in strangers:
            channel.close()
        self._tell(self._others, start=True)

    def _hear(self, channel: SocketChannel) -> bool:
        """Handles a caller's message before the start; returns whether the caller is still there."""
        try:
            messages = channel.receive()
        except LaunchProtocolError:
            return False
        for message in messages or []:
            arrival = message.get("here")
            if arrival is None:
                return False
            if arrival.nodes != self._count or not 0 < arrival.node < self._count:
                channel.send(
                    {
                        "refused": f"node 0 was started for {self._count} nodes, and this is node "
                        f"{arrival.node} of {arrival.nodes}."
                    }
                )
            elif arrival.node in self._others:
                channel.send({"refused": f"there is another node {arrival.node}."})
            else:
                self._others[arrival.node] = channel
                continue
            return False
        return messages is not None

    def _forget(self, channel: SocketChannel, selector: selectors.BaseSelector) -> None:
        selector.unregister(channel.fileno())
        self._others = {node: other for node, other in self._others.items() if other is not channel}
        channel.close()

    def _absence(self) -> str:
        missing = [str(node) for node in range(1, self._count) if node not in self._others]
        whom = f"node {missing[0]}" if len(missing) == 1 else f"nodes {', '.join(missing[:20])}"
        return f"{whom} of {self._count}, to come to port {self._place[1]} here"

    def _go_to_the_first(self) -> None:
        address, port = self._place
        why = ""
        clock = _Patience(self._within_s, lambda: f"node 0 at {address}, port {port}{why}")
        while True:
            left_s = clock.left_s()  # whose error is an OSError too
            try:
                channel = SocketChannel(socket.create_connection(self._place, min(10.0, left_s)), _FIELDS)
            except OSError as error:
                why = f" ({error.strerror or error})"
                time.sleep(min(_RETRY_S, clock.left_s()))
                continue
            if self._is_let_in(channel, clock):
                self._others = {0: channel}
                return
            channel.close()
            why = " (it closed the connection)"
            time.sleep(min(_RETRY_S, clock.left_s()))

    def _is_let_in(self, channel: SocketChannel, clock: _Patience) -> bool:
        """Whether node 0 lets this node start; false if something else listens there, or node 0 has gone."""
        channel.send({"here": {"node": self._node, "nodes": self._count}})
        with selectors.DefaultSelector() as selector:
            selector.register(channel.fileno(), selectors.EVENT_READ)
            while True:
                if not selector.select(clock.left_s()):
                    continue
                try:
                    messages = channel.receive()
                except LaunchProtocolError:
                    return False
                for message in messages or []:
                    if "refused" in message:
                        raise HostUnreachableError(f"node 0 refused this node: {message['refused']}")
                    if "start" in message:
                        return True
                if messages is None:
                    return False

    # -- while the ranks run -------------------------------------------------------------------------

    def _read(self) -> str | None:
        for key, _ in self._selector.select(0):
            node = int(key.data)
            try:
                messages = self._others[node].receive()
            except LaunchProtocolError as error:
                messages = [{"stop": f"node {node} sent an invalid message: {error}"}]
            if messages is None:
                self._selector.unregister(key.fd)
                if node not in self._ended:
                    self._end(f"node {node} was lost.", _LOST, node)
                continue
            for message in messages:
                self._act_on(node, message)
        return self._reason

    def _act_on(self, node: int, message: Message) -> None:
        if "ended" in message:
            self._ended.add(node)
        if "stop" in message:
            self._end(message["stop"], message.get("code", _LOST), node)

    def _end(self, reason: str, code: int, culprit: int) -> None:
        if self._reason is None:
            self._reason, self._code = reason, code if 0 < code < 256 else _LOST
            self._tell((node for node in self._others if node != culprit), stop=reason, code=self._code)

    def _tell_failure(self, failure: RankFailure) -> None:
        self._stop_others(failure.describe(), Outcome(failure.code).exit_code())

    def _stop_others(self, why: str, code: int) -> None:
        if self._reason is None:
            self._reason = why
            self._tell(self._others, stop=f"node {self._node}: {why[:_LONGEST_REASON]}", code=code)

    def _tell(self, nodes: Iterable[int], **message: object) -> None:
        for node in list(nodes):
            with suppress(OSError):
                self._others[node].send(message)


class _Patience:
    """A time limit, with a message to the user while it passes."""

    def __init__(self, within_s: float, whom: Callable[[], str]) -> None:
        self._whom = whom
        self._end = time.monotonic() + within_s
        self._within_s = within_s
        self._remind_at = time.monotonic() + _REMIND_AFTER_S

    def left_s(self) -> float:
        """Returns how long to wait before the next call.

        Raises:
            HostUnreachableError: the limit has passed.
        """
        now = time.monotonic()
        limit = f"{self._within_s:g} s (--start_timeout)"
        if now >= self._end:
            raise HostUnreachableError(f"no rank was started: waited {limit} for {self._whom()}.")
        if now >= self._remind_at:
            self._remind_at = now + _REMIND_EVERY_S
            with suppress(OSError):
                sys.stderr.write(f"acclimate run: waiting for {self._whom()}; for at most {limit}.\n")
                sys.stderr.flush()
        return max(0.001, min(self._end, self._remind_at) - now)
