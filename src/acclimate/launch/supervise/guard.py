"""The launcher's end of a guard: starts it, sends it commands, reads its messages and reaps it.

A guard is what containerd calls a shim: a process between the launcher and one rank. It adopts the processes
that its rank leaves behind, daemons included, and ends them. Its parent is a standby process, which does the
same if the guard is killed. Both run :mod:`acclimate.launch.supervise.guard_process`.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from acclimate.launch.plan.job import RankPlan
from acclimate.launch.supervise import processes
from acclimate.launch.supervise.guard_process import (
    FROM_GUARD,
    LONGEST_FROM_GUARD,
    GuardSettings,
    StandardStreams,
    run_standby,
)
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
