"""Checks of drawn numbers: they are in the range of their distribution, and about as often as it says."""

from __future__ import annotations

from contextlib import suppress

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import require, short
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import supported

_COUNT = 40_000
_OFF_BY = 0.05  # of a mean; for so many numbers, 10 times the standard deviation that is usual


@check(
    "manual_seed", "device_name",
    promise="Drawn numbers are in their range, below its open end in every dtype, and spread over it.",
    of="operators",
)  # fmt: skip
def draws_keep_their_range(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    accelerator.manual_seed(20_261_126)
    for dtype in supported(accelerator):
        of = f"in {short(dtype)}"
        for name, uniform, low, high in (
            ("rand", torch.rand(_COUNT, dtype=dtype, device=device), 0.0, 1.0),
            ("uniform_", torch.empty(_COUNT, dtype=dtype, device=device).uniform_(-2, 6), -2.0, 6.0),
        ):
            _require_in(f"{name} {of}", uniform, low, high)
            _require_mean(f"{name} {of}", uniform, (low + high) / 2, high - low)
        normal = torch.randn(_COUNT, dtype=dtype, device=device)
        _require_mean(f"randn {of}", normal, 0.0, 1.0)
        deviation = float(normal.cpu().double().std())
        require(abs(deviation - 1) < _OFF_BY, f"the standard deviation of randn {of} is {deviation:.3f}")
        with suppress(NotImplementedError):  # a device may lack it
            exponential = torch.empty(_COUNT, dtype=dtype, device=device).exponential_(2.0).cpu()
            require(bool((exponential >= 0).all()), f"exponential_ {of} gives {float(exponential.min())}")
            _require_mean(f"exponential_ {of}", exponential, 0.5, 1.0)
    for low, high in ((0, 3), (-2, 5), (7, 8)):
        for kind in (torch.int64, torch.int32):
            drawn = torch.randint(low, high, (_COUNT,), dtype=kind, device=device).cpu()
            found = drawn.unique().tolist()
            require(
                found == list(range(low, high)),
                f"randint({low}, {high}) in {short(kind)} gives {found}, not each of {low} to {high - 1}",
            )
    places = torch.randperm(1003, device=device).cpu()
    require(sorted(places.tolist()) == list(range(1003)), "randperm gives a number twice, or not at all")
    require(places.tolist() != list(range(1003)), "randperm gives the numbers in order")
    with suppress(NotImplementedError):
        _require_places(device)
    _require_chances(device)


def _require_places(device: str) -> None:
    weights = torch.ones(32, device=device)
    for _ in range(3):
        drawn = torch.multinomial(weights, 32).cpu()
        require(drawn.unique().numel() == 32, "multinomial without replacement draws a place twice")
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.5], [2.0, 0.0, 1e-3, 0.0, 9.0]], device=device)
    for _ in range(3):
        drawn = torch.multinomial(weights, 3).sort(-1).values.cpu()
        require(
            drawn.tolist() == [[1, 3, 4], [0, 2, 4]],
            f"multinomial of all places with a weight, without replacement, draws {drawn.tolist()}",
        )
    weights = torch.tensor([1.0, 0.0, 3.0], device=device)
    drawn = torch.multinomial(weights, _COUNT, replacement=True).cpu()
    shares = torch.bincount(drawn, minlength=3).double() / _COUNT
    for share, wanted in zip(shares.tolist(), (0.25, 0.0, 0.75), strict=True):
        require(abs(share - wanted) < _OFF_BY * wanted + 1e-9, f"multinomial draws {shares.tolist()}")


def _require_chances(device: str) -> None:
    for chance in (0.0, 0.25, 1.0):
        drawn = torch.bernoulli(torch.full((_COUNT,), chance, device=device))
        _require_mean(f"bernoulli({chance})", drawn, chance, chance)
        kept = torch.nn.functional.dropout(torch.ones(_COUNT, device=device), chance)
        values = set(kept.cpu().unique().tolist())
        wanted_values = {0.0} if chance == 1 else {1.0} if chance == 0 else {0.0, 1 / (1 - chance)}
        require(
            all(any(abs(value - want) < 1e-4 for want in wanted_values) for value in values),
            f"dropout({chance}) of ones gives {sorted(values)}",
        )
        _require_mean(f"dropout({chance}) of ones", kept, float(chance < 1), 1.0)


def _require_in(name: str, drawn: torch.Tensor, low: float, high: float) -> None:
    least, most = float(drawn.min()), float(drawn.max())
    require(low <= least and most < high, f"{name} gives {least} to {most}, not numbers in [{low}, {high})")


def _require_mean(name: str, drawn: torch.Tensor, wanted: float, width: float) -> None:
    mean = float(drawn.cpu().double().mean())
    require(abs(mean - wanted) <= _OFF_BY * width, f"the mean of {name} is {mean:.3f}, not {wanted}")
