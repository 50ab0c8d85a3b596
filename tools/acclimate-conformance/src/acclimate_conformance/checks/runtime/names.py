"""Checks that torch's own functions for devices, as in torch.accelerator, do what acclimate's do.

torch's compilers, loaders and checkpoints call these, not acclimate's.
"""

from __future__ import annotations

import inspect
import io
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from acclimate.accelerator import Accelerator, HostStream
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    all_told,
    device_names,
    equal,
    is_host,
    require_close,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.device_arguments import ways_to_name
from acclimate_conformance.checks.errors import DeliberateError
from acclimate_conformance.checks.memory.allocations import fill

_Noted = Callable[[bool, str], None]
_SIZE = 4 << 20


def _modules(accelerator: Accelerator) -> dict[str, Any]:
    """torch's modules for this device, by name."""
    if is_host(accelerator):
        raise NotOfferedError("torch's functions for devices are not those of a host")
    found: dict[str, Any] = {}
    own = getattr(torch, accelerator.device_type, None)
    if own is not None:
        found[f"torch.{accelerator.device_type}"] = own
    known = torch.accelerator.current_accelerator()
    if known is not None and known.type == accelerator.device_type:
        found["torch.accelerator"] = torch.accelerator
    if not found:
        raise NotOfferedError("torch has no functions for it")
    with suppress(ImportError, NotImplementedError):  # the compiler does not know each device
        from torch._dynamo.device_interface import get_interface_for_device

        found[f"the compiler's interface of {accelerator.device_type}"] = get_interface_for_device(
            accelerator.device_type
        )
    return found


def _functions(module: Any, *names: str, given: tuple[Any, ...] = (0,)) -> dict[str, Callable[..., Any]]:
    """The functions of these names that a module has, and that take these arguments, by their names."""
    found: dict[str, Callable[..., Any]] = {}
    for name in names:
        function = getattr(module, name, None)
        if callable(function):
            with suppress(TypeError, NotImplementedError, RuntimeError):  # as torch.mps.synchronize(0) does
                with suppress(ValueError):  # a function of C++ has no signature
                    inspect.signature(function).bind(*given)
                function(*given)
                found[name] = function
    return found


@check(
    "current_device",
    "set_device",
    "device",
    "device_count",
    "synchronize",
    "current_stream",
    promise="torch's own functions for the device mean the same devices and streams as acclimate's.",
    of="tensors",
)
def devices_of_torch(accelerator: Accelerator) -> None:
    names = device_names(accelerator)
    indices = range(len(names))
    kind = accelerator.device_type
    with all_told() as noted:
        for where, module in _modules(accelerator).items():
            for name, count in _functions(module, "device_count", given=()).items():
                noted(
                    count() == len(names), f"{where}.{name}() is {count()}, and device_count() {len(names)}"
                )
            for here in indices:
                accelerator.set_device(here)
                for name, current in _functions(
                    module, "current_device", "current_device_index", given=()
                ).items():
                    noted(current() == here, f"{where}.{name}() is {current()} while {here} is current")
                for there in indices:
                    _note_contexts(accelerator, where, module, here, there, noted)
                    for name, setter in _functions(module, "set_device", "set_device_index").items():
                        for device in (there, torch.device(kind, there)):
                            accelerator.set_device(here)
                            setter(device)
                            now = accelerator.current_device()
                            noted(now == there, f"{where}.{name}({device!r}) makes {now} the current device")
                    accelerator.set_device(here)
                    for name, wait in _functions(module, "synchronize").items():
                        wait(there)
                        now = accelerator.current_device()
                        noted(now == here, f"{where}.{name}({there}) makes {now} the current device")
                    _note_streams(accelerator, where, module, there, noted)
                    _note_exchanges(accelerator, where, module, here, there, noted)
                made = torch.empty(1, device=kind).device
                noted(made.index in (None, here), f"a tensor is made on {made} while {here} is current")


def _note_exchanges(
    accelerator: Accelerator, where: str, module: Any, here: int, there: int, noted: _Noted
) -> None:
    """Functions that set a device, if it is not negative, and return which one was current."""
    names = ("exchange_device", "maybe_exchange_device", "_exchange_device", "_maybe_exchange_device")
    for name, exchange in _functions(module, *names).items():
        for given, wanted in ((there, there), (-1, here)):
            accelerator.set_device(here)
            before = exchange(given)
            now = accelerator.current_device()
            noted(before == here, f"{where}.{name}({given}) returns {before} while {here} is current")
            noted(now == wanted, f"{where}.{name}({given}) makes {now} the current device, which was {here}")
    accelerator.set_device(here)


def _note_contexts(
    accelerator: Accelerator, where: str, module: Any, here: int, there: int, noted: _Noted
) -> None:
    """A context of a device can be entered again, from other devices, and ends with errors."""
    for name, make in _functions(module, "device", "device_index").items():
        accelerator.set_device(here)
        block = make(there)
        told = f"{where}.{name}({there})"
        other = len(device_names(accelerator)) - 1 - here
        for outer in (here, other, here):
            accelerator.set_device(outer)
            with block:
                now = accelerator.current_device()
                noted(now == there, f"within {told}, entered on {outer}, {now} is current")
            now = accelerator.current_device()
            noted(now == outer, f"after {told}, entered on {outer}, {now} is current")
            with suppress(DeliberateError), block:
                raise DeliberateError
            now = accelerator.current_device()
            noted(now == outer, f"after an error within {told}, entered on {outer}, {now} is current")
    for name, make in _functions(module, "device").items():
        with accelerator.device(there):
            for unnamed in (accelerator.device_type, torch.device(accelerator.device_type)):
                try:
                    block = make(unnamed)
                except (TypeError, ValueError, RuntimeError):  # it may take devices with an index only
                    continue
                with block:
                    now = accelerator.current_device()
                noted(now == there, f"within {where}.{name}({unnamed!r}) {now} is current, which was {there}")
    for name, make in _functions(module, "device_of", given=(torch.empty(1),)).items():
        accelerator.set_device(here)
        with make(torch.empty(1, device=device_names(accelerator)[there])):
            now = accelerator.current_device()
        noted(now == there, f"within {where}.{name}() of a tensor on device {there}, {now} is current")
    accelerator.set_device(here)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two objects are one stream: torch's own class and a vendor's need not be equal by ``==``."""
    if one == other:
        return True
    ours, theirs = ((s.device, s.stream_id) if hasattr(s, "stream_id") else s for s in (one, other))
    return bool(ours == theirs)


def _note_streams(accelerator: Accelerator, where: str, module: Any, there: int, noted: _Noted) -> None:
    if issubclass(accelerator.Stream, HostStream):
        return
    for name, current in _functions(module, "current_stream").items():
        with accelerator.device(there):
            side = accelerator.Stream()
            with accelerator.stream(side):
                noted(_is_same(current(), side), f"{where}.{name}() within stream(s) is not s")
                noted(_is_same(current(there), side), f"{where}.{name}({there}) within stream(s) is not s")
            same = _is_same(current(), accelerator.current_stream())
            noted(same, f"{where}.{name}() is not current_stream()")
    for name, setter in _functions(module, "set_stream", given=(accelerator.current_stream(),)).items():
        with accelerator.device(there):
            before, side = accelerator.current_stream(), accelerator.Stream()
            setter(side)
            same = _is_same(accelerator.current_stream(), side)
            noted(same, f"{where}.{name}(s) does not make s current")
            setter(before)


@check(
    "current_device", "get_rng_state", "set_rng_state", "torch_module", "supported_dtypes",
    "get_device_properties", "total_memory",
    promise="What torch's compilers, checkpoints and loaders ask the device's module for is true of each "
    "device, and leaves all as it was.",
    of="tensors",
)  # fmt: skip
def tools_of_torch(accelerator: Accelerator) -> None:
    names = device_names(accelerator)
    modules = _modules(accelerator)
    last = len(names) - 1
    with all_told() as noted:
        for index, name in enumerate(names):
            for given in (name, torch.device(name), accelerator.device_type):
                module = torch.get_device_module(given)
                noted(module is accelerator.torch_module, f"get_device_module({given!r}) is {module!r:.60}")
            for where, module in modules.items():
                for current in {0, last}:
                    accelerator.set_device(current)
                    _note_what_is_told(accelerator, where, module, index, noted)
        for current in {0, last}:
            accelerator.set_device(current)
            _note_states_of_checkpoints(accelerator, names, noted)
            _note_forks_of_all(accelerator, names, noted)
            now = accelerator.current_device()
            noted(now == current, f"torch's checkpoints make {now} the current device, which was {current}")
        _note_loaded_elsewhere(accelerator, noted)


def _note_what_is_told(accelerator: Accelerator, where: str, module: Any, index: int, noted: _Noted) -> None:
    """Properties, a stream's number, and which dtypes a compiler may generate code for."""
    for name, tell in _functions(module, "get_device_properties", given=(index,)).items():
        total = getattr(tell(index), "total_memory", None)
        wanted = accelerator.get_device_properties(index).total_memory
        noted(total in (None, wanted), f"{where}.{name}({index}).total_memory is {total}, not {wanted}")
    supported = accelerator.supported_dtypes()
    for name, supports in _functions(module, "is_dtype_supported", given=(torch.float32,)).items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            told = bool(supports(dtype))
            noted(
                told or dtype not in supported,
                f"{where}.{name}({dtype}) is {told}, and supported_dtypes() has {supported}",
            )
    for name, supports in _functions(module, "is_bf16_supported", given=()).items():
        told = bool(supports())
        noted(
            told or not accelerator.is_bf16_supported(), f"{where}.{name}() is {told}, not that of acclimate"
        )
    if issubclass(accelerator.Stream, HostStream):
        return
    with accelerator.device(index):
        side = accelerator.Stream()
    for name, number in _functions(module, "get_raw_stream", given=(index,)).items():
        before = number(index)
        with accelerator.stream(side):
            within = number(index)
        noted(before != within, f"{where}.{name}({index}) is {before} on the default stream and on another")
        noted(number(index) == before, f"{where}.{name}({index}) is another one after a block with a stream")
    setter = getattr(module, "_set_stream_by_id", None)
    if setter is not None and hasattr(side, "stream_id"):
        with accelerator.device(index):
            usual = accelerator.current_stream()
            with suppress(NotImplementedError):
                setter(side.stream_id, side.device_index, side.device_type)
                same = _is_same(accelerator.current_stream(), side)
                noted(same, f"{where}._set_stream_by_id() of a stream does not make it current")
            accelerator.set_stream(usual)


def _note_states_of_checkpoints(accelerator: Accelerator, names: list[str], noted: _Noted) -> None:
    """What torch.utils.checkpoint saves of the devices of its tensors, and restores there."""
    tensors = [torch.ones(2, device=name) for name in names]
    for name in names:
        torch.rand(3, device=name)
    indices, states = get_device_states(*tensors, torch.ones(1))
    wanted = [index for index, tensor in enumerate(tensors) if tensor.device.index is not None]
    noted(sorted(indices) == wanted, f"get_device_states() is of the devices {indices}, not {wanted}")
    first = [torch.rand(9, device=names[index]).cpu() for index in indices]
    set_device_states(indices, states, device_type=accelerator.device_type)
    for index, numbers in zip(indices, first, strict=True):
        again = torch.rand(9, device=names[index]).cpu()
        noted(equal(again, numbers), f"set_device_states() does not repeat the numbers of {names[index]}")


def _note_forks_of_all(accelerator: Accelerator, names: list[str], noted: _Noted) -> None:
    """torch.random.fork_rng without devices keeps the states of all."""
    before = [accelerator.get_rng_state(index).clone() for index in range(len(names))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather be told the devices
        with torch.random.fork_rng(device_type=accelerator.device_type):
            for name in names:
                torch.rand(3, device=name)
    for index, state in enumerate(before):
        same = equal(accelerator.get_rng_state(index), state)
        noted(same, f"fork_rng() of all devices does not restore the state of device {index}")


def _note_loaded_elsewhere(accelerator: Accelerator, noted: _Noted) -> None:
    """A saved storage tells its device, and torch.load refuses devices that are absent."""
    absent = f"{accelerator.device_type}:{accelerator.device_count() + 5}"
    for name in device_names(accelerator):
        storage = torch.ones(3, device=name).untyped_storage()
        tag = torch.serialization.location_tag(storage)
        noted(tag == name, f"torch.serialization.location_tag() of a storage on {name} is {tag!r}")
        file = io.BytesIO()
        torch.save(torch.ones(3, device=name), file)
        for place in (absent, torch.device(absent), {name: absent}):
            file.seek(0)
            try:
                torch.load(file, map_location=place)
            except RuntimeError:
                continue
            noted(False, f"torch.load(map_location={place!r}) accepts a device that is not here")


@check(
    "memory_allocated",
    "memory_reserved",
    "max_memory_allocated",
    "reset_peak_memory_stats",
    "memory_stats",
    "empty_cache",
    promise="torch's own figures of the device's memory are acclimate's, for each device.",
    of="tensors",
)
def figures_of_torch(accelerator: Accelerator) -> None:
    names = device_names(accelerator)
    figures = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    with all_told() as noted:
        for where, module in _modules(accelerator).items():
            held = [fill(accelerator, (index + 2) * _SIZE, name) for index, name in enumerate(names)]
            dropped = [fill(accelerator, 3 * _SIZE, name) for name in names]
            del dropped
            for index in range(len(names)):
                for name, figure in _functions(module, *figures).items():
                    wanted = getattr(accelerator, name)(index)
                    for device in ways_to_name(accelerator, index):
                        if isinstance(device, str) and where == "torch.accelerator":
                            continue
                        found = figure(device)
                        noted(
                            found == wanted, f"{where}.{name}({device!r}) is {found}, and {name}() {wanted}"
                        )
                    with accelerator.device(index):
                        found = figure()
                    noted(
                        found == wanted,
                        f"{where}.{name}() on {names[index]} is {found}, and {name}() {wanted}",
                    )
                for name, stats in _functions(module, "memory_stats").items():
                    ours = accelerator.memory_stats(index)
                    for key, value in dict(stats(index)).items():
                        same = key not in ours or ours[key] == value or key == "max_split_size"
                        noted(
                            same,
                            f'{where}.{name}({index})["{key}"] is {value}, and memory_stats() '
                            f"{ours.get(key)}",
                        )
                for name, reset in _functions(module, "reset_peak_memory_stats").items():
                    others = [accelerator.max_memory_allocated(i) for i in range(len(names))]
                    reset(index)
                    for other in range(len(names)):
                        now, before = accelerator.max_memory_allocated(other), others[other]
                        is_right = (
                            now == accelerator.memory_allocated(other) if other == index else now == before
                        )
                        noted(
                            is_right, f"after {where}.{name}({index}) max_memory_allocated({other}) is {now}"
                        )
            del held


@check(
    "get_rng_state",
    "set_rng_state",
    "manual_seed",
    "manual_seed_all",
    "initial_seed",
    "random",
    promise="torch's own functions for the device's random numbers are those of the device that is named.",
    of="tensors",
)
def random_numbers_of_torch(accelerator: Accelerator) -> None:
    names = device_names(accelerator)
    indices = range(len(names))

    def draw(name: str) -> torch.Tensor:
        return torch.rand(65, device=name).cpu()

    def states() -> list[torch.Tensor]:
        return [accelerator.get_rng_state(index).clone() for index in indices]

    with all_told() as noted:
        for where, module in _modules(accelerator).items():
            has = _functions(module, "get_rng_state")
            has |= _functions(module, "set_rng_state", given=(accelerator.get_rng_state(0), 0))
            for index in indices if len(has) == 2 else ():
                for other in indices:
                    accelerator.set_device(other)
                    for device in ways_to_name(accelerator, index):
                        accelerator.manual_seed_all(other + 3)
                        torch.rand(index + 1, device=names[index])
                        saved = has["get_rng_state"](device).clone()
                        wanted = accelerator.get_rng_state(index)
                        noted(equal(saved, wanted), f"{where}.get_rng_state({device!r}) is another device's")
                        first, before = draw(names[index]), states()
                        has["set_rng_state"](saved, device)
                        again = draw(names[index])
                        told = f"{where}.set_rng_state(state, {device!r}) while {other} is current"
                        noted(equal(again, first), f"{told} does not repeat the numbers")
                        now = states()
                        for third in indices:
                            noted(
                                equal(now[third], before[third]),
                                f"{told} changes the state of device {third}",
                            )
                    with accelerator.device(index):
                        own = has["get_rng_state"]()
                    noted(
                        equal(own, accelerator.get_rng_state(index)),
                        f"{where}.get_rng_state() on {names[index]} is another device's",
                    )
            for name, seeding in _functions(module, "manual_seed_all", given=(1,)).items():
                accelerator.manual_seed_all(1)
                seeding(29)
                found = [draw(n) for n in names]
                accelerator.manual_seed_all(29)
                for index in indices:
                    noted(
                        equal(draw(names[index]), found[index]),
                        f"{where}.{name}(29) does not seed {names[index]}",
                    )
        _note_forks(accelerator, names, noted)


def _note_forks(accelerator: Accelerator, names: list[str], noted: _Noted) -> None:
    """torch.random.fork_rng keeps the states of the devices that it is given, even after an error."""
    kind = accelerator.device_type
    if not _functions(getattr(torch, kind, None), "get_rng_state"):
        return  # fork_rng() calls it with a device
    for kept in ([0], [len(names) - 1], list(range(len(names)))):
        for given in (kept, [names[index] for index in kept]):
            for fails in (False, True):
                before = [accelerator.get_rng_state(i).clone() for i in range(len(names))]
                with suppress(DeliberateError), torch.random.fork_rng(devices=given, device_type=kind):
                    for name in names:
                        torch.rand(3, device=name)
                    if fails:
                        raise DeliberateError
                for index, state in enumerate(before):
                    restored = equal(accelerator.get_rng_state(index), state)
                    noted(
                        restored == (index in kept),
                        f"fork_rng(devices={given}){' with an error in it' * fails} "
                        f"{'restores' if restored else 'does not restore'} the state of device {index}",
                    )
    kept_state = accelerator.get_rng_state(0).clone()
    with torch.random.fork_rng(devices=[0], device_type=kind, enabled=False):
        torch.rand(3, device=names[0])
    noted(not equal(accelerator.get_rng_state(0), kept_state), "fork_rng(enabled=False) restores a state")


@check(
    "current_device",
    "current_device_name",
    promise="Hooks and functions of backward() run with their tensors' device current, in any thread.",
    of="tensors",
)
def backward_runs_on_its_device(accelerator: Accelerator) -> None:
    if is_host(accelerator):
        raise NotOfferedError("a host is one device")
    names = device_names(accelerator)
    kind = accelerator.device_type
    seen: list[str] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(f"{accelerator.current_device()} {torch.zeros(1, device=kind).device}")
            return gradient * 2

    def run(index: int) -> None:
        x = torch.ones(5, device=names[index], requires_grad=True)
        x.register_hook(
            lambda g: seen.append(f"{accelerator.current_device()} {torch.zeros(1, device=kind).device}")
        )
        Noted.apply(x).sum().backward()  # type: ignore[no-untyped-call]
        require_close(x.grad if x.grad is not None else x, torch.full((5,), 2.0), torch.float32, "a gradient")

    with all_told() as noted:
        for current in range(len(names)):
            for index, name in enumerate(names):
                for threaded in (False, True):
                    seen.clear()
                    accelerator.set_device(current)

                    def work(index: int = index, current: int = current) -> None:
                        accelerator.set_device(current)
                        run(index)

                    if threaded:
                        thread = threading.Thread(target=work)
                        thread.start()
                        thread.join()
                    else:
                        work()
                    now = accelerator.current_device()
                    noted(
                        seen == [f"{index} {torch.empty(0, device=name).device}"] * 2,
                        f"in backward() of tensors on {name}, called while {current} is current, the current "
                        f"device and the place of a new tensor are {seen}",
                    )
                    noted(now == current, f"backward() of tensors on {name} makes {now} the current device")
