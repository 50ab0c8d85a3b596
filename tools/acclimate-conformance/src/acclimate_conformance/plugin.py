"""The checks as tests of pytest, for a vendor's own continuous integration.

    pytest --acclimate-accelerator NAME       the project's own tests and the checks
    pytest --pyargs acclimate_conformance     only the checks, of the accelerator that acclimate selects

pytest loads this module in every project that has acclimate installed, so it imports next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from acclimate_conformance.result import Planned
    from acclimate_conformance.runner.session import Session

_CHECKS = Path(__file__).with_name("runner") / "catalog.py"
_session: pytest.StashKey[Session] = pytest.StashKey()


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
    """Collects the checks if an accelerator is named."""
    asked_for = {str(_CHECKS), str(Path(__file__).parent), "acclimate_conformance"} & set(config.args)
    if config.getoption("--acclimate-accelerator") and not asked_for:
        config.args.append(str(_CHECKS))


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collects the checks if their module is among the files to collect."""
    return CheckFile.from_parent(parent, path=file_path) if file_path == _CHECKS else None


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the process in which the checks ran."""
    session = config.stash.get(_session, None)
    if session is not None:
        session.close()


class CheckFile(pytest.File):
    """The checks of one accelerator."""

    def collect(self) -> Iterator[pytest.Item]:
        """One test for each check."""
        from acclimate_conformance.errors import ConformanceError
        from acclimate_conformance.runner.session import Session

        try:
            session = Session(self.config.getoption("--acclimate-accelerator"))
        except ConformanceError as error:
            raise self.CollectError(str(error)) from error
        self.config.stash[_session] = session
        for check in session.checks:
            yield CheckItem.from_parent(self, name=check.id, session_=session, check=check)


class CheckItem(pytest.Item):
    """One check."""

    def __init__(self, *, session_: Session, check: Planned, **options: Any) -> None:
        super().__init__(**options)
        self._session = session_
        self._check = check

    def runtest(self) -> None:
        """Runs the check; skips it, with the reason, if the device does not offer the feature."""
        result = self._session.run(self._check)
        if result.outcome == "not offered":
            pytest.skip(result.reason)
        if result.outcome == "failed":
            raise FailedCheckError(
                "\n".join([result.reason, f"promised: {result.promise}", *result.rules, result.detail])
            )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str | Any:
        """The check's message, without the frames of this plugin."""
        return (
            str(excinfo.value)
            if isinstance(excinfo.value, FailedCheckError)
            else super().repr_failure(excinfo)
        )

    def reportinfo(self) -> tuple[Path, None, str]:
        """The file and name under which pytest lists the check."""
        return self.path, None, self.name
