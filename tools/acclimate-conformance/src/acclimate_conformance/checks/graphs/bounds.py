"""Checks of what belongs to a graph: each kind of draw, pinned inputs, its own thread and memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator, RecordedGraph
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    device_names,
    equal,
    is_on,
    note_of_lacks,
    require,
)
from acclimate_conformance.checks.capturing import captured, new_graph, replay, warm_up
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.random.states import kinds_of_draws

_LENGTH = 257
_PATIENCE_S = 30


@check(
    "capture_to_graph", "replay_graph", "manual_seed",
    promise="Each replay draws new numbers of every kind, also from a generator of the program's, and the "
    "same "
    "ones again after the same seed.",
    once=True,
)  # fmt: skip
def every_kind_of_draw_is_repeated(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    is_recorded = isinstance(new_graph(accelerator), RecordedGraph)
    own = torch.Generator(device)
    draws = dict(kinds_of_draws(device))
    if is_recorded:  # a driver's graph must be told of generators
        draws |= {
            "rand with a generator": lambda: torch.rand(_LENGTH, device=device, generator=own),
            "normal_ with a generator": lambda: torch.empty(_LENGTH, device=device).normal_(generator=own),
            "randint with a generator": lambda: torch.randint(9999, (_LENGTH,), device=device, generator=own),
        }
    absent = set()
    for name, draw in draws.items():
        try:
            draw()
        except (NotImplementedError, RuntimeError):
            absent.add(name)
            continue
        try:
            graph, result = captured(accelerator, draw)
        except RuntimeError:
            if is_recorded and "generator" not in name:
                raise
            # A driver captures no operator that waits for the device, and a graph may say that it records the
            # default generator alone.
            absent.add(name)
            continue

        def replayed(graph: object = graph, result: torch.Tensor = result) -> torch.Tensor:
            replay(accelerator, graph)
            return result.cpu().clone()

        before: list[torch.Tensor] = []
        for seeded in range(2):
            accelerator.manual_seed(11)
            own.manual_seed(12)
            found = [replayed(), replayed(), draw().cpu()]
            if seeded:
                for ours, theirs in zip(found, before, strict=True):
                    require(
                        equal(ours, theirs),
                        f"replay_graph() of {name} from the same seed gives other numbers",
                    )
            before = found
        for first, second, what in ((0, 1, "a replay"), (1, 2, "a draw after a replay"), (0, 2, "a draw")):
            require(
                not equal(found[first], found[second]),
                f"{what} of {name} gives numbers of replay_graph() again",
            )
    return note_of_lacks(absent)


@check(
    "capture_to_graph", "replay_graph", "pin_memory",
    promise="A replay copies what pinned memory holds at the replay, in both directions.",
)  # fmt: skip
def pinned_memory_is_read_again(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    given = accelerator.pin_memory(torch.zeros(_LENGTH))
    taken = accelerator.pin_empty(_LENGTH, dtype=torch.float32).zero_()
    there = torch.zeros(_LENGTH, device=device)

    def work() -> None:
        there.copy_(given, non_blocking=True)
        there.mul_(2)
        taken.copy_(there, non_blocking=True)

    graph = new_graph(accelerator)
    if not given.is_pinned():
        raise NotOfferedError("it does not pin memory, and says so")
    warm_up(accelerator, work)
    with accelerator.capture_to_graph(graph):
        work()
    for turn in (1.0, 4.0):
        given.fill_(turn)
        replay(accelerator, graph)
        for what, found in (("from pinned memory", there), ("to pinned memory", taken)):
            wanted = torch.full((_LENGTH,), 2 * turn)
            require(equal(found, wanted), f"replay_graph() of a copy {what} gives numbers of an earlier time")


@check(
    "capture_to_graph", "replay_graph",
    promise="A graph holds the work of the thread that captures, on that thread's device, wherever it is "
    "replayed.",
)  # fmt: skip
def graphs_hold_work_of_one_thread(accelerator: Accelerator) -> None:
    index, device = accelerator.current_device(), accelerator.current_device_name()
    graph = new_graph(accelerator)
    if not isinstance(graph, RecordedGraph):
        raise NotOfferedError("a driver may forbid other threads to work during a capture")
    ones, counter = torch.ones(_LENGTH, device=device), torch.zeros(_LENGTH, device=device)
    begun, done = threading.Event(), threading.Event()

    def beside() -> None:
        begun.wait(_PATIENCE_S)
        with accelerator.device(index):
            counter.add_(1)
            accelerator.synchronize()
        done.set()

    thread = threading.Thread(target=beside)
    thread.start()

    def made() -> torch.Tensor:
        kind = accelerator.device_type
        return torch.arange(float(_LENGTH), device=kind) + torch.zeros(_LENGTH, device=kind) + ones

    with accelerator.capture_to_graph(graph):
        doubled = ones * 2
        begun.set()
        done.wait(_PATIENCE_S)
        result = made()
    thread.join()
    before = counter.cpu().clone()
    for turn, other in enumerate((index, 0, len(device_names(accelerator)) - 1), start=2):
        ones.fill_(turn)
        accelerator.synchronize()

        def elsewhere(other: int = other) -> None:
            with accelerator.device(other):
                accelerator.replay_graph(graph)
                accelerator.synchronize(index)

        runner = threading.Thread(target=elsewhere)
        runner.start()
        runner.join()
        where = f"replay_graph() in a thread on device {other}"
        require(equal(counter, before), f"{where} repeats what another thread did during the capture")
        require(equal(doubled, torch.full((_LENGTH,), 2.0 * turn)), f"{where} leaves a result as it was")
        require(
            equal(result, torch.arange(float(_LENGTH)) + turn) and is_on(result, device),
            f"{where} makes its tensors on {result.device}, or leaves them as they were",
        )


@check(
    "capture_to_graph", "replay_graph", "create_graph",
    promise="A graph that shares another's memory leaves what the program still holds of it as it is.",
)  # fmt: skip
def shared_pools_keep_results(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    ones = torch.ones(4096, device=device)
    works: list[Callable[[], torch.Tensor]] = [lambda: ones * 3, lambda: ones * 4 + 1, lambda: ones - 5]
    warm_up(accelerator, lambda: [work() for work in works])
    graphs, results = [], []
    pool = None
    for work in works:
        graph = new_graph(accelerator)
        with accelerator.capture_to_graph(graph, pool=pool):
            results.append(work())
        graphs.append(graph)
        pool = pool or getattr(graph, "pool", lambda: None)()
    for turn in (2.0, 7.0):
        ones.fill_(turn)
        for graph in graphs:
            accelerator.replay_graph(graph)
        accelerator.synchronize()
        for number, (result, wanted) in enumerate(
            zip(results, (3 * turn, 4 * turn + 1, turn - 5), strict=True)
        ):
            require(
                equal(result, torch.full((4096,), wanted)),
                f"a result of graph {number + 1} of {len(graphs)} that share memory is {float(result[0])} "
                f"after "
                f"all were replayed, not {wanted}",
            )
