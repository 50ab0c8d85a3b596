"""Checks of random numbers by device: which device is used, and that the others do not change."""

from __future__ import annotations

from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator, DeviceLike
from acclimate.errors import InvalidDeviceError
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    device_names,
    equal,
    is_host,
    offered_or_not,
    refused,
    require,
    several_devices,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.device_arguments import (
    has_indices,
    require_device_arguments,
    ways_to_name,
)

_SEED = 20_260_211


@check(
    "default_generator", "get_rng_state", "set_rng_state",
    promise="A device is an index, a name or a torch.device; one that is absent or of another type is "
    "refused.",
)  # fmt: skip
def device_arguments(accelerator: Accelerator) -> str | None:
    for index in range(len(device_names(accelerator))):  # each with a state of its own
        with accelerator.device(index):
            accelerator.manual_seed(_SEED + index)
    state = accelerator.get_rng_state()
    states = [kept.clone() for kept in accelerator.get_rng_state_all()]
    accelerator.manual_seed(_SEED - 1)
    another = accelerator.get_rng_state().clone()

    def restored_on(device: DeviceLike) -> list[int]:
        """The indices of the devices whose state changes."""
        accelerator.set_rng_state_all(states)
        accelerator.set_rng_state(another, device)
        now = accelerator.get_rng_state_all()
        return [index for index, kept in enumerate(states) if not equal(now[index], kept)]

    methods: dict[str, Callable[..., object]] = {
        "get_rng_state": accelerator.get_rng_state,
        "set_rng_state": restored_on,
    }
    if _shows_generators(accelerator):
        methods["default_generator"] = accelerator.default_generator
    if has_indices(accelerator):
        too_many = [*accelerator.get_rng_state_all(), state]
        with refused("set_rng_state_all() with more states than devices", InvalidDeviceError):
            accelerator.set_rng_state_all(too_many)
    return require_device_arguments(accelerator, methods)


@check(
    "get_rng_state", "set_rng_state", "default_generator", "manual_seed", "initial_seed", "seed",
    promise="Without a device argument, methods use the generator of the current device.",
)  # fmt: skip
def current_device_is_meant(accelerator: Accelerator) -> None:
    for index, name in enumerate(several_devices(accelerator)):
        for other in range(accelerator.device_count()):  # each with a state of its own
            with accelerator.device(other):
                accelerator.manual_seed(_SEED + other)
        with accelerator.device(index):
            told = accelerator.initial_seed()
            require(told == _SEED + index, f"initial_seed() is {told} on {name}, seeded with {_SEED + index}")
            own = accelerator.get_rng_state(index)
            require(equal(accelerator.get_rng_state(), own), f"get_rng_state() on {name} is another device's")
            first = torch.rand(64, device=name).cpu()
            accelerator.set_rng_state(own)
            require(
                equal(torch.rand(64, device=name), first),
                f"set_rng_state() on {name} restores another device",
            )
            if _shows_generators(accelerator):
                found = accelerator.default_generator()
                require(
                    found.device.index == index, f"default_generator() on {name} is one of {found.device}"
                )
                seed = accelerator.seed()
                told = accelerator.default_generator(index).initial_seed()
                require(told == seed, f"seed() on {name} returned {seed}, its generator has {told}")
        for other in range(accelerator.device_count()):
            with accelerator.device(other):
                told = accelerator.initial_seed()
            require(
                other == index or told == _SEED + other,
                f"manual_seed() or seed() on {name} changes the seed of device {other} to {told}",
            )


@check(
    "default_generator", "default_generators",
    promise="default_generator accepts every form of a device; default_generators is in device order.",
)  # fmt: skip
def generators_by_device(accelerator: Accelerator) -> None:
    _require_generators(accelerator)
    if not has_indices(accelerator):
        raise NotOfferedError("its devices share one generator")
    all_of_them = accelerator.default_generators
    for index in range(len(device_names(accelerator))):
        for device in ways_to_name(accelerator, index):
            found = accelerator.default_generator(device).device.index
            require(found == index, f"default_generator({device!r}) is one of device {found}")
        found = all_of_them[index].device.index
        require(found == index, f"default_generators[{index}] is one of device {found}")


@check(
    "manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all",
    promise="Seeding and restoring the device do not change the host's generator.",
)  # fmt: skip
def host_is_left_alone(accelerator: Accelerator) -> None:
    if is_host(accelerator):
        raise NotOfferedError("its generator is the host's")
    actions: dict[str, Callable[[], object]] = {
        "manual_seed()": lambda: accelerator.manual_seed(_SEED),
        "manual_seed_all()": lambda: accelerator.manual_seed_all(_SEED),
        "set_rng_state()": lambda: accelerator.set_rng_state(accelerator.get_rng_state()),
        "set_rng_state_all()": lambda: accelerator.set_rng_state_all(accelerator.get_rng_state_all()),
        "a draw on the device": lambda: torch.rand(8, device=accelerator.current_device_name()),
    }
    if _shows_generators(accelerator):
        actions |= {"seed()": accelerator.seed, "seed_all()": accelerator.seed_all}
    for what, act in actions.items():
        before = torch.get_rng_state()
        act()
        require(equal(torch.get_rng_state(), before), f"{what} changes the state of the host's generator")


def _shows_generators(accelerator: Accelerator) -> bool:
    try:
        _require_generators(accelerator)
    except NotOfferedError:
        return False
    return True


def _require_generators(accelerator: Accelerator) -> None:
    with offered_or_not("default generators"):
        accelerator.default_generator()
