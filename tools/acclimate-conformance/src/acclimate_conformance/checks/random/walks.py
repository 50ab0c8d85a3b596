"""A walk over random numbers: equal histories of seeds and draws give equal numbers, others do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import is_host, refused, require
from acclimate_conformance.checks.capturing import replays_change, warm_up
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.devices.walks import named
from acclimate_conformance.checks.errors import DeliberateError
from acclimate_conformance.checks.walking import Walk, move, walk

_WALKS, _MOVES = 9, 60
_SEEDS = (0, 7, 2**40 + 11, -7)  # a generator may use 32 bits only
_History = tuple[Any, ...]
_LENGTHS = (64, 65, 257)  # enough for two draws to differ, and of odd length too

_DRAWS: dict[str, Callable[[str, int, Any], torch.Tensor]] = {
    "torch.rand": lambda name, n, g: torch.rand(n, device=name, generator=g),
    "torch.randn": lambda name, n, g: torch.randn(n, device=name, generator=g),
    "torch.randn in float16": lambda name, n, g: torch.randn(n, device=name, generator=g, dtype=torch.half),
    "torch.randint": lambda name, n, g: torch.randint(0, 1 << 40, (n,), device=name, generator=g),
    "torch.randperm": lambda name, n, g: torch.randperm(n, device=name, generator=g),
    "normal_()": lambda name, n, g: torch.empty(n, device=name).normal_(1, 2, generator=g),
    "uniform_() of a transposed matrix": lambda name, n, g: (
        torch.empty(4, n, device=name).t().uniform_(generator=g)
    ),
    "exponential_()": lambda name, n, g: torch.empty(n, device=name).exponential_(generator=g),
    "bernoulli_()": lambda name, n, g: torch.empty(4 * n, device=name).bernoulli_(0.5, generator=g),
    "torch.multinomial": lambda name, n, g: torch.ones(n, device=name).multinomial(n, True, generator=g),
    "random_()": lambda name, n, g: torch.empty(n, dtype=torch.long, device=name).random_(generator=g),
}
_DRAWS_OF_THE_DEFAULT: dict[str, Callable[[str, int, Any], torch.Tensor]] = {
    "dropout()": lambda name, n, g: torch.nn.functional.dropout(torch.ones(4 * n, device=name)),
    "rand_like()": lambda name, n, g: torch.rand_like(torch.ones(n, device=name)),
    "a new module": lambda name, n, g: torch.nn.Linear(n, 4, device=name).weight.detach(),
    "a normal distribution": lambda name, n, g: torch.distributions.Normal(
        torch.zeros(n, device=name), torch.ones(n, device=name)
    ).sample(),
}
_NO_DRAWS: dict[str, Callable[[str, int], object]] = {
    "dropout in evaluation": lambda name, n: torch.nn.functional.dropout(
        torch.ones(n, device=name), training=False
    ),
    "torch.rand without elements": lambda name, n: torch.rand(0, device=name),
    "a sum": lambda name, n: torch.ones(n, device=name).sum(),
    "a copy to the host": lambda name, n: torch.ones(n, device=name).cpu(),
    "sort()": lambda name, n: torch.ones(n, device=name).sort(),
    "a product": lambda name, n: torch.ones(n, n, device=name) @ torch.ones(n, n, device=name),
}
_REFUSED: dict[str, Callable[[str, int], object]] = {
    "normal_() with a negative deviation": lambda name, n: torch.empty(n, device=name).normal_(0, -1),
    "uniform_() from 2 to 1": lambda name, n: torch.empty(n, device=name).uniform_(2, 1),
    "torch.randint of an empty range": lambda name, n: torch.randint(3, 3, (n,), device=name),
    "multinomial() of more than there are": lambda name, n: torch.ones(n, device=name).multinomial(n + 1),
    "torch.randn of a negative length": lambda name, n: torch.randn(-n, device=name),
    "exponential_() of integers": lambda name, n: torch.ones(n, device=name, dtype=torch.int).exponential_(),
}


class _Made:
    """A generator that the walk made, and what it was seeded with and drew since."""

    def __init__(self, index: int, generator: torch.Generator, history: _History) -> None:
        self.index, self.generator, self.history = index, generator, history


class _Captured:
    """A graph that draws, the device of its draw, and the tensor that each replay fills."""

    def __init__(self, index: int, kind: str, graph: Any, numbers: torch.Tensor) -> None:
        self.index, self.kind, self.graph, self.numbers = index, kind, graph, numbers


class _Random(Walk):
    """For each device, what its generator was seeded with, and what was drawn since then.

    Nothing is known of the numbers but that equal histories give equal ones, and different states others.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self.start = accelerator.current_device()
        self.before = accelerator.get_rng_state_all()
        self.of_host = torch.get_rng_state()
        self.is_host = is_host(accelerator)
        self.indices = range(len(self.names))
        self.here = {0: self.start, 1: self.start}
        self.numbers: dict[tuple[_History, str], torch.Tensor] = {}
        self.drawn: dict[tuple[str, bytes], _History] = {}
        self.states: dict[_History, torch.Tensor] = {}
        self.saved: list[tuple[int, torch.Tensor, torch.Tensor, _History]] = []
        self.generators: list[_Made] = []
        self.captured: list[_Captured] = []
        self.graphs = 0
        name = accelerator.current_device_name()
        self.has_graphs = replays_change(accelerator, lambda: torch.rand(8, device=name))
        self.forks: list[tuple[AbstractContextManager[Any], dict[int, _History], torch.Tensor]] = []
        accelerator.manual_seed_all(_SEEDS[0])
        self.histories: list[_History] = [(_SEEDS[0],) for _ in self.indices]
        self.of_host = torch.get_rng_state()

    def _go(self, choose: random.Random) -> int:
        here = choose.choice(self.indices)
        if self.ask("current_device") != here:
            self.accelerator.set_device(here)
        self.here[self.actor] = here
        return choose.choice(self.indices)

    @move(6)
    def seeds(self, choose: random.Random) -> None:
        self._go(choose)
        here, seed = self.here[self.actor], choose.choice(_SEEDS)
        self.say(f"manual_seed({seed}) on {self.names[here]}")
        self.accelerator.manual_seed(seed)
        self.histories[here] = (seed,)

    @move(3)
    def seeds_all(self, choose: random.Random) -> None:
        self._go(choose)
        seed, by_torch = choose.choice(_SEEDS), choose.random() < 0.4
        self.say(f"{'torch.manual_seed' if by_torch else 'manual_seed_all'}({seed})")
        if by_torch:
            torch.manual_seed(seed)
            self.of_host = torch.get_rng_state()
        else:
            self.accelerator.manual_seed_all(seed)
        self.histories = [(seed,) for _ in self.indices]

    @move(2)
    def seeds_afresh(self, choose: random.Random) -> None:
        self._go(choose)
        here, of_all = self.here[self.actor], choose.random() < 0.4
        self.say("seed_all()" if of_all else f"seed() on {self.names[here]}")
        seed = self.accelerator.seed_all() if of_all else self.accelerator.seed()
        require(
            all((seed,) != history[:1] for history in self.histories), f"the seed {seed} is the one before"
        )
        for index in self.indices if of_all else (here,):
            self.histories[index] = (seed,)

    def surrounding(self, choose: random.Random) -> AbstractContextManager[object]:
        blocks = (torch.inference_mode, torch.no_grad, torch.enable_grad)
        return choose.choice(blocks)() if choose.random() < 0.3 else nullcontext()

    @move(14)
    def draws(self, choose: random.Random) -> None:
        index = self._go(choose)
        table = {**_DRAWS, **_DRAWS_OF_THE_DEFAULT}
        # Few kinds at a time, so that histories meet again.
        kind, length = choose.choice(list(table)), choose.choice(_LENGTHS)
        given = choose.random() < 0.2 and kind in _DRAWS
        blocks: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "": torch.enable_grad,
            ", within inference_mode()": torch.inference_mode,
            ", within another stream": lambda: self._aside(index),
        }
        block = choose.choice(["", "", *blocks])
        what = kind if kind.startswith("a ") else f"the draw {kind}"
        said = f"{what} of {length} on {self.names[index]}{block}"
        self.say(f"{said}{', with its default generator' * given}")
        generator = self.accelerator.default_generator(index) if given else None
        with blocks[block]():
            numbers = table[kind](self.names[index], length, generator)
            self.accelerator.synchronize(index)
        self.histories[index] = self._known(self.histories[index], f"{kind} of {length}", numbers)

    def _aside(self, index: int) -> AbstractContextManager[Any]:
        manager: AbstractContextManager[Any] = self.accelerator.stream(
            self.accelerator.Stream(device=self.names[index])
        )
        return manager

    def _known(self, history: _History, kind: str, numbers: torch.Tensor) -> _History:
        """The history after a draw, whose numbers are compared with those of equal histories."""
        found = numbers.detach().cpu()
        before = self.numbers.setdefault((history, kind), found)
        require(torch.equal(found, before), "the numbers differ from those after the same seed and draws")
        # Other draws may lead to the same state, such as those of rand and of rand_like.
        before_it = self.states.get(history)
        same = self.drawn.setdefault((kind, found.numpy().tobytes()), history)
        state = self.states.get(same)
        is_same = same == history or before_it is None or state is None or torch.equal(before_it, state)
        require(is_same, f"the numbers are those that came after {same}, here after {history}")
        return (*history, kind)

    @move(4)
    def draws_nothing(self, choose: random.Random) -> None:
        index = self._go(choose)
        kind = choose.choice(list(_NO_DRAWS))
        self.say(f"{kind} on {self.names[index]}")
        _NO_DRAWS[kind](self.names[index], choose.choice(_LENGTHS))

    @move(4)
    def is_refused(self, choose: random.Random) -> None:
        index = self._go(choose)
        kind = choose.choice(list(_REFUSED))
        self.say(f"{kind} on {self.names[index]}, which is refused,")
        with refused(kind, RuntimeError, ValueError, NotImplementedError):
            _REFUSED[kind](self.names[index], choose.choice(_LENGTHS))

    @move(3)
    def is_refused_a_state(self, choose: random.Random) -> None:
        index = self._go(choose)
        device = named(self, choose, index, self.here[self.actor])
        wrong = choose.choice((torch.zeros(3, dtype=torch.uint8), torch.zeros(3), torch.zeros(0)))
        self.say(f"set_rng_state() of {wrong.numel()} {wrong.dtype} for {device!r}, which is refused,")
        with refused("set_rng_state() of no state", RuntimeError, TypeError, ValueError):
            self.accelerator.set_rng_state(wrong, device)

    @move(5)
    def saves(self, choose: random.Random) -> None:
        index = self._go(choose)
        device = named(self, choose, index, self.here[self.actor])
        by_generator = choose.random() < 0.3
        if by_generator:
            self.say(f"default_generator({device!r}).get_state()")
            state = self.accelerator.default_generator(device).get_state()
        else:
            self.say(f"get_rng_state({device!r})")
            state = self.accelerator.get_rng_state(device)
        self.saved.append((index, state, state.clone(), self.histories[index]))

    @move(7)
    def restores(self, choose: random.Random) -> None:
        index = self._go(choose)
        if not self.saved:
            return
        _, state, _, history = choose.choice(self.saved)  # also of another device
        device = named(self, choose, index, self.here[self.actor])
        by_generator = choose.random() < 0.3
        told = "default_generator({!r}).set_state(s)" if by_generator else "set_rng_state(s, {!r})"
        self.say(f"{told.format(device)}, s of after {history}")
        if by_generator:
            self.accelerator.default_generator(device).set_state(state)
        else:
            self.accelerator.set_rng_state(state, device)
        self.histories[index] = history

    @move(2)
    def restores_all(self, choose: random.Random) -> None:
        self._go(choose)
        by_device = [[saved for saved in self.saved if saved[0] == index] for index in self.indices]
        if not all(by_device):
            return
        chosen = [choose.choice(of_device) for of_device in by_device]
        self.say(f"set_rng_state_all() of after {[saved[3] for saved in chosen]}")
        self.accelerator.set_rng_state_all([saved[1] for saved in chosen])
        self.histories = [saved[3] for saved in chosen]

    @move(3)
    def makes_a_generator(self, choose: random.Random) -> None:
        index = self._go(choose)
        if len(self.generators) > 4:
            return
        seed = choose.choice(_SEEDS)
        device = choose.choice((self.names[index], torch.device(self.names[index])))
        self.say(f"torch.Generator({device!r}).manual_seed({seed})")
        made = torch.Generator(device).manual_seed(seed)
        self.generators.append(_Made(index, made, (seed,)))

    @move(6)
    def uses_a_generator(self, choose: random.Random) -> None:
        self._go(choose)
        if not self.generators:
            return
        made, kind, length = (
            choose.choice(self.generators),
            choose.choice(list(_DRAWS)),
            choose.choice(_LENGTHS),
        )
        self.say(f"the draw {kind} of {length} on {self.names[made.index]} with a generator")
        numbers = _DRAWS[kind](self.names[made.index], length, made.generator)
        made.history = self._known(made.history, f"{kind} of {length}", numbers)

    @move(3)
    def sets_a_generator(self, choose: random.Random) -> None:
        self._go(choose)
        if not self.generators:
            return
        made = choose.choice(self.generators)
        way = choose.choice(("manual_seed", "the default's state", "to the default", "seed"))
        default = self.accelerator.default_generator(made.index)
        if way == "manual_seed":
            seed = choose.choice(_SEEDS)
            self.say(f"Generator.manual_seed({seed}) of one of {self.names[made.index]}")
            made.generator.manual_seed(seed)
            made.history = (seed,)
        elif way == "seed":
            self.say(f"Generator.seed() of one of {self.names[made.index]}")
            made.history = (made.generator.seed(),)
        elif way == "to the default":
            self.say(f"the default generator of {self.names[made.index]} set to another's state")
            default.set_state(made.generator.get_state())
            self.histories[made.index] = made.history
        else:
            self.say(f"a generator of {self.names[made.index]} set to the default's state")
            made.generator.set_state(default.get_state())
            made.history = self.histories[made.index]

    @move(1)
    def copies_a_generator(self, choose: random.Random) -> None:
        index = self._go(choose)
        if len(self.generators) > 4:
            return
        self.say(f"Generator.clone_state() of default_generator({index})")
        copied = self.accelerator.default_generator(index).clone_state()
        self.generators.append(_Made(index, copied, self.histories[index]))

    @move(2)
    def captures(self, choose: random.Random) -> None:
        self._go(choose)
        index = self.here[self.actor]
        if len(self.captured) > 2 or self.actor or self.forks or not self.has_graphs:
            return
        kind, length, seed = choose.choice(_CAPTURED), choose.choice(_LENGTHS), choose.choice(_SEEDS)
        told = f"capture_to_graph() of {kind} of {length} on {self.names[index]}"
        self.say(f"{told}, and manual_seed_all({seed})")

        def draw() -> torch.Tensor:
            return {**_DRAWS, **_DRAWS_OF_THE_DEFAULT}[kind](self.names[index], length, None)

        warm_up(self.accelerator, draw)
        graph = self.accelerator.create_graph()
        with self.accelerator.capture_to_graph(graph):
            numbers = draw()
        self.accelerator.synchronize()
        # A capture may draw, or not.
        self.accelerator.manual_seed_all(seed)
        self.histories = [(seed,) for _ in self.indices]
        self.of_host = torch.get_rng_state()
        self.graphs += 1
        self.captured.append(_Captured(index, f"graph {self.graphs}, {kind} of {length}", graph, numbers))

    @move(6)
    def replays(self, choose: random.Random) -> None:
        self._go(choose)
        if not self.captured:
            return
        captured = choose.choice(self.captured)
        self.say(f"replay_graph() of {captured.kind} on {self.names[captured.index]}")
        self.accelerator.replay_graph(captured.graph)
        self.accelerator.synchronize(captured.index)
        numbers, history = captured.numbers.clone(), self.histories[captured.index]
        self.histories[captured.index] = self._known(history, f"replay of {captured.kind}", numbers)

    @move(1)
    def drops_a_graph(self, choose: random.Random) -> None:
        self._go(choose)
        if not self.captured:
            return
        captured = self.captured.pop(choose.randrange(len(self.captured)))
        by_reset = choose.random() < 0.5 and hasattr(captured.graph, "reset")
        self.say(f"Graph.reset() of {captured.kind}" if by_reset else f"{captured.kind} dropped")
        if by_reset:
            captured.graph.reset()

    @move(2)
    def takes_the_hosts_generator(self, choose: random.Random) -> None:
        index = self._go(choose)
        if self.is_host:
            return
        kind = choose.choice(("torch.rand", "normal_()", "torch.randperm"))
        self.say(f"{kind} on {self.names[index]} with a generator of the host, which is refused,")
        with refused(f"{kind} with a generator of the host", RuntimeError):
            _DRAWS[kind](self.names[index], 64, torch.Generator())

    @move(4)
    def draws_on_the_host(self, choose: random.Random) -> None:
        self._go(choose)
        if self.is_host:
            return
        self.say("a draw on the host")
        torch.rand(7)
        self.of_host = torch.get_rng_state()

    @move(4)
    def enters_a_fork(self, choose: random.Random) -> None:
        index = self._go(choose)
        if len(self.forks) >= 2 or self.actor:
            return
        kept = choose.choice(([index], list(self.indices)))
        by_name = choose.random() < 0.5
        given = [] if self.is_host else [self.names[place] if by_name else place for place in kept]
        options = {} if self.is_host else {"device_type": self.accelerator.device_type}
        self.say(f"entering fork_rng({given})")
        fork = self.accelerator.random().fork_rng(given, **options)
        fork.__enter__()
        histories = {place: self.histories[place] for place in kept}
        self.forks.append((fork, histories, torch.get_rng_state()))

    @move(4)
    def leaves_a_fork(self, choose: random.Random) -> None:
        self._go(choose)
        if not self.forks or self.actor:
            return
        fork, histories, of_host = self.forks.pop()
        by_error = choose.random() < 0.5
        self.say(f"leaving fork_rng(){' by an error' * by_error}")
        error = DeliberateError() if by_error else None
        with suppress(DeliberateError):
            fork.__exit__(DeliberateError if by_error else None, error, None)
        self.of_host = of_host
        for index, history in histories.items():
            self.histories[index] = history

    def look(self) -> None:
        for index in self.indices:
            history = self.histories[index]
            state = self.ask("get_rng_state", _named_by(self, index, history))
            known = self.states.setdefault(history, state.clone())
            require(
                torch.equal(state, known),
                f"get_rng_state({index}) differs from what it was after the same seed and draws, {history}",
            )
            earlier = self.states.get(history[:-1])
            require(
                earlier is None or not torch.equal(state, earlier),
                f"get_rng_state({index}) is what it was before the last draw",
            )
            seed = self.ask("default_generator", index).initial_seed()
            wanted = history[0] % 2**64
            require(seed % 2**64 == wanted, f"initial_seed() of {self.names[index]} is {seed}, not {wanted}")
        here = self.here[0]
        seed = self.ask("initial_seed")
        wanted = self.histories[self.ask("current_device")][0]
        require(
            seed % 2**64 == wanted % 2**64, f"initial_seed() on {self.names[here]} is {seed}, not {wanted}"
        )
        for made in self.generators:
            told = made.generator.initial_seed()
            require(
                told % 2**64 == made.history[0] % 2**64,
                f"Generator.initial_seed() is {told}, not {made.history[0]}",
            )
        for _, state, copied, history in self.saved:
            require(torch.equal(state, copied), f"what get_rng_state() told after {history} has changed")
        if not self.is_host:
            require(torch.equal(torch.get_rng_state(), self.of_host), "the host's generator has changed")

    def end(self) -> None:
        self.captured.clear()
        while self.forks:
            self.forks.pop()[0].__exit__(None, None, None)
        self.accelerator.set_rng_state_all(self.before)
        self.accelerator.set_device(self.start)


_CAPTURED = ("torch.rand", "torch.randn", "normal_()", "bernoulli_()", "dropout()", "exponential_()")
"""What is drawn in graphs: kinds that every device with graphs can capture."""


def _named_by(walked: Walk, index: int, history: _History) -> int | str | torch.device:
    """One of the ways to name a device, another one for each length of a history."""
    name = walked.names[index]
    ways: tuple[int | str | torch.device, ...] = (index, name, torch.device(name))
    return ways[len(history) % 3]


@check(
    "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "get_rng_state", "set_rng_state",
    "set_rng_state_all", "default_generator", "random",
    promise="After any sequence of seeds, draws and restored states, in any thread, on any device, equal "
    "histories give equal numbers, and others do not.",
    once=True,
)  # fmt: skip
def walks_over_random_numbers(accelerator: Accelerator) -> None:
    walk(accelerator, _Random, _WALKS, _MOVES)
