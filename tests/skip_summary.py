"""Prints one line for each reason for skipped tests, at the end of a run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


def count_by_reason(reports: list[Any]) -> Counter[str]:
    """How many tests were skipped for each reason."""
    reasons: Counter[str] = Counter()
    for report in reports:
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[" ".join(said.removeprefix("Skipped: ").split())] += 1
    return reasons


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Writes the lines."""
    reasons = count_by_reason(terminalreporter.stats.get("skipped", []))
    if not reasons:
        return
    terminalreporter.section("skipped", sep="-")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} {'test' if count == 1 else 'tests'}: {reason}")
