"""A device that torch knows and no record names is selected, with no line of code for it."""

from __future__ import annotations

import pytest

from fake_vendors import BY_WAY, FakeMachine
from fresh_process import FreshProcesses

SELECT = """
from acclimate import get_accelerator
accelerator = get_accelerator()
tell(
    kind=type(accelerator).__name__, name=accelerator.name, device=accelerator.current_device_name(),
    count=accelerator.device_count(), available=accelerator.is_available(),
)
"""
EXPECTED = {
    "kind": "GenericAccelerator",
    "name": "unheard_of",
    "device": "unheard_of:0",
    "count": 1,
    "available": True,
}
NO_DEVICE = """
import torch
from torch.utils import backend_registration
class Module(backend_registration._DummyBackendModule):
    def device_count(self): return 0
    def is_available(self): return False
class Hook(backend_registration._DummyPrivateUse1Hook):
    def is_available(self): return False
    def device_count(self): return 0
class Guard(backend_registration._DummyDeviceGuard):
    def device_count(self): return 0
backend_registration._setup_privateuseone_for_python_backend("unheard_of", Module(), Hook(), Guard())
"""


@pytest.fixture
def generic(machine: FakeMachine) -> FakeMachine:
    """A machine with a device that only torch knows."""
    machine.add(BY_WAY["generic"])
    return machine


def test_it_is_detected_before_the_cpu(generic: FakeMachine, fresh: FreshProcesses) -> None:
    ended = fresh.check(generic.prelude + SELECT)
    assert ended.told == EXPECTED
    assert (ended.stdout, ended.stderr) == ("", "")


def test_it_comes_after_cuda(generic: FakeMachine, fresh: FreshProcesses) -> None:
    generic.add(BY_WAY["cuda"])
    told = fresh.check(
        generic.prelude + "from acclimate import get_accelerator\ntell(name=get_accelerator().name)"
    ).told
    assert told["name"] == "cuda"


@pytest.mark.parametrize("variable", ["DS_ACCELERATOR", "ACCLIMATE_ACCELERATOR"])
def test_it_is_chosen_by_torchs_name_beside_cuda(
    variable: str, generic: FakeMachine, fresh: FreshProcesses
) -> None:
    generic.add(BY_WAY["cuda"])
    assert fresh.check(generic.prelude + SELECT, env={variable: "unheard_of"}).told == EXPECTED


def test_set_accelerator_takes_its_name(generic: FakeMachine, fresh: FreshProcesses) -> None:
    code = "import acclimate\nacclimate.set_accelerator('unheard_of')\n"
    assert fresh.check(generic.prelude + code + SELECT).told == EXPECTED


def test_without_a_device_it_is_passed_over(fresh: FreshProcesses) -> None:
    told = fresh.check(
        NO_DEVICE
        + """
from acclimate.selection import detect_all, get_accelerator
tell(name=get_accelerator().name, reasons={c.name: c.reason for c in detect_all()})
"""
    ).told
    assert told["name"] == "cpu"
    assert told["reasons"]["unheard_of"] == "torch knows unheard_of, but finds no device."


def test_without_a_device_its_name_is_refused(fresh: FreshProcesses) -> None:
    ended = fresh.run(
        NO_DEVICE + "import acclimate\nacclimate.get_accelerator()", env={"DS_ACCELERATOR": "unheard_of"}
    )
    assert ended.returncode == 1
    assert "AcceleratorUnavailableError: torch knows unheard_of, but finds no device." in ended.stderr


def test_a_device_that_a_record_names_is_not_generic(machine: FakeMachine, fresh: FreshProcesses) -> None:
    # torch_npu registers its device with torch when it is imported, here by torch's own autoloading.
    told = fresh.check("""
import torch
torch.utils.backend_registration._setup_privateuseone_for_python_backend("npu")
from acclimate.selection import detect_all, get_accelerator
tell(name=get_accelerator().name, names=[candidate.name for candidate in detect_all()])
""").told
    assert told["name"] == "cpu"  # torch_npu itself is not installed
    assert "(other)" in told["names"]
