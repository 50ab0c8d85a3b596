"""One rank of this host: its guard, its last lines and log, its end, and who probably killed it.

A guard is what containerd calls a shim: a process between the launcher and one rank. It adopts the processes
that its rank leaves behind, daemons included, and ends them. Its parent is a standby process, which does the
same if the guard is killed. Both run :mod:`acclimate.launch.supervise.guard_process`.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
import traceback
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from acclimate.errors import RankStartError
from acclimate.host.process_status import how_it_ended
from acclimate.host.topology.control_groups import own_groups
from acclimate.host.topology.kernel_files import LIVE, read, under
from acclimate.launch.output.views import rank_tag
from acclimate.launch.output.writer import LogFile, Tail
from acclimate.launch.plan.job import RankPlan
from acclimate.launch.plan.outcome import RankFailure
from acclimate.launch.supervise import processes
from acclimate.launch.supervise.guard_process import (
    FROM_GUARD,
    LONGEST_FROM_GUARD,
    GuardSettings,
    StandardStreams,
    run_standby,
)
from acclimate.launch.supervise.processes import NO_MORE
from acclimate.launch.wire import LineBuffer, Message, decode, encode

_REAP_S = 10.0
"""The time limit for a guard to exit after its connection has closed."""


@dataclass
class Guard:
    """The launcher's view of a running guard."""

    standby_pid: int
    """The launcher's own child."""
    channel: socket.socket
    pid: int | None = None
    """The guard's pid; ``None`` until the guard has sent it."""
    _lines: LineBuffer = field(default_factory=lambda: LineBuffer(LONGEST_FROM_GUARD), repr=False)

    def send(self, command: str, number: int = 0) -> None:
        """Sends a command of :data:`~acclimate.launch.supervise.guard_process.FROM_SUPERVISOR`.

        Does not block, since a stopped guard does not read.
        """
        with suppress(OSError):  # it has exited, or has not read for long
            self.channel.send(encode({command: number}), socket.MSG_DONTWAIT)
        self._continue()

    def receive(self) -> list[Message] | None:
        """Returns its messages; ``None`` once the guard has ended."""
        try:
            data = self.channel.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            return None
        return [decode(line, FROM_GUARD) for line in self._lines.feed(data)]

    def kill(self) -> None:
        """Kills the guard, its standby, and all their descendants."""
        for pid in (*processes.descendants(self.standby_pid), self.standby_pid):
            processes.send(pid, signal.SIGKILL)

    def reap(self) -> int:
        """Closes the connection and waits for the process; returns its code, or minus the signal's number."""
        self.channel.close()
        give_up = time.monotonic() + _REAP_S
        with suppress(ChildProcessError):  # the program that supervises ignores SIGCHLD
            while time.monotonic() < give_up:
                pid, status = os.waitpid(self.standby_pid, os.WNOHANG)
                if pid:
                    return os.waitstatus_to_exitcode(status)
                self._continue()
                time.sleep(0.002)
            self.kill()
        return 0

    def _continue(self) -> None:
        """Continues the guard and its standby, which SIGSTOP may have stopped."""
        for pid in (self.standby_pid, self.pid):
            if pid is not None:
                processes.send(pid, signal.SIGCONT)


def start_guard(
    plan: RankPlan, streams: StandardStreams, settings: GuardSettings, private: Iterable[int]
) -> Guard:
    """Forks the standby of a rank's guard, which starts the guard, which starts the rank.

    Guards close the launcher's descriptors in ``private``.

    Raises:
        OSError: the system refuses a process.
    """
    ours, theirs = socket.socketpair()
    # A signal between the fork and the guard's own handlers would also reach the launcher.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for descriptor in (*private, ours.fileno()):
                    os.close(descriptor)
                run_standby(plan, streams, theirs, settings, mask)
                code = 0
            except BaseException:  # noqa: BLE001 - nothing above may run twice, in the launcher and here
                traceback.print_exc()
            finally:
                os._exit(code)
    except OSError:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
    return Guard(pid, ours)


@dataclass(frozen=True)
class KillCount:
    """How many processes the kernel has killed for lack of memory so far; ``None`` if unknown."""

    group: int | None
    """In this process's control group and those below."""
    host: int | None
    """On the whole host, including other users'."""


def count_kills(root: Path = LIVE) -> KillCount:
    """Reads the kernel's counters."""
    found = [
        count
        for chain in own_groups(root, "memory")
        # Version 2, and version 1 since Linux 4.13.
        for name in ("memory.events", "memory.oom_control")
        if (count := _counter(f"{chain[0]}/{name}")) is not None
    ]
    return KillCount(max(found, default=None), _counter(under(root, "/proc/vmstat")))


def _counter(path: str) -> int | None:
    for line in (read(path) or "").splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdecimal():
            return int(number)
    return None


def _other_senders() -> str:
    # The ranks have the launcher's limits. At the soft one the kernel sends SIGXCPU, at the hard one SIGKILL.
    if resource.getrlimit(resource.RLIMIT_CPU)[1] == resource.RLIM_INFINITY:
        return "another process"
    return "another process, or the kernel at the time limit (ulimit -t),"


def explain_sigkill(before: KillCount, after: KillCount) -> str | None:
    """Returns a sentence on the sender of a SIGKILL between two readings; ``None`` if unknown."""
    for start, end, place in (
        (before.group, after.group, "of this control group"),
        (before.host, after.host, "on this host"),
    ):
        if start is None or end is None:
            continue
        if end > start:
            count = "a process" if end == start + 1 else f"{end - start} processes"
            return (
                f"The kernel's out-of-memory killer is the likely cause: it killed {count} {place} "
                "meanwhile. Give the job more memory, or let each rank use less."
            )
        # The group's own counter is more reliable: the host's also counts other containers.
        return f"The kernel's out-of-memory killer did not act, so {_other_senders()} sent the signal."
    return None


@dataclass
class RankProcess:
    """A rank, from its plan to its end."""

    plan: RankPlan
    log: LogFile | None = None
    tail: Tail = field(default_factory=Tail)
    guard: Guard | None = None
    """``None`` before the start, and after the end of the rank's last process."""
    pid: int | None = None
    code: int | None = None
    """Its exit code, or the negative number of a signal; ``None`` while it runs."""
    ended_at: float = 0.0
    """On the monotonic clock, which all processes of a host share."""
    trouble: str | None = None
    """A sentence on a further failure."""

    @property
    def tag(self) -> str:
        """The tag of its lines."""
        return rank_tag(self.plan.rank)

    def open_log(self) -> None:
        """Opens the log file that the plan names, if any.

        Raises:
            RankStartError: it cannot be written.
        """
        if self.plan.log_path is None:
            return
        try:
            self.log = LogFile(self.plan.log_path)
        except OSError as error:
            raise RankStartError(
                error.errno,
                f"The log of rank {self.plan.rank} cannot be written: {error.strerror}. "
                "Give --log_dir a folder that you can write to, or free space there",
                str(self.plan.log_path),
            ) from error

    def start(
        self, stdin: int, captured: Collection[int], settings: GuardSettings, private: Iterable[int]
    ) -> dict[int, int]:
        """Starts the rank; returns the descriptor of each stream that the launcher reads.

        Those of 1 and 2 that are not ``captured`` are the launcher's own. Guards close its descriptors in
        ``private``.

        Raises:
            RankStartError: the system refuses a process or a pipe.
        """
        pipes: dict[int, tuple[int, int]] = {}
        try:
            for stream in captured:
                pipes[stream] = os.pipe()
            outputs = (pipes[stream][1] if stream in pipes else stream for stream in (1, 2))
            private = [*private, *(reading for reading, _ in pipes.values())]
            self.guard = start_guard(self.plan, StandardStreams(stdin, *outputs), settings, private)
        except OSError as error:
            for reading, _ in pipes.values():
                os.close(reading)
            raise RankStartError(
                error.errno,
                f"Rank {self.plan.rank} cannot be started: {error.strerror}. {NO_MORE}",
            ) from error
        finally:
            for _, writing in pipes.values():
                os.close(writing)
        return {stream: reading for stream, (reading, _) in pipes.items()}

    def guard_was_lost(self, code: int) -> None:
        """Handles the early end of the guard, with which the kernel has killed the rank."""
        pid = self.guard.pid if self.guard is not None else None
        if self.code is None:
            how = how_it_ended(code)
            self.trouble = f"Its guard process (pid {pid}) {how}, and the rank was killed with it."

    def reap_guard(self) -> bool:
        """Reaps the guard, whose connection has closed; returns whether it exited normally."""
        if self.guard is None:
            return True
        code = self.guard.reap()
        if code != 0:
            self.guard_was_lost(code)
        self.guard = None
        return code == 0

    def failure(self, kills_before: KillCount) -> RankFailure:
        """Returns the report of its failure."""
        code = self.code if self.code is not None else 1
        cause = self.trouble
        if cause is None and code == -signal.SIGKILL:
            cause = explain_sigkill(kills_before, count_kills())
        return RankFailure(
            rank=self.plan.rank,
            host=self.plan.host or socket.gethostname(),
            pid=self.pid,
            code=code,
            last_lines=self.tail.lines(),
            cause=cause,
        )
