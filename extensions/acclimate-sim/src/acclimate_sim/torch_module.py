"""``torch.sim``: the functions that torch expects in the module of a device type.

Most of them call ``torch.accelerator``, which supports any device type whose library registers a device guard
and hooks. The others are for torch's random numbers, autocast and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import accelerator

from acclimate.accelerator import DeviceProperties

Stream = torch.Stream
Event = torch.Event

_Result = TypeVar("_Result")


def _of_device(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """A function of ``torch.accelerator`` that takes its device by keyword too, as ``torch.cuda`` does."""

    @wraps(function)
    def call(device: int | str | torch.device | None = None) -> _Result:
        # Dynamo traces these functions with a device or without an argument, not with None.
        return function() if device is None else function(device)

    return call


current_device = accelerator.current_device_index
current_stream = _of_device(accelerator.current_stream)
empty_cache = accelerator.empty_cache
max_memory_allocated = _of_device(accelerator.max_memory_allocated)
max_memory_reserved = _of_device(accelerator.max_memory_reserved)
mem_get_info = _of_device(accelerator.get_memory_info)
memory_allocated = _of_device(accelerator.memory_allocated)
memory_reserved = _of_device(accelerator.memory_reserved)
memory_stats = _of_device(accelerator.memory_stats)
reset_accumulated_memory_stats = _of_device(accelerator.reset_accumulated_memory_stats)
reset_peak_memory_stats = _of_device(accelerator.reset_peak_memory_stats)
set_device = accelerator.set_device_index
set_stream = accelerator.set_stream
synchronize = _of_device(accelerator.synchronize)


def _index(device: int | str | torch.device | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


class device(torch.accelerator.device_index):  # noqa: N801 - torch's name for it
    """A context manager within which a device is the current one; takes an index or a ``torch.device``."""

    def __init__(self, device: int | str | torch.device | None) -> None:
        super().__init__(None if device is None else _index(device))


_initialized = True  # torch's checkpoints read it, and save the RNG state if it is true

_device_count: int | None = None


def device_count() -> int:
    """The number of devices."""
    global _device_count
    if _device_count is None:  # kept, as dynamo can trace a number and not the operator
        _device_count = int(torch.ops.sim.device_count())
    return _device_count


def is_available() -> bool:
    """Whether there is a device; true, as this module exists only with the device."""
    return True


def init() -> None:
    """Does nothing: the device was initialised with this module."""


def is_initialized() -> bool:
    """Whether the device is initialised; true, as this module exists only with the device."""
    return True


def _is_in_bad_fork() -> bool:
    return False  # the device is host memory without threads, so it works in a forked child


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """A context manager within which work is queued on ``stream``; ``None`` changes nothing."""
    from contextlib import nullcontext

    if stream is None:
        return nullcontext()
    if torch.compiler.is_compiling():
        return stream
    # Another object of the same stream: in torch 2.10 one cannot be entered again within itself.
    return torch.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


# -- random numbers ----------------------------------------------------------------------------------


def default_generator(device: int | str | torch.device | None = None) -> torch.Generator:
    """The default generator of a device."""
    generator: torch.Generator = torch.ops.sim.default_generator(_index(device))
    return generator


def manual_seed(seed: int) -> None:
    """Seeds the current device's generator."""
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds every device's generator."""
    for index in range(device_count()):
        default_generator(index).manual_seed(seed)


def seed() -> int:
    """Seeds the current device's generator with a number that is different each time, and returns it."""
    return default_generator().seed()


def seed_all() -> None:
    """Seeds every device's generator with one number that is different each time."""
    manual_seed_all(default_generator(0).seed())


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return default_generator().initial_seed()


def get_rng_state(device: int | str | torch.device | None = None) -> torch.Tensor:
    """The state of a device's generator, on the host."""
    return default_generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: int | str | torch.device | None = None) -> None:
    """Restores what :func:`get_rng_state` returned."""
    default_generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices' generators, on the host."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Restores what :func:`get_rng_state_all` returned."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def set_offset(offset: int, device: int | str | torch.device | None = None) -> None:
    """Raises ``RuntimeError``: the generators of this device have no offset."""
    default_generator(device).set_offset(offset)


def get_offset(device: int | str | torch.device | None = None) -> int:
    """Raises ``RuntimeError``: the generators of this device have no offset."""
    return default_generator(device).get_offset()


# -- properties ----------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that autocast may compute in here."""
    has: Any = torch.accelerator.get_device_capability(0)
    return [dtype for dtype in (torch.float16, torch.bfloat16) if dtype in has["supported_dtypes"]]


def is_bf16_supported() -> bool:
    """Whether the device supports bfloat16, as in ``torch.cuda``."""
    return torch.bfloat16 in get_amp_supported_dtype()


def get_device_properties(device: int | str | torch.device | None = None) -> DeviceProperties:
    """The name and the memory of a device."""
    return DeviceProperties("acclimate's emulated accelerator", mem_get_info(_index(device))[1])


def get_device_name(device: int | str | torch.device | None = None) -> str:
    """The name of a device's hardware."""
    return get_device_properties(device).name
