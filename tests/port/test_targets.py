"""What each target writes exists, and calls on CUDA what the original called."""

import importlib
import sys
import types
from typing import Any

import pytest
import torch

from acclimate.accelerator import Accelerator
from acclimate.port import targets
from acclimate.port.engine import Settings, port_text


def test_every_call_that_acclimate_writes_is_in_the_interface() -> None:
    assert [name for name in sorted(targets._SAME) if not hasattr(Accelerator, name)] == []


def test_every_call_that_the_torch_target_writes_is_in_the_installed_torch() -> None:
    homes = {"torch.accelerator": "torch.accelerator", "torch.amp": "torch.amp", "torch": "torch"}
    for module, name in sorted(targets.torch_calls()):
        if module in homes:
            assert hasattr(importlib.import_module(homes[module]), name), f"{module}.{name}"
        elif module == "device module":
            assert hasattr(torch.xpu, name), name
    target = targets.TorchTarget("torch", "accelerator_type")
    for name in sorted(targets._SAME):
        spelling = target.runtime(name)
        if isinstance(spelling, targets.Spelling) and spelling.text.startswith("torch.accelerator."):
            assert hasattr(torch.accelerator, spelling.text.rpartition(".")[2]), spelling.text


def test_the_record_begins_with_torch_2_10() -> None:
    assert ("torch.accelerator", "Graph") not in targets.torch_calls()
    assert ("torch.accelerator", "get_device_name") not in targets.torch_calls()


PROGRAM = """\
import torch

torch.cuda.set_device(1)
torch.cuda.synchronize()
torch.cuda.synchronize(device=1)
torch.cuda.empty_cache()
n = torch.cuda.memory_allocated(device=0) + torch.cuda.max_memory_allocated(1)
torch.cuda.reset_peak_memory_stats()
torch.cuda.manual_seed_all(3)
name = torch.cuda.get_device_name(0)
free, total = torch.cuda.mem_get_info(0)
torch.cuda.nvtx.range_push("step")
torch.cuda.nvtx.range_pop()
device_type = "cuda"
synchronize = torch.cuda.synchronize if device_type == "cuda" else lambda: None
synchronize()
if device_type == "cuda":
    torch.cuda.manual_seed(42)
    capability = torch.cuda.get_device_capability()
elif device_type == "cpu":
    torch.cuda.seed()
"""


class Recorder:
    """What torch.cuda would do, as a list of calls; two devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        answers = {
            "memory_allocated": 5,
            "max_memory_allocated": 7,
            "get_device_name": "H",
            "mem_get_info": (1, 2),
            "get_device_capability": (9, 0),
        }
        for name in (
            *("set_device", "synchronize", "empty_cache", "memory_allocated", "max_memory_allocated"),
            *("reset_peak_memory_stats", "manual_seed_all", "get_device_name", "mem_get_info"),
            *("manual_seed", "get_device_capability", "seed"),
        ):
            monkeypatch.setattr(torch.cuda, name, self._recording(name, answers.get(name)))
        for name in ("range_push", "range_pop"):
            monkeypatch.setattr(torch.cuda.nvtx, name, self._recording(f"nvtx.{name}", None))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        # `torch.cuda.device(1)` around a call changes nothing, as 1 is current.
        monkeypatch.setattr(torch.cuda, "_exchange_device", lambda index: 1)
        monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda index: 1)

    def _recording(self, name: str, answer: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, (*args, *kwargs.values())))
            return answer

        return call


def test_a_ported_program_makes_the_same_calls_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = importlib.import_module("acclimate.backends.cuda").CUDAAccelerator
    recorder = Recorder(monkeypatch)
    before: dict[str, Any] = {}
    exec(PROGRAM, before)
    expected, recorder.calls = recorder.calls, []

    accelerator = cuda()
    stand_in = types.ModuleType("acclimate")
    stand_in.get_accelerator = lambda: accelerator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "acclimate", stand_in)
    ported = port_text(PROGRAM, Settings(unsafe=True)).text
    assert "torch.cuda" not in ported
    after: dict[str, Any] = {}
    exec(ported, after)

    def told(calls: list[tuple[str, tuple[Any, ...]]]) -> list[tuple[str, tuple[Any, ...]]]:
        # The index of the current device, 1, may be said or left to torch.
        return [(name, tuple(value for value in values if value not in (None, 1))) for name, values in calls]

    assert told(recorder.calls) == told(expected)
    for name in ("n", "name", "total", "device_type", "capability"):
        assert before[name] == after[name], name
