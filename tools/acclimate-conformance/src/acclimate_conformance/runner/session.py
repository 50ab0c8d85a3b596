"""Runs checks in a worker process, and starts another one after a check that crashes it or hangs."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from acclimate_conformance.errors import ConformanceError
from acclimate_conformance.processes import tail
from acclimate_conformance.result import About, Planned, Report, Result
from acclimate_conformance.runner.worker_process import WorkerDiedError, WorkerProcess

_START_TIMEOUT_S = 120


class Session:
    """Runs the checks of one accelerator, one at a time; a context manager.

    This process imports neither torch nor the accelerator, so they cannot crash it.

    Args:
        source: the name of a registered accelerator, ``"module:Class"``, or empty for the one that
            acclimate selects.
        timeout_s: replaces the time limit of every check, in seconds.

    Raises:
        ConformanceError: the accelerator cannot be loaded.
    """

    def __init__(self, source: str = "", timeout_s: float | None = None) -> None:
        self._source = source
        self._timeout_s = timeout_s
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._worker: WorkerProcess | None
        self._worker, told = self._start()
        self.about = About(**{**told["about"], "devices": tuple(told["about"]["devices"])})
        self.checks = [Planned(**{**check, "rules": tuple(check["rules"])}) for check in told["checks"]]

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, check: Planned) -> Result:
        """Runs one check.

        A check fails if it ends its process or exceeds its time limit; the next runs in a new worker.
        """
        timeout_s = check.timeout_s if self._timeout_s is None else self._timeout_s
        start = time.perf_counter()
        try:
            if self._worker is None:
                self._worker, _ = self._start()
            answer = self._worker.ask(check.id, timeout_s)
        except (WorkerDiedError, ConformanceError) as died:
            self._worker = None
            return Result(
                check=check.id,
                category=check.category,
                promise=check.promise,
                outcome="failed",
                reason=str(died),
                rules=check.rules,
                seconds=time.perf_counter() - start,
                detail=tail(self._output, lines=40),
            )
        lists = {name: tuple(value) for name, value in answer.items() if isinstance(value, list)}
        return Result(**{**answer, **lists})

    def close(self) -> None:
        """Ends the worker and all processes that it started."""
        if self._worker is not None:
            self._worker.close()
        self._output.close()

    def _start(self) -> tuple[WorkerProcess, dict[str, Any]]:
        """A worker that has loaded the accelerator, and its description of it."""
        worker = WorkerProcess(self._source, self._output)
        try:
            told = worker.answer(_START_TIMEOUT_S)
        except WorkerDiedError as died:
            name = f'The accelerator "{self._source}"' if self._source else "The accelerator"
            said = tail(self._output, lines=5)
            raise ConformanceError(
                f"{name} cannot be loaded: {died}." + (f" It wrote:\n{said}" if said else "")
            ) from None
        except BaseException:  # the user's Ctrl-C: the worker is in another group and would stay
            worker.close()
            raise
        if "unusable" in told:
            worker.close()
            raise ConformanceError(told["unusable"])
        return worker, told


def run(
    source: str = "",
    only: Sequence[str] = (),
    progress: Callable[[Planned], None] | None = None,
    timeout_s: float | None = None,
) -> Report:
    """Checks an accelerator. Ctrl-C or SIGTERM ends the run with the results so far.

    Args:
        source: see :class:`Session`.
        only: categories or ids of the checks to run; all if empty.
        progress: called before each check.
        timeout_s: see :class:`Session`.

    Raises:
        ConformanceError: the accelerator cannot be loaded, or ``only`` names no check.
    """
    start = time.perf_counter()
    with Session(source, timeout_s) as session:
        results: list[Result] = []
        planned = select(session.checks, only)
        with suppress(KeyboardInterrupt), _terminated_as_interrupted():
            for check in planned:
                if progress is not None:
                    progress(check)
                results.append(session.run(check))
        return Report(session.about, results, time.perf_counter() - start, planned[len(results) :])


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


def select(checks: list[Planned], only: Sequence[str]) -> list[Planned]:
    """The checks that ``only`` names, by category or id; all if it is empty.

    Raises:
        ConformanceError: a name is no category and no check.
    """
    known = {check.category for check in checks} | {check.id for check in checks}
    for name in only:
        if name not in known:
            categories = ", ".join(dict.fromkeys(check.category for check in checks))
            raise ConformanceError(
                f'There is no check or category "{name}". The categories are {categories}.'
            )
    return [check for check in checks if not only or check.category in only or check.id in only]
