"""What each target writes exists, and calls on CUDA what the original called."""

import importlib
import sys
import types
from typing import Any

import pytest

from acclimate_port.engine import Settings, port_text
from acclimate_port.new_code import targets
from porting import ported_once_for_all

torch = pytest.importorskip("torch", reason="runs ported code")


def test_every_call_that_acclimate_writes_is_in_the_interface() -> None:
    interface = pytest.importorskip("acclimate.accelerator").Accelerator
    assert [name for name in sorted(targets._SAME) if not hasattr(interface, name)] == []


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


def answers(name: str) -> Any:
    """Returns what a function of ``torch.cuda`` answers without arguments, if it does."""
    try:
        return getattr(torch.cuda, name)()
    except Exception:  # of any type: it needs CUDA or arguments
        return NotImplemented


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", ["acclimate", "torch"])
def test_what_answers_without_cuda_answers_the_same_after_an_edit(target: str) -> None:
    functions = [
        name for name in dir(torch.cuda) if isinstance(getattr(torch.cuda, name), types.FunctionType)
    ]
    edited = []
    for name in functions:
        before = answers(name)
        source = f"import torch\n\n\ndef answer():\n    return torch.cuda.{name}()\n"
        ported = port_text(source, Settings(target)).text
        if before is not NotImplemented and ported != source:
            space: dict[str, Any] = {}
            exec(ported, space)
            assert space["answer"]() == before, name
            edited.append(name)
    assert {"device_count", "memory_allocated", "is_available"} <= set(edited)


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


def choose_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``from acclimate import get_accelerator`` find the accelerator for CUDA."""
    accelerator = importlib.import_module("acclimate.backends.cuda").CUDAAccelerator()
    stand_in = types.ModuleType("acclimate")
    stand_in.get_accelerator = lambda: accelerator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "acclimate", stand_in)


def test_a_ported_program_makes_the_same_calls_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    before: dict[str, Any] = {}
    exec(PROGRAM, before)
    expected, recorder.calls = recorder.calls, []

    choose_cuda(monkeypatch)
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


QUESTIONS = """\
import torch
from torch.cuda import is_bf16_supported

ask = torch.cuda.is_bf16_supported
answers = [
    torch.cuda.is_bf16_supported(),
    torch.cuda.is_bf16_supported(True),
    torch.cuda.is_bf16_supported(False),
    torch.cuda.is_bf16_supported(including_emulation=True),
    torch.cuda.is_bf16_supported(including_emulation=False),
    (torch.cuda.is_bf16_supported)(  # where the answer is
    ),
    is_bf16_supported(),
    ask(),
    ask(False),
    ask(including_emulation=False),
    *map(torch.cuda.is_bf16_supported, [True, False]),
    f"{torch.cuda.is_bf16_supported()} {torch.cuda.is_bf16_supported(False)}",
]
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
"""


class OldGPU:
    """What torch.cuda tells of a GPU that emulates bfloat16, and with which argument it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[bool] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", self.is_bf16_supported)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        self.asked.append(including_emulation)
        return including_emulation


def test_a_ported_program_asks_cuda_for_bfloat16_with_the_same_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = OldGPU(monkeypatch)
    before: dict[str, Any] = {}
    exec(QUESTIONS, before)
    expected, gpu.asked = gpu.asked, []

    choose_cuda(monkeypatch)
    ported = ported_once_for_all(QUESTIONS, "acclimate")
    assert "torch.cuda" not in ported
    after: dict[str, Any] = {}
    exec(ported, after)
    assert gpu.asked == expected
    assert after["answers"] == before["answers"]
    assert after["dtype"] == before["dtype"] == "bfloat16"


@pytest.mark.parametrize("arguments", ["*arguments", "**options"])
def test_a_question_for_bfloat16_whose_arguments_are_not_known_is_left(arguments: str) -> None:
    source = f"import torch\n\nok = torch.cuda.is_bf16_supported({arguments})\n"
    assert ported_once_for_all(source, "acclimate") == source


def test_the_accelerator_of_deepspeed_is_asked_for_bfloat16_with_torchs_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = (
        "import torch\nfrom deepspeed.accelerator import get_accelerator\n\n"
        "answers = [torch.cuda.is_bf16_supported(), torch.cuda.is_bf16_supported(including_emulation=False)]\n"
    )
    ported = ported_once_for_all(source, "acclimate")
    assert "get_accelerator().is_bf16_supported(), torch.cuda.is_bf16_supported(including_e" in ported

    class TheirCUDA:
        """As DeepSpeed's."""

        def is_bf16_supported(self) -> bool:
            return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True

    gpu = OldGPU(monkeypatch)
    theirs = types.ModuleType("deepspeed.accelerator")
    theirs.get_accelerator = TheirCUDA  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", theirs)
    exec(ported, {})
    assert gpu.asked == [True, False]
