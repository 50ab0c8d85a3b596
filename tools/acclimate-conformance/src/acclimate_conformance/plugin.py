"""The checks as tests of pytest: for `acclimate conformance`, and for a vendor's own continuous integration.

    pytest --acclimate-accelerator NAME       the project's own tests and the checks
    pytest --pyargs acclimate_conformance     only the checks, of the accelerator that acclimate selects

pytest loads this module in every project that has acclimate installed, so it imports next to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from acclimate_conformance.checks.check import Check
    from acclimate_conformance.checks.target import Subject
    from acclimate_conformance.result import Result
    from acclimate_conformance.runner.worker import Worker

_HOME = Path(__file__).parent
_CHECKS = os.path.join(_HOME, "checks", "")
_subject: pytest.StashKey[Subject] = pytest.StashKey()
_worker: pytest.StashKey[Worker] = pytest.StashKey()
_ahead: pytest.StashKey[Sequence[str]] = pytest.StashKey()
"""The checks of dtypes, which other processes observe ahead."""
_lost: pytest.StashKey[str] = pytest.StashKey()
"""The check after which the device computes nothing more in this process."""


class FailedCheckError(Exception):
    """A check failed; the message says everything."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares ``--acclimate-accelerator``."""
    group = parser.getgroup("acclimate", "conformance of an accelerator to acclimate's interface")
    group.addoption(
        "--acclimate-accelerator",
        metavar="NAME",
        default="",
        help='also check this accelerator: its name, or "module:Class" if it is not registered',
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collects the checks if an accelerator is named, or this package."""
    task = getattr(config, "workerinput", {}).get("acclimate_conformance")
    if task is not None:
        from acclimate_conformance.runner.worker import Worker

        config.stash[_worker] = Worker(task, config.workerinput["workerid"])  # type: ignore[attr-defined]
        config.pluginmanager.register(config.stash[_worker])
        return
    named = {str(_HOME), "acclimate_conformance"} & set(config.args)
    if config.getoption("--acclimate-accelerator") or named:
        from acclimate_conformance.runner.catalog import FILES

        own = [argument for argument in config.args if argument not in named]
        config.args[:] = [*own, *map(str, FILES)]


def pytest_pycollect_makeitem(collector: pytest.Module, obj: object) -> list[pytest.Item] | None:
    """One test for each check in a module of checks."""
    if not str(collector.path).startswith(_CHECKS):  # asked for every name in a project's tests
        return None
    from acclimate_conformance.runner.catalog import checks_in

    return [CheckItem.from_parent(collector, name=check.id, check=check) for check in checks_in(obj)]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Loads the accelerator if checks were collected, and keeps the checks that the command asks for."""
    found = [item for item in items if isinstance(item, CheckItem)]
    if not found:
        return
    from acclimate.errors import AcclimateError
    from acclimate.imports import describe
    from acclimate_conformance.checks.target import find

    worker = config.stash.get(_worker, None)
    source = worker.source if worker else config.getoption("--acclimate-accelerator")
    try:
        config.stash[_subject] = find(source)
        if worker is not None:
            chosen = worker.start(config.stash[_subject].accelerator, [item.check for item in found])
            items[:] = [item for item in found if item.check.id in chosen]
        checks = [item.check for item in items if isinstance(item, CheckItem)]
        config.stash[_ahead] = tuple(check.name for check in checks if check.category == "dtypes")
    except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
        named = f'The accelerator "{source}"' if source else "The accelerator"
        ours = isinstance(error, AcclimateError)
        why = str(error) if ours else f"{named} cannot be loaded: {describe(error, whole=True)}"
        if worker is not None:
            worker.refuse(why)
        found[0].unusable = why  # one test says it; the others would repeat it
        items[:] = [item for item in items if item not in found[1:]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds a check's result to the report of its test."""
    report = yield
    if isinstance(item, CheckItem) and item.result is not None and report.when == "call":
        report.acclimate_result = item.result.as_json()  # type: ignore[attr-defined]
    return report


class CheckItem(pytest.Item):
    """One check."""

    def __init__(self, *, check: Check, **options: Any) -> None:
        super().__init__(**options)
        self.check = check
        self.result: Result | None = None
        self.unusable = ""
        """Why the accelerator cannot be loaded."""
        worker = self.config.stash.get(_worker, None)
        self.add_marker(pytest.mark.timeout((worker and worker.timeout_s) or check.timeout_s))
        self.user_properties.append(("promise", check.promise))

    def runtest(self) -> None:
        """Runs the check; skips it, with the reason, if the device does not offer the feature."""
        if self.unusable:
            raise FailedCheckError(self.unusable)
        from acclimate.selection import use_accelerator
        from acclimate_conformance.checks.target import LOST, still_computes
        from acclimate_conformance.runner.examine import examine

        if lost := self.config.stash.get(_lost, ""):
            raise FailedCheckError(f"not checked, as it comes after {lost}, {LOST}")
        subject = self.config.stash[_subject]
        # Not by a process that takes over in the middle: much has been observed then.
        if self.check.category == "dtypes" and self.check.name in self.config.stash.get(_ahead, ())[:1]:
            from acclimate_conformance.checks.dtypes.sampled import child

            child.begin(subject, self.config.stash[_ahead])
        with use_accelerator(subject.accelerator):
            self.result = examine(self.check, subject)
            if self.result.outcome == "failed" and not still_computes(subject.accelerator):
                if LOST not in self.result.reason:
                    self.result = replace(self.result, reason=f"{self.result.reason}, {LOST}")
                self.config.stash[_lost] = self.check.id
                if worker := self.config.stash.get(_worker, None):
                    worker.end_after(self.result)
        if self.result.outcome == "not offered":
            pytest.skip(self.result.reason)
        if self.result.outcome == "failed":
            raise FailedCheckError(self.result.text())

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str | Any:
        """The check's message, without the frames of this plugin."""
        failed = isinstance(excinfo.value, FailedCheckError)
        return str(excinfo.value) if failed else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, None, str]:
        """The file and name under which pytest lists the check."""
        return self.path, None, self.name
