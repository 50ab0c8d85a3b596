"""The two targets of a port: the code that each writes for a device, a call, a backend."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from importlib import resources

from acclimate_port.new_code.edits import Part
from acclimate_port.source.torch_cuda import CURRENT_STREAMS, FIGURES, OLD_RESETS, RESETS, SEEDS, STREAMS
from acclimate_port.source.vendors import WITHOUT_STREAMS


@dataclass(frozen=True)
class Spelling:
    """A target's code for one name of ``torch.cuda``."""

    text: str
    keywords: tuple[str, ...] | None = None
    """The parameter names in order; ``None``: the same as in torch.cuda."""
    positional_only: bool = False
    on_host: str | None = None
    """The expression to use instead of the call on a CPU-only machine, where the call would raise."""
    condition: str | None = None
    """The condition for making the call; ``None``: there is an accelerator."""
    unsafe: str = ""
    """Why a person must review the edit; ``""``: it is safe."""
    default: str = ""
    """The one keyword argument whose default differs from torch.cuda's."""


@dataclass(frozen=True)
class Missing:
    """The reason why a target has no code for a name of ``torch.cuda``."""

    reason: str


class Target(ABC):
    """The code for any accelerator, in terms of one library.

    Args:
        torch: the name under which the file imports torch.
    """

    name: str
    device_type: str
    """The expression for ``"cuda"``."""
    current_device_name: str
    """The expression for the current device, as a device."""
    backend: str
    """The expression for ``"nccl"``."""
    not_host: str
    """A condition that is false on a CPU-only machine."""

    def __init__(self, torch: str) -> None:
        self.torch = torch

    @abstractmethod
    def device_at(self, *index: Part) -> tuple[Part, ...]:
        """The expression for ``"cuda:<index>"``; the index is a number."""

    @abstractmethod
    def runtime(self, name: str) -> Spelling | Missing:
        """The code for a name of ``torch.cuda``. Other rules handle submodules such as ``amp``."""


# The names of torch.cuda that acclimate's interface has too; a test compares them with the interface.
_SAME = {
    *("is_available", "device_count", "is_initialized", "init", "synchronize", "set_device", "device"),
    *("current_device", "get_device_name", "get_device_capability", "get_device_properties"),
    *(*STREAMS, "Event", "is_current_stream_capturing", "is_bf16_supported", "OutOfMemoryError"),
    *(*FIGURES, *RESETS, *OLD_RESETS, "empty_cache"),
    *("memory_stats", "memory_summary", "mem_get_info", "ipc_collect"),
    *(*SEEDS, "get_rng_state", "get_rng_state_all", "initial_seed"),
    *("BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor"),
}
_DEVICE_INDEX = {
    *("device", "get_rng_state", "set_device", "synchronize", *CURRENT_STREAMS, "memory_stats"),
    *(*FIGURES, *RESETS, *OLD_RESETS),
}
_KEYWORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_DEVICE_INDEX, ("device_index",)),
    "set_rng_state": ("new_state", "device_index"),
}
NO_CAPABILITY = "only CUDA has a compute capability; elsewhere it is (0, 0), less than any of CUDA's"
_WITHOUT_CUDA = {
    **dict.fromkeys(SEEDS, "None"),
    **dict.fromkeys(FIGURES, "0"),
    "get_rng_state_all": "[]",
    "memory_stats": "{}",
}
"""What torch.cuda does without CUDA, where acclimate's functions use the CPU's generator and memory."""
_DEFAULTS = {"is_bf16_supported": "including_emulation=True"}
"""Defaults of torch.cuda that differ from acclimate's."""

# DeepSpeed's function takes no argument and calls torch's with the default.
_KEYWORDS_OF_DEEPSPEED: dict[str, tuple[str, ...]] = {**_KEYWORDS, "is_bf16_supported": ()}
# Of the names above, those that DeepSpeed 0.19's interface lacks.
_NOT_IN_DEEPSPEED = {
    *("is_initialized", "init", "get_device_name", "get_device_capability", "get_device_properties"),
    *("get_rng_state_all", "set_rng_state_all", "seed", "seed_all", "set_stream", "mem_get_info"),
    *("ipc_collect", "OutOfMemoryError", "memory_summary"),
}


class AcclimateTarget(Target):
    """Code that calls ``get_accelerator()`` of acclimate or of DeepSpeed.

    Args:
        torch: the name under which the file imports torch.
        accelerator: the name under which the file imports ``get_accelerator``.
        of_deepspeed: whether the file imports ``get_accelerator`` from DeepSpeed.
    """

    name = "acclimate"

    def __init__(self, torch: str, accelerator: str, of_deepspeed: bool) -> None:
        super().__init__(torch)
        self.accelerator = f"{accelerator}()"
        self.of_deepspeed = of_deepspeed
        self.device_type = f"{self.accelerator}.device_name()"
        self.current_device_name = f"{self.accelerator}.current_device_name()"
        self.backend = f"{self.accelerator}.communication_backend_name()"
        self.not_host = f"not {self.accelerator}.is_synchronized_device()"

    def device_at(self, *index: Part) -> tuple[Part, ...]:
        return (f"{self.accelerator}.device_name(", *index, ")")

    def runtime(self, name: str) -> Spelling | Missing:
        if name not in _SAME:
            if ("device module", name) in torch_calls():
                return Missing(f"get_accelerator() has no {name}, and only some devices' modules in torch do")
            return Missing(f"torch.cuda.{name} is CUDA's own; no other accelerator has it")
        if self.of_deepspeed and name in _NOT_IN_DEEPSPEED:
            return Missing(f"DeepSpeed's accelerator has no {name}; get_accelerator() of acclimate has it")
        keywords = _KEYWORDS_OF_DEEPSPEED if self.of_deepspeed else _KEYWORDS
        default = "" if self.of_deepspeed else _DEFAULTS.get(name, "")
        unsafe = NO_CAPABILITY if name == "get_device_capability" else ""
        return Spelling(
            f"{self.accelerator}.{name}",
            keywords.get(name),
            on_host=_WITHOUT_CUDA.get(name),
            unsafe=unsafe,
            default=default,
        )


@cache
def torch_calls() -> frozenset[tuple[str, str]]:
    """Module and name of each function that every recorded torch release from 2.10 on has."""
    text = resources.files("acclimate_port.new_code").joinpath("torch_calls.json").read_text(encoding="utf-8")
    releases = [
        {(module, name) for module, names in offered.items() for name in names}
        for offered in json.loads(text).values()
    ]
    return frozenset(set.intersection(*releases))


_RENAMED = {
    "set_device": "set_device_index",
    "current_device": "current_device_index",
    "mem_get_info": "get_memory_info",
}
# torch.accelerator has functions of these names that return something else.
_OTHER_MEANING = {"get_device_capability", "memory_stats", "device_index", "current_stream", "set_stream"}
_RETURN_NOTHING = RESETS | SEEDS | {"synchronize", "set_device", "empty_cache", "init"}
# Replacements on a CPU-only machine, where torch.accelerator raises and torch.cpu lacks the name, and on
# another whose module lacks it.
_ON_HOST = {
    **dict.fromkeys(FIGURES | {"current_device"}, "0"),
    **dict.fromkeys(_RETURN_NOTHING, "None"),
    "get_device_name": "{helper}",
    "get_device_capability": "(0, 0)",
    "get_device_properties": "None",
    "mem_get_info": "(0, 0)",
    "memory_stats": "{}",
    "get_rng_state": "{torch}.get_rng_state()",
    "get_rng_state_all": "[]",
    "initial_seed": "{torch}.initial_seed()",
    "is_bf16_supported": "True",
    "is_tf32_supported": "False",
    "memory_stats_as_nested_dict": "{}",
    "device": "{torch}.accelerator.device_index(None)",
}
_WITHOUT_ALLOCATOR = "(" + ", ".join(f'"{kind}"' for kind in ("cpu", *WITHOUT_STREAMS)) + ")"
# These raise on MPS in torch 2.10 to 2.12, which has no such allocator there.
_OF_ALLOCATOR = FIGURES | RESETS | {"empty_cache", "mem_get_info"}
_EMPTY_ON_HOST = {"Event", "Stream"}
# Names that torch.cuda and torch.xpu have and torch.mps lacks.
_NOT_ON_APPLE = {
    *("Stream", "stream", "set_stream", "get_device_name", "get_device_properties", "get_rng_state_all"),
    *("init", "initial_seed", "is_bf16_supported", "is_initialized", "manual_seed_all", "memory_stats"),
    *("seed_all", "set_rng_state_all", "device", "is_tf32_supported", "memory_stats_as_nested_dict"),
}
_NVIDIAS = {"get_arch_list", "get_gencode_flags"}
"""What torch has for other devices, too, and what answers for a compiler of CUDA source."""
_OF_ONE_DEVICE = {"manual_seed_all": "manual_seed", "seed_all": "seed"}
"""Functions for all devices, and what MPS has in their place, with its one device."""


class TorchTarget(Target):
    """Code that calls ``torch.accelerator``, or the device's module if that has no equivalent.

    Args:
        torch: the name under which the file imports torch.
        helper: the name of the function in the file that returns the device type.
    """

    name = "torch"

    def __init__(self, torch: str, helper: str) -> None:
        super().__init__(torch)
        self.helper = self.device_type = self.current_device_name = f"{helper}()"
        self.backend = f"{torch}.distributed.get_default_backend_for_device({self.helper})"
        self.not_host = f"{torch}.accelerator.is_available()"
        self.module = f"{torch}.get_device_module({self.helper})"

    def device_at(self, *index: Part) -> tuple[Part, ...]:
        if len(index) == 1 and isinstance(index[0], str) and index[0].isdigit():
            return (f'f"{{{self.helper}}}:{index[0]}"',)
        return (f'f"{{{self.helper}}}:{{', *index, '}"')

    def runtime(self, name: str) -> Spelling | Missing:
        on_host = _ON_HOST.get(name)
        if on_host is not None:
            on_host = on_host.replace("{torch}", self.torch).replace("{helper}", self.helper)
        here = _RENAMED.get(name, name)
        if name == "OutOfMemoryError":
            return Spelling(f"{self.torch}.OutOfMemoryError")
        if name == "device_of":
            return Missing("torch.cuda.device_of does nothing for tensors of other devices")
        if name in _NVIDIAS:
            return Missing(f"torch.cuda.{name} is for a compiler of CUDA source")
        if name not in _OTHER_MEANING and ("torch.accelerator", here) in torch_calls():
            condition = f"{self.helper} not in {_WITHOUT_ALLOCATOR}" if name in _OF_ALLOCATOR else None
            text = f"{self.torch}.accelerator.{here}"
            return Spelling(text, positional_only=True, on_host=on_host, condition=condition)
        if name == "get_device_capability":
            # torch.xpu's is a dictionary, and torch.mps has none.
            condition = f'{self.helper} == "cuda"'
            text = f"{self.module}.{name}"
            return Spelling(text, on_host=on_host, condition=condition, unsafe=NO_CAPABILITY)
        if ("device module", name) in torch_calls():
            if name in _OF_ONE_DEVICE:
                text = f'getattr({self.module}, "{name}", {self.module}.{_OF_ONE_DEVICE[name]})'
                return Spelling(text, on_host=on_host)
            lacks = name in _NOT_ON_APPLE
            condition = f'hasattr({self.module}, "{name}")' if lacks and on_host is not None else None
            unsafe = f"torch has no {name} for MPS" if lacks and on_host is None else ""
            if name in _EMPTY_ON_HOST:
                unsafe = f"torch's {name} of a CPU has no methods; acclimate's has (--to acclimate)"
            return Spelling(f"{self.module}.{name}", on_host=on_host, condition=condition, unsafe=unsafe)
        if name in _SAME:
            return Missing(f"torch has no {name} for every device; acclimate has one (--to acclimate)")
        return Missing(f"torch.cuda.{name} is CUDA's own; no other accelerator has it")
