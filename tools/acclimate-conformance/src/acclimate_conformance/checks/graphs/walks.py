"""A walk over graphs: random programs are captured, and replayed among other work as if they ran anew."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import torch

from acclimate.accelerator import Accelerator, HostStream
from acclimate_conformance.checks.assertions import require
from acclimate_conformance.checks.capturing import new_graph, warm_up
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.walking import Walk, move, walk

_WALKS, _MOVES = 8, 30
_SIDE = 8
_TENSORS = 4
_MODULUS = 97
"""Numbers stay below it, so that float32 holds sums of their products exactly."""
_MOST_GRAPHS = 3

_Numbers = Sequence[torch.Tensor]
_Step = Callable[[_Numbers], object]


def _reduced(to: torch.Tensor, result: torch.Tensor) -> None:
    to.copy_(result.remainder(_MODULUS))


def _gradient(to: torch.Tensor, given: torch.Tensor) -> None:
    with torch.enable_grad():
        x = given.clone().requires_grad_()
        (x * x).sum().backward()
    if x.grad is not None:
        _reduced(to, x.grad)


def _step(choose: random.Random) -> tuple[str, _Step]:
    """One step of a program, which reads and writes some of its matrices."""
    a, b, c = (choose.randrange(_TENSORS) for _ in range(3))
    k, row = choose.randrange(1, 5), choose.randrange(1, _SIDE - 1)
    order = choose.sample(range(_SIDE), _SIDE)

    def places(given: torch.Tensor) -> torch.Tensor:
        return torch.arange(_SIDE, device=given.device).mul(3).remainder(_SIDE)

    steps: dict[str, _Step] = {
        "in place": lambda r: r[a].mul_(k).add_(r[b]).remainder_(_MODULUS),
        "of a view": lambda r: r[a][row:, ::2].add_(k).remainder_(_MODULUS),
        "of a column": lambda r: r[a].t()[row].copy_(r[b][0]),
        "flip": lambda r: r[a].copy_(r[b].flip(0)),
        "where": lambda r: r[a].copy_(torch.where(r[b] > 20, r[c], r[a])),
        "cumsum": lambda r: _reduced(r[a], r[b].cumsum(0)),
        "product": lambda r: _reduced(r[a], r[b] @ r[c].t()),
        "sort": lambda r: r[a].copy_(r[b].sort(1).values),
        "gather": lambda r: r[a].copy_(r[b].gather(0, places(r[b]).expand(_SIDE, _SIDE))),
        "index_select": lambda r: r[a].copy_(r[b].index_select(1, places(r[b]))),
        "index_add": lambda r: _reduced(r[a], r[a].index_add(0, places(r[b]), r[b])),
        "cat": lambda r: r[a].copy_(torch.cat([r[b][:row], r[c][row:]])),
        "stack": lambda r: _reduced(r[a], torch.stack([r[b], r[c]]).sum(0)),
        "cast": lambda r: r[a].copy_((r[b].to(torch.int32) // 2).to(torch.float32)),
        "half": lambda r: r[a].copy_(r[b].to(torch.bfloat16)),
        "out": lambda r: torch.add(r[b], k, out=r[a]).remainder_(_MODULUS),
        "foreach": lambda r: [
            torch._foreach_add_([r[0], r[1]], k), r[0].fmod_(_MODULUS), r[1].fmod_(_MODULUS)
        ],
        "a number": lambda r: r[a][row, row].fill_(k),
        "fill": lambda r: r[a][:row].zero_(),
        "masked": lambda r: r[a].masked_fill_(r[b] < 10, k),
        "clone": lambda r: r[a].copy_(r[b].clone().mul_(k).fmod_(_MODULUS)),
        "strided": lambda r: r[a].copy_(r[b].as_strided((_SIDE, _SIDE), (1, _SIDE))),
        "maximum": lambda r: r[a].copy_(torch.maximum(r[b], r[c].amax(1, keepdim=True) - 50).abs()),
        "expanded": lambda r: _reduced(r[a], r[b][row].expand(_SIDE, _SIDE) + r[c]),
        "a gradient": lambda r: _gradient(r[a], r[b]),
        "made within": lambda r: _reduced(r[a], torch.full_like(r[b], k) + r[a]),
        "swapped": lambda r: r[a].copy_(
            r[b][order.index(row)].unsqueeze(1).expand(_SIDE, _SIDE).contiguous()
        ),
        "roll": lambda r: r[a].copy_(r[b].roll((k, 1), (0, 1))),
        "split": lambda r: [part.add_(1).fmod_(_MODULUS) for part in r[a].split(3)[:k]],
    }  # fmt: skip
    told = choose.choice(list(steps))
    return told, steps[told]


class _Captured:
    """A graph, its program, and the results that it writes to."""

    def __init__(self, graph: Any, steps: list[_Step], results: list[torch.Tensor]) -> None:
        self.graph, self.steps, self.results = graph, steps, results
        self.wanted: torch.Tensor | None = None
        """What its result must be: nothing is known before the first replay."""


class _Replayed(Walk):
    """Matrices on a device, and the same on the host, to which each program is applied without a graph."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self.start = accelerator.current_device()
        self.name = accelerator.current_device_name()
        self.has_streams = not issubclass(accelerator.Stream, HostStream)
        self.host = [torch.zeros(_SIDE, _SIDE) for _ in range(_TENSORS)]
        self.there = [torch.zeros(_SIDE, _SIDE, device=self.name) for _ in range(_TENSORS)]
        self.captured: list[_Captured] = []
        self.noise: list[torch.Tensor] = []
        new_graph(accelerator)
        self._renew(random.Random(1))

    def _renew(self, choose: random.Random) -> None:
        """Puts new numbers into all matrices."""
        seed = torch.Generator().manual_seed(choose.randrange(1 << 20))
        for mine, theirs in zip(self.host, self.there, strict=True):
            mine.copy_(torch.randint(0, _MODULUS, (_SIDE, _SIDE), generator=seed))
            theirs.copy_(mine)
        self.accelerator.synchronize()

    @move(4)
    def captures(self, choose: random.Random) -> None:
        if len(self.captured) >= _MOST_GRAPHS or self.actor:
            return
        program = [_step(choose) for _ in range(choose.randrange(1, 7))]
        steps = [step for _, step in program]
        aside = choose.randrange(len(steps)) if self.has_streams and choose.random() < 0.4 else -1
        block = choose.choice(("", "", "no_grad()", "device()", "stream()"))
        side = self.accelerator.Stream()
        other = choose.randrange(self.accelerator.device_count())
        told = ", ".join(
            f"{name}{' on a side stream' * (place == aside)}" for place, (name, _) in enumerate(program)
        )
        self.say(f"capture_to_graph() of: {told}{block and f', within {block}'}")

        def work() -> torch.Tensor:
            for place, step in enumerate(steps):
                if place != aside:
                    step(self.there)
                    continue
                here = self.accelerator.current_stream(self.name)
                side.wait_stream(here)
                with self.accelerator.stream(side):
                    step(self.there)
                here.wait_stream(side)
            return self.there[0] * 2 + self.there[-1]

        graph = new_graph(self.accelerator)
        warm_up(self.accelerator, work)
        options = {"stream": self.accelerator.Stream()} if block == "stream()" and self.has_streams else {}
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad() if block == "no_grad()" else nullcontext())
            stack.enter_context(self.accelerator.capture_to_graph(graph, **options))
            if block == "device()":
                with self.accelerator.device(other):
                    torch.zeros(1).add_(1)
            result = work()
        self.accelerator.synchronize()
        # A capture may run the work, or not.
        self._renew(choose)
        self.captured.append(_Captured(graph, steps, [result]))

    @move(8)
    def replays(self, choose: random.Random) -> None:
        if not self.captured:
            return
        captured, times = choose.choice(self.captured), choose.choice((1, 1, 2, 5))
        aside = self.has_streams and choose.random() < 0.3
        self.say(
            f"replay_graph() {f'{times} times ' * (times > 1)}of graph {self.captured.index(captured)}"
            f"{' on another stream' * aside}"
        )
        side = self.accelerator.Stream(device=self.name) if aside else None
        here = self.accelerator.current_stream(self.name)
        if side is not None:
            side.wait_stream(here)
        with self.accelerator.stream(side) if side is not None else nullcontext():
            for _ in range(times):
                self.accelerator.replay_graph(captured.graph)
        if side is not None:
            here.wait_stream(side)
        for _ in range(times):
            for step in captured.steps:
                step(self.host)
        captured.wanted = self.host[0] * 2 + self.host[-1]

    @move(5)
    def works_without_a_graph(self, choose: random.Random) -> None:
        told, step = _step(choose)
        self.say(f"work without a graph: {told}")
        step(self.there)
        step(self.host)

    @move(3)
    def changes_the_inputs(self, choose: random.Random) -> None:
        self.say("other inputs")
        self._renew(choose)

    @move(3)
    def allocates(self, choose: random.Random) -> None:
        self.say("other tensors made and dropped")
        self.noise = [
            torch.full((_SIDE, choose.choice((1, _SIDE, 64))), 55.0, device=self.name) for _ in range(20)
        ]
        for numbers in self.noise:
            numbers.mul_(2)

    @move(2)
    def draws(self, choose: random.Random) -> None:
        self.say("a draw, and a seed")
        torch.rand(9, device=self.name)
        self.accelerator.manual_seed(choose.randrange(9))

    @move(2)
    def goes_elsewhere(self, choose: random.Random) -> None:
        index = choose.randrange(self.accelerator.device_count())
        self.say(f"work on device {index} within device({index})")
        with self.accelerator.device(index):
            torch.ones(_SIDE, device=self.accelerator.current_device_name()).mul_(2)
            self.accelerator.synchronize()

    @move(2)
    def fails_within_a_capture(self, choose: random.Random) -> None:
        if self.actor:
            return
        self.say("a capture that ends by an error")
        graph = new_graph(self.accelerator)
        with suppress(RuntimeError), self.accelerator.capture_to_graph(graph):
            self.there[0] @ torch.zeros(3, 3, device=self.name)
        self.accelerator.synchronize()
        require(
            not self.accelerator.is_current_stream_capturing(),
            "is_current_stream_capturing() is True after a capture that ended by an error",
        )
        self._renew(choose)

    @move(2)
    def drops(self, choose: random.Random) -> None:
        if not self.captured:
            return
        captured = choose.choice(self.captured)
        by_reset = choose.random() < 0.5 and hasattr(captured.graph, "reset")
        number = self.captured.index(captured)
        self.say(f"Graph.reset() of graph {number}" if by_reset else f"graph {number} dropped")
        self.accelerator.synchronize()
        if by_reset:
            captured.graph.reset()
        self.captured.remove(captured)

    def look(self) -> None:
        self.accelerator.synchronize(self.name)
        for place, (mine, theirs) in enumerate(zip(self.host, self.there, strict=True)):
            found = theirs.cpu()
            if not torch.equal(found, mine):
                spot = (found != mine).nonzero()[0].tolist()
                seen, want = found[tuple(spot)].item(), mine[tuple(spot)].item()
                require(
                    False, f"matrix {place} has {seen} at {spot}, and {want} if the work runs without graphs"
                )
        for number, captured in enumerate(self.captured):
            if captured.wanted is not None:
                require(
                    torch.equal(captured.results[0].cpu(), captured.wanted),
                    f"the result of graph {number} is not what its last replay gave",
                )

    def end(self) -> None:
        self.captured.clear()
        self.accelerator.synchronize()
        self.accelerator.set_device(self.start)


@check(
    "capture_to_graph", "replay_graph", "create_graph",
    promise="Random programs that are captured do the same at each replay as without graphs, whatever is "
    "called in between.",
    timeout_s=240,
    once=True,
)  # fmt: skip
def walks_over_graphs(accelerator: Accelerator) -> None:
    walk(accelerator, _Replayed, _WALKS, _MOVES)
