"""Checks of memory that others free or want: other threads, other devices, operators, backward passes."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import (
    MIB,
    BrokenPromiseError,
    NotOfferedError,
    device_names,
    is_host,
    require,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.memory.allocations import (
    fill,
    mib,
    pass_back_many,
    release,
    require_figures,
    settle,
)

_SIZE = 8 * MIB
_BEYOND = 2**50
"""More elements than any memory holds, of a tensor that is one number repeated."""


@check(
    "memory_allocated", "max_memory_allocated",
    promise="Memory counts on its device wherever it is allocated and freed: in another thread, while "
    "another "
    "device is current, by an autograd thread.",
)  # fmt: skip
def memory_is_freed_anywhere(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    if is_host(accelerator):
        raise NotOfferedError("a host's figures are those of the whole process")
    names = device_names(accelerator)
    here = accelerator.current_device()
    for index, name in enumerate(names):
        _require_counted(accelerator, names, index, name)
    require(accelerator.current_device() == here, "memory that is freed elsewhere changes the current device")


def _require_counted(accelerator: Accelerator, names: list[str], index: int, name: str) -> None:
    other = (index + 1) % len(names)
    steps: dict[str, Callable[[list[torch.Tensor]], None]] = {
        "in another thread": lambda held: _in_thread(held.clear),
        "while another device is current": lambda held: _on(accelerator, other, held.clear),
        "in a thread with another device": lambda held: _in_thread(
            lambda: _on(accelerator, other, held.clear)
        ),
        "here": lambda held: held.clear(),
    }
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "here": lambda: fill(accelerator, _SIZE, name),
        "in another thread": lambda: _in_thread(lambda: fill(accelerator, _SIZE, name)),
        "while another device is current": lambda: _on(
            accelerator, other, lambda: fill(accelerator, _SIZE, name)
        ),
    }
    for made, make in makers.items():
        for freed, free in steps.items():
            settle(accelerator)
            before = [accelerator.memory_allocated(i) for i in range(len(names))]
            held = [make()]
            during = [accelerator.memory_allocated(i) - before[i] for i in range(len(names))]
            free(held)
            settle(accelerator)
            after = [accelerator.memory_allocated(i) - before[i] for i in range(len(names))]
            told = f"{mib(_SIZE)} on {name}, allocated {made} and freed {freed},"
            require(
                during == [_within(during[i]) if i == index else 0 for i in range(len(names))],
                f"{told} change memory_allocated() of the devices by {during}",
            )
            require(not any(after), f"{told} leave memory_allocated() changed by {after}")


def _within(grown: int) -> int:
    """The same if it is the size, perhaps rounded up; else the size."""
    return grown if _SIZE <= grown <= _SIZE + _SIZE // 4 else _SIZE


def _in_thread(call: Callable[[], Any]) -> Any:
    """Calls in a new thread that is gone afterwards, and returns the result without keeping it."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results.pop()


def _on(accelerator: Accelerator, index: int, call: Callable[[], Any]) -> Any:
    with accelerator.device(index):
        return call()


_TOO_LARGE: dict[str, Callable[[torch.Tensor], object]] = {
    "torch.empty": lambda x: torch.empty(_BEYOND, device=x.device),
    "torch.zeros": lambda x: torch.zeros(_BEYOND, device=x.device),
    "torch.full": lambda x: torch.full((_BEYOND,), 3.0, device=x.device),
    "torch.add": lambda x: x.expand(_BEYOND) + 1,
    "torch.mul": lambda x: x.expand(_BEYOND) * x,
    "torch.neg": lambda x: -x.expand(_BEYOND),
    "torch.exp": lambda x: x.expand(_BEYOND).exp(),
    "torch.where": lambda x: torch.where(x > 0, x.expand(_BEYOND), x),
    "torch.clone": lambda x: x.expand(_BEYOND).clone(memory_format=torch.contiguous_format),
    "Tensor.contiguous": lambda x: x.expand(_BEYOND).contiguous(),
    "a conversion": lambda x: x.expand(_BEYOND).to(torch.int32),
    "torch.outer": lambda x: torch.outer(x.expand(2**25), x.expand(2**25)),
    "a sum that broadcasts": lambda x: x.expand(2**25)[:, None] + x.expand(2**25)[None],
    "torch.cat": lambda x: torch.cat([x.expand(_BEYOND), x]),
    "Tensor.repeat": lambda x: x.repeat(_BEYOND),
    "torch.zeros_like": lambda x: torch.zeros_like(x.expand(_BEYOND), memory_format=torch.contiguous_format),
    "torch.arange": lambda x: torch.arange(_BEYOND, dtype=x.dtype, device=x.device),
    "Tensor.resize_": lambda x: torch.empty(0, device=x.device).resize_(_BEYOND),
    "a backward pass": lambda x: pass_back_many(x[:1], _BEYOND),
}
"""Calls whose results do not fit into any memory, though their inputs are small."""


@check(
    "OutOfMemoryError", "is_out_of_memory", "memory_allocated", "memory_stats",
    promise="Whatever allocates too much raises an error that is_out_of_memory recognises, and leaves the "
    "figures and the device as they were; statistics count it.",
    of="operators",
)  # fmt: skip
def results_that_do_not_fit(accelerator: Accelerator) -> None:
    for index, name in enumerate(device_names(accelerator)):
        there = torch.ones(1, device=name)
        release(accelerator)
        figures = None if is_host(accelerator) else accelerator.memory_allocated(index)
        for what, call in _TOO_LARGE.items():
            counted = accelerator.memory_stats(index).get("num_ooms")
            try:
                call(there)
            except NotImplementedError:  # whether an operator is there is for others to check
                continue
            except Exception as error:  # noqa: BLE001 - its type is what is checked
                require(
                    accelerator.is_out_of_memory(error),
                    f"{what}, of which the result does not fit into the memory of {name}, raises "
                    f"{type(error).__name__}, which is_out_of_memory() does not recognise: "
                    f"{describe(error.with_traceback(None), whole=True)[:200]}",
                )
            else:
                raise BrokenPromiseError(f"{what} of {_BEYOND} elements on {name} is accepted")
            if counted is not None and figures is not None and what == "torch.empty":
                more = accelerator.memory_stats(index)["num_ooms"] - counted
                require(more > 0, f'memory_stats({index})["num_ooms"] stays {counted} when {what} is refused')
            require(float((there + 1).sum()) == 2.0, f"after {what} was refused a sum on {name} is wrong")
        settle(accelerator)
        if figures is not None:
            left = accelerator.memory_allocated(index) - figures
            require(left < MIB, f"what is refused for want of memory leaves {left} bytes allocated on {name}")


def _calls(accelerator: Accelerator, name: str, other: str) -> dict[str, Callable[[torch.Tensor], object]]:
    """Calls on a matrix that nothing else refers to."""
    host = torch.ones(64, 64)
    places = torch.tensor([1, 5])
    side = accelerator.Stream()

    def on_two_streams(x: torch.Tensor) -> None:
        x.record_stream(side)
        with accelerator.stream(side):
            x.add_(1)
        side.synchronize()

    return {
        "to() from the host": lambda x: host.to(name),
        "to() in another dtype": lambda x: host.to(name, torch.int32),
        "cpu()": lambda x: x.cpu(),
        "a non-blocking copy": lambda x: host.to(name, non_blocking=True),
        "to() another device": lambda x: x.to(other),
        "copy_() from the host": lambda x: x.copy_(host),
        "copy_() of a transposed matrix": lambda x: x.t().copy_(host),
        "item()": lambda x: x[0, 0].item(),
        "tolist()": lambda x: x.tolist(),
        "repr()": repr,
        "indexing with places of the host": lambda x: x[places],
        "an assignment": lambda x: x.__setitem__(places, 1.0),
        "nonzero": lambda x: x.nonzero(),
        "unique": lambda x: x.unique(),
        "sort": lambda x: x.sort(),
        "a product": lambda x: x @ x,
        "a product of views": lambda x: x.t() @ x[:, ::2],
        "a sum": lambda x: x.sum(),
        "an operator with out": lambda x: torch.add(x, 1, out=torch.empty(0, device=name)),
        "a generator": lambda x: torch.rand(64, device=name, generator=torch.Generator(name).manual_seed(1)),
        "dropout": torch.nn.functional.dropout,
        "inv": lambda x: torch.linalg.inv(x + torch.eye(64, device=name)),
        "foreach": lambda x: torch._foreach_add([x, x], 1.0),
        "record_stream()": on_two_streams,
        "an operator that is refused": lambda x: x + x[:, :3],
        "an operator in place that is refused": lambda x: x.add_(x[:, :3]),
        "a product that is refused": lambda x: x @ x[:3],
        "a product of batches that is refused": lambda x: torch.bmm(x[None], x[None, :3]),
        "a sum with a product that is refused": lambda x: torch.addmm(x, x, x[:3]),
        "a layer that is refused": lambda x: torch.nn.functional.linear(x, x[:, :3]),
        "a convolution that is refused": lambda x: torch.nn.functional.conv1d(x[None], x[:, :3, None]),
        "attention that is refused": lambda x: torch.nn.functional.scaled_dot_product_attention(
            x[None], x[None, :, :3], x[None]
        ),
        "a norm that is refused": lambda x: torch.nn.functional.layer_norm(x, (3,)),
        "a loss that is refused": lambda x: torch.nn.functional.cross_entropy(x, x[:3].argmax(-1)),
        "cat that is refused": lambda x: torch.cat([x, x[:, :3]]),
        "a copy that is refused": lambda x: x.copy_(x[:, :3]),
        "a view that is refused": lambda x: x.view(3, 3),
        "gather that is refused": lambda x: x.gather(0, x.argmax(0)),
        "a reduction that is refused": lambda x: x.sum(5),
        "foreach that is refused": lambda x: torch._foreach_add([x, x], [x, x[:, :3]]),
        "an operator with out that is refused": lambda x: torch.add(x, x, out=x.int()),
        "an inverse that is refused": lambda x: torch.linalg.inv(x * 0),
        "a backward pass that is refused": lambda x: x.requires_grad_().exp().backward(),
        "a function that raises in backward()": _raises_in_backward,
        "copy.deepcopy": copy.deepcopy,
    }


def _raises_in_backward(x: torch.Tensor) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(given * 3)
            return given * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("on purpose")

    Raises.apply(x.clone().requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]


_LATE_S = 2.0
"""In which a thread of autograd, which outlives the call that raises, lets go of what it holds."""


@check(
    "memory_allocated",
    promise="No call keeps memory: copies, reads, draws and operators, on several streams, and those that "
    "raise.",
    of="operators",
)  # fmt: skip
def no_call_keeps_memory(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    if is_host(accelerator):
        raise NotOfferedError("a host's figures are those of the whole process")
    name = accelerator.current_device_name()
    names = device_names(accelerator)
    indices = range(len(names))
    other = names[-1] if names[-1] != name else names[0]
    for what, call in _calls(accelerator, name, other).items():

        def turns(count: int, call: Callable[[torch.Tensor], object] = call) -> list[int]:
            for _ in range(count):
                with suppress(RuntimeError, ValueError, IndexError):
                    call(torch.ones(64, 64, device=name))
            settle(accelerator)
            return [accelerator.memory_allocated(index) for index in indices]

        try:
            before = turns(3)  # workspaces are made once
            after = turns(10)
        except NotImplementedError:
            continue
        grown = [b - a for a, b in zip(before, after, strict=True)]
        deadline = time.monotonic() + _LATE_S
        while max(grown) > 0 and time.monotonic() < deadline:
            time.sleep(_LATE_S / 40)
            grown = [b - a for a, b in zip(before, turns(0), strict=True)]
        require(
            max(grown) <= 0,
            f"10 calls of {what} leave memory_allocated() of the devices {grown} bytes higher",
        )
