"""Checks of every family of memory figures, of what takes no memory, and of what gives it up."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import MIB, NotOfferedError, all_told, equal, is_host
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.memory.allocations import fill, release, require_figures, settle

_SIZE = 3 * MIB
_Noted = Callable[[bool, str], None]


def _require_exact(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    if is_host(accelerator):
        raise NotOfferedError("a host's figures are those of the whole process")


def _families(accelerator: Accelerator) -> dict[str, dict[str, int]]:
    """By family, such as "allocation.all", its figures."""
    found: dict[str, dict[str, int]] = {}
    for key, value in accelerator.memory_stats().items():
        family, _, figure = key.rpartition(".")
        if family and figure in ("current", "peak", "allocated", "freed"):
            found.setdefault(family, {})[figure] = int(value)
    return found


@check(
    "memory_stats",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "memory_allocated",
    promise="In every family of memory_stats what was allocated less what was freed is what there is, and "
    "resets "
    "change their own figures only.",
)
def statistics_add_up(accelerator: Accelerator) -> None:
    _require_exact(accelerator)
    release(accelerator)
    kept = [fill(accelerator, size) for size in (100, _SIZE, 40 * MIB)]
    start = _families(accelerator)
    held = [fill(accelerator, size) for size in (7, 5000, 2 * MIB, _SIZE)]
    during = _families(accelerator)
    del held
    settle(accelerator)
    after = _families(accelerator)
    with all_told() as noted:
        for when, first, second in (("allocations", start, during), ("tensors were freed", during, after)):
            for family, now in second.items():
                before = first.get(family, {})
                if {"current", "allocated", "freed"} <= set(now) & set(before):
                    change = {key: now[key] - before[key] for key in now}
                    noted(
                        change["allocated"] - change["freed"] == change["current"],
                        f'after {when} memory_stats()["{family}…"] changes by {change}',
                    )
                    noted(
                        change["allocated"] >= 0 and change["freed"] >= 0,
                        f'after {when} a counter of memory_stats()["{family}…"] falls: {change}',
                    )
                if {"current", "peak"} <= set(now):
                    noted(
                        now["peak"] >= now["current"],
                        f'after {when} memory_stats()["{family}.peak"] is {now["peak"]}, below '
                        f"{now['current']}",
                    )
        for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats"):
            extra = [fill(accelerator, _SIZE)]
            extra.clear()
            settle(accelerator)
            before_reset = _families(accelerator)
            getattr(accelerator, name)()
            for family, now in _families(accelerator).items():
                earlier = before_reset.get(family, now)
                same = ("current", "allocated", "freed") if "peak" in name else ("current", "peak")
                for figure in (f for f in same if f in now):
                    told = f'{name}() changes memory_stats()["{family}.{figure}"] from {earlier[figure]} '
                    f"to {now[figure]}"
                    noted(now[figure] == earlier[figure], told)
                if "peak" in name and {"current", "peak"} <= set(now):
                    told = f'after {name}() memory_stats()["{family}.peak"] is {now["peak"]}, not '
                    f"{now['current']}"
                    noted(now["peak"] == now["current"], told)
        noted(int(kept[1][-1]) == 7, "a tensor changed while figures were read")


def _without_memory(accelerator: Accelerator, there: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Calls that make no memory of the device."""
    numbers = torch.ones(_SIZE // 4)
    return {
        "a tensor of the host": lambda: torch.ones(_SIZE // 4),
        "pin_memory()": lambda: accelerator.pin_memory(numbers),
        "pin_empty()": lambda: accelerator.pin_empty(_SIZE // 4, dtype=torch.float32),
        "a tensor without memory": lambda: torch.empty(_SIZE, device="meta"),
        "a copy to the host": there.cpu,
        "a view": lambda: [there[1:], there.view(-1, 2), there.t() if there.dim() == 2 else there[::2]],
        "an expanded tensor": lambda: there[:1].expand(1 << 40),
        "detach() and data": lambda: [there.detach(), there.data],
        "to() the same place": lambda: there.to(there.device, there.dtype),
        "contiguous()": there.contiguous,
        "an operator in place": lambda: there.mul_(1),
        "a parameter": lambda: torch.nn.Parameter(there),
        "as_tensor": lambda: torch.as_tensor(there, device=there.device),
        "reshape": lambda: there.reshape(2, -1),
        "a view in another dtype": lambda: there.view(torch.int32),
        "split and unbind": lambda: [*there.split(1000), *there[:8].unbind()],
        "an empty tensor": lambda: torch.empty(0, 5, device=there.device),
        "dropout in evaluation": lambda: torch.nn.functional.dropout(there, 0.5, training=False),
        "copy_() of itself": lambda: there.copy_(there),
    }


@check(
    "memory_allocated",
    "pin_memory",
    "pin_empty",
    promise="Views, memory of the host and calls in place take no memory of the device.",
    of="tensors",
)
def what_takes_no_memory(accelerator: Accelerator) -> None:
    _require_exact(accelerator)
    there = torch.ones(_SIZE // 4, device=accelerator.current_device_name())
    with all_told() as noted:
        for what, call in _without_memory(accelerator, there).items():
            settle(accelerator)
            before = accelerator.memory_allocated()
            made = call()
            more = accelerator.memory_allocated() - before
            noted(more <= 0, f"{what} raises memory_allocated() by {more}")
            del made
        noted(equal(there, torch.ones(_SIZE // 4)), "calls that change nothing change a tensor")


def _replaced(there: torch.Tensor) -> list[torch.Tensor]:
    parameter = torch.nn.Parameter(there.clone())
    parameter.data = there
    return [parameter]


def _with_history(there: torch.Tensor) -> list[torch.Tensor]:
    x = there[:8].clone().requires_grad_()
    loss = (there.expand(1, -1) * x.sum()).exp().square().sum()
    loss.backward()
    return [x, loss.detach()]


def _raising(there: torch.Tensor) -> list[torch.Tensor]:
    try:
        held = there * 2
        raise ValueError(len(held))
    except ValueError as error:
        error.__traceback__ = None
    return []


def _in_a_cycle(there: torch.Tensor) -> list[torch.Tensor]:
    ring: list[Any] = [there * 2]
    ring.append(ring)
    return []


def _of_a_module(there: torch.Tensor) -> list[torch.Tensor]:
    module = torch.nn.Linear(1024, 768, device=there.device)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 1024, device=there.device)).sum().backward()
    optimizer.step()
    return []


def _swapped(there: torch.Tensor) -> list[torch.Tensor]:
    one, two = there.clone(), torch.zeros(2, device=there.device)
    torch.utils.swap_tensors(one, two)
    return [one]


def _moved(there: torch.Tensor) -> list[torch.Tensor]:
    module = torch.nn.Linear(1024, 768, device=there.device)
    module.to("cpu")
    return list(module.parameters())


def _set(there: torch.Tensor) -> list[torch.Tensor]:
    one = there.clone()
    one.set_(there.untyped_storage(), 0, (4,), (1,))
    return [one]


def _of_a_generator(there: torch.Tensor) -> list[torch.Tensor]:
    made = (there * n for n in range(3))
    next(made)
    return [torch.zeros(1), *list(made)[:0]]


def _saved_on_the_host(there: torch.Tensor) -> list[torch.Tensor]:
    x = there.clone().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        y = x.exp()
    kept = y.sum()
    del y
    return [kept.detach()]


_GIVING_UP: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "a parameter whose data is replaced": _replaced,
    "a graph of which only the loss is kept": _with_history,
    "an error that left a function": _raising,
    "a cycle of references": _in_a_cycle,
    "a module with its optimizer": _of_a_module,
    "tensors that were swapped": _swapped,
    "a module that was moved to the host": _moved,
    "a tensor that was set to another's storage": _set,
    "a generator that was left": _of_a_generator,
    "tensors saved on the host": _saved_on_the_host,
}


@check(
    "memory_allocated",
    promise="Memory is given up with what held it: replaced data, graphs, errors, cycles, modules and "
    "optimizers; "
    "what is loaded from a mapped file has memory of its own.",
    of="tensors",
)
def memory_is_given_up(accelerator: Accelerator) -> None:
    _require_exact(accelerator)
    device = accelerator.current_device_name()
    there = torch.full((_SIZE // 4,), 1e-6, device=device)
    with all_told() as noted:
        for what, call in _GIVING_UP.items():
            call(there)  # workspaces are made once
            gc.collect()
            settle(accelerator)
            before = accelerator.memory_allocated()
            kept = call(there)
            gc.collect()
            settle(accelerator)
            more = accelerator.memory_allocated() - before
            noted(more <= _SIZE // 3, f"{what} leaves memory_allocated() {more} bytes higher")
            del kept
        _note_mapped(accelerator, device, noted)


def _note_mapped(accelerator: Accelerator, device: str, noted: _Noted) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.pt"
        torch.save(torch.ones(_SIZE // 4), path)
        settle(accelerator)
        before = accelerator.memory_allocated()
        loaded = torch.load(path, mmap=True, map_location=device)
        more = accelerator.memory_allocated() - before
        noted(
            more >= _SIZE,
            f"torch.load(mmap=True) of {_SIZE} bytes to {device} raises memory_allocated() by {more}",
        )
        loaded.fill_(5)
        again = torch.load(path, mmap=True, map_location=device)
        noted(
            equal(again, torch.ones(_SIZE // 4)),
            f"a change of what torch.load(mmap=True) gave on {device} changes the file",
        )
        path.write_bytes(b"")
        noted(
            equal(loaded, torch.full((_SIZE // 4,), 5.0)),
            f"what torch.load(mmap=True) gave on {device} changes with the file",
        )
        del loaded, again
