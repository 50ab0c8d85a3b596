"""``pytest --sim-profile``: the hardware that sim emulates under ``--on-accelerator sim``."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from acclimate_sim.profile import VARIABLE


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares ``--sim-profile``."""
    parser.getgroup("acclimate").addoption(
        "--sim-profile", metavar="PROFILE", default=None, help=f"a value for {VARIABLE}, such as mps-like"
    )


@pytest.hookimpl(wrapper=True)  # before acclimate's own hook, which creates the device
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, None, None]:
    """Sets the variable, which processes that tests start inherit."""
    profile = early_config.known_args_namespace.sim_profile
    if profile is not None:
        os.environ[VARIABLE] = profile
    yield
