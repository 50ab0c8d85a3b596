"""What can be shown of the CUDA accelerator without a GPU: the real torch.cuda, and a driver's answers."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from acclimate.accelerator import CATEGORIES
from acclimate.backends import cuda as cuda_module
from acclimate.backends.cuda import CUDAAccelerator
from acclimate.errors import InvalidDeviceError
from fake_vendors import FakeMachine
from fresh_process import FreshProcesses

without_gpu = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")


@pytest.fixture
def cuda() -> CUDAAccelerator:
    return CUDAAccelerator()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the driver answer as one would that has a device of a compute capability."""

    def has(capability: tuple[int, int], hip: str | None = None, emulates_bf16: bool = False) -> None:
        def is_bf16_supported(including_emulation: bool = True) -> bool:
            return bool(hip) or capability >= (8, 0) or (including_emulation and emulates_bf16)

        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(cuda_module, "is_installed", lambda package: package == "triton" and not hip)
        monkeypatch.delenv("DS_ALLOW_DEPRECATED_FP16", raising=False)

    return has


# -- without a GPU ---------------------------------------------------------------------------------------


@without_gpu
def test_constructing_and_asking_touches_no_device(fresh: FreshProcesses) -> None:
    told = fresh.check(
        """
import sys, torch
from acclimate.backends.cuda import CUDAAccelerator
cuda = CUDAAccelerator()
answers = [
    cuda.device_count(), cuda.is_available(), cuda.is_initialized(), cuda.name, cuda.device_type,
    cuda.device_name(), cuda.device_name(1), cuda.communication_backend_name(), cuda.is_triton_supported(),
    cuda.prefer_triton_grouped_mm(), cuda.is_bf16_supported(), cuda.is_fp16_supported(),
    cuda.is_fp64_supported(), cuda.export_envs(), cuda.visible_devices_envs(),
]
tell(answers=answers, initialized=torch.cuda.is_initialized(), imported="triton" in sys.modules)
"""
    ).told
    assert told["answers"] == [
        *[0, False, False, "cuda", "cuda", "cuda", "cuda:1", "nccl", False],
        *[False, True, True, True, ["NCCL"], ["CUDA_VISIBLE_DEVICES"]],
    ]
    assert told["initialized"] is False
    assert told["imported"] is False


@without_gpu
def test_is_available_does_not_ask_the_driver(cuda: CUDAAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_driver() -> bool:
        raise AssertionError("torch.cuda.is_available() starts the driver")

    monkeypatch.setattr(torch.cuda, "is_available", start_driver)
    assert cuda.is_available() is False


@without_gpu
def test_without_a_device_every_index_is_refused(cuda: CUDAAccelerator) -> None:
    for use in (cuda.device, cuda.set_device, cuda.memory_allocated, cuda.total_memory):
        with pytest.raises(InvalidDeviceError, match="has no device 0; devices that exist here: none"):
            use(0)


@without_gpu
def test_without_a_device_memory_is_not_pinned(cuda: CUDAAccelerator) -> None:
    tensor = torch.ones(2)
    assert cuda.pin_memory(tensor) is tensor
    assert cuda.is_pinned(cuda.pin_empty(2, dtype=torch.float32)) is False


def test_streams_events_and_graphs_are_torchs(cuda: CUDAAccelerator) -> None:
    assert cuda.Stream is torch.cuda.Stream
    assert cuda.Event is torch.cuda.Event
    assert cuda.OutOfMemoryError is torch.cuda.OutOfMemoryError
    assert cuda.FloatTensor is torch.cuda.FloatTensor
    assert cuda.torch_module is torch.cuda


def test_work_on_a_device_is_not_finished_when_its_call_returns(cuda: CUDAAccelerator) -> None:
    assert not cuda.is_synchronized_device()
    assert not cuda.use_host_timers()
    assert not cuda.resolves_data_dependency()
    assert not cuda.handles_memory_backpressure()


def test_the_environment_of_a_rank_names_its_devices(cuda: CUDAAccelerator) -> None:
    environment: dict[str, str] = {}
    cuda.set_visible_devices_envs(environment, [0, 3])
    assert environment == {"CUDA_VISIBLE_DEVICES": "0,3"}


# -- what torch.cuda is asked for ------------------------------------------------------------------------

INDEX, NOTHING = ((0,), {}), ((), {})
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "_lazy_call": ((print,), {}),
    "current_device": NOTHING,
    "current_stream": INDEX,
    "default_stream": INDEX,
    "device": INDEX,
    "device_count": NOTHING,
    "empty_cache": NOTHING,
    "get_device_capability": INDEX,
    "get_device_name": INDEX,
    "get_device_properties": INDEX,
    "get_rng_state": ((torch.device("cuda", 0),), {}),
    "graph": ((None, None, None), {}),
    "init": NOTHING,
    "initial_seed": NOTHING,
    "ipc_collect": NOTHING,
    "is_bf16_supported": ((), {"including_emulation": False}),
    "is_current_stream_capturing": NOTHING,
    "is_initialized": NOTHING,
    "manual_seed": INDEX,
    "manual_seed_all": INDEX,
    "max_memory_allocated": INDEX,
    "max_memory_reserved": INDEX,
    "mem_get_info": INDEX,
    "memory_allocated": INDEX,
    "memory_reserved": INDEX,
    "memory_stats": INDEX,
    "memory_summary": ((0, False), {}),
    "reset_accumulated_memory_stats": INDEX,
    "reset_peak_memory_stats": INDEX,
    "set_device": INDEX,
    "set_rng_state": ((None, torch.device("cuda", 0)), {}),
    "set_stream": INDEX,
    "stream": INDEX,
    "synchronize": NOTHING,
}
"""How the interface calls each function of the device's module."""
WITHOUT_COUNTERPART = {"default_generator", "get_amp_supported_dtype", "is_available"}
"""torch.cuda lacks the first two, for which others serve, and starts the driver in the third."""


@pytest.mark.parametrize("name", CALLS)
def test_torch_cuda_takes_the_call(name: str) -> None:
    function = getattr(torch.cuda, name)
    positional, keywords = CALLS[name]
    inspect.signature(function).bind(*positional, **keywords)


def names_asked_for() -> set[str]:
    """The names that the interface's source looks up in the device's module."""
    found = set()
    for category in CATEGORIES:
        for node in ast.walk(ast.parse(Path(inspect.getfile(category)).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            function, arguments = node.func, node.args
            offered = isinstance(function, ast.Attribute) and function.attr.startswith("_offered")
            looked_up = isinstance(function, ast.Name) and function.id == "getattr" and len(arguments) > 1
            place = arguments[1] if looked_up else arguments[0] if offered and arguments else None
            module = not looked_up or ast.unparse(arguments[0]) in ("self.torch_module", "module")
            if module and isinstance(place, ast.Constant):
                found.add(place.value)
    return found


def test_every_function_asked_of_a_device_is_one_of_torch_cuda() -> None:
    asked = names_asked_for() - WITHOUT_COUNTERPART - {"default_generators"}
    assert len(asked) > 25
    assert asked <= set(CALLS), f"not tried here: {asked - set(CALLS)}"
    assert hasattr(torch.cuda, "default_generators")


# -- capabilities ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "bf16", "fp16", "triton", "grouped"),
    [
        ((6, 1), False, False, False, False),
        ((7, 0), False, True, False, False),
        ((7, 5), False, True, False, False),
        ((8, 0), True, True, True, True),
        ((8, 9), True, True, True, True),
        ((9, 0), True, True, True, False),
        ((10, 0), True, True, True, False),
    ],
)
def test_what_a_gpu_can_do_follows_from_its_capability(
    cuda: CUDAAccelerator,
    gpu: Callable[..., None],
    capability: tuple[int, int],
    bf16: bool,
    fp16: bool,
    triton: bool,
    grouped: bool,
) -> None:
    gpu(capability, emulates_bf16=True)
    assert cuda.is_bf16_supported() is bf16
    assert cuda.is_bf16_supported(including_emulation=True)
    assert cuda.is_fp16_supported() is fp16
    assert cuda.is_triton_supported() is triton
    assert cuda.prefer_triton_grouped_mm() is grouped
    assert (torch.bfloat16 in cuda.supported_dtypes()) is bf16
    assert (torch.float16 in cuda.supported_dtypes()) is fp16
    assert torch.float64 in cuda.supported_dtypes()
    assert cuda.get_device_capability() == capability


@pytest.mark.parametrize(
    ("capability", "value", "supported"),
    [((6, 0), "1", True), ((6, 0), "0", False), ((6, 0), "", False), ((5, 2), "1", False)],
)
def test_deprecated_float16_is_allowed_by_request_from_capability_6(
    cuda: CUDAAccelerator,
    gpu: Callable[..., None],
    capability: tuple[int, int],
    value: str,
    supported: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu(capability)
    monkeypatch.setenv("DS_ALLOW_DEPRECATED_FP16", value)
    assert cuda.is_fp16_supported() is supported


def test_without_triton_installed_it_is_not_supported(
    cuda: CUDAAccelerator, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu((9, 0))
    monkeypatch.setattr(cuda_module, "is_installed", lambda package: False)
    assert cuda.is_triton_supported() is False


# -- ROCm ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(6, 0), (9, 4)])
def test_on_rocm_reduced_precision_is_supported_and_triton_not_looked_for(
    cuda: CUDAAccelerator,
    gpu: Callable[..., None],
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu(capability, hip="6.2.41133")
    looked_for = []
    monkeypatch.setattr(cuda_module, "is_installed", lambda package: looked_for.append(package) or True)
    assert cuda.is_bf16_supported()
    assert cuda.is_fp16_supported()
    assert cuda.is_triton_supported() is False
    assert cuda.prefer_triton_grouped_mm() is False
    assert looked_for == []


def test_on_rocm_triton_is_not_imported(fresh: FreshProcesses, machine: FakeMachine) -> None:
    machine.write("triton", "raise RuntimeError('triton was imported')")
    told = fresh.check(
        """
import sys, torch
torch.version.hip = "6.2.41133"
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (9, 4)
from acclimate.backends import presence
presence.torch_build = lambda: {"hip": "6.2.41133"}  # as torch's version.py says
from acclimate.backends.cuda import CUDAAccelerator
cuda = CUDAAccelerator()
tell(
    triton=cuda.is_triton_supported(), grouped=cuda.prefer_triton_grouped_mm(),
    imported="triton" in sys.modules, variable=cuda.visible_devices_envs(), name=cuda.device_name(0),
)
""",
        path=machine.path,
    ).told
    assert told == {
        "triton": False,
        "grouped": False,
        "imported": False,
        "variable": ["HIP_VISIBLE_DEVICES"],
        "name": "cuda:0",
    }


def test_whether_triton_is_supported_is_told_without_importing_it(
    fresh: FreshProcesses, machine: FakeMachine
) -> None:
    machine.write("triton", "raise RuntimeError('triton was imported')")
    told = fresh.check(
        """
import sys, torch
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (8, 0)
from acclimate.backends.cuda import CUDAAccelerator
tell(triton=CUDAAccelerator().is_triton_supported(), imported="triton" in sys.modules)
""",
        path=machine.path,
    ).told
    assert told == {"triton": True, "imported": False}


# -- profiler marks ----------------------------------------------------------------------------------------


class Marks:
    """What the nvtx package and torch.cuda.nvtx were called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
        self.calls: list[tuple[Any, ...]] = []
        nvtx = types.ModuleType("nvtx")
        # The parameters of nvtx 0.2.
        nvtx.push_range = lambda message=None, color=None, domain=None, category=None, payload=None: (
            self.calls.append(("push", message, domain, category))
        )
        nvtx.pop_range = lambda domain=None: self.calls.append(("pop", domain))
        if installed:
            monkeypatch.setitem(sys.modules, "nvtx", nvtx)
        monkeypatch.setattr(cuda_module, "is_installed", lambda package: installed and package == "nvtx")
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda msg: self.calls.append(("torch push", msg)))
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: self.calls.append(("torch pop",)))


def test_a_range_with_a_domain_goes_to_nvtx(cuda: CUDAAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = Marks(monkeypatch, installed=True)
    cuda.range_push("work", domain="library", category="kind")
    cuda.range_pop(domain="library")
    assert marks.calls == [("push", "work", "library", "kind"), ("pop", "library")]
    assert cuda.supports_nvtx_domain is True


def test_a_range_without_a_domain_goes_to_torch(
    cuda: CUDAAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = Marks(monkeypatch, installed=True)
    cuda.range_push("work", category="kind")
    cuda.range_pop()
    with cuda.nvtx.range("block"):
        pass
    assert marks.calls == [("torch push", "work"), ("torch pop",), ("torch push", "block"), ("torch pop",)]


def test_without_the_nvtx_package_a_domain_is_left_out(
    cuda: CUDAAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = Marks(monkeypatch, installed=False)
    cuda.range_push("work", domain="library")
    cuda.range_pop(domain="library")
    assert marks.calls == [("torch push", "work"), ("torch pop",)]


# -- pinned memory -------------------------------------------------------------------------------------------


def test_foreign_memory_is_registered_with_the_driver(
    cuda: CUDAAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda *arguments: calls.append(("register", *arguments)) or 0,
        cudaHostUnregister=lambda *arguments: calls.append(("unregister", *arguments)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: calls.append(("check", code)))
    assert cuda.register_host_memory(4096, 8192) is True
    cuda.unregister_host_memory(4096)
    assert calls == [("register", 4096, 8192, 0), ("check", 0), ("unregister", 4096), ("check", 0)]


def test_an_error_of_registration_is_not_left_for_the_next_kernel(
    cuda: CUDAAccelerator, monkeypatch: pytest.MonkeyPatch, gpu: Callable[..., None]
) -> None:
    gpu((9, 0))
    kept_by_the_runtime: list[int] = []

    def refused(*arguments: int) -> int:
        kept_by_the_runtime.append(713)
        return 713

    def launched(*size: object, device: str) -> None:
        assert device.startswith("cuda")
        if kept_by_the_runtime:
            raise RuntimeError(f"CUDA error {kept_by_the_runtime.pop()}")

    def check_error(result: int) -> None:
        if result:
            raise RuntimeError(f"refused with {result}")

    runtime = types.SimpleNamespace(cudaHostRegister=refused, cudaHostUnregister=refused)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(torch, "ones", launched)
    with pytest.raises(RuntimeError, match="refused with 713"):
        cuda.register_host_memory(4096, 8192)
    with pytest.raises(RuntimeError, match="refused with 713"):
        cuda.unregister_host_memory(4096)
    assert not kept_by_the_runtime
