"""Checks of streams as objects: how long they live, which are equal, which one backward() runs on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    Work,
    device_names,
    equal,
    new_stream,
    require,
    require_streams,
)
from acclimate_conformance.checks.check import check

_LENGTH = 1 << 14


@check(
    "Stream", "stream", "current_stream",
    promise="A stream that only a block refers to stays current until the block ends; equal streams have "
    "equal "
    "hashes.",
)  # fmt: skip
def streams_live_as_long_as_they_are_used(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    device = accelerator.current_device_name()
    default = accelerator.default_stream()
    for _ in range(3):
        with accelerator.stream(new_stream(accelerator)):
            inside = accelerator.current_stream()
            gc.collect()
            others = [new_stream(accelerator) for _ in range(3)]
            now = accelerator.current_stream()
            require(
                now == inside and now != default,
                "stream(s) of a stream that nothing else refers to ends when garbage is collected",
            )
            doubled = torch.ones(_LENGTH, device=device) * 2
            now.synchronize()
            require(equal(doubled, torch.full((_LENGTH,), 2.0)), "work on a stream without a name is wrong")
        del inside, now, others
    side = new_stream(accelerator)
    for stream in (side, default):
        with accelerator.stream(stream):
            other = accelerator.current_stream()
        require(
            stream == other and hash(stream) == hash(other), "two objects of one Stream have other hashes"
        )
        require({stream: 1}.get(other) == 1, "current_stream() does not find its Stream in a dict")


@check(
    "Stream", "stream", "current_stream",
    promise="The backward pass of an operator runs on the stream on which the operator ran, and is complete "
    "for the stream that called backward().",
    once=True,
)  # fmt: skip
def backward_runs_on_its_stream(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    seen: list[Any] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(accelerator.current_stream(gradient.device))
            return gradient * 2

    for index, name in enumerate(device_names(accelerator)):
        with accelerator.device(index):
            side = new_stream(accelerator)
            work = Work(accelerator, at_least_ms=5)
            x = torch.ones(_LENGTH, device=name, requires_grad=True)
            accelerator.synchronize()
            with accelerator.stream(side):
                noted = Noted.apply(x)  # type: ignore[no-untyped-call]
                loss = (noted * work.queue()[0, 0]).sum()
            accelerator.current_stream().wait_stream(side)
            seen.clear()
            loss.backward()
            gradient = x.grad * 1 if x.grad is not None else None
            require(
                seen == [side],
                f"the backward pass of what ran within stream(s) on {name} runs on another stream: "
                f"current_stream() is {seen}",
            )
            require(
                gradient is not None and equal(gradient, torch.full((_LENGTH,), 2.0)),
                f"after backward() of what ran within stream(s) on {name} a gradient is wrong",
            )


@check(
    "Stream", "synchronize", "pin_empty",
    promise="A copy takes the numbers that its source has at the copy's place in the queue, and none that "
    "are "
    "written there later.",
    of="tensors",
)  # fmt: skip
def copies_keep_their_place_in_the_queue(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    others = [name for name in device_names(accelerator) if name != device]
    work = Work(accelerator, at_least_ms=5)
    targets: dict[str, Callable[[], torch.Tensor]] = {
        "pinned memory": lambda: accelerator.pin_empty(_LENGTH, dtype=torch.float32).zero_(),
        "ordinary memory": lambda: torch.zeros(_LENGTH),
        "the same device": lambda: torch.zeros(_LENGTH, device=device),
        **{name: lambda name=name: torch.zeros(_LENGTH, device=name) for name in others[:1]},  # type: ignore[misc]
    }
    for what, make in targets.items():
        for non_blocking in (False, True):
            source, target = torch.ones(_LENGTH, device=device), make()
            accelerator.synchronize()
            source += work.queue()[0, 0]
            target.copy_(source, non_blocking=non_blocking)
            source.add_(1)
            later = target * 3 if target.device.type == accelerator.device_type else None
            accelerator.synchronize()
            for name in others:
                accelerator.synchronize(name)
            told = f"copy_(non_blocking={non_blocking}) to {what}"
            require(
                equal(target, torch.full((_LENGTH,), 2.0)),
                f"{told} has numbers that were written to its source before or after it",
            )
            require(
                later is None or equal(later, torch.full((_LENGTH,), 6.0)), f"what reads {told} does not wait"
            )
            require(equal(source, torch.full((_LENGTH,), 3.0)), f"{told} changes its source")
