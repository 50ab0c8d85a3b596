"""A rank that was started: what the launcher reads of it, and how it ended."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from acclimate.errors import RankStartError
from acclimate.launch.output.writer import LogFile, Tail
from acclimate.launch.plan.outcome import RankFailure
from acclimate.launch.plan.rank_plan import RankPlan
from acclimate.launch.supervise import processes
from acclimate.launch.supervise.guard import Guard, Streams, start_guard
from acclimate.launch.supervise.oom import KillCount, count_kills, explain_sigkill


@dataclass
class RunningRank:
    """Starts as a plan; :meth:`start` makes it run."""

    plan: RankPlan
    log: LogFile | None = None
    tail: Tail = field(default_factory=Tail)
    guard: Guard | None = None
    """``None`` before the start, and after the last of the rank's processes is gone."""
    pid: int | None = None
    code: int | None = None
    """Its exit code, or the negative number of a signal; ``None`` while it runs."""
    ended_at: float = 0.0
    """On the monotonic clock, which all processes of a host share."""
    trouble: str | None = None
    """What went wrong besides, as a sentence."""

    @property
    def tag(self) -> str:
        """What its lines begin with."""
        return f"[rank {self.plan.rank}] "

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
                "Give --log_dir a folder of yours, or free space there",
                str(self.plan.log_path),
            ) from error

    def start(
        self,
        stdin: int,
        captured: Collection[int],
        *,
        grace_s: float,
        shares_terminal: bool,
        ignored: Collection[int],
        private: Iterable[int],
    ) -> dict[int, int]:
        """Starts it; returns for each captured stream the descriptor to read it from.

        Args:
            stdin: a descriptor.
            captured: which of the streams 1 and 2 the launcher reads; the others are its own.
            grace_s, shares_terminal, ignored, private: as for the guard.

        Raises:
            RankStartError: the system refuses a process or a pipe.
        """
        pipes: dict[int, tuple[int, int]] = {}
        try:
            for stream in captured:
                pipes[stream] = os.pipe()
            self.guard = start_guard(
                self.plan,
                Streams(stdin, *(pipes[stream][1] if stream in pipes else stream for stream in (1, 2))),
                grace_s=grace_s,
                shares_terminal=shares_terminal,
                ignored=ignored,
                private=[*private, *(reading for reading, _ in pipes.values())],
            )
        except OSError as error:
            for reading, _ in pipes.values():
                os.close(reading)
            raise RankStartError(
                error.errno,
                f"Rank {self.plan.rank} cannot be started: {error.strerror}. The limits on processes and "
                "open files (ulimit -u, ulimit -n) say how many there may be",
            ) from error
        finally:
            for _, writing in pipes.values():
                os.close(writing)
        return {stream: reading for stream, (reading, _) in pipes.items()}

    def bury_guard(self) -> str | None:
        """Takes leave of a guard that ended; a sentence where it ended before its work was done."""
        if self.guard is None:
            return None
        guard, self.guard = self.guard, None
        guard.channel.close()
        status = 0
        with suppress(ChildProcessError):  # the program that supervises ignores SIGCHLD
            _, status = os.waitpid(guard.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        return f"Its guard process (pid {guard.pid}) {how}, and the rank was killed with it."

    def take_leave(self, ended_at: float) -> None:
        """For a rank whose guard is gone, and which the kernel therefore killed: learns how it ended."""
        self.code, self.ended_at = -signal.SIGKILL, ended_at
        if self.pid is not None:
            processes.send_to_group(self.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def failure(self, kills_before: KillCount) -> RankFailure:
        """What to tell of it, where it failed."""
        code = self.code or 0
        cause = self.trouble
        if cause is None and code == -signal.SIGKILL:
            cause = explain_sigkill(kills_before, count_kills())
        return RankFailure(
            rank=self.plan.rank,
            host=socket.gethostname(),
            pid=self.pid,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            last_lines=self.tail.lines(),
            cause=cause,
        )
