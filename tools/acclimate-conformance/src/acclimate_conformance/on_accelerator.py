"""Runs a project's tests on a chosen accelerator.

    pytest --on-accelerator sim tests/
    ACCLIMATE_ACCELERATOR=sim pytest tests/

pytest loads this module in every project that has acclimate installed, so it imports almost nothing, and does
nothing unless an accelerator is named.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator

VARIABLE = "ACCLIMATE_ACCELERATOR"
OPTION = "--on-accelerator"  # not --accelerator, which projects have for themselves

_header: pytest.StashKey[str] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares ``--on-accelerator``."""
    group = parser.getgroup("acclimate")
    group.addoption(
        OPTION,
        metavar="NAME",
        default=None,
        help=f"select this accelerator before any test is imported, and set the variables from which test "
        f"suites read their device; same as {VARIABLE}. torch's default device stays unchanged",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Selects the named accelerator, if any, before a conftest looks for devices."""
    name = early_config.known_args_namespace.on_accelerator or os.environ.get(VARIABLE)
    if not name:
        return
    os.environ[VARIABLE] = name  # for processes that tests start
    from acclimate.errors import AcclimateError
    from acclimate.selection import get_accelerator

    try:
        accelerator = get_accelerator()
    except AcclimateError as error:
        raise pytest.UsageError(str(error)) from error
    from acclimate.compat.accelerate import tell_libraries

    told = tell_libraries(accelerator)
    early_config.stash[_header] = _describe(accelerator, told)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Returns a line that names the device."""
    return config.stash.get(_header, None)


def _describe(accelerator: Accelerator, told: dict[str, str]) -> str:
    # Only what needs no device context: a test may still fork.
    count = accelerator.device_count()
    devices = f"{count} device{'s' if count != 1 else ''} of type {accelerator.device_type}"
    return ", ".join([f"accelerator: {accelerator.name}", devices, *(f"{n}={v}" for n, v in told.items())])
