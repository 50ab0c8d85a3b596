"""Checks of draws that are refused, of generators of other devices, and of what a state holds."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import all_told, device_names, equal, is_host, several_devices
from acclimate_conformance.checks.check import check

_Draw = Callable[[str], object]
_REFUSED: dict[str, _Draw] = {
    "torch.normal with a negative deviation": lambda d: torch.normal(0.0, -1.0, (3,), device=d),
    "normal_ with a negative deviation": lambda d: torch.empty(3, device=d).normal_(0, -1),
    "uniform_ from 2 to 1": lambda d: torch.empty(3, device=d).uniform_(2, 1),
    "exponential_ with a rate below 0": lambda d: torch.empty(3, device=d).exponential_(-1),
    "geometric_ with a chance of 2": lambda d: torch.empty(3, device=d).geometric_(2),
    "geometric_ with a chance of 0": lambda d: torch.empty(3, device=d).geometric_(0),
    "cauchy_ with a width below 0": lambda d: torch.empty(3, device=d).cauchy_(0, -1),
    "log_normal_ with a deviation of 0": lambda d: torch.empty(3, device=d).log_normal_(0, 0),
    "torch.randint from 3 to 3": lambda d: torch.randint(3, 3, (2,), device=d),
    "random_ from 5 to 2": lambda d: torch.empty(3, device=d).random_(5, 2),
    "random_ beyond the dtype": lambda d: torch.empty(3, dtype=torch.uint8, device=d).random_(0, 300),
    "bernoulli_ with a chance of 1.5": lambda d: torch.empty(3, device=d).bernoulli_(1.5),
    "dropout with a chance of 1.5": lambda d: torch.nn.functional.dropout(torch.ones(3, device=d), 1.5),
    "torch.randperm of -1": lambda d: torch.randperm(-1, device=d),
    "torch.randperm beyond the dtype": lambda d: torch.randperm(300, dtype=torch.uint8, device=d),
    "torch.multinomial of more than there are": lambda d: torch.multinomial(torch.ones(3, device=d), 5),
    "torch.multinomial of no numbers": lambda d: torch.multinomial(torch.ones(3, device=d), 0),
    "torch.multinomial of integers": lambda d: torch.multinomial(torch.ones(3, device=d).int(), 2),
    "torch.rand of a negative size": lambda d: torch.rand(-1, device=d),
    "torch.rand of integers": lambda d: torch.rand(3, dtype=torch.int32, device=d),
    "torch.randn of truth values": lambda d: torch.randn(3, dtype=torch.bool, device=d),
    "uniform_ of overlapping elements": lambda d: torch.empty(1, device=d).expand(3).uniform_(),
}
"""Draws that torch refuses by their arguments alone.

Not ``torch.bernoulli`` of integers, which torch refuses on CUDA after it has taken from the generator.
"""


@check(
    "get_rng_state",
    "manual_seed",
    "current_device_name",
    promise="Draws with arguments that do not fit are refused, and change no generator.",
    of="operators",
)
def refused_draws_change_nothing(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    with all_told() as noted:
        for what, draw in _REFUSED.items():
            try:
                draw("cpu")
            except Exception:  # noqa: BLE001 - what this torch refuses
                pass
            else:
                continue
            accelerator.manual_seed(5)
            torch.rand(1, device=device)
            state, host = accelerator.get_rng_state().clone(), torch.get_rng_state()
            try:
                draw(device)
            except NotImplementedError:
                continue
            except Exception as error:  # noqa: BLE001 - of any type, as torch's differ
                told = describe(error.with_traceback(None), whole=True)
                noted(not isinstance(error, MemoryError), f"{what} raises {told}")
            else:
                noted(False, f"{what} is accepted on {device}")
            noted(
                equal(accelerator.get_rng_state(), state),
                f"{what}, which is refused, changes the state of {device}",
            )
            if not is_host(accelerator):
                noted(
                    equal(torch.get_rng_state(), host), f"{what}, which is refused, changes the host's state"
                )
            accelerator.set_rng_state(state)
            again = torch.rand(5, device=device)
            accelerator.set_rng_state(state)
            noted(
                equal(torch.rand(5, device=device), again),
                f"after {what} a restored state gives other numbers",
            )


@check(
    "default_generator",
    "get_rng_state",
    "initial_seed",
    "set_rng_state",
    promise="A state holds its seed; generators are copied with their states; one of another device is "
    "used or "
    "refused.",
    of="operators",
)
def states_hold_their_seed(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    with all_told() as noted:
        accelerator.manual_seed(7)
        torch.rand(3, device=device)
        saved = accelerator.get_rng_state().clone()
        accelerator.manual_seed(8)
        accelerator.set_rng_state(saved)
        told = accelerator.initial_seed()
        noted(told == 7, f"after set_rng_state() of a state with the seed 7 initial_seed() is {told}")
        own, twin = torch.Generator(device).manual_seed(9), torch.Generator(device).manual_seed(10)
        torch.rand(5, device=device, generator=own)
        twin.set_state(own.get_state())
        told = twin.initial_seed()
        noted(told == 9, f"Generator.initial_seed() of one with the state of one with the seed 9 is {told}")
        seed = own.seed()
        first = torch.rand(65, device=device, generator=own).cpu()
        again = torch.rand(65, device=device, generator=torch.Generator(device).manual_seed(seed))
        noted(equal(again, first), "the seed that Generator.seed() returned gives other numbers")
        ways: dict[str, Callable[[torch.Generator], torch.Generator]] = {
            "pickle": lambda g: pickle.loads(pickle.dumps(g)),
            "copy.deepcopy": copy.deepcopy,
        }
        for how, copied in ways.items():
            try:
                other = copied(own)
            except (TypeError, RuntimeError, AttributeError, SystemError):  # torch copies some types only
                continue
            drawn = torch.rand(65, device=device, generator=own).cpu()
            noted(
                str(other.device) == str(own.device),
                f"{how} of a generator of {own.device} is on {other.device}",
            )
            noted(
                equal(torch.rand(65, device=device, generator=other), drawn),
                f"{how} of a generator draws other numbers",
            )
    _require_of_other_devices(accelerator)


def _require_of_other_devices(accelerator: Accelerator) -> None:
    """A generator of another device is refused, or is the one that is used."""
    if len(device_names(accelerator)) < 2:
        return
    names = several_devices(accelerator)
    with all_told() as noted:
        for here, there in ((names[0], names[1]), (names[1], names[0])):
            own = torch.Generator(there).manual_seed(3)
            for what, draw in {
                "torch.rand": lambda h=here, g=own: torch.rand(65, device=h, generator=g),
                "normal_": lambda h=here, g=own: torch.empty(65, device=h).normal_(generator=g),
                "torch.randperm": lambda h=here, g=own: torch.randperm(65, device=h, generator=g),
            }.items():
                states = [accelerator.get_rng_state(i).clone() for i in range(len(names))]
                before = own.get_state()
                try:
                    draw()  # type: ignore[no-untyped-call]
                except (RuntimeError, ValueError, TypeError):
                    used = True
                else:
                    used = not equal(own.get_state(), before)
                noted(used, f"{what} on {here} with a generator of {there} does not use it")
                now = [accelerator.get_rng_state(i) for i in range(len(names))]
                noted(
                    all(map(equal, now, states)),
                    f"{what} on {here} with a generator of {there} changes another state",
                )
