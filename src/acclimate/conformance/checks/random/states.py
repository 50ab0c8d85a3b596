"""Checks of random states: a state is a copy, and repeats every distribution."""

from __future__ import annotations

from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator
from acclimate.conformance.checks.assertions import device_names, equal, require
from acclimate.conformance.checks.check import check

_COUNT = 301


def _kinds_of_draws(device: str) -> dict[str, Callable[[], torch.Tensor]]:
    ones = torch.ones(_COUNT, device=device)
    return {
        "rand": lambda: torch.rand(_COUNT, device=device),
        "randn": lambda: torch.randn(_COUNT, device=device),
        "a single randn": lambda: torch.randn(1, device=device),
        "randint": lambda: torch.randint(0, 1 << 20, (_COUNT,), device=device),
        "randperm": lambda: torch.randperm(_COUNT, device=device),
        "dropout": lambda: torch.nn.functional.dropout(ones, 0.5),
        "bernoulli": lambda: torch.bernoulli(ones / 2),
        "normal_": lambda: torch.empty(_COUNT, device=device).normal_(),
        "exponential_": lambda: torch.empty(_COUNT, device=device).exponential_(),
    }


@check("get_rng_state", "set_rng_state", "manual_seed")
def every_kind_of_draw_repeats(accelerator: Accelerator) -> None:
    """Restoring a state, or seeding again, repeats random numbers of every distribution."""
    device = accelerator.current_device_name()
    draws = _kinds_of_draws(device)
    state = accelerator.get_rng_state()
    first = [draw().cpu() for draw in draws.values()]
    accelerator.set_rng_state(state)
    for (name, draw), numbers in zip(draws.items(), first, strict=True):
        require(equal(draw(), numbers), f"the restored state gives other numbers to {name}")
    for name, draw in draws.items():
        accelerator.manual_seed(7)
        numbers = draw().cpu()
        accelerator.manual_seed(7)
        require(equal(draw(), numbers), f"the same seed gives other numbers to {name}")


@check("get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all")
def states_are_copies(accelerator: Accelerator) -> None:
    """Drawing numbers does not change a saved state, which can be restored repeatedly and from a copy."""
    for index, name in enumerate(device_names(accelerator)):
        state = accelerator.get_rng_state(index)
        kept = state.clone()
        require(equal(accelerator.get_rng_state(index), kept), f"reading the state of {name} changes it")
        first = torch.rand(_COUNT, device=name).cpu()
        require(equal(state, kept), f"drawing on {name} changes a state that was read before")
        later = accelerator.get_rng_state(index)
        for given in (state, kept, state):
            accelerator.set_rng_state(given, index)
            require(
                equal(torch.rand(_COUNT, device=name), first), f"a state restored on {name} does not repeat"
            )
            require(equal(given, kept), f"drawing on {name} changes the state that was restored")
        require(
            equal(accelerator.get_rng_state(index), later),
            f"equal draws from an equal state leave {name} in another state",
        )
    states = accelerator.get_rng_state_all()
    copies = [state.clone() for state in states]
    for name in device_names(accelerator):
        torch.rand(_COUNT, device=name)
    for state, copy in zip(states, copies, strict=True):
        require(equal(state, copy), "drawing changes what get_rng_state_all() returned before")
    accelerator.set_rng_state_all(tuple(copies))
    for index in range(len(device_names(accelerator))):
        require(
            equal(accelerator.get_rng_state(index), copies[index]),
            f"after set_rng_state_all() the state of device {index} is not the one given for it",
        )


@check("manual_seed", "manual_seed_all", "initial_seed")
def seeds_of_every_size(accelerator: Accelerator) -> None:
    """A seed from 0 to 2**63 - 1 is used unchanged, and initial_seed returns it."""
    for seed in (0, 1, 2**31, 2**40 + 3, 2**63 - 1):
        for seeding in (accelerator.manual_seed, accelerator.manual_seed_all):
            seeding(seed)
            told = accelerator.initial_seed()
            require(told == seed, f"after {seeding.__name__}({seed}) initial_seed() is {told}")
    accelerator.manual_seed(0)
    zero = torch.rand(_COUNT, device=accelerator.current_device_name()).cpu()
    accelerator.manual_seed(1)
    require(
        not equal(torch.rand(_COUNT, device=accelerator.current_device_name()), zero),
        "the seeds 0 and 1 give the same numbers",
    )
    accelerator.manual_seed_all(5)
    for index, name in enumerate(device_names(accelerator)):
        with accelerator.device(index):
            told = accelerator.initial_seed()
        require(told == 5, f"after manual_seed_all(5) initial_seed() on {name} is {told}")
