"""The accelerator under test: the CPU, and in processes of their own (see test_other_devices.py) others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acclimate.accelerator import Accelerator
from acclimate.backends.cpu import CPUAccelerator

TESTED = os.environ.get("ACCLIMATE_TESTED_DEVICE", "cpu")
"""What this process tests: ``cpu``, or a device of python_device.py."""

# Fixtures for promises that do not hold everywhere, and where they hold.
_HOLDS_ON = {
    "cpu": {"cpu"},
    "whole": {"whole"},
    "bare": {"bare"},
    "with_generators": {"cpu", "whole"},
    "indexed": {"whole", "bare"},
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the promises that are not about the accelerator under test."""
    here = Path(__file__).parent
    foreign = {name for name, places in _HOLDS_ON.items() if TESTED not in places}

    def is_left_out(item: pytest.Item) -> bool:
        fixtures = set(getattr(item, "fixturenames", ()))
        about_another = TESTED != "cpu" and "acc" not in fixtures  # the CPU's process tries it already
        return item.path.is_relative_to(here) and bool(about_another or foreign & fixtures)

    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def acc() -> Accelerator:
    """Any accelerator: what is promised of it is promised of all."""
    if TESTED == "cpu":
        return CPUAccelerator()
    import python_device

    from acclimate.backends.generic import GenericAccelerator

    python_device.register(TESTED)
    return GenericAccelerator()


@pytest.fixture
def cpu(acc: Accelerator) -> Accelerator:
    """The CPU, for what is promised of it alone."""
    return acc


@pytest.fixture
def whole(acc: Accelerator) -> Accelerator:
    """A device whose torch module has what a vendor's usually has."""
    return acc


@pytest.fixture
def bare(acc: Accelerator) -> Accelerator:
    """A device whose torch module has next to nothing."""
    return acc


@pytest.fixture
def with_generators(acc: Accelerator) -> Accelerator:
    """Any accelerator whose torch module shows its random generators."""
    return acc


@pytest.fixture
def indexed(acc: Accelerator) -> Accelerator:
    """Any accelerator whose indices torch tells apart, as it does not on the host."""
    return acc
