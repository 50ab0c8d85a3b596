"""Whether methods accept a device as an index, a name, a ``torch.device``, or ``None``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from acclimate.accelerator import Accelerator, DeviceLike, HostStream
from acclimate.errors import InvalidDeviceError
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import BrokenPromiseError, device_names, refused, require

Methods = Mapping[str, Callable[[DeviceLike], object]]
"""By name, a method that takes a device."""
_VALUES = (bool, int, float, str, tuple, list, dict, torch.Tensor)
"""Types of results that are data; others are objects, such as context managers."""
_ROUNDS = 3  # other processes use the devices too


def methods_of(accelerator: Accelerator, *names: str) -> dict[str, Callable[..., Any]]:
    """The accelerator's methods of these names, by name."""
    return {name: getattr(accelerator, name) for name in names}


def has_indices(accelerator: Accelerator) -> bool:
    """Whether torch distinguishes the devices; the host is one device."""
    return torch.empty(1, device=accelerator.device_type).device.index is not None


def ways_to_name(accelerator: Accelerator, index: int) -> Iterator[DeviceLike]:
    """Every way to name one device: its index, its name, and torch's object."""
    name = device_names(accelerator)[index]
    yield from (index, name, torch.device(name))


def require_device_arguments(accelerator: Accelerator, methods: Methods) -> str | None:
    """Fails the check if a method depends on how a device is named, or accepts one that does not exist.

    A method that returns nothing shows its device by an effect: ``methods`` then has a function that calls it
    and returns the effect. Each device has a stream that is not the default one, which no method may change.

    Returns:
        A note if torch does not distinguish the devices, so that any index means the same device.
    """
    with streams_of_their_own(accelerator):
        _require_accepted(accelerator, methods)
        return _require_refused(accelerator, methods)


@contextmanager
def streams_of_their_own(accelerator: Accelerator) -> Iterator[None]:
    """A block in which the current stream of each device is a new one, as :mod:`ambient` then notices."""
    if not has_indices(accelerator) or issubclass(accelerator.Stream, HostStream):
        yield
        return
    here = accelerator.current_device()
    names = device_names(accelerator)
    before = [accelerator.current_stream(index) for index in range(len(names))]
    for name in names:
        accelerator.set_stream(accelerator.Stream(device=name))
    accelerator.set_device(here)  # some devices make the stream's device the current one
    try:
        yield
    finally:
        here = accelerator.current_device()
        for stream in before:
            accelerator.set_stream(stream)
        accelerator.set_device(here)


def _require_accepted(accelerator: Accelerator, methods: Methods) -> None:
    kind = accelerator.device_type
    for index in range(len(device_names(accelerator))):
        by_name = list(ways_to_name(accelerator, index))
        unnamed: list[DeviceLike] = [None, kind, torch.device(kind)]
        for name, use in methods.items():
            for device in by_name:
                _require_same(accelerator, name, use, device, index)
            for key in set(inspect.signature(use).parameters) & {"device", "device_index"}:
                _require_same(accelerator, name, use, index, index, key)
            with accelerator.device(index):
                for device in unnamed:
                    _require_same(accelerator, name, use, device, index)


def _require_same(
    accelerator: Accelerator, name: str, use: Callable[..., object], device: DeviceLike, index: int,
    key: str = "",
) -> None:  # fmt: skip
    """Fails the check if one way to name a device, or to pass it, gives another result than the index."""
    differing, told = "", f"{name}({key}{key and '='}{device!r})"
    by_index = functools.partial(use, index)
    other = functools.partial(use, **{key: device}) if key else functools.partial(use, device)
    for _ in range(_ROUNDS):
        try:
            before, found, after = (_comparable(accelerator, call()) for call in (by_index, other, by_index))
        except Exception as error:
            raise BrokenPromiseError(f"{told} raises {describe(error, whole=True)}") from error
        require(
            type(found) is type(before) or not isinstance(before, _VALUES),
            f"{told} is a {type(found).__name__}, {name}({index}) a {type(before).__name__}",
        )
        # What changes by itself, or is a new object each time, cannot be compared.
        stable = has_indices(accelerator) and _agree(before, after)
        if not stable or _agree(before, found):
            return
        differing = f"{told}, with device {index} meant, gives {found!r:.80}, not {before!r:.80}"
    raise BrokenPromiseError(differing)


def _comparable(accelerator: Accelerator, result: object) -> object:
    """The result of a method; for a context manager that sets the current device, that device.

    The objects may differ: None may give one that does nothing, and an index one that is reused.
    """
    if isinstance(result, AbstractContextManager) and not isinstance(
        result, (torch.Stream, accelerator.Stream)
    ):
        with result:
            return accelerator.current_device()
    return result


def _agree(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return bool(first == second)


def _require_refused(accelerator: Accelerator, methods: Methods) -> str | None:
    others = ("meta", "meta:0")  # another type alone, and with a number that is one of a device here
    absent: list[DeviceLike] = [*others, *(torch.device(name) for name in others), "no such device"]
    count = accelerator.device_count()
    if has_indices(accelerator):
        beyond = f"{accelerator.device_type}:{count}"
        absent += [count, -1, beyond, torch.device(beyond)]
    there = ", ".join(device_names(accelerator))
    for name, use in methods.items():
        for device in absent:
            with refused(f"{name}({device!r}), with the devices {there},", InvalidDeviceError):
                use(device)
    if has_indices(accelerator):
        return None
    return "its devices have no names of their own, so every index is valid"
