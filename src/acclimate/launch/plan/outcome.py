"""How a job ended, and the words that tell a person."""

from __future__ import annotations

import signal
from dataclasses import dataclass

KEPT_LINES = 20
"""How many of a failed rank's last lines are shown."""


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed first."""

    rank: int
    host: str
    pid: int | None
    """``None`` where it did not come to be."""
    code: int
    """As in :mod:`subprocess`: its exit code, or minus the number of the signal that ended it."""
    last_lines: tuple[str, ...] = ()
    """Of what it wrote to both streams, at most :data:`KEPT_LINES`; empty where a terminal has shown it."""
    cause: str | None = None
    """A sentence on what probably ended it."""

    def describe(self) -> str:
        """Which rank, where, and how it ended, in one sentence; then the cause, where one is known."""
        pid = f", pid {self.pid}" if self.pid is not None else ""
        if self.code < 0:
            how = f"was killed by {signal_name(-self.code)} (signal {-self.code})"
        else:
            how = f"ended with exit code {self.code}"
        sentence = f"rank {self.rank} (host {self.host}{pid}) {how}."
        return f"{sentence} {self.cause}" if self.cause else sentence


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int
    """0, the failed rank's own code, or minus the number of the signal that ended the job."""
    failed: RankFailure | None = None
    reason: str | None = None
    """Why it was ended where no rank failed by itself: a signal to the launcher, a lost host; a sentence."""

    def report(self) -> str:
        """What a user is told at the end, newline included; empty where all went well."""
        lines = []
        if self.failed is not None:
            if self.failed.last_lines:
                shown = len(self.failed.last_lines)
                last = f"the last {shown} lines" if shown > 1 else "the last line"
                lines.append(f"acclimate run: {last} of rank {self.failed.rank}:")
                lines += [f"    {line}" for line in self.failed.last_lines]
            lines.append(f"acclimate run: {self.failed.describe()}")
        if self.reason is not None:
            lines.append(f"acclimate run: {self.reason}")
        return "".join(f"{line}\n" for line in lines)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; the number for one without a name, as realtime signals are."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shell_code(code: int) -> int:
    """The exit code that a shell reports: the process's own, or 128 + the signal's number."""
    return 128 - code if code < 0 else code
