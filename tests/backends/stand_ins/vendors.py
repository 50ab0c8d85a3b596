"""What each vendor's module does differently from the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from stand_ins import emulated

Functions = dict[str, Any]


@dataclass(frozen=True)
class XpuProperties:
    """Fields that torch.xpu tells of a device; among them is no compute capability."""

    name: str
    total_memory: int
    platform_name: str = "a stand-in"
    max_compute_units: int = 128
    gpu_eu_count: int = 128
    gpu_subslice_count: int = 16
    has_fp16: bool = True
    has_fp64: bool = True


def cuda(functions: Functions) -> Functions:
    registered: set[int] = set()

    def register(address: int, num_bytes: int, flags: int) -> int:
        if address in registered:
            return _ALREADY_REGISTERED
        registered.add(address)
        torch.ops.sim.register_pinned(address, num_bytes)
        return 0

    def unregister(address: int) -> int:
        if address not in registered:
            return _NOT_REGISTERED
        registered.discard(address)
        torch.ops.sim.unregister_pinned(address)
        return 0

    def cudart() -> SimpleNamespace:
        torch.empty(1).pin_memory()  # as torch.cuda.cudart does, it initializes CUDA, else nothing is pinned
        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)

    return {
        "check_error": _check_cuda_error,
        "cudart": cudart,
        # torch reads it when it notes an error of a collective.
        "nccl": SimpleNamespace(version=lambda: (2, 29, 3)),
        "nvtx": emulated.ranges(),
        **emulated.graphs("CUDAGraph"),
    }


_ALREADY_REGISTERED, _NOT_REGISTERED = 712, 713  # as in CUDA's list of errors


def _check_cuda_error(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"CUDA error {result}")


def xpu(functions: Functions) -> Functions:
    def properties(device: Any = None) -> XpuProperties:
        index = emulated.index_of(device)
        return XpuProperties(functions["get_device_name"](index), functions["mem_get_info"](index)[1])

    return {
        "get_device_capability": lambda device=None: vars(properties(device)),
        "get_device_properties": properties,
        **emulated.graphs("XPUGraph"),
    }


def npu(functions: Functions) -> Functions:
    def capability(device: Any = None) -> None:
        warnings.warn("CANN has no such concept", stacklevel=2)

    def properties(device: Any = None) -> SimpleNamespace:
        found = functions["mem_get_info"](device)
        return SimpleNamespace(
            name="a stand-in for npu", total_memory=found[1], cube_core_num=24, vector_core_num=48
        )

    return {
        "get_device_capability": capability,
        "get_device_properties": properties,
        "mstx": type("mstx", (), {name: staticmethod(do) for name, do in emulated.ranges().items()}),
        **emulated.graphs("NPUGraph"),
    }


def mlu(functions: Functions) -> Functions:
    return {"cnpx": emulated.ranges(), **emulated.graphs("MLUGraph")}


def mps(functions: Functions) -> Functions:
    return {
        "current_allocated_memory": functions["memory_allocated"],
        "driver_allocated_memory": functions["memory_reserved"],
        "recommended_max_memory": lambda: functions["mem_get_info"]()[1],
        "event": {"Event": functions["Event"]},
    }


def hpu(functions: Functions) -> Functions:
    """As habana_frameworks/torch/hpu documents: statistics of its own, and properties that are a text."""

    def statistics(device: Any = None) -> dict[str, int]:
        generic = functions["memory_stats"](device)
        return {
            "Limit": functions["mem_get_info"](device)[1],
            "InUse": generic["allocated_bytes.all.current"],
            "MaxInUse": generic["allocated_bytes.all.peak"],
            "NumAllocs": generic["num_device_alloc"],
            "NumFrees": generic["num_device_free"],
        }

    def limit(device: Any = None) -> int:
        return statistics(device)["Limit"]

    def free_and_limit(device: Any = None) -> tuple[int, int]:
        return limit(device) - statistics(device)["InUse"], limit(device)

    def of_first(function: Callable[..., Any], argument: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if emulated.index_of(args[argument] if len(args) > argument else None) != 0:
                raise RuntimeError("hpu random number states are those of device 0 only")
            return function(*args)

        return call

    return {
        "get_device_capability": lambda device=None: "1.17.0",
        "get_device_properties": lambda device=None: f"(sramBaseAddress=0, dramSize={limit(device)})",
        "get_rng_state": of_first(functions["get_rng_state"], 0),
        "max_memory_cached": limit,
        "max_memory_reserved": limit,
        "mem_get_info": free_and_limit,
        "memory_cached": limit,
        "memory_reserved": limit,
        "memory_stats": statistics,
        "set_rng_state": of_first(functions["set_rng_state"], 1),
        **emulated.graphs("HPUGraph"),
    }


def sdaa(functions: Functions) -> Functions:
    return {}


_SPECIFIC: Mapping[str, Callable[[Functions], Functions]] = {
    "cuda": cuda, "hpu": hpu, "mlu": mlu, "mps": mps, "npu": npu, "sdaa": sdaa, "xpu": xpu,
}  # fmt: skip


def emulation(device_type: str) -> Functions:
    """All that stands behind the names of a vendor's module."""
    functions = emulated.device_functions(device_type)
    return functions | _SPECIFIC[device_type](functions)
