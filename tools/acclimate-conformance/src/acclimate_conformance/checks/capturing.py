"""Functions that checks share to capture and replay graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import offered_or_not

_T = TypeVar("_T")


def new_graph(accelerator: Accelerator) -> Any:
    """An empty graph; ends the check if the accelerator offers none."""
    with offered_or_not("graphs"):
        return accelerator.create_graph()


def offers_graphs(accelerator: Accelerator) -> bool:
    """Whether graphs can be captured and replayed, for checks that have others to look at."""
    ones = torch.ones(4, device=accelerator.current_device_name())
    return replays_change(accelerator, lambda: ones.add_(1))


def replays_change(accelerator: Accelerator, work: Callable[[], torch.Tensor]) -> bool:
    """Whether graphs are offered and a replay of the work changes its result; others check if it should."""
    try:
        graph, result = captured(accelerator, work)
        before = result.clone()
        replay(accelerator, graph)
        return not torch.equal(before, result)
    except Exception:  # noqa: BLE001 - a vendor's code may raise anything
        return False


def warm_up(accelerator: Accelerator, work: Any) -> None:
    """Runs the work before a capture, on another stream, as devices with real graphs require."""
    stream = accelerator.Stream()
    stream.wait_stream(accelerator.current_stream())
    with accelerator.stream(stream):
        for _ in range(3):
            work()
    accelerator.current_stream().wait_stream(stream)
    accelerator.synchronize()


def captured(accelerator: Accelerator, work: Callable[[], _T]) -> tuple[Any, _T]:
    """A graph into which work was captured after a first run, and the result of the capture."""
    graph = new_graph(accelerator)
    warm_up(accelerator, work)
    with accelerator.capture_to_graph(graph):
        result = work()
    accelerator.synchronize()
    return graph, result


def replay(accelerator: Accelerator, graph: Any) -> None:
    """Replays a graph and waits for its work."""
    accelerator.replay_graph(graph)
    accelerator.synchronize()
