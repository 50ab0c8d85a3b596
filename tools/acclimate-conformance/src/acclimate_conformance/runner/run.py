"""Runs the checks with pytest in a worker of pytest-xdist, which is replaced if a check crashes it or hangs.

This process imports neither torch nor the accelerator, so they cannot crash it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from acclimate.host.process_status import how_it_ended
from acclimate_conformance.errors import ConformanceError
from acclimate_conformance.processes import end_group, tail
from acclimate_conformance.result import About, Planned, Report, Result
from acclimate_conformance.runner.catalog import FILES, HOME
from acclimate_conformance.runner.causes import ranked
from acclimate_conformance.runner.worker import LAST_RESULT

LOADING_S = 120
"""How long loading torch and the accelerator may take, in seconds."""
_ENDING_S = 5.0  # how long a process that closed its output may take to end
_TIMED_OUT = "Timeout ("  # as faulthandler writes it
_OF_PYTEST = re.compile(r'  File ".*/(_pytest|pluggy|xdist|execnet)/')
# Nothing of the project in whose folder the command runs: no plugin, option, conftest or cache.
_OPTIONS = (
    "-p", "acclimate_conformance.plugin", "-p", "pytest_timeout", "-p", "xdist.plugin",
    "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:warnings", "-p", "no:faulthandler",
    "-c", os.devnull, f"--rootdir={HOME}", "--noconftest", "--assert=plain", "--capture=no",
    "-n1", f"--max-worker-restart={10**6}",
)  # fmt: skip


def run(
    source: str = "",
    only: Sequence[str] = (),
    progress: Callable[[str], None] = lambda check: None,
    timeout_s: float | None = None,
) -> Report:
    """Checks an accelerator. Ctrl-C or SIGTERM ends the run with the results so far.

    A check fails if it ends its process or exceeds its time limit; the next runs in a new process.

    Args:
        source: the name of a registered accelerator, ``"module:Class"``, or empty for the one that
            acclimate selects.
        only: categories or ids of the checks to run; all if empty.
        progress: called with the id of each check before it runs.
        timeout_s: replaces the time limit of every check, in seconds.

    Raises:
        ConformanceError: the accelerator cannot be loaded, or ``only`` names no check.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = {"source": source, "only": list(only), "timeout_s": timeout_s}
        controller = _Controller(folder, task, progress)
        written = folder / "junit.xml"
        arguments = [*_OPTIONS, f"--junitxml={written}", "-o", "junit_suite_name=acclimate conformance"]
        with _alone(), suppress(KeyboardInterrupt), _terminated_as_interrupted():
            pytest.main([*arguments, *map(str, FILES)], plugins=[controller])
        return replace(
            controller.report(time.perf_counter() - start),
            junit=written.read_bytes() if written.exists() else b"",
        )


class _Controller:
    """The plugin of pytest in this process: it collects results, and says how workers ended."""

    def __init__(self, folder: Path, task: dict[str, Any], progress: Callable[[str], None]) -> None:
        self._folder, self._task, self._progress = folder, task, progress
        self._results: dict[str, Result] = {}
        self._started: set[str] = set()
        self._ended = self._trouble = ""
        self._interrupted = False
        self._limit: float = LOADING_S  # of what a worker does now

    def report(self, seconds: float) -> Report:
        """What came out.

        Raises:
            ConformanceError: nothing could come out.
        """
        if self._trouble:
            raise ConformanceError(self._trouble)
        told = self._told()
        planned = [check for check in told.values() if check.id not in self._results]
        results = [self._results[check.id] for check in told.values() if check.id in self._results]
        return Report(self._about(), ranked(results), seconds, planned)

    def pytest_configure_node(self, node: Any) -> None:
        """Tells a worker what to do."""
        node.workerinput["acclimate_conformance"] = {
            **self._task,
            "folder": str(self._folder),
            "loading_s": LOADING_S,
        }
        self._limit = LOADING_S

    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """A worker has loaded the accelerator."""
        self._started.add(node.gateway.id)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A check begins."""
        check = nodeid.rpartition("::")[2]
        self._limit = self._told()[check].timeout_s
        self._progress(check)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A check has ended."""
        told = getattr(report, "acclimate_result", None)
        if told is not None:
            result = Result.from_json(told)
            self._results[result.check] = result

    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """A worker has ended: at the end, because of a check, or because it cannot load the accelerator."""
        # One that has run all of its checks waits until it is told to end.
        self._ended = self._end(node, within_s=_ENDING_S if error else 0.0)
        if node.gateway.id in self._started:
            return
        unusable = self._folder / "unusable"
        if unusable.exists():
            self._trouble = unusable.read_text(encoding="utf-8")
        else:
            source = self._task["source"]
            name = f'The accelerator "{source}"' if source else "The accelerator"
            said = self._said(lines=5)
            self._trouble = f"{name} cannot be loaded: {self._ended}." + (
                f" It wrote:\n{said}" if said else ""
            )
        if self._results:  # it could be loaded earlier: the checks that are left fail for this reason
            for check in self._told().values():
                self._results.setdefault(check.id, check.failed(self._trouble, ""))
            self._trouble = ""
        pytest.exit("the accelerator cannot be loaded")

    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Says of a check that ended its worker how it did that."""
        check = self._told()[crashitem.rpartition("::")[2]]
        told = self._folder / LAST_RESULT
        if told.exists():
            result = Result.from_json(told.read_text(encoding="utf-8"))
            told.unlink()
        else:
            said = self._said(lines=100).splitlines()
            detail = "\n".join(line for line in said if not _OF_PYTEST.match(line))
            result = check.failed(self._ended, detail)
        report.when = "call"
        report.longrepr = result.text()
        report.acclimate_result = result.as_json()  # type: ignore[attr-defined]

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """The user, or continuous integration, wants no more."""
        self._interrupted |= isinstance(excinfo.value, KeyboardInterrupt)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Ends the worker at once, for which pytest-xdist would wait."""
        if self._interrupted:
            for path in self._folder.glob("*.pid"):
                end_group(int(path.read_text()))

    def _end(self, node: Any, within_s: float) -> str:
        """Ends what a worker left running, and says how it ended itself."""
        path = self._folder / f"{node.gateway.id}.pid"
        process = node.gateway._io.popen  # execnet has no public name for it
        with suppress(subprocess.TimeoutExpired):
            process.wait(within_s)
        process.kill()
        if path.exists():
            end_group(int(path.read_text()))
            path.unlink()
        if _TIMED_OUT in self._said(lines=200):
            return f"it did not finish within {self._limit:g} s"
        return f"its process {how_it_ended(process.wait())}"

    def _said(self, lines: int) -> str:
        """The last lines that the worker wrote, since the latest check began."""
        with (self._folder / "output").open("rb") as file:
            return tail(file, lines)

    def _told(self) -> dict[str, Planned]:
        """The checks, by id; none before a worker has loaded the accelerator."""
        told = self._content()
        return {check["id"]: Planned(**{**check, "rules": tuple(check["rules"])}) for check in told["checks"]}

    def _about(self) -> About:
        about = self._content()["about"]
        return About(**{**about, "devices": tuple(about["devices"])})

    def _content(self) -> dict[str, Any]:
        path = self._folder / "told.json"
        if not path.exists():  # Ctrl-C while it was loaded
            raise KeyboardInterrupt
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content


@contextmanager
def _alone() -> Iterator[None]:
    """A block in which pytest loads only the plugins that it is given, in its workers too."""
    kept = {
        name: text for name, text in os.environ.items() if name not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")
    }
    with mock.patch.dict(os.environ, {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, clear=True):
        yield


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A block in which SIGTERM acts like Ctrl-C; continuous integration ends a run with SIGTERM."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
