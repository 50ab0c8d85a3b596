"""Processes that end in every way while the device is in any state, as ranks and workers do.

They are forked from a process that has loaded the accelerator and not used its device, which is faster than
starting each anew.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

import torch
from torch import distributed

from acclimate.accelerator import Accelerator
from acclimate.host.process_status import how_it_ended
from acclimate_conformance.checks.assertions import device_names, in_thread
from acclimate_conformance.checks.target import load
from acclimate_conformance.processes import tail

_ENDS_S = 100.0
_POLL_S = 0.01
_UNUSABLE = 97
"""The exit code of a process that cannot use the device at all: another check is about that."""
_WENT_ON = 96
"""The exit code of a process that something keeps from ending."""
_LENGTH = 1 << 18
_COMPUTED = b"12.0"

_State = Callable[[Accelerator, str, ExitStack], object]
_kept: list[object] = []
"""What a process holds until it ends."""


def ends_in_any_state(source: str) -> list[str]:
    """What is wrong with processes that end in each way, in all states at once.

    Args:
        source: the argument of :func:`acclimate_conformance.checks.target.load`.
    """
    if not hasattr(os, "fork"):
        return []
    with suppress(Exception):  # once, and not in each of the processes
        importlib.import_module("torch._dynamo")
    start = time.monotonic()
    gc.collect()
    gc.freeze()  # what was imported before need not be looked at when a process ends
    try:
        ends = [_Ending(source, way, _STATES) for way in _WAYS]
        found = {ending.way: seen for ending in ends if (seen := ending.wrong())}
        if not found:
            return []
        way, seen = next(iter(found.items()))
        told = f"a process that {way} {seen}, with {', '.join(_STATES)}"
        for state, make in _STATES.items():
            if time.monotonic() - start > _ENDS_S:
                break
            if alone := _Ending(source, way, {state: make}).wrong():
                told = f"with {state} a process that {way} {alone}"
                break
    finally:
        gc.unfreeze()
    return [told, *(f"a process that {other} {seen}" for other, seen in found.items() if other != way)]


class _Ending:
    """A process that makes states of the device and ends.

    Args:
        source: of the accelerator.
        way: how it ends.
        states: what it does before.
    """

    def __init__(self, source: str, way: str, states: Mapping[str, _State]) -> None:
        self.way = way
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by wrong()
        self._reading, writing = os.pipe()
        self._deadline = time.monotonic() + _ENDS_S
        self._process = os.fork()
        if self._process == 0:
            _run(source, way, states, writing, self._errors.fileno())
        os.close(writing)

    def wrong(self) -> str:
        """Waits for the process; says how it ended if that is not what its way means, else nothing."""
        while (status := os.waitpid(self._process, os.WNOHANG))[0] == 0:
            if time.monotonic() > self._deadline:
                os.kill(self._process, signal.SIGKILL)
                os.waitpid(self._process, 0)
                break
            time.sleep(_POLL_S)
        with os.fdopen(self._reading, "rb") as pipe:
            written = pipe.read() if status[0] else b""
        said = tail(self._errors, lines=1)
        self._errors.close()
        wrote = f"; it wrote: {said}" if said else ""
        if status[0] == 0:
            return f"does not end within {_ENDS_S:.0f} s{wrote}"
        code, (_, wanted) = os.waitstatus_to_exitcode(status[1]), _WAYS[self.way]
        if code == _UNUSABLE:
            return ""
        if code == _WENT_ON:
            return "goes on as if nothing had happened"
        is_interrupted = wanted == -signal.SIGINT and code == 1 and said == "KeyboardInterrupt"
        if code != wanted and not is_interrupted:
            return f"{how_it_ended(code)}{wrote}"
        if written and written != _COMPUTED:
            return f"computes {written.decode()} in a function of atexit, not {_COMPUTED.decode()}"
        return ""


def _run(source: str, way: str, states: Mapping[str, _State], writing: int, errors: int) -> NoReturn:
    """The process; ends as its way says."""
    os.dup2(errors, 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        accelerator = load(source).accelerator
        name = device_names(accelerator)[-1]
        accelerator.set_device(len(device_names(accelerator)) - 1)
        ones = torch.ones(_LENGTH, device=name)
        accelerator.synchronize()
    except BaseException:  # noqa: BLE001 - whatever a vendor's code raises
        os._exit(_UNUSABLE)
    _kept.append(ones)
    with ExitStack() as stack:
        for state, make in states.items():
            if state == _AT_EXIT:
                _computes_at_exit(name, writing)
            else:
                with suppress(Exception):  # other checks are about what is lacking
                    _kept.append(make(accelerator, name, stack))
        _WAYS[way][0]()
    os._exit(_WENT_ON)


# -- states --------------------------------------------------------------------------------------


def _copies(accelerator: Accelerator, name: str, stack: ExitStack) -> object:
    pinned = accelerator.pin_memory(torch.ones(_LENGTH))
    there = [pinned.to(name, non_blocking=True) * 2 for _ in range(4)]
    back = accelerator.pin_empty(_LENGTH, dtype=torch.float32)
    return pinned, back.copy_(there[-1], non_blocking=True), there


def _streams(accelerator: Accelerator, name: str, stack: ExitStack) -> object:
    streams = [accelerator.Stream(device=name) for _ in range(3)]
    events = [accelerator.Event(enable_timing=number % 2 == 0) for number in range(3)]
    for stream, event in zip(streams, events, strict=True):
        stack.enter_context(accelerator.stream(stream))
        torch.ones(_LENGTH, device=name).mul_(2)
        event.record()
        streams[0].wait_event(event)
    return streams, events


def _capture(accelerator: Accelerator, name: str, stack: ExitStack) -> object:
    ones, graph = torch.ones(4, device=name), accelerator.create_graph()
    accelerator.synchronize()
    stack.enter_context(accelerator.capture_to_graph(graph))
    return graph, ones.add_(1)


def _replays(accelerator: Accelerator, name: str, stack: ExitStack) -> object:
    ones, graph = torch.ones(_LENGTH, device=name), accelerator.create_graph()
    accelerator.synchronize()
    with accelerator.capture_to_graph(graph):
        ones.add_(1)
    for _ in range(4):
        accelerator.replay_graph(graph)
    return graph, ones


def _blocks(accelerator: Accelerator, name: str, stack: ExitStack) -> object:
    stack.enter_context(accelerator.device(0))
    stack.enter_context(accelerator.amp.autocast(dtype=torch.bfloat16))
    accelerator.range_push("open")
    return torch.ones(4, 4, device=name) @ torch.ones(4, 4, device=name)


def _gradients(accelerator: Accelerator, name: str, stack: ExitStack) -> object:
    given = torch.ones(_LENGTH, device=name, requires_grad=True)
    given.register_hook(lambda gradient: gradient * 2)
    loss = given.exp().sum()
    loss.backward(retain_graph=True)
    return loss, torch.nn.Linear(8, 8, device=name)


def _refusal(accelerator: Accelerator, name: str, stack: ExitStack) -> object:
    try:
        return torch.empty(2 * accelerator.total_memory(), dtype=torch.uint8, device=name)
    except RuntimeError as error:
        return error


def _threads(accelerator: Accelerator, name: str, stack: ExitStack) -> object:
    """A thread that has ended with a stream of its own current, and one that still holds tensors."""

    def works() -> object:
        accelerator.set_stream(accelerator.Stream(device=name))
        return torch.ones(_LENGTH, device=name).mul_(2)

    started = threading.Event()

    def holds() -> None:
        held = works()
        started.set()
        threading.Event().wait()
        del held

    threading.Thread(target=holds, daemon=True).start()
    started.wait(_ENDS_S / 4)
    return in_thread(works)


def _group(accelerator: Accelerator, name: str, stack: ExitStack) -> object:
    """A process group of this process alone, which is over when the process ends."""
    if not (accelerator.supports_collectives and distributed.is_available()):
        return None
    backend = accelerator.communication_backend_name()
    store: Any = getattr(distributed, "HashStore")()  # noqa: B009 - torch does not export it
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        reduced = torch.ones(4, device=name)
        distributed.all_reduce(reduced)
        accelerator.synchronize()
        return reduced
    finally:
        distributed.destroy_process_group()


def _computes_at_exit(name: str, writing: int) -> None:
    """Uses the device once the program has ended, as libraries that save or log then do."""

    def compute() -> None:
        try:
            total = torch.full((4,), 3.0, device=name).sum().float()
            os.write(writing, str(float(total)).encode())
        except Exception as error:  # noqa: BLE001 - told to the process that waits
            os.write(writing, f"{type(error).__name__}: {error}"[:300].encode())

    atexit.register(compute)
    kept = torch.ones(4, device=name)
    _kept.append(weakref.finalize(kept, lambda: torch.ones(4, device=name).add_(1)))
    _kept.append(kept)


_AT_EXIT = "a function of atexit that uses the device"
_STATES: dict[str, _State] = {
    "copies from and to memory of pin_memory() in flight": _copies,
    "gradients and modules": _gradients,
    "an allocation that was refused": _refusal,
    "a process group of communication_backend_name() that was destroyed": _group,
    "a graph whose replay_graph() is queued": _replays,
    "a thread that holds tensors, and one that ended after set_stream()": _threads,
    _AT_EXIT: lambda accelerator, name, stack: None,
    "open blocks of device() and of autocast, and an open range of range_push()": _blocks,
    "an open block of stream(), and events that are recorded": _streams,
    "an open block of capture_to_graph()": _capture,
}
"""What a process does before it ends. A capture is last, as much is refused within it."""


# -- ways to end ---------------------------------------------------------------------------------


class _UncaughtError(BaseException):
    """Not an ``Exception``, of which the program of a child process makes an answer."""


def _fail() -> NoReturn:
    raise _UncaughtError


def _signalled(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(_ENDS_S)


def _terminated_and_exits() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(9))
    _signalled(signal.SIGTERM)


_WAYS: dict[str, tuple[Callable[[], Any], int]] = {
    "calls sys.exit(7)": (lambda: sys.exit(7), 7),
    "ends without cleaning up, by os._exit(5),": (lambda: os._exit(5), 5),
    "raises an error that nothing catches": (_fail, 1),
    "is ended by SIGTERM": (lambda: _signalled(signal.SIGTERM), -signal.SIGTERM),
    "is ended by Ctrl-C": (lambda: _signalled(signal.SIGINT), -signal.SIGINT),
    "calls sys.exit(9) in a handler of SIGTERM": (_terminated_and_exits, 9),
}
"""Each way to end, and the exit code that the process must have, negative for a signal.

Of Ctrl-C in a module that ``python -m`` runs, some releases of Python make exit code 1.
"""
