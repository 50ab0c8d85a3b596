"""Every program that is compared with the host's runs on the host, with this torch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from acclimate_conformance.checks.programs import Program, difference
from acclimate_conformance.checks.runtime import combined, foreign, functions, modules, transformed

PROGRAMS: dict[str, Program] = {
    **functions._PROGRAMS, **modules._MODULES, **modules._OPTIMIZERS, **modules._DATA, **foreign._PROGRAMS,
    **transformed._PROGRAMS, **combined._PROGRAMS,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", PROGRAMS)
def test_a_program_of_the_checks_gives_the_same_twice_on_the_host(what: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)  # as the checks do: some programs draw
        first: Any = PROGRAMS[what]("cpu")
        assert first is not None
        torch.manual_seed(0)
        assert difference(PROGRAMS[what]("cpu"), first, "cpu") == ""
