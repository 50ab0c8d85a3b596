"""Where agents and slots call in, when the engine that starts them passes no input on to them.

One program of the engine's starts them all: ``pdsh``, ``mpirun``, ``srun``. Those of MPI and Slurm need
connections from the hosts to this machine themselves, so that one more asks nothing new of the network.
"""

from __future__ import annotations

import hmac
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from acclimate.launch.plan.job import JobPlan
from acclimate.launch.plan.outcome import Outcome
from acclimate.launch.remote.addresses import own_addresses
from acclimate.launch.remote.callback import LAUNCHER_VARIABLE
from acclimate.launch.remote.coordinator import ANSWER_S, Coordinator, Peer
from acclimate.launch.remote.protocol import SocketChannel
from acclimate.launch.remote.ssh_check import SshReachabilityCheck

_BACKLOG = 1024
_READ_BYTES = 1 << 16
_LAST_WORDS_S = 5.0
"""How long those who called may take to say how they ended, after the engine's program has."""
CHECK_AFTER_S = 2.0
"""After so long without all calls, it is looked into which hosts can be reached."""
_TERM_S = 3.0
"""What MPI's programs need to end the processes they started elsewhere."""

Command = Callable[[Mapping[str, str]], Sequence[str]]
"""Makes the command of an engine's program, from the variables by which the server is found."""


class MemoryFile:
    """A file in memory that a program is handed: nothing is left of it, also when this process is killed."""

    def __init__(self, text: str) -> None:
        self.descriptor = os.memfd_create("acclimate-hosts")
        os.write(self.descriptor, text.encode())

    @property
    def path(self) -> str:
        """What the program and those that it starts find it by."""
        return f"/proc/self/fd/{self.descriptor}"

    def __enter__(self) -> MemoryFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


class CallbackServer:
    """A processes of callers, and the one program that starts them.

    Args:
        job: what to run.
        command: of the engine's program.
        each_rank: whether there is a caller for each rank, or one for each host.
        environment: variables of the program besides this process's own and the job's.
        hostfile: for the program to read.
        on_stderr: told what the program writes to standard error; else that is this process's own.
        answer_s: how long to wait for the first call.
        ssh_check: finds out which hosts cannot be reached, where the program does not tell.
    """

    def __init__(
        self,
        job: JobPlan,
        command: Command,
        *,
        each_rank: bool,
        environment: Mapping[str, str] | None = None,
        hostfile: MemoryFile | None = None,
        on_stderr: Callable[[CallbackServer, bytes], None] | None = None,
        answer_s: float = ANSWER_S,
        ssh_check: SshReachabilityCheck | None = None,
    ) -> None:
        self._job, self._command, self._on_stderr = job, command, on_stderr
        self._settings = environment or {}
        self._passed_descriptors = () if hostfile is None else (hostfile.descriptor,)
        names = [host.name for host in job.hosts]
        if each_rank:
            self.peers = {str(rank): Peer(names[job.node_of(rank)]) for rank in range(job.world_size)}
        else:
            self.peers = {name: Peer(name) for name in names}
        self._node_ranks = {name: node_rank for node_rank, name in enumerate(names)}
        self._each_rank = each_rank
        self._answer_s, self._ssh_check = answer_s, ssh_check
        self._key = secrets.token_hex(16)
        self._server = _listen()
        self._callers: set[SocketChannel] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._open: set[int] = set()
        """Descriptors that the program's end or its last words will be read from."""

    def run(self) -> Outcome:
        """Runs the job to its end.

        Raises:
            HostUnreachableError: a host does not answer or cannot do its part; no rank was started.
        """
        self.coordinator = Coordinator(self._job, list(self.peers.values()), self._answer_s)
        return self.coordinator.run(self)

    def open(self, coordinator: Coordinator) -> None:
        """Starts the program, and answers calls."""
        sys.stdout.flush()
        sys.stderr.flush()
        addresses = own_addresses([host.name for host in self._job.hosts])
        port = self._server.getsockname()[1]
        where = {LAUNCHER_VARIABLE: f"{self._key}@{','.join(addresses)}:{port}"}
        coordinator.watch(self._server.fileno(), self._answer)
        command = self._command(where)
        self._name = Path(command[0]).name
        self._process = process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=None if self._on_stderr is None else subprocess.PIPE,
            env=self._environment(where),
            pass_fds=self._passed_descriptors,
            start_new_session=True,  # Ctrl-C is for the ranks, to which it is passed on
        )
        if process.stderr is not None:
            self._watch(process.stderr.fileno(), self._read_stderr)
        self._watch(os.pidfd_open(process.pid), self._program_ended)
        if self._ssh_check is not None:
            coordinator.after(CHECK_AFTER_S, self._check_silent_hosts)

    def _check_silent_hosts(self) -> None:
        if self._ssh_check is not None and not all(peer.decided for peer in self.peers.values()):
            self._ssh_check.begin(self.coordinator)

    def _environment(self, where: Mapping[str, str]) -> dict[str, str]:
        """The user's own settings of an engine hold before ours.

        They come last: MPICH 5.0.2 does not carry the variable at the end of its environment.
        """
        all_others = {**os.environ, **self._job.environment, **where}
        settings = {name: all_others.pop(name, value) for name, value in self._settings.items()}
        return {**all_others, **settings}

    @property
    def running(self) -> bool:
        """Whether the program runs, somebody who called is still there, or it is being found out why not."""
        examining = self._ssh_check is not None and self._ssh_check.running
        return bool(self._open or self._callers) or examining

    @property
    def waits_for_reader(self) -> bool:
        """Never: the program writes to the launcher's own streams by itself."""
        return False

    def kill(self) -> None:
        """Ends the program; callers whose connection has ended end their ranks."""
        self._server.close()
        if self._ssh_check is not None:
            self._ssh_check.end()
        for channel in self._callers:
            channel.close()
        if self._process is None:
            return
        with self._process as process:  # closes its pipe
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_S)
                return
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _watch(self, descriptor: int, react: Callable[[int], None]) -> None:
        self._open.add(descriptor)
        self.coordinator.watch(descriptor, partial(react, descriptor))

    def _forget(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        self.coordinator.forget(descriptor)

    # -- calls ---------------------------------------------------------------------------------------

    def _answer(self) -> None:
        connection, _ = self._server.accept()
        channel = SocketChannel(connection)
        self._callers.add(channel)
        self.coordinator.watch(channel.fileno(), partial(self._listen_to, channel, []))

    def _listen_to(self, channel: SocketChannel, known: list[Peer]) -> None:
        """Hears one caller; ``known`` holds who that is once it has said so."""
        messages = channel.receive()
        for message in messages or ():
            if known:
                self.coordinator.heard(known[0], message)
                continue
            peer = self._introduce(channel, message.get("hello"))
            if peer is None:
                messages = None
                break
            known.append(peer)
        if messages is None:
            self._callers.discard(channel)
            self.coordinator.forget(channel.fileno())
            channel.close()
            if known:
                self._call_ended(known[0])

    def _call_ended(self, peer: Peer) -> None:
        words = f"{self._whose(peer)} ended or cannot be heard any more"
        if self.coordinator.started:
            self.coordinator.lost(peer, words)
            return
        # The engine most likely ended it because of another host, and will say so.
        peer.channel = peer.ready = None
        self.coordinator.after(_LAST_WORDS_S, partial(self.coordinator.lost, peer, words))

    def _whose(self, peer: Peer) -> str:
        caller = next(name for name, other in self.peers.items() if other is peer)
        return f"the slot of rank {caller}" if self._each_rank else "its agent"

    def _introduce(self, channel: SocketChannel, hello: object) -> Peer | None:
        """Who calls; None for strangers, and for who has called before."""
        if not isinstance(hello, dict) or not hmac.compare_digest(str(hello.get("key")), self._key):
            return None
        peer = self.peers.get(str(hello.get("rank", hello.get("host"))))
        if peer is None or peer.channel is not None or peer.gone:
            return None
        peer.channel = channel
        channel.send({"job": self._job.to_json(), "node_rank": self._node_ranks[peer.host], "mark": ""})
        return peer

    # -- the program ---------------------------------------------------------------------------------

    def _read_stderr(self, descriptor: int) -> None:
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            self._forget(descriptor)
        elif self._on_stderr is not None:
            self._on_stderr(self, data)

    def _program_ended(self, descriptor: int) -> None:
        self._forget(descriptor)
        os.close(descriptor)
        process = self._process
        if process is None:
            return
        code = process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.coordinator.engine_ended(f"{self._name} {how}", _LAST_WORDS_S)
        if self._ssh_check is not None and not self.coordinator.started:
            self._ssh_check.begin(self.coordinator)


def _listen() -> socket.socket:
    """On all addresses of this machine, and a free port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)
