"""Checks of captures: several graphs, random numbers, many results, and the state after an error."""

from __future__ import annotations

from typing import Any

import torch

from acclimate.accelerator import Accelerator, RecordedGraph
from acclimate.errors import GraphCaptureError
from acclimate_conformance.checks.assertions import (
    equal,
    in_thread,
    let_through,
    refused,
    require,
    require_close,
)
from acclimate_conformance.checks.capturing import captured, new_graph, replay, warm_up
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.errors import DeliberateError


@check(
    "create_graph", "capture_to_graph", "replay_graph",
    promise="Several graphs can be replayed in any order, each with its own inputs and results.",
    timeout_s=240,
)  # fmt: skip
def graphs_are_independent(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    inputs = [torch.full((16,), float(n), device=device) for n in range(3)]
    shared = torch.zeros(16, device=device)
    graphs, results = [], []
    for number, given in enumerate(inputs):

        def work(number: int = number, given: torch.Tensor = given) -> torch.Tensor:
            shared.mul_(2).add_(number + 1)
            return given * 10 + shared

        graph, result = captured(accelerator, work)
        graphs.append(graph)
        results.append(result)
    require(len({id(graph) for graph in graphs}) == 3, "create_graph() returns the same graph again")
    shared.zero_()
    expected_shared = 0.0
    for turn, number in enumerate((2, 0, 1, 1, 2, 0)):
        inputs[number].fill_(float(turn))
        replay(accelerator, graphs[number])
        expected_shared = expected_shared * 2 + number + 1
        found, wanted = results[number].cpu(), torch.full((16,), turn * 10 + expected_shared)
        require(
            equal(found, wanted),
            f"replay_graph(), call {turn + 1} of several graphs, gives {found[0]}, not {wanted[0]}",
        )
    kept = results[1].cpu().clone()
    graphs[0].reset()
    replay(accelerator, graphs[2])
    require(equal(results[1], kept), "Graph.reset() or a replay changes another graph's result")


@check(
    "capture_to_graph", "replay_graph", "manual_seed",
    promise="Each replay draws new random numbers, and the same ones again after the same seed.",
    timeout_s=240,
)  # fmt: skip
def replays_draw_new_numbers(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    ones = torch.ones(512, device=device)

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.dropout(ones, 0.5), torch.rand(512, device=device)

    graph, results = captured(accelerator, work)

    def replayed() -> list[torch.Tensor]:
        replay(accelerator, graph)
        return [result.cpu().clone() for result in results]

    accelerator.manual_seed(11)
    first, second = replayed(), replayed()
    accelerator.manual_seed(11)
    again = replayed()
    for what, one, two, three in zip(("dropout", "rand"), first, second, again, strict=True):
        require(not equal(one, two), f"replay_graph(), twice, of {what} gives the same numbers")
        require(equal(one, three), f"replay_graph() of {what} from the same seed gives other numbers")
    apart = (first[1] - second[1]).abs().mean()
    require(bool(apart > 0.1), "replay_graph(), twice, of rand gives nearly the same numbers")


@check(
    "capture_to_graph", "replay_graph",
    promise="A replay updates every result of the capture: outputs, views, copies, and in-place changes.",
)  # fmt: skip
def every_result_is_replayed(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    inputs = torch.zeros(6, 40, device=device)
    table = torch.zeros(6, device=device)
    history = torch.zeros(3, device=device)

    def work() -> dict[str, torch.Tensor]:
        doubled = inputs * 2
        table.copy_(doubled[:, 3])
        history[1:2].add_(1)
        values, places = doubled.max(-1)
        return {
            "the first result": doubled, "a view": doubled[1:3], "a sum": doubled.sum(-1),
            "a maximum": values, "its place": places, "a copied column": table,
            "a joined result": torch.cat([doubled, inputs]),
            "the last result": (doubled + 1).t().contiguous(),
        }  # fmt: skip

    graph, results = captured(accelerator, work)
    history.zero_()
    generator = torch.Generator().manual_seed(3)
    for turn in range(1, 4):
        fresh = torch.randint(-50, 50, (6, 40), generator=generator).float()
        fresh[torch.arange(6), torch.randint(0, 40, (6,), generator=generator)] = 100  # one maximum a row
        inputs.copy_(fresh)
        replay(accelerator, graph)
        doubled = fresh * 2
        wanted = {
            "the first result": doubled, "a view": doubled[1:3], "a sum": doubled.sum(-1),
            "a maximum": doubled.max(-1).values, "its place": doubled.max(-1).indices,
            "a copied column": doubled[:, 3], "a joined result": torch.cat([doubled, fresh]),
            "the last result": (doubled + 1).t(),
        }  # fmt: skip
        for what, expected in wanted.items():
            require(
                equal(results[what], expected),
                f"after replay_graph() {turn} times {what} does not follow the new input",
            )
        require(
            equal(history, torch.tensor([0.0, turn, 0.0])),
            f"after {turn} calls of replay_graph() a count kept in place is {history.tolist()}",
        )


@check(
    "capture_to_graph", "is_current_stream_capturing",
    promise="An error within a capture ends it and is not suppressed; the next capture works.",
)  # fmt: skip
def capture_ends_after_an_error(accelerator: Accelerator) -> None:
    ones = torch.ones(4, device=accelerator.current_device_name())
    failed = new_graph(accelerator)
    accelerator.synchronize()
    with let_through("capture_to_graph()"), accelerator.capture_to_graph(failed):
        ones * 2
        raise DeliberateError
    if isinstance(failed, RecordedGraph):  # a driver keeps what was captured before the error
        with refused("replaying a graph whose capture failed", GraphCaptureError):
            accelerator.replay_graph(failed)
    require(
        accelerator.is_current_stream_capturing() is False,
        "capture_to_graph() is not ended by an error within it",
    )
    require(
        accelerator.current_stream() == accelerator.default_stream(),
        "after an error within capture_to_graph() another stream is current",
    )
    graph = new_graph(accelerator)
    with accelerator.capture_to_graph(graph):
        result = ones + 4
    ones.fill_(2)
    replay(accelerator, graph)
    require(equal(result, torch.full((4,), 6.0)), "a capture after a failed one gives a wrong result")


@check(
    "capture_to_graph", "create_graph", "replay_graph",
    promise="A second capture into a graph replaces the first; a failed one leaves the first unchanged.",
)  # fmt: skip
def second_capture_replaces(accelerator: Accelerator) -> None:
    graph = new_graph(accelerator)
    counts = torch.zeros(3, device=accelerator.current_device_name())
    warm_up(accelerator, lambda: counts.add_(1))

    def replayed() -> list[float]:
        counts.zero_()
        replay(accelerator, graph)
        found: list[float] = counts.tolist()
        return found

    with accelerator.capture_to_graph(graph):
        counts[0].add_(1)
    require(replayed() == [1, 0, 0], f"replay_graph() adds {replayed()} where 1, 0 and 0 were captured")
    if not isinstance(graph, RecordedGraph):  # a driver's must be reset first
        graph.reset()
    with accelerator.capture_to_graph(graph):
        counts[1].add_(1)
    require(
        replayed() == [0, 1, 0],
        f"after a second capture_to_graph(), of 0, 1 and 0, a replay adds {replayed()}",
    )
    if isinstance(graph, RecordedGraph):
        with let_through("capture_to_graph()"), accelerator.capture_to_graph(graph):
            counts[2].add_(1)
            raise DeliberateError
        require(replayed() == [0, 1, 0], f"after a third capture, which failed, a replay adds {replayed()}")
    graph.reset()
    with accelerator.capture_to_graph(graph):
        counts[2].add_(1)
    require(replayed() == [0, 0, 1], f"a capture after Graph.reset(), of 0, 0 and 1, adds {replayed()}")


@check(
    "capture_to_graph", "create_graph",
    promise="capture_to_graph raises GraphCaptureError for anything but a graph of this accelerator.",
)  # fmt: skip
def what_is_no_graph_is_refused(accelerator: Accelerator) -> None:
    new_graph(accelerator)
    for given in (None, object(), "graph"):
        with (
            refused(f"capture_to_graph({given!r})", GraphCaptureError),
            accelerator.capture_to_graph(given),
        ):
            pass


@check(
    "capture_to_graph", "replay_graph",
    promise="A capture on a given stream, and one that shares another graph's memory, replay correctly.",
)  # fmt: skip
def capture_options(accelerator: Accelerator) -> None:
    ones = torch.ones(64, device=accelerator.current_device_name())
    stream = accelerator.Stream()
    first, second = new_graph(accelerator), new_graph(accelerator)
    warm_up(accelerator, lambda: ones * 3)
    before = accelerator.current_stream()
    with accelerator.capture_to_graph(first, stream=stream):
        tripled = ones * 3
    require(
        accelerator.current_stream() == before,
        "after capture_to_graph() on a stream that stream stays current",
    )
    pool: Any = getattr(first, "pool", lambda: None)()
    with accelerator.capture_to_graph(second, pool=pool):
        fourfold = ones * 4
    for turn in (2.0, 5.0):
        ones.fill_(turn)
        for graph, result, factor in ((first, tripled, 3), (second, fourfold, 4)):
            accelerator.replay_graph(graph)
            accelerator.synchronize()
            require_close(
                result, torch.full((64,), turn * factor), torch.float32, f"{turn} times {factor} in a graph"
            )


@check(
    "is_current_stream_capturing", "capture_to_graph",
    promise="A capture belongs to one thread, and a second capture within it is refused.",
)  # fmt: skip
def capture_is_one_threads(accelerator: Accelerator) -> None:
    graph = new_graph(accelerator)
    ones = torch.ones(4, device=accelerator.current_device_name())
    with accelerator.capture_to_graph(graph):
        doubled = ones * 2
        if isinstance(graph, RecordedGraph):  # a driver may forbid these calls during a capture
            elsewhere = in_thread(accelerator.is_current_stream_capturing)
            require(elsewhere is False, "during a capture it is True in another thread")
            second = new_graph(accelerator)
            with (
                refused("a capture within a capture", GraphCaptureError),
                accelerator.capture_to_graph(second),
            ):
                pass
            still = accelerator.is_current_stream_capturing()
            require(still is True, "refusing a second capture ends the first one")
            index = accelerator.current_device()
            other, tripled = in_thread(lambda: _captured_there(accelerator, index, ones))
    ones.fill_(3)
    replay(accelerator, graph)
    require(equal(doubled, torch.full((4,), 6.0)), "a replay gives a wrong result")
    if isinstance(graph, RecordedGraph):
        before = float(tripled[0])
        require(before == 3, f"a replay repeats what another thread captured meanwhile: {before}")
        replay(accelerator, other)
        require(
            equal(tripled, torch.full((4,), 9.0)), "what a thread captured during a capture is not replayed"
        )


def _captured_there(accelerator: Accelerator, index: int, ones: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A graph of another thread, captured while this one captures."""
    accelerator.set_device(index)
    graph = new_graph(accelerator)
    with accelerator.capture_to_graph(graph):
        tripled = ones * 3
    return graph, tripled
