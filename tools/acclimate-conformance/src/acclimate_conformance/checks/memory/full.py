"""Checks of a full device: whoever finds no room says so in one way, and there is room again afterwards."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from acclimate.accelerator import Accelerator
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import (
    MIB,
    NotOfferedError,
    all_told,
    device_names,
    is_host,
)
from acclimate_conformance.checks.capturing import offers_graphs
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.memory.allocations import pass_back_many, release, require_figures, settle

_LEFT = MIB
"""What is left of a device that counts as full."""
_COUNT = 1 << 22
"""How many numbers a result has that does not fit: in one byte each they take four times what is left."""
_SIDE = 1 << 11
_LARGEST = 1 << 44


def _fill(accelerator: Accelerator, name: str) -> list[torch.Tensor]:
    """Takes the memory of a device, in larger and then smaller parts, and writes to none of it."""
    index = torch.device(name).index or 0
    held: list[torch.Tensor] = []
    size = min(_LARGEST, accelerator.total_memory(index))
    while size >= _LEFT:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=name))
        except Exception as error:
            if not accelerator.is_out_of_memory(error):
                raise
            size //= 2
    return held


class _Given:
    """Small tensors of a device, made before it is full, of which large results are made."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.one = torch.ones(1, device=name)
        self.column = torch.ones(_SIDE, 1, device=name)
        self.places = torch.zeros(1, dtype=torch.int64, device=name)
        self.weight = torch.ones(1, 1, device=name)
        self.image = torch.ones(1, 1, 1, 1, device=name)
        self.host = torch.ones(1).expand(_COUNT)
        self.long = self.one.expand(_COUNT)
        self.square = self.column.expand(_SIDE, _SIDE)
        self.rows = self.weight.expand(_COUNT, 1)
        self.generator = torch.Generator(name).manual_seed(3)
        self.parameter = torch.nn.Parameter(torch.zeros(_COUNT, device=name))
        self.file = io.BytesIO()
        torch.save(torch.zeros(_COUNT), self.file)
        # What a library makes for its first product is made before the device is full.
        functional.linear(self.weight @ self.weight, self.weight, self.one)
        torch.bmm(self.weight[None], self.weight[None])

    def loaded(self) -> Any:
        self.file.seek(0)
        return torch.load(self.file, map_location=self.name)

    def optimized(self) -> None:
        self.parameter.grad = self.parameter.detach()
        torch.optim.Adam([self.parameter], foreach=False).step()


_Call = Callable[[_Given], object]
_CALLS: dict[str, _Call] = {
    "torch.empty": lambda g: torch.empty(_COUNT, device=g.name),
    "torch.zeros": lambda g: torch.zeros(_COUNT, device=g.name),
    "torch.full": lambda g: torch.full((_COUNT,), 3.0, device=g.name),
    "torch.empty_strided": lambda g: torch.empty_strided((_SIDE, _SIDE), (1, _SIDE), device=g.name),
    "torch.eye": lambda g: torch.eye(_SIDE, device=g.name),
    "torch.arange": lambda g: torch.arange(_COUNT, device=g.name),
    "torch.linspace": lambda g: torch.linspace(0, 1, _COUNT, device=g.name),
    "new_empty": lambda g: g.one.new_empty(_COUNT),
    "empty_like": lambda g: torch.empty_like(g.long, memory_format=torch.contiguous_format),
    "torch.add": lambda g: g.long + 1,
    "torch.mul": lambda g: g.long * g.one,
    "torch.neg": lambda g: -g.long,
    "torch.exp": lambda g: g.long.exp(),
    "a comparison": lambda g: g.long > 0,
    "torch.where": lambda g: torch.where(g.one > 0, g.long, g.one),
    "torch.clone": lambda g: g.long.clone(memory_format=torch.contiguous_format),
    "Tensor.contiguous": lambda g: g.long.contiguous(),
    "a conversion": lambda g: g.long.to(torch.int32),
    "Tensor.repeat": lambda g: g.one.repeat(_COUNT),
    "torch.cat": lambda g: torch.cat([g.long, g.one]),
    "torch.stack": lambda g: torch.stack([g.long, g.long]),
    "torch.outer": lambda g: torch.outer(g.column[:, 0], g.column[:, 0]),
    "a product of matrices": lambda g: g.column @ g.column.t(),
    "a product of batches": lambda g: torch.bmm(g.column[None], g.column.t()[None]),
    "torch.nn.functional.linear": lambda g: functional.linear(g.column, g.column),
    "torch.addmm": lambda g: torch.addmm(g.weight, g.column, g.column.t()),
    "torch.index_select": lambda g: g.one.index_select(0, g.places.expand(_COUNT)),
    "torch.gather": lambda g: g.one.gather(0, g.places.expand(_COUNT)),
    "indexing": lambda g: g.one[g.places.expand(_COUNT)],
    "torch.nn.functional.embedding": lambda g: functional.embedding(g.places.expand(_COUNT), g.weight),
    "torch.softmax": lambda g: g.square.softmax(-1),
    "torch.cumsum": lambda g: g.square.cumsum(-1),
    "torch.sum": lambda g: g.rows.sum(-1),
    "torch.nn.functional.relu": lambda g: g.long.relu(),
    "torch.nn.functional.pad": lambda g: functional.pad(g.one, (0, _COUNT)),
    "torch.nn.functional.interpolate": lambda g: functional.interpolate(g.image, size=(_SIDE, _SIDE)),
    "torch.nn.functional.one_hot": lambda g: functional.one_hot(g.places, _COUNT),
    "torch.tril": lambda g: g.square.tril(),
    "torch.flip": lambda g: g.square.flip(0),
    "torch.rand": lambda g: torch.rand(_COUNT, device=g.name),
    "torch.randn of a generator": lambda g: torch.randn(_COUNT, device=g.name, generator=g.generator),
    "torch.randint": lambda g: torch.randint(9, (_COUNT,), device=g.name),
    "torch.bernoulli": lambda g: torch.bernoulli(g.long),
    "torch.nn.functional.dropout": lambda g: functional.dropout(g.long),
    "foreach": lambda g: torch._foreach_add([g.long, g.one], 1.0),
    "a list that is added up": lambda g: sum([g.long, g.long]),
    "a number of the host": lambda g: g.long * torch.tensor(2.0),
    "out, which grows": lambda g: torch.add(g.long, 1, out=torch.empty(0, device=g.name)),
    "resize_": lambda g: torch.empty(0, device=g.name).resize_(_COUNT),
    "untyped_storage().resize_": lambda g: (
        torch.empty(0, device=g.name).untyped_storage().resize_(4 * _COUNT)
    ),
    "to() from the host": lambda g: g.host.to(g.name),
    "to() from the host in another dtype": lambda g: g.host.to(g.name, torch.int32),
    "a non-blocking copy": lambda g: g.host.to(g.name, non_blocking=True),
    "torch.tensor": lambda g: torch.tensor(g.host.numpy(), device=g.name),
    "torch.load": lambda g: g.loaded(),
    "Module.to": lambda g: torch.nn.Linear(_SIDE, _SIDE, bias=False, device="meta").to_empty(device=g.name),
    "a step of Adam": lambda g: g.optimized(),
    "a backward pass": lambda g: pass_back_many(g.one, _COUNT),
    "a thread": lambda g: _in_thread(lambda: g.long + 1),
}  # fmt: skip
"""Calls whose results, of 4 to 32 MiB, have no room on a full device, though their inputs are small."""

_IN_BRIEF = ("torch.empty", "torch.zeros", "torch.add", "a thread", "a backward pass", "to() from the host")
"""What is tried on another device too."""


def _in_thread(call: Callable[[], object]) -> None:
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised again
            raised.append(error.with_traceback(None))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for told in raised:
        raise told


def _within_a_capture(accelerator: Accelerator) -> _Call:
    """A result in a capture: what a capture makes of an error is for others to check."""

    def call(given: _Given) -> None:
        told: list[Exception] = []
        try:
            with accelerator.capture_to_graph(accelerator.create_graph()):
                try:
                    given.long + 1
                except Exception as error:  # noqa: BLE001 - raised again
                    told.append(error.with_traceback(None))
        except Exception:
            if not told:
                raise
        for raised in told:
            raise raised

    return call


@check(
    "OutOfMemoryError", "is_out_of_memory", "memory_allocated", "memory_stats",
    promise="On a full device whatever finds no room raises the error that an allocation raises, and is "
    "counted; afterwards there is room, also in what the allocator has kept.",
    once=True,
)  # fmt: skip
def a_full_device_says_so(accelerator: Accelerator) -> str | None:
    require_figures(accelerator)
    if is_host(accelerator):
        raise NotOfferedError("a host gives more memory than it has")
    lacks: dict[str, None] = {}
    names = device_names(accelerator)
    with all_told() as noted:
        accelerator.set_device(0)
        for name in dict.fromkeys((names[-1], names[0])):
            lacks |= _observe(accelerator, name, noted, is_brief=name != names[-1])
    return f"it lacks {', '.join(lacks)}" if lacks else None


def _observe(
    accelerator: Accelerator, name: str, noted: Callable[[bool, str], None], *, is_brief: bool
) -> dict[str, None]:
    index = torch.device(name).index or 0
    given = _Given(name)
    calls = {what: call for what, call in _CALLS.items() if what in _IN_BRIEF or not is_brief}
    if offers_graphs(accelerator) and index == accelerator.current_device():
        calls["a capture"] = _within_a_capture(accelerator)
    release(accelerator)
    start = accelerator.memory_allocated(index)
    held = _fill(accelerator, name)
    full = accelerator.memory_allocated(index)
    wanted = _raised(lambda: calls["torch.empty"](given))
    if wanted is None or not held:
        raise NotOfferedError(f"all memory of {name} that is offered is taken, and more is given")
    kind = type(wanted)
    lacks: dict[str, None] = {}
    for what, call in calls.items():
        counted = accelerator.memory_stats(index).get("num_ooms")
        error = _raised(lambda call=call: call(given))  # type: ignore[misc]
        if isinstance(error, NotImplementedError):
            lacks[what] = None
            continue
        told = f"{what}, for whose result {name} has no room,"
        noted(error is not None, f"OutOfMemoryError: {told} is accepted")
        if error is not None:
            is_told = accelerator.is_out_of_memory(error) and isinstance(error, kind)
            noted(
                is_told,
                f"OutOfMemoryError: {told} raises {describe(error, whole=True)[:200]}; torch.empty raises "
                f"{kind.__module__}.{kind.__qualname__}",
            )
        if counted is not None and error is not None:
            more = accelerator.memory_stats(index)["num_ooms"] - counted
            noted(more > 0, f'memory_stats({index})["num_ooms"] stays {counted} when {told} is refused')
        del error
    left = _once_freed(accelerator, index, full) - full
    noted(left == 0, f"memory_allocated({index}) is {left} bytes higher after what {name} had no room for")
    # The allocator may keep all of it, from which others then take theirs.
    held.clear()
    settle(accelerator)
    for what in (name for name in calls if name not in lacks):
        error = _raised(lambda what=what: calls[what](given))  # type: ignore[misc]
        why = describe(error, whole=True)[:200] if error else ""
        noted(not why, f"{what} raises {why} when {name}, which was full, is empty again")
        del error
    settle(accelerator)
    accelerator.empty_cache()
    rest = accelerator.memory_allocated(index) - start
    noted(rest < MIB, f"memory_allocated({index}) is {rest} bytes higher after {name} was full")
    return lacks


def _once_freed(accelerator: Accelerator, index: int, expected: int) -> int:
    """The memory that tensors occupy when it is `expected`, or after a second.

    torch's thread for backward passes frees what a failed pass held after it has told of the failure.
    """
    end = time.monotonic() + 1
    while True:
        settle(accelerator)
        found = accelerator.memory_allocated(index)
        if found == expected or time.monotonic() > end:
            return found
        time.sleep(0.01)


def _raised(call: Callable[[], object]) -> Exception | None:
    """The error of a call, without the frames that hold tensors."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - its type is what is checked
        return error.with_traceback(None)
    return None
