"""The state that calls of the interface must not change: the current device, streams, autocast, variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from acclimate.accelerator import Accelerator

Ambient = Mapping[str, object]
"""State of the thread or the process: each description with its value."""

_DEVICE, _STREAM = "the current device", "the current stream of device"
_CHANGES: dict[str, tuple[str, ...]] = {
    "set_device": (_DEVICE,),
    "set_stream": (_DEVICE, _STREAM),  # some devices make the stream's device the current one
}
"""The state that each method may change."""


def look(accelerator: Accelerator) -> Ambient:
    """The present state, without values that cannot be read."""
    kind = accelerator.device_type
    readings: dict[str, Callable[[], object]] = {
        _DEVICE: _plain(accelerator, "current_device"),
        "whether autocast is on": lambda: (torch.is_autocast_enabled(kind), torch.is_autocast_enabled("cpu")),
        "autocast's dtype": lambda: (torch.get_autocast_dtype(kind), torch.get_autocast_dtype("cpu")),
        "autocast's cache": torch.is_autocast_cache_enabled,
        "the default dtype": torch.get_default_dtype,
        "whether gradients are recorded": torch.is_grad_enabled,
        "whether anomalies are detected": torch.is_anomaly_enabled,
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled,
        "the precision of float32 products": torch.get_float32_matmul_precision,
        "the number of the host's threads": torch.get_num_threads,
        "the default device": torch.get_default_device,
        "the working directory": os.getcwd,
        "the environment": lambda: dict(os.environ),
    }
    current_stream = _plain(accelerator, "current_stream")
    for index in range(_distinct_devices(accelerator)):
        readings[f"{_STREAM} {index}"] = lambda index=index: current_stream(index)  # type: ignore[misc]
    found: dict[str, object] = {}
    for what, read in readings.items():
        with suppress(Exception):  # another check reports errors of these calls
            found[what] = read()
    return found


def changed(before: Ambient, after: Ambient, method: str = "") -> str:
    """The first difference that ``method`` may not make, as text; empty if there is none."""
    for what, value in before.items():
        if what not in after or what.startswith(_CHANGES.get(method, ())):
            continue
        now = after[what]
        if what == "the environment":
            # A driver may add variables when it starts; variables that existed before belong to the user.
            variables = _variables(value), _variables(now)
            changes = [name for name, text in variables[0].items() if variables[1].get(name) != text]
            if changes:
                return f"the environment variable {changes[0]}, now {variables[1].get(changes[0])!r}"
        elif now != value:
            return f"{what} from {value} to {now}"
    return ""


def follows(accelerator: Accelerator, before: Ambient, after: Ambient) -> str:
    """The stream that is told of a device as another device is the current one, as text; mostly nothing.

    Such an answer changes with each ``set_device()``, which is then not at fault: it changes back as well.
    """
    here, there = after.get(_DEVICE), before.get(_DEVICE)
    if here == there or not isinstance(here, int) or not isinstance(there, int):
        return ""
    changes = [name for name in after if name.startswith(_STREAM) and after[name] != before.get(name)]
    set_device = _plain(accelerator, "set_device")
    try:
        set_device(there)
        back = look(accelerator)
    finally:
        set_device(here)
    again = look(accelerator)
    for name in changes:
        if name in before and back.get(name) == before[name] and again.get(name) == after[name]:
            index = name.removeprefix(_STREAM).strip()
            return (
                f"current_stream({index}) is {before[name]} while device {there} is the current one, and "
                f"{after[name]} while device {here} is"
            )
    return ""


def device_of(accelerator: Accelerator) -> object:
    """The current device."""
    return _plain(accelerator, "current_device")()


def return_to(accelerator: Accelerator, before: Ambient) -> None:
    """Makes the device current that was so in an earlier state."""
    device = before.get(_DEVICE)
    if isinstance(device, int):
        _plain(accelerator, "set_device")(device)


@contextmanager
def restored(accelerator: Accelerator, tell: Callable[[str], None]) -> Iterator[None]:
    """A block after which state is as it was before; what had changed, except the device, is told as text."""
    before = look(accelerator)
    try:
        yield
    finally:
        change = changed(before, look(accelerator), "set_device")
        if change:
            tell(change)
            _restore(accelerator.device_type, before)


def _restore(kind: str, state: Ambient) -> None:
    setters: dict[str, Callable[[Any], object]] = {
        "whether autocast is on": lambda both: list(map(torch.set_autocast_enabled, (kind, "cpu"), both)),
        "autocast's dtype": lambda both: list(map(torch.set_autocast_dtype, (kind, "cpu"), both)),
        "autocast's cache": torch.set_autocast_cache_enabled,
        "the default dtype": torch.set_default_dtype,
        "whether gradients are recorded": torch.set_grad_enabled,
        "whether anomalies are detected": torch.autograd.set_detect_anomaly,
        "whether algorithms are deterministic": torch.use_deterministic_algorithms,
        "the precision of float32 products": torch.set_float32_matmul_precision,
        "the number of the host's threads": torch.set_num_threads,
        "the default device": torch.set_default_device,
        "the working directory": os.chdir,
        "the environment": os.environ.update,
    }
    for what, restore in setters.items():
        if what in state:
            restore(state[what])


def _variables(value: object) -> dict[str, str]:
    return value if isinstance(value, dict) else {}


def _plain(accelerator: Accelerator, name: str) -> Callable[..., Any]:
    """A method of the accelerator's class, without the recording of calls."""
    method: Callable[..., Any] = getattr(type(accelerator), name).__get__(accelerator)
    return method


def _distinct_devices(accelerator: Accelerator) -> int:
    if accelerator.device_type == torch.zeros(1).device.type:
        return 1
    with suppress(Exception):
        return int(_plain(accelerator, "device_count")())
    return 0
