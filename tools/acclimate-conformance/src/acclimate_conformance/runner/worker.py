"""In a worker of pytest-xdist: tells the command about the accelerator, and ends checks that hang."""

from __future__ import annotations

import faulthandler
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from acclimate.host.replace_file import replace_file
from acclimate_conformance.errors import ConformanceError
from acclimate_conformance.result import Planned, Result

if TYPE_CHECKING:
    from acclimate_conformance.checks.check import Check


LAST_RESULT = "last.json"
"""The file with the result of a check after which its worker ended by itself."""


class Worker:
    """The plugin of pytest in a worker that the command has started.

    Args:
        task: what the command tells it: ``source``, ``only``, ``timeout_s`` and ``folder``.
        worker: its name.
    """

    def __init__(self, task: dict[str, Any], worker: str) -> None:
        self._task, self._folder = task, Path(task["folder"])
        self.source: str = task["source"]
        self.timeout_s: float | None = task["timeout_s"]
        os.setsid()  # a group of its own, which can be ended as a whole
        (self._folder / f"{worker}.pid").write_text(str(os.getpid()))
        self._output = (self._folder / "output").open("wb")
        os.dup2(self._output.fileno(), 1)
        os.dup2(self._output.fileno(), 2)
        faulthandler.enable(self._output)

    def refuse(self, why: str) -> None:
        """Ends this process, and with it the run, which says why."""
        (self._folder / "unusable").write_text(why, encoding="utf-8", errors="backslashreplace")
        os._exit(2)  # before pytest-xdist hears of any test

    def end_after(self, result: Result) -> None:
        """Ends this process after a check, as no other can run in it; the command reads the result."""
        (self._folder / LAST_RESULT).write_text(result.as_json(), encoding="utf-8")
        os._exit(1)  # as after a crash, pytest-xdist starts another worker

    def start(self, accelerator: Any, found: list[Check]) -> set[str]:
        """Tells the command about the accelerator and the checks; returns the ids of those to run.

        Raises:
            ConformanceError: the command names no check.
        """
        chosen = select(found, self._task["only"])
        planned = [
            Planned(check.id, check.category, check.promise, check.rules, self.timeout_s or check.timeout_s)
            for check in chosen
        ]
        content = {"about": _about(accelerator), "checks": [asdict(check) for check in planned]}
        replace_file(self._folder / "told.json", json.dumps(content).encode())
        return {check.id for check in chosen}

    def watch(self, seconds: float) -> None:
        """Ends this process after a time, with its stack, even if a call holds Python's lock."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._output)

    def pytest_timeout_set_timer(self, settings: Any) -> bool:
        """Sets the timer of pytest-timeout: after a hang this process is in an unknown state."""
        self.watch(settings.timeout)
        return True

    def pytest_timeout_cancel_timer(self) -> bool:
        """Stops it."""
        faulthandler.cancel_dump_traceback_later()
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Limits the time of what follows: importing torch, and whatever a vendor's package does then."""
        self.watch(self._task["loading_s"])

    def pytest_collection_finish(self) -> None:
        """It has loaded."""
        faulthandler.cancel_dump_traceback_later()


def select(checks: list[Check], only: Sequence[str]) -> list[Check]:
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


def _about(accelerator: Any) -> dict[str, Any]:
    import torch

    from acclimate import __version__
    from acclimate.imports import describe
    from acclimate_conformance.checks.assertions import device_names

    def told(device: str) -> str:
        try:
            return str(accelerator.get_device_name(device))
        except Exception as error:  # noqa: BLE001 - a check fails for it
            return f"get_device_name() raises {describe(error)}"

    return {
        "accelerator": accelerator.name,
        "implementation": f"{type(accelerator).__module__}:{type(accelerator).__qualname__}",
        "devices": [f"{name} ({told(name)})" for name in device_names(accelerator)],
        "acclimate": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
