"""One rank of this host: its guard, its last lines and log, and its end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from acclimate.errors import RankStartError
from acclimate.host.process_status import how_it_ended
from acclimate.launch.output.views import rank_tag
from acclimate.launch.output.writer import LogFile, Tail
from acclimate.launch.plan.job import RankPlan
from acclimate.launch.plan.outcome import RankFailure
from acclimate.launch.supervise.guard import Guard, start_guard
from acclimate.launch.supervise.guard_process import GuardSettings, StandardStreams
from acclimate.launch.supervise.oom import KillCount, count_kills, explain_sigkill
from acclimate.launch.supervise.processes import NO_MORE


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
        """Starts the rank; returns the descriptor of each captured stream.

        Args:
            stdin: a descriptor.
            captured: which of the streams 1 and 2 the launcher reads; the others are the launcher's own.
            settings: how to treat the rank.
            private: descriptors of the launcher that guards must not keep open.

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
