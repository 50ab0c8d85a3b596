"""Checks that work on another device leaves the current one as it is, and what a type alone means."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from acclimate.accelerator import Accelerator, HostStream
from acclimate_conformance.checks.assertions import MIB, equal, require, several_devices
from acclimate_conformance.checks.check import check

_Action = Callable[[str], object]


def _dropped(name: str) -> None:
    held = [torch.empty(size * MIB, dtype=torch.uint8, device=name) for size in (1, 4, 40)]
    held.clear()
    gc.collect()


def _refused(call: Callable[[], object]) -> None:
    with suppress(RuntimeError, ValueError, NotImplementedError):
        call()


def _backward(name: str, threads: bool = True) -> None:
    x = torch.ones(3, device=name, requires_grad=True)
    with torch.autograd.set_multithreading_enabled(threads):
        (x * x).sum().backward()


def _failing_backward(name: str) -> None:
    x = torch.ones(3, device=name, requires_grad=True)
    y = x.exp()
    with torch.no_grad():
        y.add_(1)
    _refused(lambda: y.sum().backward())


def _saved(name: str) -> None:
    file = io.BytesIO()
    torch.save(torch.ones(3, device=name), file)
    file.seek(0)
    torch.load(file, map_location=name)


def _actions(accelerator: Accelerator) -> dict[str, _Action]:
    """What torch does on a device that is named."""
    too_much = 4 * accelerator.total_memory()
    actions: dict[str, _Action] = {
        "dropping tensors": _dropped,
        "an allocation that is refused": lambda name: _refused(
            lambda: torch.empty(too_much, dtype=torch.uint8, device=name)
        ),
        "making tensors": lambda name: [torch.ones(3, device=name), torch.randn(3, device=name)],
        "copying from the host": lambda name: torch.ones(3).to(name),
        "copying to the host": lambda name: torch.ones(3, device=name).cpu(),
        "a non-blocking copy": lambda name: torch.ones(3).to(name, non_blocking=True).to("cpu"),
        "copying from the current device": lambda name: torch.ones(3, device=accelerator.device_type).to(
            name
        ),
        "copying to the current device": lambda name: torch.ones(3, device=name).to(accelerator.device_type),
        "copy_()": lambda name: torch.empty(3, device=name).copy_(torch.ones(3)),
        "item()": lambda name: torch.ones((), device=name).item(),
        "operators": lambda name: (
            (torch.ones(3, 3, device=name) @ torch.ones(3, 3, device=name)).add_(1).sum()
        ),
        "an operator that is refused": lambda name: _refused(
            lambda: torch.ones(3, device=name) + torch.ones(4, device=name)
        ),
        "indexing": lambda name: torch.arange(5.0, device=name)[torch.tensor([1, 2])],
        "sort and nonzero": lambda name: torch.arange(5.0, device=name).sort().values.nonzero(),
        "backward()": _backward,
        "backward() in the calling thread": lambda name: _backward(name, False),
        "a backward() that is refused": _failing_backward,
        "a generator": lambda name: torch.rand(
            3, device=name, generator=torch.Generator(name).manual_seed(1)
        ),
        "torch.save and torch.load": _saved,
        "copy.deepcopy": lambda name: copy.deepcopy(torch.nn.Linear(2, 2, device=name)),
        "repr()": lambda name: repr(torch.ones(3, device=name)),
        "resizing a storage": lambda name: _refused(
            lambda: torch.ones(3, device=name).untyped_storage().resize_(4096)
        ),
    }
    if not issubclass(accelerator.Stream, HostStream):
        actions["streams and events"] = lambda name: _streams(accelerator, name)
    return actions


def _streams(accelerator: Accelerator, name: str) -> None:
    stream = accelerator.Stream(device=name)
    event = stream.record_event()
    stream.wait_event(event)
    stream.query()
    event.query()
    event.synchronize()
    stream.synchronize()


@check(
    "current_device", "set_device", "device_name",
    promise="What torch does on a device that is named leaves the current device as it is, even if it "
    "raises.",
    of="tensors",
)  # fmt: skip
def work_elsewhere_leaves_the_device(accelerator: Accelerator) -> None:
    names = several_devices(accelerator)
    for here, there in ((0, len(names) - 1), (len(names) - 1, 0)):
        for what, act in _actions(accelerator).items():
            accelerator.set_device(here)
            act(names[there])
            now, made = accelerator.current_device(), torch.empty(1, device=accelerator.device_type).device
            require(
                now == here and str(made) == names[here],
                f"{what} on {names[there]} makes {now} the current device, with tensors on {made}; it was "
                f"{names[here]}",
            )


@check(
    "current_device", "device_type",
    promise="A device's type without an index means the current device wherever a tensor is moved, also "
    "one of "
    "another device of the same type.",
    of="tensors",
)  # fmt: skip
def types_mean_the_current_device(accelerator: Accelerator) -> None:
    kind = accelerator.device_type
    names = several_devices(accelerator)
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "to(type)": lambda x: x.to(kind),
        "to(device=type)": lambda x: x.to(device=kind),
        "to(torch.device(type), dtype)": lambda x: x.to(torch.device(kind), torch.int32),
        "to(type, copy=True)": lambda x: x.to(kind, copy=True),
        "torch.as_tensor": lambda x: torch.as_tensor(x, device=kind),
        "torch.asarray": lambda x: torch.asarray(x, device=kind),
        "new_zeros": lambda x: x.new_zeros(2, device=kind),
        "empty_like": lambda x: torch.empty_like(x, device=kind),
        "Module.to": lambda x: torch.nn.Linear(2, 2, device=x.device).to(kind).weight,
    }
    alike: dict[str, Callable[[torch.Tensor], Any]] = {
        "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
        "new_empty": lambda x: x.new_empty(2),
        "new_zeros": lambda x: x.new_zeros(2),
        "new_ones": lambda x: x.new_ones((2,), dtype=torch.int32),
        "new_full": lambda x: x.new_full((2,), 3),
        "new_empty_strided": lambda x: x.new_empty_strided((2,), (1,)),
        "empty_like": torch.empty_like,
        "rand_like": torch.rand_like,
        "full_like": lambda x: torch.full_like(x, 2, dtype=torch.int32),
        "clone": lambda x: x.clone(),
        "copy.deepcopy": copy.deepcopy,
        "to(dtype)": lambda x: x.to(torch.int32),
        "an operator": lambda x: x + 1,
        "an operator with out": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
        "a sum": lambda x: x.sum(),
        "cat": lambda x: torch.cat([x, x]),
        "stack": lambda x: torch.stack([x, x]),
        "bincount": lambda x: x.long().bincount(),
        "a product": lambda x: x @ x,
        "indexing": lambda x: x[torch.tensor([1, 0])],
        "where": lambda x: torch.where(x > 1, x, 0),
        "sort": lambda x: x.sort().indices,
        "nonzero": lambda x: x.nonzero(),
        "foreach": lambda x: torch._foreach_add([x, x], 1)[1],
        "tensor_split": lambda x: x.tensor_split(2)[0],
        "Module.to of a tensor": lambda x: torch.nn.Linear(2, 2).to(x).weight,
        "to of a tensor": lambda x: torch.ones(2).to(x),
        "type_as": lambda x: torch.ones(2).type_as(x),
    }
    for index, name in enumerate(names):
        for source in names:
            with accelerator.device(index):
                there = torch.arange(3.0, device=source)
                for what, make in alike.items():
                    found = make(there)
                    require(
                        str(found.device) == source,
                        f"{what} of a tensor on {source} gives one on {found.device} while {name} is current",
                    )
                for what, move in ways.items():
                    found = move(there)
                    require(
                        str(found.device) == name,
                        f"{what} of a tensor on {source} gives one on {found.device} while {name} is current",
                    )
                require(
                    there.to(name) is there or source != name, f"to({name!r}) of a tensor there copies it"
                )
                require(equal(there.to(kind), torch.arange(3.0)), "to(type) changes numbers")
