"""A device that torch knows and no record names; tests/accelerator holds it to the interface."""

from __future__ import annotations

import pytest
import torch

from acclimate.backends.generic import GenericAccelerator, unnamed_device
from acclimate.errors import UnsupportedError
from fresh_process import FreshProcesses

without_device = pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None, reason="torch has an accelerator here"
)
REGISTER = """
import torch
torch.utils.backend_registration._setup_privateuseone_for_python_backend("unheard_of")
from acclimate.backends.generic import GenericAccelerator, unnamed_device
"""


@without_device
def test_where_torch_has_no_accelerator_there_is_none() -> None:
    assert unnamed_device([]) is None
    with pytest.raises(UnsupportedError, match="torch has no accelerator in this process"):
        GenericAccelerator()


def test_a_device_is_unnamed_until_a_record_names_it(fresh: FreshProcesses) -> None:
    told = fresh.check(
        REGISTER + "tell(free=unnamed_device({'cuda'}), taken=unnamed_device({'cuda', 'unheard_of'}))"
    ).told
    assert told == {"free": "unheard_of", "taken": None}


def test_its_names_are_torchs(fresh: FreshProcesses) -> None:
    told = fresh.check(
        REGISTER
        + "acc = GenericAccelerator()\n"
        + "tell(names=[acc.name, acc.device_type, acc.device_name(), acc.device_name(0)], shown=repr(acc))"
    ).told
    assert told["names"] == ["unheard_of", "unheard_of", "unheard_of", "unheard_of:0"]
    assert told["shown"] == "<GenericAccelerator unheard_of>"


def test_without_distributed_its_communication_backend_is_gloo(fresh: FreshProcesses) -> None:
    told = fresh.check(
        REGISTER
        + "torch.distributed.is_available = lambda: False\n"
        + "tell(backend=GenericAccelerator().communication_backend_name())"
    ).told
    assert told["backend"] == "gloo"


def test_a_backend_registered_for_it_is_its_communication_backend(fresh: FreshProcesses) -> None:
    told = fresh.check(
        REGISTER
        + "make = lambda *a: None\n"
        + "torch.distributed.Backend.register_backend('uccl', make, devices=['unheard_of'])\n"
        + "tell(backend=GenericAccelerator().communication_backend_name())"
    ).told
    assert told["backend"] == "uccl"


def test_peaks_that_its_statistics_lack_are_the_largest_figures_read(fresh: FreshProcesses) -> None:
    """As torchvulkan's, whose module keeps statistics of its own while torch's are empty."""
    told = fresh.check(
        REGISTER
        + """
module, now = torch.unheard_of, {"allocated": 0, "reserved": 0, "peak": 0}
module.memory_allocated = lambda index=None: now["allocated"]
module.memory_reserved = lambda index=None: now["reserved"]
module.memory_stats = lambda index=None: {
    "allocated_bytes.all.current": now["allocated"],
    "allocated_bytes.all.peak": now["peak"],
    "reserved_bytes.all.current": now["reserved"],
}
module.current_device, module.device_count = lambda: 0, lambda: 1
acc, seen = GenericAccelerator(), []
for figures in ((1, 8, 4), (2, 6, 9), (2, 3, 9)):
    now.update(zip(("allocated", "reserved", "peak"), figures))
    seen.append([acc.max_memory_reserved(), acc.memory_stats()["reserved_bytes.all.peak"]])
now["peak"] = 2
acc.reset_peak_memory_stats()
tell(seen=seen, reset=acc.max_memory_reserved(), allocated=acc.max_memory_allocated())
"""
    ).told
    assert told["seen"] == [[8, 8], [9, 9], [9, 9]]  # reserved is never less than allocated
    assert told["reset"] == 3
    assert told["allocated"] == 2


def test_a_device_that_inductor_generates_no_code_for_runs_traced_graphs(fresh: FreshProcesses) -> None:
    told = fresh.check(
        REGISTER
        + """
import sys
acc = GenericAccelerator()
before, imported = acc.get_compile_backend(), "torch._inductor" in sys.modules
torch.unheard_of.Scheduling = object
tell(before=before, imported=imported, after=acc.get_compile_backend())
"""
    ).told
    assert told == {"before": "eager", "imported": False, "after": "inductor"}
