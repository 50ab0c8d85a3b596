"""An engine's program (``pdsh``, ``mpirun`` or ``srun``), which starts all agents; these call the launcher.

MPI and Slurm themselves need connections from the hosts to this machine, so agents need nothing new.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from acclimate.host.local_address import own_addresses
from acclimate.host.process_status import how_it_ended
from acclimate.launch.output.views import Source
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.plan.outcome import Outcome
from acclimate.launch.remote.callback import LAUNCHER_VARIABLE, CallbackServer
from acclimate.launch.remote.coordinator import HOST_ANSWER_S, Coordinator, Peer
from acclimate.launch.remote.protocol import Assignment, SocketChannel
from acclimate.launch.remote.ssh_client import FAILED
from acclimate.launch.remote.watched_program import WatchedProgram
from acclimate.launch.supervise.processes import send_to_group


class SshReachabilityCheck:
    """Connects to each host by ssh if a job does not start, only to explain the failure."""

    def __init__(self, hosts: Sequence[str], command: Sequence[str]) -> None:
        self._hosts, self._ssh = hosts, command
        self._programs: list[WatchedProgram] = []
        self._words: dict[str, bytes] = {}
        self._has_begun = False

    @property
    def running(self) -> bool:
        """Whether an answer is still missing."""
        return any(program.running for program in self._programs)

    def begin(self, coordinator: Coordinator) -> None:
        """Starts the check of all hosts, once."""
        if self._has_begun:
            return
        self._has_begun = True
        for host in self._hosts:
            process = subprocess.Popen(
                [*self._ssh, "--", host, "true"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._words[host] = b""
            received, exited = partial(self._received, host), partial(self._exited, coordinator, host)
            self._programs.append(WatchedProgram(coordinator.loop, process, received, exited))

    def _received(self, host: str, _: int, data: bytes) -> None:
        self._words[host] += data

    def _exited(self, coordinator: Coordinator, host: str, code: int) -> None:
        if code == FAILED and not coordinator.started:
            words = self._words[host].decode(errors="backslashreplace").strip()
            coordinator.explain(f'host "{host}" cannot be reached: {words or "ssh did not say why"}')

    def end(self) -> None:
        """Stops the check."""
        for program in self._programs:
            program.kill()
            program.close()


_LAST_WORDS_S = 5.0
"""How long after the engine's program agents may report their outcome."""
CHECK_AFTER_S = 2.0
"""After this time without all agents, ssh is used to find unreachable hosts."""
_TERM_S = 3.0
"""The time that the program gets to end its processes on other hosts."""

Command = Callable[[Mapping[str, str]], Sequence[str]]
"""Makes the command of an engine's program, given the variables with the launcher's address."""


class MemoryFile:
    """A file in memory for a program to read, which leaves nothing behind even after SIGKILL."""

    def __init__(self, text: str) -> None:
        self.descriptor = os.memfd_create("acclimate-hosts")
        with open(self.descriptor, "wb", closefd=False) as file:
            file.write(text.encode())

    @property
    def path(self) -> str:
        """The path at which the program and its children find the file."""
        return f"/proc/self/fd/{self.descriptor}"

    def __enter__(self) -> MemoryFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


class EngineProgram:
    """The program and its agents.

    Args:
        job: the job to run.
        command: makes the program's command.
        each_rank: whether there is an agent for each rank, or one for each host.
        environment: variables of the program besides this process's and the job's.
        hostfile: a file for the program to read.
        on_stderr: called with the program's standard error, empty at its end; returns what to show of it.
            ``None``: all is shown.
        answer_s: the time limit for the first call.
        ssh_check: finds unreachable hosts, if the program does not report them.
    """

    def __init__(
        self,
        job: JobPlan,
        command: Command,
        *,
        each_rank: bool,
        environment: Mapping[str, str] | None = None,
        hostfile: MemoryFile | None = None,
        on_stderr: Callable[[EngineProgram, bytes], bytes] | None = None,
        answer_s: float = HOST_ANSWER_S,
        ssh_check: SshReachabilityCheck | None = None,
    ) -> None:
        self._job, self._command, self._on_stderr = job, command, on_stderr
        self._settings = environment or {}
        self._passed_descriptors = () if hostfile is None else (hostfile.descriptor,)
        names = [host.name for host in job.hosts]
        if each_rank:
            self.peers = {
                str(job.rank_offset(node) + local): Peer(host.name)
                for node, host in enumerate(job.hosts)
                for local in range(len(host.slots))
            }
        else:
            self.peers = {name: Peer(name) for name in names}
        self._node_ranks = {name: node_rank for node_rank, name in enumerate(names)}
        self._each_rank = each_rank
        self._answer_s, self._ssh_check = answer_s, ssh_check
        self._key = secrets.token_hex(16)
        self._server: CallbackServer | None = None
        self._program: WatchedProgram | None = None

    def run(self) -> Outcome:
        """Runs the job to its end."""
        self.coordinator = Coordinator(self._job, list(self.peers.values()), self._answer_s)
        return self.coordinator.run(self)

    def open(self, coordinator: Coordinator) -> None:
        """Starts the program and listens for its agents."""
        self._server = CallbackServer(
            coordinator.loop,
            self._key,
            self.peers,
            answered=self._assign,
            on_message=lambda name, message: coordinator.handle(self.peers[name], message),
            ended=self._call_ended,
            hindered=coordinator.explain,
        )
        addresses = own_addresses([host.name for host in self._job.hosts])
        where = {LAUNCHER_VARIABLE: f"{self._key}@{','.join(addresses)}:{self._server.port}"}
        command = self._command(where)
        self._name = Path(command[0]).name
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment(where),
            pass_fds=self._passed_descriptors,
            start_new_session=True,  # Ctrl-C is for the ranks, to which it is passed on
        )
        self._program = WatchedProgram(
            coordinator.loop, process, self._received, self._exited, coordinator.pump
        )
        if self._ssh_check is not None:
            coordinator.loop.after(CHECK_AFTER_S, self._check_silent_hosts)

    def _check_silent_hosts(self) -> None:
        if self._ssh_check is not None and not all(peer.decided for peer in self.peers.values()):
            self._ssh_check.begin(self.coordinator)

    def _environment(self, where: Mapping[str, str]) -> dict[str, str]:
        """Returns the program's variables; the user's settings of an engine precede ours."""
        # The settings come last: MPICH 5.0.2 does not pass on the last variable of its environment.
        all_others = {**os.environ, **self._job.environment, **where}
        settings = {name: all_others.pop(name, value) for name, value in self._settings.items()}
        return {**all_others, **settings}

    @property
    def running(self) -> bool:
        """Whether the program, an agent or the ssh check still runs."""
        checking = self._ssh_check is not None and self._ssh_check.running
        has_agents = self._server is not None and self._server.has_agents
        return (self._program is not None and self._program.running) or has_agents or checking

    def kill(self) -> None:
        """Ends the program; agents end their ranks when their connection closes."""
        if self._server is not None:
            self._server.close()
        if self._ssh_check is not None:
            self._ssh_check.end()
        if self._program is None:
            return
        process = self._program.process
        process.terminate()
        try:
            process.wait(_TERM_S)
        except subprocess.TimeoutExpired:
            send_to_group(process.pid, signal.SIGKILL)
        self._program.close()

    # -- agents --------------------------------------------------------------------------------------

    def _assign(self, name: str, channel: SocketChannel) -> None:
        peer = self.peers[name]
        peer.channel = channel
        channel.send({"assignment": asdict(Assignment(self._job, self._node_ranks[peer.host]))})

    def _call_ended(self, name: str, reason: str) -> None:
        peer = self.peers[name]
        agent = f"the agent of rank {name}" if self._each_rank else "its agent"
        if self.coordinator.started:
            self.coordinator.lost(peer, f"{agent} {reason}")
            return
        # The engine has probably ended it because of another host, and will say so.
        peer.channel = peer.ready = None
        later = partial(self.coordinator.lost, peer, f"{agent} {reason}")
        self.coordinator.loop.after(_LAST_WORDS_S, later)

    # -- the program ---------------------------------------------------------------------------------

    def _received(self, stream: int, data: bytes) -> None:
        pump, source = self.coordinator.pump, Source("", stream)
        shown = self._on_stderr(self, data) if stream == 2 and self._on_stderr is not None else data
        pump.feed(stream, source, shown)
        if not data:
            pump.end(stream, source)

    def _exited(self, code: int) -> None:
        self.coordinator.engine_ended(f"{self._name} {how_it_ended(code)}", _LAST_WORDS_S)
        if self._ssh_check is not None and not self.coordinator.started:
            self._ssh_check.begin(self.coordinator)
