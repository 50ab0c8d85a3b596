"""Checks of random states: a state is a copy, and repeats every distribution."""

from __future__ import annotations

import io
from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    device_names,
    equal,
    in_thread,
    is_host,
    require,
    several_devices,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.device_arguments import methods_of

_COUNT = 301


def kinds_of_draws(device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """By operator, a draw from the default generator; those of torch's tag ``nondeterministic_seeded``."""
    ones = torch.ones(_COUNT, device=device)

    def filled(fill: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return lambda: fill(torch.empty(_COUNT, device=device))

    return {
        "rand": lambda: torch.rand(_COUNT, device=device),
        "rand_like": lambda: torch.rand_like(ones),
        "randn": lambda: torch.randn(_COUNT, device=device),
        "randn of one number": lambda: torch.randn(1, device=device),
        "randn_like": lambda: torch.randn_like(ones),
        "randint": lambda: torch.randint(0, 1 << 20, (_COUNT,), device=device),
        "randint_like": lambda: torch.randint_like(ones, 1 << 20),
        "randperm": lambda: torch.randperm(_COUNT, device=device),
        "normal": lambda: torch.normal(ones, ones),
        "bernoulli": lambda: torch.bernoulli(ones / 2),
        "multinomial": lambda: torch.multinomial(ones, _COUNT // 2),
        "multinomial with replacement": lambda: torch.multinomial(ones, _COUNT, replacement=True),
        "poisson": lambda: torch.poisson(ones * 9),
        "dropout": lambda: torch.nn.functional.dropout(ones, 0.5),
        "native_dropout": lambda: torch.native_dropout(ones, 0.5, True)[0],
        "alpha_dropout": lambda: torch.nn.functional.alpha_dropout(ones, 0.5, training=True),
        "feature_dropout": lambda: torch.feature_dropout(ones.reshape(-1, 1), 0.5, True),
        "feature_alpha_dropout": lambda: torch.feature_alpha_dropout(ones.reshape(-1, 1), 0.5, True),
        "binomial": lambda: torch.binomial(ones * 9, ones / 2),
        "gamma": lambda: torch._standard_gamma(ones),
        "dirichlet": lambda: torch._sample_dirichlet(ones),
        "rrelu": lambda: torch.nn.functional.rrelu(-ones, training=True),
        "random_": filled(lambda t: t.random_()),
        "uniform_": filled(lambda t: t.uniform_()),
        "bernoulli_": filled(lambda t: t.bernoulli_()),
        "normal_": filled(lambda t: t.normal_()),
        "exponential_": filled(lambda t: t.exponential_()),
        "geometric_": filled(lambda t: t.geometric_(0.1)),
        "cauchy_": filled(lambda t: t.cauchy_()),
        "log_normal_": filled(lambda t: t.log_normal_()),
    }


_EVERYWHERE = (
    "rand", "randn", "randn of one number", "randint", "randperm", "dropout", "bernoulli", "normal_",
)  # fmt: skip
"""Draws that every device has; it may lack others."""


_FEW = 3
"""How many kinds of draws may have a fault of one operator: such as dropout and its native form."""


def _offered_draws(device: str) -> dict[str, Callable[[], torch.Tensor]]:
    offered = {}
    for name, draw in kinds_of_draws(device).items():
        try:
            draw()
        except (NotImplementedError, RuntimeError):
            if name in _EVERYWHERE:
                raise
            continue
        offered[name] = draw
    return offered


@check(
    "get_rng_state", "set_rng_state", "manual_seed",
    promise="A restored state, or the same seed, repeats the numbers of every distribution.",
)  # fmt: skip
def every_kind_of_draw_repeats(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    draws = _offered_draws(device)
    broken: dict[str, str] = {}
    for name, draw in draws.items():
        try:
            _require_repeats(accelerator, name, draw)
        except BrokenPromiseError as seen:
            broken[name] = str(seen)
    for name, told in broken.items():
        # What few kinds of draws do not keep is theirs, not that of the methods that all of them use.
        whose = f"the operator {name}: " if len(broken) <= _FEW and "the operator" not in told else ""
        raise BrokenPromiseError(whose + told)


def _require_repeats(accelerator: Accelerator, name: str, draw: Callable[[], torch.Tensor]) -> None:
    device = accelerator.current_device_name()
    accelerator.manual_seed(7)
    torch.randn(1, device=device)  # a state in the middle of other draws
    host = torch.get_rng_state()
    state = accelerator.get_rng_state().clone()  # another check is about a reused tensor
    numbers, next_ones = draw().cpu(), torch.randn(1, device=device).cpu()
    accelerator.set_rng_state(state)
    require(equal(draw(), numbers), f"set_rng_state() with a saved state gives other numbers to {name}")
    between = accelerator.get_rng_state().clone()
    for _ in range(2):
        require(
            equal(torch.randn(1, device=device), next_ones),
            f"set_rng_state() before or after {name} does not give the same number next",
        )
        accelerator.set_rng_state(between)
    if not is_host(accelerator):
        require(
            equal(torch.get_rng_state(), host),
            f"the operator {name} changes the state of the host's generator",
        )
    require(not equal(between, state), f"get_rng_state() is the same before and after {name} on {device}")
    accelerator.manual_seed(7)
    first = draw().cpu()
    accelerator.manual_seed(7)
    require(equal(draw(), first), f"manual_seed() with the same seed gives other numbers to {name}")
    require(not equal(draw(), first), f"two draws of {name} in a row are equal")


@check(
    "manual_seed_all", "initial_seed",
    promise="torch.manual_seed seeds every device, whichever is current.",
)  # fmt: skip
def torch_seeds_every_device(accelerator: Accelerator) -> None:
    devices = range(len(device_names(accelerator)))
    for current in devices:
        with accelerator.device(current):
            torch.manual_seed(_COUNT + current)
        for index in devices:
            with accelerator.device(index):
                told = accelerator.initial_seed()
            require(
                told == _COUNT + current,
                f"after torch.manual_seed of {_COUNT + current} with device {current} current, through "
                f"manual_seed_all() of the device's module, initial_seed() on device {index} is {told}",
            )


@check(
    "get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all",
    promise="Drawing numbers does not change a saved state, which can be restored repeatedly and from "
    "a copy.",
)  # fmt: skip
def states_are_copies(accelerator: Accelerator) -> None:
    for index, name in enumerate(device_names(accelerator)):
        state = accelerator.get_rng_state(index)
        kept = state.clone()
        require(equal(accelerator.get_rng_state(index), kept), f"get_rng_state() changes the state of {name}")
        first = torch.rand(_COUNT, device=name).cpu()
        require(equal(state, kept), f"get_rng_state() of {name} returns a tensor that changes with a draw")
        later = accelerator.get_rng_state(index)
        require(equal(state, kept), f"get_rng_state() of {name} changes what it returned before")
        for given in (state, kept, state):
            accelerator.set_rng_state(given, index)
            require(
                equal(torch.rand(_COUNT, device=name), first),
                f"set_rng_state() on {name} does not repeat the numbers",
            )
            require(equal(given, kept), f"set_rng_state() on {name} keeps a tensor that a draw then changes")
        require(
            equal(accelerator.get_rng_state(index), later),
            f"get_rng_state() of {name} differs after equal draws from an equal state",
        )
    states = accelerator.get_rng_state_all()
    copies = [state.clone() for state in states]
    for name in device_names(accelerator):
        torch.rand(_COUNT, device=name)
    for state, copy in zip(states, copies, strict=True):
        require(equal(state, copy), "get_rng_state_all() returns tensors that change with a draw")
    accelerator.set_rng_state_all(tuple(copies))
    for index in range(len(device_names(accelerator))):
        require(
            equal(accelerator.get_rng_state(index), copies[index]),
            f"after set_rng_state_all() the state of device {index} is not the one given for it",
        )
    _require_read_from_any_memory(accelerator, copies)
    for name in device_names(accelerator):
        torch.rand(_COUNT, device=name)
    others = [state.clone() for state in accelerator.get_rng_state_all()]
    accelerator.set_rng_state_all(copies[:1])
    for index, wanted in enumerate((*copies[:1], *others[1:])):
        require(
            equal(accelerator.get_rng_state(index), wanted),
            f"set_rng_state_all() of the first state alone does not restore it, or changes that of {index}",
        )


def _require_read_from_any_memory(accelerator: Accelerator, states: list[torch.Tensor]) -> None:
    """A state may lie in any memory of its own. (torch's own generator does not read parts of others.)"""
    index = len(device_names(accelerator)) - 1
    state = states[-1]
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "pinned memory": lambda: accelerator.pin_memory(state.clone()),
        "an array": lambda: torch.from_numpy(state.numpy().copy()),
        "bytes": lambda: torch.frombuffer(bytearray(bytes(state.tolist())), dtype=torch.uint8),
        "a file": lambda: _through_a_file(state),
    }
    for what, make in ways.items():
        torch.rand(_COUNT, device=device_names(accelerator)[index])
        given = make()
        accelerator.set_rng_state(given, index)
        found = accelerator.get_rng_state(index)
        require(equal(found, state), f"set_rng_state() of a state in {what} restores another one")
        require(equal(given, state), f"set_rng_state() changes a state in {what}")


def _through_a_file(state: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


@check(
    "manual_seed", "manual_seed_all", "initial_seed",
    promise="A seed from -(2**63) to 2**64 - 1 is used unchanged; initial_seed returns it, a negative one "
    "plus 2**64.",
)  # fmt: skip
def seeds_of_every_size(accelerator: Accelerator) -> None:
    for seed in (0, 1, 2**31, 2**40 + 3, 2**63 - 1, 2**64 - 1, -1, -5, -(2**31), -(2**63)):
        wanted = torch.Generator().manual_seed(seed).initial_seed()
        for name, seeding in methods_of(accelerator, "manual_seed", "manual_seed_all").items():
            seeding(seed)
            told = accelerator.initial_seed()
            require(told == wanted, f"after {name}({seed}) initial_seed() is {told}, not {wanted}")
    drawn: dict[int, torch.Tensor] = {}
    for seed in (0, 1, 1 + 2**8, 1 + 2**16, 1 + 2**24, 1 + 2**31):
        accelerator.manual_seed(seed)
        numbers = torch.rand(_COUNT, device=accelerator.current_device_name()).cpu()
        for other, theirs in drawn.items():
            require(
                not equal(numbers, theirs),
                f"manual_seed() with {other} and with {seed} gives the same numbers",
            )
        drawn[seed] = numbers
    accelerator.manual_seed_all(5)
    for index, name in enumerate(device_names(accelerator)):
        with accelerator.device(index):
            told = accelerator.initial_seed()
        require(told == 5, f"after manual_seed_all(5) initial_seed() on {name} is {told}")


@check(
    "manual_seed", "get_rng_state", "set_rng_state",
    promise="All threads draw from a device's one generator, and seed and restore it.",
)  # fmt: skip
def threads_share_the_generator(accelerator: Accelerator) -> None:
    index, name = accelerator.current_device(), accelerator.current_device_name()

    def draw() -> torch.Tensor:
        return torch.rand(_COUNT, device=name).cpu()

    def seed() -> None:
        with accelerator.device(index):
            accelerator.manual_seed(23)

    seed()
    wanted = [draw() for _ in range(4)]
    for seeding in (seed, lambda: in_thread(seed)):
        seeding()
        found = [run() for run in (draw, lambda: in_thread(draw), lambda: in_thread(draw), draw)]
        for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            require(
                equal(ours, theirs),
                f"after manual_seed() draw {number + 1} of 4 in turn by two threads gives other numbers than "
                "in one thread",
            )
    in_thread(seed)
    state = in_thread(lambda: accelerator.get_rng_state(index).clone())
    draw()
    in_thread(lambda: accelerator.set_rng_state(state, index))
    require(equal(draw(), wanted[0]), "set_rng_state() in another thread does not restore the state here")


@check(
    "default_generator", "device_name",
    promise="A generator of a device that is not current draws its own numbers and changes no other state.",
)  # fmt: skip
def generators_of_other_devices(accelerator: Accelerator) -> None:
    names = several_devices(accelerator)
    for here in range(len(names)):
        for there, name in enumerate(names):
            accelerator.set_device(here)
            states = [accelerator.get_rng_state(index).clone() for index in range(len(names))]
            own = torch.Generator(name).manual_seed(31)
            where = f"a generator of {name} while device {here} is current"
            require(str(own.device) == name, f"{where} is on {own.device}")
            first = torch.rand(_COUNT, device=name, generator=own).cpu()
            twin = torch.Generator(name).manual_seed(31)
            filled = torch.empty(_COUNT, device=name).uniform_(generator=twin)
            require(equal(filled, first), f"{where} does not repeat the numbers of another of the same seed")
            for index, state in enumerate(states):
                require(
                    equal(accelerator.get_rng_state(index), state),
                    f"{where} changes the state of {names[index]}",
                )
            with accelerator.device(there):
                accelerator.manual_seed(37)
                wanted = torch.rand(_COUNT, device=name).cpu()
                accelerator.manual_seed(37)
            found = torch.rand(_COUNT, device=name)
            require(equal(found, wanted), f"a draw on {name} while device {here} is current is another")
