"""Checks of graphs: work captured once gives right results at every replay."""

from __future__ import annotations

import torch

from acclimate.accelerator import Accelerator, RecordedGraph
from acclimate.errors import GraphCaptureError
from acclimate_conformance.checks.assertions import (
    equal,
    refused,
    require,
    require_close,
)
from acclimate_conformance.checks.capturing import captured, new_graph, replay
from acclimate_conformance.checks.check import check

_MANY_REPLAYS = 1000
_MANY_CALLS = 3000
"""So many that a fault which only some replays have shows; their sums stay exact in float32."""


@check(
    "create_graph", "capture_to_graph", "replay_graph", "supports_graphs",
    promise="A replay reads the present values of the captured inputs, and writes to the captured results.",
    timeout_s=240,
)  # fmt: skip
def replay_follows_inputs(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    weight, inputs = torch.randn(32, 32, device=device), torch.zeros(8, 32, device=device)

    def work() -> torch.Tensor:
        return torch.relu(inputs @ weight) + inputs.sum(-1, keepdim=True)

    graph, result = captured(accelerator, work)
    address = result.data_ptr()
    for seed in range(3):
        fresh = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
        inputs.copy_(fresh)
        if seed == 1:  # what replay_graph() calls
            graph.replay()
            accelerator.synchronize()
        else:
            replay(accelerator, graph)
        wanted = torch.relu(fresh.double() @ weight.cpu().double()) + fresh.double().sum(-1, keepdim=True)
        require_close(result, wanted, torch.float32, f"replay_graph(): the result of replay {seed + 1}")
    require(result.data_ptr() == address, "replay_graph() moves the result to another address")


@check(
    "capture_to_graph", "replay_graph",
    promise="Each replay, however many there are and however long the graph is, repeats captured in-place "
    "updates on the present inputs.",
)  # fmt: skip
def replay_repeats_updates(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    counter, total = torch.zeros(16, device=device), torch.zeros(16, device=device)
    given = torch.zeros(16, device=device)

    def work() -> None:
        counter.add_(1)
        total.add_(given * 2)

    graph, _ = captured(accelerator, work)
    for replays in (1, 4, 60, _MANY_REPLAYS):
        for tensor in (counter, total):
            tensor.zero_()
        for turn in range(replays):
            given.fill_(turn)
            accelerator.replay_graph(graph)
        accelerator.synchronize()
        grown = counter.unique().tolist()
        require(grown == [replays], f"replay_graph() of an addition of 1, {replays} times, adds {grown}")
        added, wanted = total.unique().tolist(), float(replays * (replays - 1))
        require(
            added == [wanted],
            f"replay_graph() of twice each number below {replays} adds {added}, not {wanted}",
        )

    def work_long() -> None:
        for _ in range(_MANY_CALLS):
            counter.add_(given)

    graph, _ = captured(accelerator, work_long)
    for turn in (1, 2):
        counter.zero_()
        given.fill_(turn)
        replay(accelerator, graph)
        added, wanted = counter.unique().tolist(), float(turn * _MANY_CALLS)
        require(
            added == [wanted],
            f"replay_graph() of {_MANY_CALLS} additions of {turn} adds {added}, not {wanted}",
        )


@check(
    "capture_to_graph", "replay_graph",
    promise="A captured training step (forward, backward, update) trains like the same step without a graph.",
    timeout_s=240,
)  # fmt: skip
def replay_trains(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(8, 16, generator=generator) / 4
    batches = [torch.randn(4, 16, generator=generator) for _ in range(3)]
    weight = start.clone().to(device).requires_grad_()
    inputs = batches[0].clone().to(device)

    def step(parameter: torch.Tensor, batch: torch.Tensor) -> None:
        (gradient,) = torch.autograd.grad((batch @ parameter.T).square().mean(), [parameter])
        with torch.no_grad():
            parameter.sub_(0.1 * gradient)

    graph, _ = captured(accelerator, lambda: step(weight, inputs))
    with torch.no_grad():
        weight.copy_(start)
    expected = start.clone().requires_grad_()
    for batch in batches:
        inputs.copy_(batch)
        accelerator.replay_graph(graph)
        step(expected, batch)
    accelerator.synchronize()
    require(not equal(weight, start), "replay_graph() of a training step does not change the weights")
    require_close(weight, expected, torch.float32, "replay_graph(): a weight after three training steps")


@check(
    "is_current_stream_capturing", "capture_to_graph",
    promise="is_current_stream_capturing is True within a capture and False outside.",
)  # fmt: skip
def capture_is_told(accelerator: Accelerator) -> None:
    graph = new_graph(accelerator)
    ones = torch.ones(4, device=accelerator.current_device_name())
    accelerator.synchronize()
    require(
        accelerator.is_current_stream_capturing() is False,
        "is_current_stream_capturing() is True before a capture",
    )
    with accelerator.capture_to_graph(graph):
        inside = accelerator.is_current_stream_capturing()
        ones.add_(1)
    require(inside is True, f"is_current_stream_capturing() is {inside} within a capture")
    require(
        accelerator.is_current_stream_capturing() is False,
        "is_current_stream_capturing() is True after a capture",
    )


@check(
    "replay_graph", "create_graph",
    promise="Replaying a graph that has no capture, or was reset, raises.",
)  # fmt: skip
def empty_graph_refused(accelerator: Accelerator) -> None:
    graph = new_graph(accelerator)
    # A driver's graph raises errors of its own.
    raises = GraphCaptureError if isinstance(graph, RecordedGraph) else RuntimeError
    with refused("replay_graph() of a graph without a capture", raises):
        accelerator.replay_graph(graph)
    ones = torch.ones(4, device=accelerator.current_device_name())
    accelerator.synchronize()
    with accelerator.capture_to_graph(graph):
        ones.add_(1)
    graph.reset()
    with refused("replay_graph() after Graph.reset()", raises):
        accelerator.replay_graph(graph)


@check(
    "capture_to_graph", "is_current_stream_capturing",
    promise="Reading a value back to the host within a capture raises, since a replay could not repeat it.",
)  # fmt: skip
def host_reads_refused(accelerator: Accelerator) -> None:
    graph = new_graph(accelerator)
    ones = torch.ones(4, device=accelerator.current_device_name())
    accelerator.synchronize()
    with (
        refused("capture_to_graph() with a value that is read back", RuntimeError),
        accelerator.capture_to_graph(graph),
    ):
        float((ones * 2).sum())
    require(
        accelerator.is_current_stream_capturing() is False,
        "is_current_stream_capturing() is True after a failed capture",
    )
    require(float((ones * 2).sum()) == 8.0, "capture_to_graph() that failed makes later results wrong")
