"""Selecting creates no device context, so that a fork afterwards can still use the device."""

from __future__ import annotations

import pytest

from fake_vendors import IN_ORDER, FakeMachine, FakeVendor
from fresh_process import FreshProcesses
from quick_parameters import few_of

# Each of these starts CUDA's driver, after which a forked child cannot use it.
TRAPS = """
import torch
touched = []
def trap(place, name):
    def touch(*args, **kwargs):
        touched.append(name)
        raise RuntimeError(name + " starts the driver")
    setattr(place, name, touch)
for name in ("is_available", "init", "_lazy_init", "current_device", "get_device_properties", "mem_get_info"):
    trap(torch.cuda, name)
for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_setDevice", "_xpu_init"):
    trap(torch._C, name)
for name in ("is_available", "init", "_lazy_init"):
    trap(torch.xpu, name)
"""
SELECT = """
from acclimate import get_accelerator
from acclimate.selection import detect_all
tell(name=get_accelerator().name)
detect_all()
tell(touched=touched, initialized=torch.cuda.is_initialized() or torch.xpu.is_initialized())
"""


@pytest.mark.parametrize("vendor", few_of(IN_ORDER, 3), ids=lambda vendor: vendor.way)
def test_selecting_starts_no_driver(vendor: FakeVendor, machine: FakeMachine, fresh: FreshProcesses) -> None:
    machine.add(vendor)
    told = fresh.check(TRAPS + machine.prelude + SELECT, path=machine.path).told
    assert told == {"name": vendor.name, "touched": [], "initialized": False}


def test_a_machine_with_everything_starts_no_driver(machine: FakeMachine, fresh: FreshProcesses) -> None:
    for vendor in IN_ORDER:
        machine.add(vendor)
    told = fresh.check(TRAPS + machine.prelude + SELECT, path=machine.path).told
    assert told == {"name": "xpu.external", "touched": [], "initialized": False}


def test_a_forked_child_uses_the_device(fresh: FreshProcesses) -> None:
    told = fresh.check("""
import os
import torch
from acclimate import get_accelerator
accelerator = get_accelerator()
child = os.fork()
if child == 0:
    x = torch.ones(64, 64, device=accelerator.current_device_name(), requires_grad=True)
    (x @ x).sum().backward()
    accelerator.synchronize()
    right = get_accelerator() is accelerator and x.grad.sum().item() == 2 * 64**3
    os._exit(0 if right else 1)
tell(status=os.waitpid(child, 0)[1])
""").told
    assert told == {"status": 0}


def test_a_child_forked_while_another_thread_selects_can_select_itself(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.write(
        "slow",
        """
import threading, time
from acclimate import Backend
probing = threading.Event()
def probe():
    if threading.current_thread() is not threading.main_thread():
        probing.set()
        time.sleep(1)
BACKEND = Backend("slow", "acclimate.backends.cpu:CPUAccelerator", probe, 5)
""",
    )
    machine.add_entry_points([("slow", "slow:BACKEND")])
    told = fresh.check(
        """
import os, signal, threading
import slow
from acclimate import get_accelerator
import acclimate.backends.generic
thread = threading.Thread(target=get_accelerator)
thread.start()
slow.probing.wait()
child = os.fork()
if child == 0:
    signal.alarm(200)
    os._exit(0 if get_accelerator() is not None else 1)
tell(status=os.waitpid(child, 0)[1])
thread.join()
""",
        path=machine.path,
    ).told
    assert told == {"status": 0}


@pytest.mark.parametrize("kind", ["plug-in", "vendor's package"])
def test_a_child_forked_while_another_thread_imports_a_package_does_not_hang(
    kind: str, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    package = "torch_npu" if kind != "plug-in" else "slow_vendor"
    machine.write(package, "import started, time\nstarted.importing.set()\ntime.sleep(1)\n")
    machine.write("started", "import threading\nimporting = threading.Event()\n")
    machine.write(
        "slow",
        "from acclimate import Backend\ndef probe():\n    import slow_vendor\n    return 'no card'\n"
        "BACKEND = Backend('slow', 'slow:None', probe, 5)\n",
    )
    if kind == "plug-in":
        machine.add_entry_points([("slow", "slow:BACKEND")])
    told = fresh.check(
        """
import os, signal, threading
import started
from acclimate import get_accelerator
thread = threading.Thread(target=get_accelerator)
thread.start()
started.importing.wait()
child = os.fork()
if child == 0:
    signal.alarm(200)
    os._exit(0 if get_accelerator().name == "cpu" else 1)
tell(status=os.waitpid(child, 0)[1])
thread.join()
""",
        path=machine.path,
    ).told
    assert told == {"status": 0}


def test_a_fork_by_the_thread_that_is_choosing_does_not_wait_for_itself(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.write(
        "forking",
        """
import os, time
from acclimate import Backend
def probe():
    child = os.fork()
    if child == 0:
        os._exit(7)
    return f"the child said {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}"
BACKEND = Backend("forking", "forking:None", probe, 5)
""",
    )
    machine.add_entry_points([("forking", "forking:BACKEND")])
    told = fresh.check(
        "from acclimate.selection import detect_all, get_accelerator\nget_accelerator()\n"
        "tell(reasons=[row.reason for row in detect_all() if row.name == 'forking'])",
        path=machine.path,
    ).told
    assert told == {"reasons": ["the child said 7"]}


def test_forked_data_loader_workers_use_the_accelerator(fresh: FreshProcesses) -> None:
    told = fresh.check("""
import torch
from torch.utils.data import DataLoader, Dataset
from acclimate import get_accelerator

class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        return torch.tensor(float(index), device=get_accelerator().current_device_name()) ** 2

get_accelerator()
loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context="fork")
tell(sum=sum(batch.sum().item() for batch in loader))
""").told
    assert told == {"sum": 140.0}
