"""The outcome of a job and its report."""

from __future__ import annotations

from dataclasses import dataclass

from acclimate.host.exit_codes import USER_ERROR, shell_code
from acclimate.host.process_status import how_it_ended

KEPT_LINES = 20
"""The number of a failed rank's last lines that are shown."""
KEPT_BYTES = 2000
"""How much is kept of a line that may explain an end."""


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed first."""

    rank: int
    host: str
    pid: int | None
    """``None`` if it was not started."""
    code: int
    """Its exit code, or minus the number of the signal that killed it, as in :mod:`subprocess`."""
    last_lines: tuple[str, ...] = ()
    """At most :data:`KEPT_LINES` of both streams; empty if a terminal has shown them."""
    cause: str | None = None
    """A sentence on the probable cause."""

    def describe(self) -> str:
        """Returns a sentence on the rank, its host and its end, and one on the cause, if known."""
        pid = f", pid {self.pid}" if self.pid is not None else ""
        sentence = f"rank {self.rank} (host {self.host}{pid}) {how_it_ended(self.code)}."
        return f"{sentence} {self.cause}" if self.cause else sentence


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int
    """0, the failed rank's code, or minus the number of the signal that ended the job."""
    failed: RankFailure | None = None
    reason: str | None = None
    """A sentence on why it was ended if no rank failed by itself: a signal to the launcher, a lost host."""
    missing: tuple[str, ...] = ()
    """Output that could not be written, and why: a stream or a log file on a full disk."""

    def exit_code(self) -> int:
        """Returns the launcher's exit code: that of the job, or of missing output after success."""
        return USER_ERROR if self.code == 0 and self.missing else shell_code(self.code)

    def report(self) -> str:
        """Returns the report for the user, with a newline; empty after success."""
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
        lines += [f"acclimate run: output is missing: {what}." for what in self.missing]
        return "".join(f"{line}\n" for line in lines)
