"""What a build of torch for a device says and has besides the device's module."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from acclimate.backends import cuda_toolkit
from acclimate.errors import CompilerNotFoundError
from acclimate_sim import torch_module as sim
from stand_ins.ways import Way


def pretend(way: Way) -> None:
    """Makes this torch as if it had been built for a device."""
    if way.device_type == "cuda":
        torch.backends.cuda.is_built = lambda: True
        cuda_toolkit.nvcc = _no_nvcc  # what it compiles runs on NVIDIA's GPUs only
    if way.device_type == "mps":
        _metal()
    if way.device_type == "hpu":
        _seed_with_torch()
    if way.communication in ("nccl", "xccl"):
        _gloo_as(way.communication.upper())
    if way.keeps_statistics:
        return
    for name in ("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved",
                 "max_memory_reserved", "reset_peak_memory_stats", "reset_accumulated_memory_stats",
                 "get_memory_info"):  # fmt: skip
        setattr(torch.accelerator, name, _without_statistics)


def _no_nvcc() -> str:
    raise CompilerNotFoundError("a stand-in runs no code for GPUs")


def _metal() -> None:
    """The functions of torch's core that torch.mps and torch.backends.mps call."""
    core: Any = torch._C
    core._mps_is_available = lambda: True
    core._mps_is_on_macos_or_newer = lambda major, minor: True
    core._mps_get_name = lambda: "a stand-in for mps"
    core._mps_get_core_count = lambda: 10
    core._mps_get_default_generator = lambda: sim.default_generator(0)


def _seed_with_torch() -> None:
    """Lets ``torch.manual_seed`` seed the device, as ``torch_overwrites.py`` of habana_frameworks does."""
    seed_host = torch.manual_seed

    @functools.wraps(seed_host)
    def manual_seed(seed: int) -> torch.Generator:
        sim.manual_seed(int(seed))
        return seed_host(seed)

    torch.manual_seed = manual_seed


def _without_statistics(*_: Any) -> None:
    raise RuntimeError("Allocator for mps is not a DeviceAllocator.")


def run_as_it_is(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """A compiler for ``torch.compile`` under a vendor's name that compiles nothing."""
    return graph.forward


# -- NCCL and XCCL, as gloo under their names ---------------------------------------------------------


class _Options(SimpleNamespace):
    """What torch fills with its time-outs before it makes a group."""


class _GlooByAnotherName(type):
    """A class that torch calls, and asks whether a group is of it."""

    Options = _Options

    def __call__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo)


def _gloo_as(name: str) -> None:
    setattr(distributed_c10d, f"_{name}_AVAILABLE", True)
    setattr(distributed_c10d, f"ProcessGroup{name}", _GlooByAnotherName(f"ProcessGroup{name}", (), {}))
