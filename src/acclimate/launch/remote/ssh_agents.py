"""Agents that ssh starts, one on each host, and their connections."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections import deque
from dataclasses import asdict
from functools import partial

from acclimate.errors import LaunchProtocolError
from acclimate.launch.output.views import Source
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.plan.outcome import Outcome
from acclimate.launch.remote.coordinator import Coordinator, Peer, starting_programs
from acclimate.launch.remote.protocol import AGENT_IS_HERE, Assignment, MessageDemux, PipeChannel
from acclimate.launch.remote.ssh_client import FAILED, agent_command, ssh_options, what_was_said

_READ_BYTES = 1 << 16
_LAST_WORDS = 500


class SshConnection(Peer):
    """One host's ssh."""

    def __init__(self, node_rank: int, plan: HostPlan) -> None:
        super().__init__(plan.name)
        self.node_rank, self.plan = node_rank, plan
        self.process: subprocess.Popen[bytes] | None = None
        self.demux = MessageDemux(AGENT_IS_HERE)
        self.last_words = b""
        self.open_streams = 0


class SshAgents:
    """All hosts' connections.

    Args:
        job: what to run.
        program: path of ssh's client.
    """

    def __init__(self, job: JobPlan, program: str) -> None:
        self._job, self._program = job, program
        # Ranks write to the same stream as their agent, whose messages begin with a mark that no rank knows.
        self._mark = f"\x1e{secrets.token_hex(8)}"
        self.connections = [SshConnection(node_rank, plan) for node_rank, plan in enumerate(job.hosts)]
        self._unconnected = deque(self.connections)

    def run(self) -> Outcome:
        """Runs the job to its end.

        Raises:
            HostUnreachableError: a host does not answer or cannot do its part; no rank was started.
        """
        return Coordinator(self._job, self.connections).run(self)

    def open(self, coordinator: Coordinator) -> None:
        """Starts to connect to all hosts; each agent that answers gets its assignment."""
        self._coordinator = coordinator
        self._connect_next()

    @property
    def running(self) -> bool:
        """Whether a connection is open or not made yet."""
        return bool(self._unconnected) or any(connection.open_streams for connection in self.connections)

    def kill(self) -> None:
        """Closes all connections, after which agents end their ranks."""
        for connection in self.connections:
            if connection.process is not None:
                with connection.process as process:  # closes its pipes
                    process.kill()

    def _connect_next(self) -> None:
        """Connects to one host per turn of the loop, so that signals are handled in between."""
        with starting_programs():
            self._connect(self._unconnected.popleft())
        if self._unconnected:
            self._coordinator.loop.after(0.0, self._connect_next)

    def _connect(self, connection: SshConnection) -> None:
        port = connection.plan.port or self._job.ssh_port
        process = subprocess.Popen(
            [
                self._program,
                *self._job.launcher_args,
                *ssh_options(),
                *(["-p", str(port)] if port is not None else []),
                "--",
                connection.plan.name,
                agent_command(self._job),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the ranks, to which the agents pass it on
        )
        connection.process = process
        if process.stdin is None or process.stdout is None or process.stderr is None:
            return
        connection.channel = PipeChannel(process.stdout.fileno(), process.stdin.fileno())
        for stream, pipe in ((1, process.stdout), (2, process.stderr)):
            connection.open_streams += 1
            react = partial(self._read, connection, stream, pipe.fileno())
            self._coordinator.pump.read_from(pipe.fileno(), stream, react)

    def _read(self, connection: SshConnection, stream: int, descriptor: int) -> None:
        data = os.read(descriptor, _READ_BYTES)
        source = Source(connection.plan.label, stream)
        if not data:
            self._coordinator.pump.feed(stream, source, connection.demux.end() if stream == 1 else b"")
            self._coordinator.pump.end(stream, source)
            self._coordinator.pump.forget(descriptor)
            connection.open_streams -= 1
            if not connection.open_streams:
                self._ended(connection)
            return
        if stream == 1:
            data = self._hear(connection, data)
        else:
            connection.last_words = (connection.last_words + data)[-_LAST_WORDS:]
            if not self._coordinator.started:
                return  # shown as the reason where the host cannot be used
        self._coordinator.pump.feed(stream, source, data)

    def _hear(self, connection: SshConnection, data: bytes) -> bytes:
        """Handles the agent's messages; returns its ranks' output."""
        written = b""
        try:
            written, messages = connection.demux.feed(data)
        except LaunchProtocolError as error:
            reason = f"its agent sent an invalid message: {error}"
            self._coordinator.lost(connection, reason, was_reached=True)
            messages = []
        for message in messages:
            if "here" in message:
                self._assign(connection)
            self._coordinator.heard(connection, message)
        if connection.gone and connection.process is not None:
            connection.process.kill()  # an agent without a connection ends its ranks
        return written

    def _assign(self, connection: SshConnection) -> None:
        """Sends the plan once the agent runs; before that ssh reads nothing, and its pipe is short."""
        connection.demux.mark = self._mark.encode()
        if connection.channel is not None:
            assignment = Assignment(self._job, connection.node_rank, self._mark)
            connection.channel.send({"assignment": asdict(assignment)})

    def _ended(self, connection: SshConnection) -> None:
        if connection.process is None:
            return
        code = connection.process.wait()
        words = connection.last_words.decode(errors="backslashreplace").strip()
        self._coordinator.lost(connection, what_was_said(code, words), was_reached=code != FAILED)
