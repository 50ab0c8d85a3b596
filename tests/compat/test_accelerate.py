"""The options for devices that Accelerate detects itself; acclimate-sim's tests cover all others."""

from __future__ import annotations

import os

from acclimate import use_accelerator
from acclimate.compat.accelerate import accelerator_options, max_memory


def test_a_cpu_that_was_chosen_stays_chosen_beside_a_gpu() -> None:
    with use_accelerator("cpu"):
        assert accelerator_options() == {"cpu": True}


def test_accelerate_measures_the_memory_of_devices_that_it_knows() -> None:
    with use_accelerator("cpu"):
        assert max_memory() is None


def test_nothing_is_set_for_a_device_that_accelerate_finds() -> None:
    before = dict(os.environ)
    with use_accelerator("cpu"):
        accelerator_options()
    assert dict(os.environ) == before
