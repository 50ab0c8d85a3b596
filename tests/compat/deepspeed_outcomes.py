"""A plugin of pytest for DeepSpeed's unit tests: writes what becomes of each test, while they run.

The file that ``ACCLIMATE_OUTCOMES`` names gets a line of JSON for each event: the test, what became of it,
and why. The last line of a test counts, so that a run which is killed leaves what it found.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

# The tests start ranks from a fork server, and each would import DeepSpeed.
multiprocessing.set_forkserver_preload(["deepspeed", "numpy", "pytest"])


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        write(item.nodeid, "not run", "the time of its part was up")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if not report.passed:
        write(report.nodeid, report.outcome, reason(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    write(nodeid, "failed", "it had not ended when its part was stopped")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        write(report.nodeid, report.outcome, reason(report))


def reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Returns why a test was skipped, or the last error line of one that failed."""
    if isinstance(report.longrepr, tuple):
        return " ".join(report.longrepr[2].split())[:300]
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E  ")]
    return " ".join(" ".join([*lines[:1], *lines[1:][-1:]]).split())[:300]


def write(test: str, became: str, why: str) -> None:
    with Path(os.environ["ACCLIMATE_OUTCOMES"]).open("a") as file:
        file.write(json.dumps([test, became, why]) + "\n")
