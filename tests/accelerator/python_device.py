"""A torch device written in Python: real to torch, computed by the host.

torch lets a process name its PrivateUse1 device once, so each of the two below lives in a process of its
own. Their tensors hold a host tensor as ``.host``; every operator runs on those.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

BARE, WHOLE = "bare", "whole"
"""The devices: one whose module has what torch demands and nothing more, and one with a vendor's usual."""

MEMORY = 1 << 30
ALLOCATED = (1000, 2000)
"""Bytes per device that the whole one says are allocated."""

_libraries: list[torch.library.Library] = []


def register(name: str) -> types.ModuleType:
    """Makes the device ``name`` known to torch, and gives its module."""
    module = _bare_module(name) if name == BARE else _whole_module(name)
    _setup_privateuseone_for_python_backend(name, module)
    _register_operators(name)
    return module


def _on_device(host: torch.Tensor) -> torch.Tensor:
    tensor = torch._C._acc.create_empty_tensor(host.shape, host.dtype)
    tensor.host = host
    return tensor


def _register_operators(name: str) -> None:
    def compute(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        owners: dict[int, torch.Tensor] = {}

        def to_host(value: Any) -> Any:
            if hasattr(value, "host"):
                owners[id(value.host)] = value
                return value.host
            is_ours = isinstance(value, torch.device) and value.type == name
            return torch.device("cpu") if is_ours else value

        def to_device(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return owners[id(value)] if id(value) in owners else _on_device(value)

        host_args, host_kwargs = tree_map(to_host, (args, kwargs))
        return tree_map(to_device, operator(*host_args, **host_kwargs))

    def copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        getattr(target, "host", target).copy_(getattr(source, "host", source))
        return target

    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(compute, "PrivateUse1")
    aten.impl("_copy_from", copy, "PrivateUse1")
    for view in ("detach", "alias"):
        aten.impl(view, lambda tensor: _on_device(tensor.host.detach()), "PrivateUse1")
    _libraries.extend((every, aten))


def _bare_module(name: str) -> types.ModuleType:
    module = types.ModuleType(f"torch.{name}")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed)
    return module


def _whole_module(name: str) -> types.ModuleType:
    module = _bare_module(name)
    state = {"current": 0, "peak_resets": []}
    log: list[tuple[str, int]] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index, self.outer = index, 0

        def __enter__(self) -> None:
            self.outer, state["current"] = state["current"], self.index

        def __exit__(self, *error: object) -> None:
            state["current"] = self.outer

    generators = (torch.default_generator, torch.Generator())
    module.log = log
    module.device = Device
    module.device_count = lambda: len(ALLOCATED)
    module.current_device = lambda: state["current"]
    module.set_device = lambda index: state.update(current=index)
    module.synchronize = lambda: log.append(("synchronize", state["current"]))
    module.is_initialized = lambda: False
    module.init = lambda: log.append(("init", state["current"]))
    module.get_amp_supported_dtype = lambda: [torch.float16]
    module.default_generators = generators
    module.manual_seed = lambda seed: generators[state["current"]].manual_seed(seed)
    module.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in generators]
    module.memory_allocated = lambda index: ALLOCATED[index]
    module.memory_stats = lambda index: {
        "allocated_bytes.all.peak": 2 * ALLOCATED[index],
        "reserved_bytes.all.current": 3 * ALLOCATED[index],
        "reserved_bytes.all.peak": 4 * ALLOCATED[index],
    }
    module.reset_peak_memory_stats = lambda index: log.append(("reset_peak_memory_stats", index))
    module.empty_cache = lambda: log.append(("empty_cache", state["current"]))
    module.get_device_properties = lambda index: types.SimpleNamespace(
        name=f"Whole {index}", total_memory=MEMORY, marketing_name="The Whole"
    )
    module._lazy_call = lambda callback: log.append(("lazy_call", callback()))
    return module
