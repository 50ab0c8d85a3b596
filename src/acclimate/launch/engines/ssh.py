"""One agent on each host, over the system's ``ssh``.

The plan goes to the agent's standard input: nothing of it is seen in a list of processes, or needs quoting.
Host keys, users and jump hosts are ssh's business: what ``ssh HOST`` does for the user it does here.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from acclimate.errors import LaunchOptionError
from acclimate.launch.output.pump import STREAM_NAMES, OutputPump, own_streams
from acclimate.launch.output.views import Source, WholeLines
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.remote.coordinator import Coordinator, Peer
from acclimate.launch.remote.protocol import AGENT_IS_HERE, Message, PipeChannel, decode
from acclimate.launch.supervise.own_python import own_python

if TYPE_CHECKING:
    from acclimate.launch.plan.outcome import Outcome

CONNECT_S = 7
"""How long a host may take to accept a connection."""
FAILED = 255
"""ssh's exit code for its own failures; any other is the remote command's."""
_READ_BYTES = 1 << 16
_LAST_WORDS = 500


def find(environ: Mapping[str, str]) -> str | None:
    """Path of ssh's client; None where it is not installed."""
    return shutil.which("ssh", path=environ.get("PATH"))


def launch(job: JobPlan, program: str) -> Outcome:
    """Runs the job to its end.

    Raises:
        HostUnreachableError: a host does not answer or cannot do its part; no rank was started.
    """
    processes = SshAgents(job, program)
    return Coordinator(job, list(processes.connections)).run(processes)


def options(connect_s: int) -> tuple[str, ...]:
    """Which ssh should ask nobody anything, and notice when a host is gone.

    The user's own options go before them: the first of a kind holds.
    """
    found_out = "-oServerAliveInterval=5", "-oServerAliveCountMax=3"
    return "-T", "-oBatchMode=yes", f"-oConnectTimeout={connect_s}", *found_out


def common_port(job: JobPlan, engine: str) -> int | None:
    """ssh's port on all hosts, for engines that take names and one port; None where nothing says which.

    Raises:
        LaunchOptionError: there are several ports, or an IPv6 address among the names.
    """
    odd = next((host for host in job.hosts if ":" in host.name), None)
    if odd is not None:
        raise LaunchOptionError(
            f"{engine} takes no IPv6 address, as {odd.label}. Give a name, or use --launcher ssh."
        )
    ports = {host.port or job.ssh_port for host in job.hosts}
    if len(ports) > 1:
        raise LaunchOptionError(
            f"{engine} takes one port for all hosts. Give all the same one, or use --launcher ssh."
        )
    return ports.pop()


def what_was_said(code: int, words: str) -> str:
    """Why a host's ssh ended: in its own words where it failed, else in those of the remote command."""
    if code == FAILED:
        return words or "ssh did not say why"
    return f"exit code {code}: {words}" if words else f"exit code {code}"


def remote_command(job: JobPlan, *arguments: str) -> str:
    """What a login shell of whatever kind has to run there to become an agent."""
    words = own_python("acclimate.launch.remote.agent", *arguments)
    if "PYTHONPATH" in job.environment:  # an agent needs it before it has the plan
        words = ["env", f"PYTHONPATH={job.environment['PYTHONPATH']}", *words]
    return "exec " + shlex.join(words)


class Connection(Peer):
    """One host's ssh."""

    def __init__(self, node_rank: int, plan: HostPlan) -> None:
        super().__init__(plan.name)
        self.node_rank, self.plan = node_rank, plan
        self.process: subprocess.Popen[bytes] | None = None
        self.demux = MessageDemux(AGENT_IS_HERE)
        self.last_words = b""
        self.open_streams = 0


class MessageDemux:
    """Tells what an agent says from what its ranks write to the same stream."""

    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        """What a message begins with."""
        self._rest = b""

    def feed(self, data: bytes) -> tuple[bytes, list[Message]]:
        """The ranks' part of what has come, and the agent's messages in it."""
        data = self._rest + data
        written, messages = b"", list[Message]()
        while True:
            before, mark, after = data.partition(self.mark)
            line, end, rest = after.partition(b"\n")
            written += before
            if not mark:
                self._rest = b""
                break
            if not end:
                self._rest = mark + after
                return written, messages
            messages.append(decode(line))
            data = rest
        # What may be the beginning of a mark waits for the rest of it.
        for length in range(min(len(self.mark) - 1, len(written)), 0, -1):
            if self.mark.startswith(written[-length:]):
                self._rest = written[-length:]
                return written[:-length], messages
        return written, messages

    def end(self) -> bytes:
        """What was held back, when nothing more comes."""
        rest, self._rest = self._rest, b""
        return rest


class SshAgents:
    """All hosts' connections."""

    def __init__(self, job: JobPlan, program: str) -> None:
        self._job, self._program = job, program
        # Ranks write to the same stream as their agent; what it says begins with what no rank knows.
        self._mark = f"\x1e{secrets.token_hex(8)}"
        self.connections = [Connection(node_rank, plan) for node_rank, plan in enumerate(job.hosts)]

    def open(self, coordinator: Coordinator) -> None:
        """Connects to all hosts at once, and tells each agent its part."""
        self._coordinator = coordinator
        self._pump = OutputPump(coordinator, own_streams(WholeLines), self._stream_failed)
        for connection in self.connections:
            self._connect(connection)

    @property
    def running(self) -> bool:
        """Whether a connection is open, or something is left to show."""
        return self.waits_for_reader or any(connection.open_streams for connection in self.connections)

    @property
    def waits_for_reader(self) -> bool:
        """Whether the launcher holds output that its own reader did not take yet."""
        return self._pump.waiting

    def kill(self) -> None:
        """Ends all connections; an agent without one ends its ranks."""
        for connection in self.connections:
            if connection.process is not None:
                with connection.process as process:  # closes its pipes
                    process.kill()

    def _connect(self, connection: Connection) -> None:
        port = connection.plan.port or self._job.ssh_port
        process = subprocess.Popen(
            [
                self._program,
                *self._job.launcher_args,
                *options(CONNECT_S),
                *(["-p", str(port)] if port is not None else []),
                "--",
                connection.plan.name,
                remote_command(self._job),
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
            self._pump.read_from(pipe.fileno(), stream, react)

    def _read(self, connection: Connection, stream: int, descriptor: int) -> None:
        data = os.read(descriptor, _READ_BYTES)
        source = Source(connection.plan.label, stream)
        if not data:
            self._pump.feed(stream, source, connection.demux.end() if stream == 1 else b"")
            self._pump.end(stream, source)
            self._pump.forget(descriptor)
            connection.open_streams -= 1
            if not connection.open_streams:
                self._ended(connection)
            return
        if stream == 1:
            data, messages = connection.demux.feed(data)
            for message in messages:
                if "hello" in message:
                    self._tell_its_part(connection)
                self._coordinator.heard(connection, message)
        else:
            connection.last_words = (connection.last_words + data)[-_LAST_WORDS:]
            if not self._coordinator.started:
                return  # shown as the reason where the host cannot be used
        self._pump.feed(stream, source, data)

    def _stream_failed(self, stream: int, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            reason = f"nobody reads standard {STREAM_NAMES[stream]} any more, so the ranks were ended."
            self._coordinator.end(reason, 128 + signal.SIGPIPE)
            return
        why = f"standard {STREAM_NAMES[stream]} cannot be written ({error.strerror}); the ranks go on."
        self._pump.feed(2, Source("", 0), f"acclimate run: {why}\n".encode())

    def _tell_its_part(self, connection: Connection) -> None:
        """Only now: until its agent is there ssh reads nothing, and a long plan does not fit its pipe."""
        connection.demux.mark = self._mark.encode()
        if connection.channel is not None:
            part = {"job": self._job.to_json(), "node_rank": connection.node_rank, "mark": self._mark}
            connection.channel.send(part)

    def _ended(self, connection: Connection) -> None:
        if connection.process is None:
            return
        code = connection.process.wait()
        words = connection.last_words.decode(errors="backslashreplace").strip()
        self._coordinator.lost(connection, what_was_said(code, words), was_reached=code != FAILED)
