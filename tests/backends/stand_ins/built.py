"""What a build of torch for a device says and has besides the device's module."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map_only

from acclimate.backends import cuda_toolkit
from acclimate.errors import CompilerNotFoundError
from acclimate_sim import torch_module as sim
from stand_ins.ways import Way


def pretend(way: Way) -> None:
    """Makes this torch as if it had been built for a device."""
    if way.device_type == "cuda":
        torch.backends.cuda.is_built = lambda: True
        cuda_toolkit.nvcc = _no_nvcc  # what it compiles runs on NVIDIA's GPUs only
        _operators_of_cuda()
    if way.device_type in ("cuda", "mps", "xpu"):
        _operators_without_place(way.device_type.upper())
    if way.device_type == "xpu":
        _operators_of_xpu()
    if way.device_type in ("cuda", "mps"):
        _storages(way.device_type)
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


_OPERATORS = torch.library.Library("aten", "IMPL")


def _operators_of_cuda() -> None:
    """What torch asks of a device only where it is called cuda: options and kernels that hosts have not."""
    aten = torch.ops.aten

    def softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return aten._softmax(x.float() if half_to_float else x, dim, False)

    def log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return aten._log_softmax(x.float() if half_to_float else x, dim, False)

    def softmax_backward(grad: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return aten._softmax_backward_data(grad, y, dim, grad.dtype).to(dtype)

    def log_softmax_backward(
        grad: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return aten._log_softmax_backward_data(grad, y, dim, grad.dtype).to(dtype)

    for name, operator in {
        "_softmax": softmax,
        "_log_softmax": log_softmax,
        "_softmax_backward_data": softmax_backward,
        "_log_softmax_backward_data": log_softmax_backward,
        "convolution": aten.convolution,  # those of one channel in each group have kernels of their own
        "convolution_backward": aten.convolution_backward,
    }.items():
        _OPERATORS.impl(name, functools.partial(_on_host, operator), "CUDA")
    for library in ("cudnn", "miopen"):  # they take lengths on the host, so torch does not check their device
        _OPERATORS.impl(f"_use_{library}_ctc_loss.Tensor", lambda *_: False, "CUDA")


def _operators_without_place(key: str) -> None:
    """What torch computes by kernels of the device, for which a build without it has no place."""
    for name, operator in {
        "conj_physical_": lambda x: x.copy_(torch.ops.aten._conj_physical(x)),
        "ldexp.Tensor": lambda x, exponent: torch.ldexp(x.cpu(), exponent.cpu()).to(x.device),
    }.items():
        _OPERATORS.impl(name, operator, key)


def _operators_of_xpu() -> None:
    """What torch does differently for xpu alone."""

    def group_norm_backward(
        grad: torch.Tensor, x: torch.Tensor, *others: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """Of any strides, which torch makes contiguous for every device but this one."""
        backward = torch.ops.aten.native_group_norm_backward
        return backward(grad.contiguous(), x.contiguous(), *others)

    _OPERATORS.impl("native_group_norm_backward", functools.partial(_on_host, group_norm_backward), "XPU")


def _storages(device_type: str) -> None:
    """Makes storages, which are copied and loaded so; torch does it in builds for the hardware only."""
    construct = torch.UntypedStorage.__new__

    def make(
        cls: type[torch.UntypedStorage], *args: Any, device: Any = None, **others: Any
    ) -> torch.UntypedStorage:
        if device is None or torch.device(device).type != device_type:
            return construct(cls, *args, device=device, **others)
        return torch.empty(*args or (0,), dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = make


def _on_host(operator: Any, *args: Any) -> Any:
    """Computes on the host with tensors of a device, and gives the results to their device."""
    device, *others = {arg.device for arg in args if isinstance(arg, torch.Tensor)}
    if others:
        raise RuntimeError(f"Expected all tensors to be on the same device, not {device} and {others[0]}")
    on_host = tree_map_only(torch.Tensor, torch.Tensor.cpu, args)
    return tree_map_only(torch.Tensor, lambda result: result.to(device), operator(*on_host))


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
    device = torch.accelerator.current_accelerator()
    raise RuntimeError(f"Allocator for {device} is not a DeviceAllocator.")


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
