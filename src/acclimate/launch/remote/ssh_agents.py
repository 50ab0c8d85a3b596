"""Agents that ssh starts, one on each host, and their connections."""

from __future__ import annotations

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
from acclimate.launch.remote.watched_program import WatchedProgram

_LAST_WORDS = 500
_CLOSED_S = 5.0
"""How long an ssh that has closed its streams may take to exit."""


class SshConnection(Peer):
    """One host's ssh."""

    def __init__(self, node_rank: int, plan: HostPlan) -> None:
        super().__init__(plan.name)
        self.node_rank, self.plan = node_rank, plan
        self.ssh: WatchedProgram | None = None
        self.demux = MessageDemux(AGENT_IS_HERE)
        self.last_words = b""


class SshAgents:
    """All hosts' connections."""

    def __init__(self, job: JobPlan, program: str) -> None:
        self._job, self._program = job, program
        # Ranks write to the same stream as their agent, whose messages begin with a mark that no rank knows.
        self._mark = f"\x1e{secrets.token_hex(8)}"
        self.connections = [SshConnection(node_rank, plan) for node_rank, plan in enumerate(job.hosts)]
        self._unconnected = deque(self.connections)

    def run(self) -> Outcome:
        """Runs the job to its end."""
        return Coordinator(self._job, self.connections).run(self)

    def open(self, coordinator: Coordinator) -> None:
        """Starts to connect to all hosts; each agent that answers gets its assignment."""
        self._coordinator = coordinator
        self._connect_next()

    @property
    def running(self) -> bool:
        """Whether a connection is open or not made yet."""
        programs = (connection.ssh for connection in self.connections)
        return bool(self._unconnected) or any(ssh is not None and ssh.running for ssh in programs)

    def kill(self) -> None:
        """Closes all connections, after which agents end their ranks."""
        for connection in self.connections:
            if connection.ssh is not None:
                connection.ssh.kill()
                connection.ssh.close()

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
        connection.ssh = WatchedProgram(
            self._coordinator.loop,
            process,
            partial(self._received, connection),
            partial(self._exited, connection),
            self._coordinator.pump,
        )
        if process.stdin is not None and process.stdout is not None:
            connection.channel = PipeChannel(process.stdout.fileno(), process.stdin.fileno())

    def _received(self, connection: SshConnection, stream: int, data: bytes) -> None:
        source = Source(connection.plan.label, stream)
        if not data:
            self._coordinator.pump.feed(stream, source, connection.demux.end() if stream == 1 else b"")
            self._coordinator.pump.end(stream, source)
            self._expect_exit(connection)
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
            self._coordinator.handle(connection, message)
        if connection.gone and connection.ssh is not None:
            connection.ssh.kill()  # an agent without a connection ends its ranks
        return written

    def _assign(self, connection: SshConnection) -> None:
        """Sends the plan once the agent runs; before that ssh reads nothing, and its pipe is short."""
        connection.demux.mark = self._mark.encode()
        if connection.channel is not None:
            assignment = Assignment(self._job, connection.node_rank, self._mark)
            connection.channel.send({"assignment": asdict(assignment)})

    def _expect_exit(self, connection: SshConnection) -> None:
        """Kills an ssh that has closed its streams and does not exit."""
        if connection.ssh is not None and connection.ssh.has_closed_its_streams:
            self._coordinator.loop.after(_CLOSED_S, connection.ssh.kill)

    def _exited(self, connection: SshConnection, code: int) -> None:
        words = connection.last_words.decode(errors="backslashreplace").strip()
        self._coordinator.lost(connection, what_was_said(code, words), was_reached=code != FAILED)
