"""Checks of calls: a method changes only what it is for, and takes its arguments by place and by name."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate.errors import CompilerNotFoundError, UnsupportedError
from acclimate_conformance.checks import ambient
from acclimate_conformance.checks.assertions import (
    MIB,
    device_names,
    is_host,
    require,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.device_arguments import streams_of_their_own

Arguments = dict[str, Any]
Make = Callable[[Accelerator], Arguments]

_RANDOM, _PEAKS, _RESERVED = "random numbers of", "the peak of", "the reserved"
_BACKEND, _COUNTED = "the compile backend", "whether allocations are counted on"
_CHANGES: dict[str, tuple[str, ...]] = {
    "set_device": ("the current device",),
    "set_stream": ("the current device", "the current stream"),
    "set_rng_state": (f"the {_RANDOM} device",),
    "set_rng_state_all": (f"the {_RANDOM} device",),
    "manual_seed": (f"the {_RANDOM} device",),
    "manual_seed_all": (f"the {_RANDOM} device",),
    "seed": (f"the {_RANDOM} device",),
    "seed_all": (f"the {_RANDOM} device",),
    "reset_peak_memory_stats": (_PEAKS,),
    "reset_max_memory_allocated": (_PEAKS,),
    "reset_max_memory_cached": (_PEAKS,),
    "reset_accumulated_memory_stats": (_COUNTED,),
    "empty_cache": (_RESERVED,),
    "ipc_collect": (_RESERVED,),
    "set_compile_backend": (_BACKEND,),
}
"""What each method may change, by how its description begins."""
_DIFFERS = ("seed", "seed_all", "available_memory", "mem_get_info", "memory_stats", "memory_summary")
"""Methods whose result may be another one each time."""


def _nothing(accelerator: Accelerator) -> Arguments:
    return {}


def _first(name: str) -> Make:
    """Arguments that name the first device, while the last is the current one."""
    return lambda accelerator: {name: 0}


_BY_INDEX = (
    "device_name", "device", "set_device", "synchronize", "default_generator", "get_rng_state",
    "current_stream", "default_stream", "memory_allocated", "max_memory_allocated",
    "reset_max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached", "reset_max_memory_cached", "reset_peak_memory_stats",
    "reset_accumulated_memory_stats", "memory_stats", "total_memory", "available_memory",
)  # fmt: skip
_WITHOUT_ARGUMENTS = (
    "random", "is_synchronized_device", "use_host_timers", "resolves_data_dependency",
    "handles_memory_backpressure",
    "current_device", "current_device_name", "device_count", "is_available", "is_initialized", "init",
    "get_rng_state_all", "seed", "seed_all", "initial_seed", "empty_cache", "ipc_collect",
    "is_fp16_supported", "is_fp64_supported", "supported_dtypes", "is_current_stream_capturing",
    "pin_memory_alignment", "op_builder_dir", "op_include_paths", "toolkit_version",
    "communication_backend_name", "is_triton_supported", "prefer_triton_grouped_mm", "get_compile_backend",
    "export_envs", "visible_devices_envs",
)  # fmt: skip
_BUILDER = "AsyncIOBuilder"


def _host_tensor() -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).reshape(4, 6)


_ARGUMENTS: dict[str, Make] = {
    **dict.fromkeys(_WITHOUT_ARGUMENTS, _nothing),
    **dict.fromkeys(_BY_INDEX, _first("device_index")),
    "get_device_properties": _first("device"),
    "get_device_name": _first("device"),
    "get_device_capability": _first("device"),
    "mem_get_info": _first("device"),
    "memory_summary": lambda accelerator: {"device": 0, "abbreviated": True},
    "set_rng_state": lambda accelerator: {"new_state": accelerator.get_rng_state(), "device_index": 0},
    "set_rng_state_all": lambda accelerator: {"new_states": accelerator.get_rng_state_all()},
    "manual_seed": lambda accelerator: {"seed": 2**40 + 7},
    "manual_seed_all": lambda accelerator: {"seed": 2**40 + 7},
    "stream": lambda accelerator: {"stream": accelerator.default_stream()},
    "set_stream": lambda accelerator: {"stream": accelerator.default_stream()},
    "is_out_of_memory": lambda accelerator: {"error": RuntimeError("a reason")},
    "is_bf16_supported": lambda accelerator: {"including_emulation": True},
    "pin_memory": lambda accelerator: {"tensor": _host_tensor(), "make_copy": True, "match_shape": True},
    "pin_empty_like": lambda accelerator: {"tensor": _host_tensor(), "device": "cpu", "dtype": torch.int16},
    "is_pinned": lambda accelerator: {"tensor": _host_tensor()},
    "on_accelerator": lambda accelerator: {"tensor": torch.ones(3, device=accelerator.device_type)},
    "get_op_builder": lambda accelerator: {"class_name": _BUILDER},
    "create_op_builder": lambda accelerator: {"class_name": _BUILDER},
    "op_compiler": lambda accelerator: {"suffix": ".cpp"},
    "op_compile_flags": lambda accelerator: {"suffix": ".cpp", "portable": True},
    "op_link_flags": lambda accelerator: {"suffixes": (".cpp",)},
    "build_extension": _nothing,
    "lazy_call": lambda accelerator: {"callback": int},
    "set_compile_backend": lambda accelerator: {"backend": "eager"},
    "range_push": lambda accelerator: {"msg": "a range", "domain": None, "category": None},
    "range_pop": lambda accelerator: {"domain": None},
    "set_visible_devices_envs": lambda accelerator: {"current_env": {}, "local_accelerator_ids": [0]},
}  # fmt: skip
"""By name, makes the arguments of a call, in their order."""
_OFTEN = 16
"""How many times a method without arguments is called in a row."""


@check(
    *_ARGUMENTS,
    promise="A method changes only what it is for, gives the same each time, and takes arguments by place "
    "and by name.",
    timeout_s=240, once=True,
)  # fmt: skip
def calls_change_nothing_else(accelerator: Accelerator) -> None:
    accelerator.init()
    with _marked_state(accelerator) as marked:
        marked()
        for name, make in _ARGUMENTS.items():
            with suppress(UnsupportedError, CompilerNotFoundError):
                _require_no_side_effect(accelerator, name, make, marked)
            if name in _CHANGES:
                marked()


def _require_no_side_effect(
    accelerator: Accelerator, name: str, make: Make, marked: Callable[[], None]
) -> None:
    method = getattr(accelerator, name)
    given = make(accelerator)
    _outcome(accelerator, method, *given.values())  # the first call may import and set up what it needs
    results: list[Any] = []
    states: list[Mapping[str, object]] = []
    by_place = f"{name}({', '.join(map(_told, given.values()))})"
    by_name = f"{name}({', '.join(f'{key}={_told(value)}' for key, value in given.items())})"
    ways: list[tuple[str, Callable[[], Any]]] = [
        (by_place, lambda: method(*given.values())), (by_name, lambda: method(**given)),
    ]  # fmt: skip
    for told, call in ways[: 2 if given else 1]:
        if name in _CHANGES:
            marked()
        given = make(accelerator)
        before = _state(accelerator)
        results.append(_outcome(accelerator, call))
        if "current_env" in given:
            results[-1] = given["current_env"]
        after = _state(accelerator)
        states.append(after)
        for what, value in before.items():
            allowed = what.startswith(_CHANGES.get(name, ()))
            require(
                allowed or after.get(what) == value,
                f"{told} changes {what}{_from_to(value, after.get(what))}",
            )
    figure = is_host(accelerator) and "memory" in name  # of the whole process
    repeated = name not in _DIFFERS and not figure
    if len(results) > 1 and repeated:
        require(
            _agree(results[0], results[1]),
            f"{by_name} gives {results[1]!r:.80}, {by_place} {results[0]!r:.80}",
        )
        for what, value in states[0].items():
            require(states[1].get(what) == value, f"{by_name} leaves another state of {what} than {by_place}")
    if not _CHANGES.get(name) and "current_env" not in given:
        _require_the_same_each_time(accelerator, name, lambda: method(**given), results[0], repeated)


def _require_the_same_each_time(
    accelerator: Accelerator, name: str, call: Callable[[], Any], first: Any, repeated: bool
) -> None:
    """Fails the check if one of many calls gives something else, or they leave memory allocated."""
    indices = range(0 if is_host(accelerator) else len(device_names(accelerator)))
    before = [accelerator.memory_allocated(index) for index in indices]
    for number in range(_OFTEN):
        again = _outcome(accelerator, call)
        require(
            type(again) is type(first) and (not repeated or _agree(again, first)),
            f"call {number + 2} of {name}() gives {again!r:.80}, the first one {first!r:.80}",
        )
    again = None

    def grown() -> bool:
        return any(accelerator.memory_allocated(index) > before[index] for index in indices)

    if grown():
        gc.collect()
        require(not grown(), f"{_OFTEN} calls of {name}() leave memory allocated")


def _outcome(accelerator: Accelerator, call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns; of a context manager, what is current within it."""
    result = call(*arguments)
    if isinstance(result, AbstractContextManager) and not isinstance(
        result, (torch.Stream, accelerator.Stream)
    ):
        with result:
            return [accelerator.current_device(), accelerator.current_stream()]
    return result


def _agree(first: Any, second: Any) -> bool:
    """Whether two results are the same; of objects that cannot be compared, whether their types are."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        alike = (first.dtype, first.shape, first.device) == (second.dtype, second.shape, second.device)
        return alike and (first.dtype == torch.int16 or torch.equal(first, second))  # not set: pin_empty_like
    if isinstance(first, (list, tuple)) and type(first) is type(second) and len(first) == len(second):
        return all(map(_agree, first, second))
    return type(first) is type(second) and (first == second or _is_compared_by_identity(first))


def _is_compared_by_identity(value: object) -> bool:
    return getattr(type(value), "__eq__", None) is getattr(object, "__eq__")  # noqa: B009


def _state(accelerator: Accelerator) -> dict[str, object]:
    """What a method may not change unless that is what it is for."""
    found = dict(ambient.look(accelerator))
    found.update({f"the variable {key}": value for key, value in os.environ.items()})
    found.pop("the environment", None)
    readings: dict[str, Callable[[], object]] = {
        "Python's random numbers": random.getstate,
        "whether garbage is collected": gc.isenabled,
        "the handler of SIGINT": lambda: signal.getsignal(signal.SIGINT),
        "the handler of SIGTERM": lambda: signal.getsignal(signal.SIGTERM),
        _BACKEND: accelerator.get_compile_backend,
    }
    if not is_host(accelerator):
        readings["the host's random numbers"] = lambda: bytes(torch.get_rng_state().numpy())
    for index, name in enumerate(device_names(accelerator)):
        readings[f"the {_RANDOM} device {name}"] = partial(_random_state, accelerator, index)
        if not is_host(accelerator):  # whose figures are those of the whole process
            readings[f"the allocated memory of {name}"] = partial(accelerator.memory_allocated, index)
            readings[f"{_PEAKS} {name}"] = partial(accelerator.max_memory_allocated, index)
            readings[f"{_COUNTED} {name}"] = partial(_counts_allocations, accelerator, index)
            readings[f"{_RESERVED} memory of {name}"] = partial(accelerator.memory_reserved, index)
    for what, read in readings.items():
        with suppress(UnsupportedError, NotImplementedError):
            found[what] = read()
    return found


def _random_state(accelerator: Accelerator, index: int) -> bytes:
    return bytes(accelerator.get_rng_state(index).numpy())


def _counts_allocations(accelerator: Accelerator, index: int) -> bool:
    return int(accelerator.memory_stats(index).get("allocated_bytes.all.allocated", 0)) >= MIB


@contextmanager
def _marked_state(accelerator: Accelerator) -> Iterator[Callable[[], None]]:
    """A block with a state that shows changes: the last device and streams of their own are current, each
    device has its own random numbers, some memory in use, a higher peak and memory that is kept for later.

    Yields:
        A function that makes that state again.
    """
    names = device_names(accelerator)
    kept = [torch.ones((index + 1) * MIB // 4, device=name) for index, name in enumerate(names)]
    backend = accelerator.get_compile_backend()
    states = accelerator.get_rng_state_all()
    host = torch.get_rng_state()
    with streams_of_their_own(accelerator):
        streams = [accelerator.current_stream(index) for index in range(len(names))]

        def mark() -> None:
            for index, name in enumerate(names):
                with accelerator.device(index):
                    accelerator.manual_seed(index + 1)
                torch.empty(4 * MIB, device=name)
            for stream in streams:
                accelerator.set_stream(stream)
            if len(names) > 1:
                accelerator.set_device(len(names) - 1)
            accelerator.set_compile_backend(backend)

        try:
            yield mark
        finally:
            accelerator.set_compile_backend(backend)
            accelerator.set_rng_state_all(states)
            torch.set_rng_state(host)
            del kept


def _told(value: object) -> str:
    if isinstance(value, (torch.Tensor, list, Exception)):
        return f"a {type(value).__name__}"
    return f"{value!r:.40}"


def _from_to(before: object, after: object) -> str:
    if isinstance(before, (bytes, tuple)):
        return ""
    return f" from {before!r:.60} to {after!r:.60}"
