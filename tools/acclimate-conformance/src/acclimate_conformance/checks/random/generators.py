"""Checks of random numbers: seeds, states and generators."""

from __future__ import annotations

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    device_names,
    equal,
    exactly,
    is_host,
    offered_or_not,
    require,
    several_devices,
)
from acclimate_conformance.checks.check import check

_SEED = 20_260_101


def _draw(device: str, count: int = 257) -> torch.Tensor:
    """Random numbers from a device's default generator, on the host."""
    return torch.rand(count, device=device).cpu()


@check(
    "manual_seed", "initial_seed",
    promise="Equal seeds give equal numbers, different seeds different ones, and initial_seed returns "
    "the seed.",
)  # fmt: skip
def seeds(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    accelerator.manual_seed(_SEED)
    started = exactly(accelerator.initial_seed(), int, "initial_seed()")
    require(started == _SEED, f"after manual_seed({_SEED}) initial_seed() is {started}")
    first, second = _draw(device), _draw(device)
    require(not equal(first, second), "two draws in a row are equal")
    require(0.3 < float(first.mean()) < 0.7, f"the mean of uniform numbers is {float(first.mean()):.2f}")
    accelerator.manual_seed(_SEED)
    require(equal(_draw(device), first), "manual_seed() with the same seed gives other numbers")
    accelerator.manual_seed(_SEED + 1)
    require(not equal(_draw(device), first), "manual_seed() with another seed gives the same numbers")


@check("manual_seed_all", promise="manual_seed_all seeds every device, so that each repeats its numbers.")
def seeds_of_all_devices(accelerator: Accelerator) -> None:
    names = device_names(accelerator)
    accelerator.manual_seed_all(_SEED)
    first = [_draw(name) for name in names]
    accelerator.manual_seed_all(_SEED)
    for name, numbers in zip(names, first, strict=True):
        require(
            equal(_draw(name), numbers), f"manual_seed_all() with the same seed gives other numbers on {name}"
        )
    accelerator.manual_seed_all(_SEED + 1)
    for name, numbers in zip(names, first, strict=True):
        require(
            not equal(_draw(name), numbers),
            f"manual_seed_all() with another seed gives the same numbers on {name}",
        )


@check(
    "get_rng_state", "set_rng_state",
    promise="Restoring a saved state gives the same numbers again, on each device.",
)  # fmt: skip
def state_saved_and_restored(accelerator: Accelerator) -> None:
    for index, name in enumerate(device_names(accelerator)):
        for device in (index, name):
            given = accelerator.get_rng_state(device)
            state = given.clone()  # another check is about a tensor that a later call overwrites
            require(
                given.device.type == "cpu" and given.dtype == torch.uint8,
                f"get_rng_state() is a {given.dtype} tensor on {given.device}, not uint8 on the host",
            )
            first = _draw(name)
            require(
                not equal(accelerator.get_rng_state(device), state),
                f"get_rng_state() is the same before and after a draw on {name}",
            )
            require(not equal(_draw(name), first), f"two draws in a row are equal on {name}")
            accelerator.set_rng_state(state, device)
            require(
                equal(accelerator.get_rng_state(device), state),
                f"set_rng_state() does not set the state of {name} to the one given",
            )
            require(
                equal(_draw(name), first), f"set_rng_state() with a saved state gives other numbers on {name}"
            )


@check(
    "get_rng_state_all", "set_rng_state_all",
    promise="get_rng_state_all returns one state per device; restoring them repeats the numbers of all "
    "devices.",
)  # fmt: skip
def states_of_all_devices(accelerator: Accelerator) -> None:
    names = device_names(accelerator)
    for index in range(len(names)):  # each with a state of its own
        with accelerator.device(index):
            accelerator.manual_seed(_SEED + index)
    states = exactly(accelerator.get_rng_state_all(), list, "get_rng_state_all()")
    require(
        len(states) == len(names), f"get_rng_state_all() has {len(states)} states for {len(names)} devices"
    )
    for index, name in enumerate(names):
        require(
            equal(states[index], accelerator.get_rng_state(index)),
            f"entry {index} of get_rng_state_all() is not the state of {name}",
        )
    first = [_draw(name) for name in names]
    accelerator.set_rng_state_all(states)
    for name, numbers in zip(names, first, strict=True):
        require(
            equal(_draw(name), numbers),
            f"set_rng_state_all() with saved states gives other numbers on {name}",
        )


@check(
    "manual_seed", "set_rng_state", "get_rng_state",
    promise="Seeding, restoring and drawing on one device do not change the other devices' generators.",
)  # fmt: skip
def devices_draw_independently(accelerator: Accelerator) -> None:
    names = several_devices(accelerator)
    accelerator.manual_seed_all(_SEED)
    for index, name in enumerate(names):
        others = [other for other in range(len(names)) if other != index]
        before = {other: accelerator.get_rng_state(other) for other in others}
        start = accelerator.get_rng_state(index)
        with accelerator.device(index):
            accelerator.manual_seed(_SEED + 1 + index)
        _draw(name)
        accelerator.set_rng_state(start, index)
        for other in others:
            require(
                equal(accelerator.get_rng_state(other), before[other]),
                f"manual_seed() or a draw on {name} changes the state of {names[other]}",
            )
    streams = []
    for index, name in enumerate(names):
        with accelerator.device(index):
            accelerator.manual_seed(_SEED + index)
        streams.append(_draw(name))
    require(not equal(streams[0], streams[1]), "two devices with different seeds draw the same numbers")


@check(
    "default_generator", "default_generators",
    promise="The default generator of a device is the one that its operations use; a copy of it draws the "
    "same numbers by itself.",
)  # fmt: skip
def generators(accelerator: Accelerator) -> None:
    with offered_or_not("default generators"):
        generators = accelerator.default_generators
    require(
        len(exactly(generators, tuple, "default_generators")) == accelerator.device_count(),
        f"there are {len(generators)} default generators for {accelerator.device_count()} devices",
    )
    for index, name in enumerate(device_names(accelerator)):
        generator = accelerator.default_generator(index)
        require(
            isinstance(generator, torch.Generator),
            f"default_generator() of {name} is a {type(generator).__name__}",
        )
        require(
            generator.device.type == accelerator.device_type,
            f"default_generator() of {name} is one of {generator.device}",
        )
        generator.manual_seed(_SEED)
        first = _draw(name)
        for same in (accelerator.default_generator(index), generators[index]):
            same.manual_seed(_SEED)
            require(
                equal(_draw(name), first),
                f"default_generator() of {name}, seeded again, does not repeat that device's numbers",
            )
        generator.manual_seed(_SEED)
        given = torch.rand(len(first), device=name, generator=generator).cpu()
        require(equal(given, first), f"default_generator() of {name}, when given, draws other numbers")
        _require_own_state_of_copies(generator, name, first)


def _require_own_state_of_copies(generator: torch.Generator, name: str, first: torch.Tensor) -> None:
    generator.manual_seed(_SEED)
    try:
        copies = {"Generator.clone_state()": generator.clone_state()}
    except (AttributeError, RuntimeError):  # torch implements it for some types of devices only
        return
    state = generator.get_state().clone()
    for how, copied in copies.items():
        drawn = torch.rand(len(first), device=name, generator=copied).cpu()
        require(
            equal(generator.get_state(), state),
            f"a draw from {how} of default_generator() changes the state of the generator of {name}",
        )
        require(equal(drawn, first), f"{how} of default_generator() of {name} draws other numbers")
        require(equal(_draw(name), first), f"a draw from {how} of default_generator() changes {name}'s own")


@check(
    "seed", "seed_all", "initial_seed",
    promise="seed and seed_all return a different seed each time, with which manual_seed repeats the "
    "numbers.",
)  # fmt: skip
def fresh_seeds(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    with offered_or_not("seeding with a fresh number"):
        seeds = [accelerator.seed(), accelerator.seed()]
    seeds.append(accelerator.seed_all())
    for seed in seeds:
        exactly(seed, int, "the seed")
    require(len(set(seeds)) == len(seeds), f"seed() and seed_all() return {seeds}")
    started = accelerator.initial_seed()
    require(started == seeds[-1], f"seed_all() returned {seeds[-1]}, initial_seed() is {started}")
    first = [_draw(name) for name in device_names(accelerator)]
    accelerator.manual_seed_all(seeds[-1])
    for name, numbers in zip(device_names(accelerator), first, strict=True):
        require(
            equal(_draw(name), numbers), f"the seed that seed_all() returned gives other numbers on {name}"
        )
    seed = accelerator.seed()
    started = accelerator.initial_seed()
    require(started == seed, f"seed() returned {seed}, initial_seed() is {started}")
    numbers = _draw(device)
    accelerator.manual_seed(seed)
    require(equal(_draw(device), numbers), "the seed that seed() returned gives other numbers")


@check(
    "manual_seed", "initial_seed", "seed", "default_generator",
    promise="initial_seed returns the last seed, set by manual_seed, seed, torch.manual_seed or a generator.",
)  # fmt: skip
def last_seed_is_told(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    with offered_or_not("seeding with a fresh number"):
        accelerator.seed()
        accelerator.default_generator()

    def by_generator() -> int:
        accelerator.default_generator().manual_seed(_SEED + 3)
        return _SEED + 3

    def by_hand() -> int:
        accelerator.manual_seed(_SEED + 1)
        return _SEED + 1

    def by_torch() -> int:
        torch.manual_seed(_SEED + 2)
        return _SEED + 2

    ways = {"manual_seed": by_hand, "seed": accelerator.seed, "torch.manual_seed": by_torch,
            "torch.seed": torch.seed,
            "default_generator().manual_seed": by_generator}  # fmt: skip
    for _ in range(2):  # so that each also follows the last
        for name, seeding in ways.items():
            before = accelerator.initial_seed()
            given = seeding()
            numbers = _draw(device)
            told = accelerator.initial_seed()
            if name == "torch.seed" and told == before:
                continue  # torch.seed() knows the devices that torch names by itself
            through = "by manual_seed_all() of the module, " if name.startswith("torch") else ""
            require(told == given, f"after {name} with {given}, {through}initial_seed() is {told}")
            accelerator.manual_seed(told)
            require(
                equal(_draw(device), numbers),
                f"manual_seed() with the seed {told} that {name} set does not repeat the numbers",
            )


@check("random", promise="random() returns torch.random, whose fork_rng keeps this device's state.")
def torch_random(accelerator: Accelerator) -> None:
    module = accelerator.random()
    require(module is torch.random, f"random() is {module!r}")
    device = accelerator.current_device_name()
    before = accelerator.get_rng_state()
    # torch always forks the host's generator, and of others those that are named.
    on_host = is_host(accelerator)
    others = {} if on_host else {"device_type": accelerator.device_type}
    with module.fork_rng(devices=[] if on_host else [accelerator.current_device()], **others):
        _draw(device)
    require(equal(accelerator.get_rng_state(), before), "a draw within random().fork_rng() changed the state")
