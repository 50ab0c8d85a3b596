"""Checks of generators of the program's own, and of states and generators that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import equal, is_host, refused, require
from acclimate_conformance.checks.check import check

_SEEDS = (0, 1, 2**31, 2**40 + 5, 2**63 - 1, 2**64 - 1, -5)


@check(
    "get_rng_state", "set_rng_state", "default_generator", "current_device_name",
    promise="A generator keeps a seed of any size; states and generators that do not fit are refused, and "
    "change nothing.",
)  # fmt: skip
def what_does_not_fit_is_refused(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    for seed in _SEEDS:
        own = torch.Generator(device)
        returned = own.manual_seed(seed)
        told, wanted = own.initial_seed(), torch.Generator().manual_seed(seed).initial_seed()
        require(told == wanted, f"Generator.initial_seed() of one with the seed {seed} is {told}")
        require(returned is own, "Generator.manual_seed() returns another generator")
    accelerator.manual_seed(5)
    state = accelerator.get_rng_state()
    wrong: dict[str, torch.Tensor] = {
        # No round part: a device may take an older form of its states, such as CUDA's of 8 bytes.
        "of one byte more": torch.cat([state, state[:1]]),
        "of one byte less": state[:-1].clone(),
        "of nothing": state[:0].clone(),
        "of another dtype": state.float(),
    }
    if not is_host(accelerator):
        wrong["on the device"] = state.to(device)
    for what, given in wrong.items():
        with refused(f"set_rng_state() of a state {what}", RuntimeError, TypeError, ValueError):
            accelerator.set_rng_state(given)
        require(equal(accelerator.get_rng_state(), state), f"a refused state {what} changes the state")
    if is_host(accelerator):
        return
    host = torch.Generator()
    calls: dict[str, Callable[[], object]] = {
        "torch.rand on the device with a generator of the host": lambda: torch.rand(
            3, device=device, generator=host
        ),
        "normal_ on the device with a generator of the host": lambda: torch.empty(3, device=device).normal_(
            generator=host
        ),
        "torch.randperm on the device with a generator of the host": lambda: torch.randperm(
            3, device=device, generator=host
        ),
    }
    for what, call in calls.items():
        before = accelerator.get_rng_state(), host.get_state(), torch.get_rng_state()
        with refused(what, RuntimeError, ValueError, TypeError):
            call()
        now = accelerator.get_rng_state(), host.get_state(), torch.get_rng_state()
        require(all(map(equal, before, now)), f"{what}, which is refused, changes a state")


@check(
    "manual_seed", "current_device_name",
    promise="Complex numbers and integers of any dtype are drawn over their whole range.",
    of="operators",
)  # fmt: skip
def draws_in_other_dtypes(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    count = 20_000
    accelerator.manual_seed(19)
    with suppress(NotImplementedError, TypeError):
        for name, drawn in (
            ("torch.randn", torch.randn(count, dtype=torch.complex64, device=device)),
            ("normal_", torch.empty(count, dtype=torch.complex64, device=device).normal_()),
        ):
            parts = torch.view_as_real(drawn.cpu()).double()
            # torch documents a variance of 1, which is the sum of those of both parts.
            for part, of in enumerate(("real", "imaginary")):
                found = float(parts[:, part].var())
                require(
                    abs(found - 0.5) < 0.03,
                    f"the {of} parts of {name} in complex64 have the variance {found:.3f}",
                )
            together = float((parts[:, 0] * parts[:, 1]).mean())
            require(abs(together) < 0.03, f"both parts of {name} in complex64 depend on each other")
        drawn = torch.view_as_real(torch.rand(count, dtype=torch.complex64, device=device).cpu())
        require(
            bool(((drawn >= 0) & (drawn < 1)).all()) and abs(float(drawn.mean()) - 0.5) < 0.02,
            "parts of torch.rand in complex64 are not spread over [0, 1)",
        )
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        places = torch.randperm(100, dtype=dtype, device=device).cpu()
        require(
            places.dtype == dtype and sorted(places.tolist()) == list(range(100)),
            f"torch.randperm(100) in {dtype} does not give each number once",
        )
        few = torch.randint(limits.max - 3, limits.max, (999,), dtype=dtype, device=device).cpu()
        require(
            sorted(set(few.tolist())) == list(range(limits.max - 3, limits.max)),
            f"torch.randint below the largest number of {dtype} gives {sorted(set(few.tolist()))[:5]}",
        )
        wide = torch.empty(count, dtype=dtype, device=device).random_().cpu().double()
        # torch draws from 0 to the largest number of a dtype.
        require(
            float(wide.min()) >= 0 and abs(float(wide.mean()) / limits.max - 0.5) < 0.02,
            f"random_() in {dtype} gives {wide.min():.3g} to {wide.max():.3g}, {wide.mean():.3g} in the "
            f"middle",
        )
