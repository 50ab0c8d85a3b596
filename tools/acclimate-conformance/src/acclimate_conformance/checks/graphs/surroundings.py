"""Checks that a replay does what was captured, whatever state of torch is current at the replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks import ambient
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    device_names,
    equal,
    require,
    require_close,
)
from acclimate_conformance.checks.capturing import new_graph, warm_up
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import numbers, reduced_dtypes

_State = Callable[[], AbstractContextManager[object]]


@check(
    "capture_to_graph", "replay_graph", "amp",
    promise="A replay computes in the dtypes of the capture and records no gradients, under any autocast, "
    "default dtype or gradient mode.",
)  # fmt: skip
def replays_keep_their_state(accelerator: Accelerator) -> None:
    states = _states(accelerator)
    device = accelerator.current_device_name()
    values, weights = numbers(24, 40).float(), numbers(40, 16, seed=1).float() + 2.0**-10
    for captured_in, at_capture in states.items():
        inputs, weight = torch.zeros(24, 40, device=device), weights.to(device)
        inputs.requires_grad_(captured_in == "within no_grad")

        def work(x: torch.Tensor = inputs, w: torch.Tensor = weight) -> list[torch.Tensor]:
            product = x @ w
            return [
                product,
                product.sum(-1),
                torch.nn.functional.softmax(product, -1),
                torch.ones_like(product) * x[0, 0],
            ]

        graph = new_graph(accelerator)
        before = ambient.look(accelerator)
        with at_capture():
            warm_up(accelerator, work)
            with accelerator.capture_to_graph(graph):
                results = work()
        accelerator.synchronize()  # another stream may have read the inputs
        change = ambient.changed(before, ambient.look(accelerator))
        require(not change, f"capture_to_graph() {captured_in} changes {change}")
        kinds = [result.dtype for result in results]
        for turn, (replayed_in, at_replay) in enumerate(states.items(), start=1):
            with torch.no_grad():
                inputs.copy_(values * turn)
                weight.copy_(weights / turn)
            with at_replay():
                accelerator.replay_graph(graph)
            accelerator.synchronize()
            with at_capture():
                wanted = [result.detach().cpu() for result in work(inputs.detach(), weight)]
            accelerator.synchronize()  # on another stream it has read the inputs, which change next
            what = f"replay_graph() {replayed_in} of what was captured {captured_in}"
            for result, kind, expected in zip(results, kinds, wanted, strict=True):
                require(result.dtype == kind, f"{what} gives {result.dtype}, not {kind}")
                require_close(result, expected, kind, what)
                if kind == torch.float32 and "autocast" not in captured_in:
                    apart = float((result.detach().cpu() - expected).abs().max() / expected.abs().max())
                    require(apart < 1e-3, f"{what} is as coarse as a reduced dtype: off by {apart:.0e}")


def _states(accelerator: Accelerator) -> dict[str, _State]:
    states: dict[str, _State] = {"without autocast": nullcontext}
    try:
        for dtype in reduced_dtypes(accelerator):
            states[f"within autocast({dtype})"] = lambda dtype=dtype: accelerator.amp.autocast(dtype=dtype)  # type: ignore[misc]
    except NotOfferedError:
        pass
    return states | {
        "within no_grad": torch.no_grad,
        "within inference_mode": torch.inference_mode,
        "with another default dtype": _other_default_dtype,
        "on another stream": lambda: accelerator.stream(accelerator.Stream()),
    }


@contextmanager
def _other_default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@check(
    "capture_to_graph", "replay_graph",
    promise="A graph of one device is replayed while another is current, on its own device's tensors.",
)  # fmt: skip
def replays_from_other_devices(accelerator: Accelerator) -> None:
    names = device_names(accelerator)
    for index, name in enumerate(names):
        accelerator.set_device(index)
        ones = torch.ones(64, device=name)
        graph = new_graph(accelerator)
        warm_up(accelerator, lambda ones=ones: ones * 3)
        with accelerator.capture_to_graph(graph):
            tripled = ones * 3
        for turn, other in enumerate(range(len(names)), start=2):
            ones.fill_(turn)
            accelerator.synchronize()
            with accelerator.device(other):
                accelerator.replay_graph(graph)
                accelerator.synchronize(index)
                now = accelerator.current_device()
            require(
                equal(tripled, torch.full((64,), 3.0 * turn)),
                f"replay_graph() of a graph of {name} while device {other} is current gives wrong values",
            )
            if len(names) > 1:
                require(now == other, f"replay_graph() makes device {now} current, not {other}")


@check(
    "capture_to_graph", "replay_graph",
    promise="A replay treats every element of tensors of any length, and an empty one.",
)  # fmt: skip
def replays_of_any_length(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    tensors = [
        torch.zeros(length, device=device)
        for length in (0, 1, 3, 5, 7, 17, 33, 1003, 4097, 70_001, 1_300_003)
    ]
    graph = new_graph(accelerator)
    warm_up(accelerator, lambda: [tensor * 2 + 1 for tensor in tensors])
    with accelerator.capture_to_graph(graph):
        results = [tensor * 2 + 1 for tensor in tensors]
    for turn in (1, 2):
        for tensor in tensors:
            tensor.copy_(torch.arange(float(len(tensor))) * turn)
        accelerator.replay_graph(graph)
        accelerator.synchronize()
        for result in results:
            wanted = torch.arange(float(len(result))) * turn * 2 + 1
            require(equal(result, wanted), f"replay_graph() with {len(result)} elements gives wrong values")
