"""A log of the events in a run's processes, in one file that the test reads."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

VARIABLE = "STAND_IN_LOG"
_written: set[str] = set()


def note(event: str, what: str) -> None:
    """Writes a line unless this process wrote it before; it stays when the process is killed."""
    line = f"{event} {what}\n"
    if line in _written or VARIABLE not in os.environ:
        return
    _written.add(line)
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
        file.write(line)


def read(file: Path) -> dict[str, set[str]]:
    """What was noted, by event."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        event, _, what = line.partition(" ")
        found[event].add(what)
    return found
