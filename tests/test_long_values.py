"""A message quotes only the start of a long value: nobody can find what is wrong in 100 kB of it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from acclimate.accelerator.ops import host_compiler
from acclimate.backends.cuda_toolkit import architecture_flags
from acclimate.errors import AcclimateError
from acclimate.launch.binding.cores import check_environment
from acclimate.launch.engines.registry import choose_engine
from acclimate.launch.plan.devices import count_local_ranks, visible_devices
from acclimate.ops.aio.engines import Settings, start_engine
from acclimate.ops.build.run_compilers import build_timeout_s
from acclimate.ops.simd import chosen_isa
from acclimate.selection import load_by_name, requested, set_accelerator

LONG = "x" * 100_000

READERS: dict[str, Callable[[], object]] = {
    "DS_ACCELERATOR": lambda: load_by_name(os.environ["DS_ACCELERATOR"], "DS_ACCELERATOR"),
    "DS_ACCELERATOR of a launch": lambda: count_local_ranks(None),
    "ACCLIMATE_ACCELERATOR": requested,
    "CXX": host_compiler,
    "TORCH_CUDA_ARCH_LIST": lambda: architecture_flags([]),
    "ACCLIMATE_BUILD_TIMEOUT": build_timeout_s,
    "ACCLIMATE_CPU_ISA": chosen_isa,
    "ACCLIMATE_AIO": lambda: start_engine(Settings(1, 1, False, False, 1)),
    "KMP_AFFINITY": lambda: check_environment(os.environ),
    "CUDA_VISIBLE_DEVICES": lambda: visible_devices("cuda", (1,), os.environ),
    "a name in a call": lambda: set_accelerator(LONG),
    "--launcher": lambda: choose_engine(LONG, os.environ),
}
"""By what holds the value, what reads it."""


@pytest.mark.parametrize("name", READERS)
def test_a_message_quotes_only_the_start_of_a_long_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = name.split()[0]
    monkeypatch.setenv(variable, LONG)
    if name == "ACCLIMATE_ACCELERATOR":
        monkeypatch.setenv("DS_ACCELERATOR", f"{LONG}y")
    with pytest.raises(AcclimateError) as caught:
        READERS[name]()
    message = str(caught.value)
    assert 'xxx…"' in message
    assert len(message) < 1000
