"""Checks of drawn numbers: each distribution with its arguments, no number twice, and every element drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    device_names,
    equal,
    is_host,
    require,
    short,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import supported

_COUNT = 40_003
_RARE = 1e-6
"""How many numbers that are too large for a dtype may be expected of a distribution that gives none."""
_PERIODS = 2**21 + 2**17
"""More numbers than any grid of threads draws at once; a product of small factors, for the transform."""
_DRAWS = 300  # in a row, so that a fault of every so many shows
_APART = 0.022
"""How far the shares of so many numbers may be from a distribution: by chance, once in 10^16 times."""
_TOGETHER = 0.02
"""How large the correlation of so many numbers may be at any distance: 30 times its standard deviation."""
_Share = Callable[[torch.Tensor], torch.Tensor]
"""The share of a distribution's numbers that are at most so large."""


def _normal(mean: float, deviation: float) -> _Share:
    return lambda x: 0.5 * (1 + torch.erf((x - mean) / (deviation * math.sqrt(2))))


def _uniform(low: float, high: float) -> _Share:
    return lambda x: ((x - low) / (high - low)).clamp(0, 1)


_CONTINUOUS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], _Share]] = {
    "torch.rand_like": (torch.rand_like, _uniform(0, 1)),
    "torch.randn_like": (torch.randn_like, _normal(0, 1)),
    "uniform_(-3, 5)": (lambda t: t.uniform_(-3, 5), _uniform(-3, 5)),
    "uniform_(100, 101)": (lambda t: t.uniform_(100, 101), _uniform(100, 101)),
    "normal_(2, 3)": (lambda t: t.normal_(2, 3), _normal(2, 3)),
    "torch.normal(means, 0.5)": (lambda t: torch.normal(torch.full_like(t, 4), 0.5), _normal(4, 0.5)),
    "torch.normal(-1, deviations)": (lambda t: torch.normal(-1.0, torch.full_like(t, 2)), _normal(-1, 2)),
    "torch.normal(means, deviations)": (
        lambda t: torch.normal(torch.full_like(t, 3), torch.full_like(t, 0.25)),
        _normal(3, 0.25),
    ),
    "exponential_(0.5)": (lambda t: t.exponential_(0.5), lambda x: 1 - torch.exp(-0.5 * x)),
    "exponential_(4)": (lambda t: t.exponential_(4), lambda x: 1 - torch.exp(-4 * x)),
    "cauchy_(1, 2)": (lambda t: t.cauchy_(1, 2), lambda x: torch.atan((x - 1) / 2) / math.pi + 0.5),
    "log_normal_(0.5, 0.75)": (
        lambda t: t.log_normal_(0.5, 0.75),
        lambda x: _normal(0.5, 0.75)(x.clamp_min(1e-30).log()),
    ),
    "torch._standard_gamma of 1": (
        lambda t: torch._standard_gamma(torch.ones_like(t)),
        lambda x: 1 - torch.exp(-x),
    ),
}
"""Draws of numbers into a tensor or like it, and their distributions."""


def _binomial(tries: int, chance: float) -> list[float]:
    return [math.comb(tries, k) * chance**k * (1 - chance) ** (tries - k) for k in range(tries + 1)]


_COUNTED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[float]]] = {
    "torch.bernoulli of 0.3": (lambda t: torch.bernoulli(torch.full_like(t, 0.3)), [0.7, 0.3]),
    "bernoulli_(0.8)": (lambda t: t.bernoulli_(0.8), [0.2, 0.8]),
    "bernoulli_(chances)": (lambda t: t.bernoulli_(torch.full_like(t, 0.1)), [0.9, 0.1]),
    "bernoulli_() of integers": (lambda t: t.long().bernoulli_(0.6), [0.4, 0.6]),
    "geometric_(0.4)": (lambda t: t.geometric_(0.4), [0.0, *(0.4 * 0.6**k for k in range(12))]),
    "torch.poisson of 1.5": (
        lambda t: torch.poisson(torch.full_like(t, 1.5)),
        [math.exp(-1.5) * 1.5**k / math.factorial(k) for k in range(9)],
    ),
    "torch.poisson of 20": (
        lambda t: torch.poisson(torch.full_like(t, 20)),
        [math.exp(-20) * 20.0**k / math.factorial(k) for k in range(45)],
    ),
    "torch.binomial of 9 tries": (
        lambda t: torch.binomial(torch.full_like(t, 9), torch.full_like(t, 0.3)),
        _binomial(9, 0.3),
    ),
    "random_(5)": (lambda t: t.random_(5), [0.2] * 5),
    "random_(2, 7)": (lambda t: t.random_(2, 7), [0.0, 0.0, *[0.2] * 5]),
    "random_(3) of integers": (lambda t: t.int().random_(3), [1 / 3] * 3),
    "random_() of uint8": (lambda t: t.to(torch.uint8).random_(), [1 / 256] * 256),
    "random_() of truth values": (lambda t: t.bool().random_(), [0.5, 0.5]),
    "torch.randint(3)": (lambda t: torch.randint(3, t.shape, device=t.device), [1 / 3] * 3),
    "torch.randint(1, 5) of uint8": (
        lambda t: torch.randint(1, 5, t.shape, dtype=torch.uint8, device=t.device),
        [0.0, *[0.25] * 4],
    ),
    "torch.randint(0, 4) of float32": (
        lambda t: torch.randint(0, 4, t.shape, dtype=torch.float32, device=t.device),
        [0.25] * 4,
    ),
    "torch.randint_like(2, 6)": (lambda t: torch.randint_like(t, 2, 6), [0.0, 0.0, *[0.25] * 4]),
    "torch.multinomial with replacement": (
        lambda t: torch.multinomial(
            torch.tensor([2.0, 0.0, 5.0, 1.0], device=t.device), t.numel(), replacement=True
        ),
        [0.25, 0.0, 0.625, 0.125],
    ),
    "torch.multinomial of rows": (
        lambda t: torch.multinomial(
            torch.tensor([[1.0, 1.0, 0.0, 2.0]], device=t.device).expand(101, 4), t.numel() // 101, True
        ),
        [0.25, 0.25, 0.0, 0.5],
    ),
    "torch.multinomial without replacement": (
        lambda t: torch.multinomial(torch.tensor([[1.0, 3.0]], device=t.device).expand(t.numel(), 2), 1),
        [0.25, 0.75],
    ),
    "the place of 1 in torch.randperm(4)": (
        lambda t: torch.stack([torch.randperm(4, device=t.device).eq(1).int().argmax() for _ in range(600)]),
        [0.25] * 4,
    ),
}
"""Draws of whole numbers, and the share of each from 0 on."""


def _offered(draw: Callable[[], Any]) -> bool:
    """Whether a device has a draw, which only some need."""
    try:
        draw()
    except NotImplementedError:
        return False
    return True


@check(
    "manual_seed",
    "device_name",
    promise="Each distribution is the one that its arguments say, in each dtype, in the middle and at the "
    "ends.",
    once=True,
    timeout_s=240,
    of="operators",
)
def distributions(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    accelerator.manual_seed(20_261_127)
    for dtype in supported(accelerator):
        for name, (draw, share) in _CONTINUOUS.items():
            into = torch.zeros(_COUNT, dtype=dtype, device=device)
            if not _offered(lambda d=draw, t=into: d(t.clone())):  # type: ignore[misc]
                continue
            if dtype != torch.float32 and name.startswith(
                ("uniform_(100", "torch._standard", "torch.normal(m")
            ):
                continue  # few numbers of 16 bits are so close together
            drawn = draw(into).cpu()
            require(drawn.dtype == dtype, f"{name} in {short(dtype)} draws {short(drawn.dtype)}")
            if dtype == torch.float32 and name.startswith("exponential_"):
                zeros = int((drawn <= 0).sum())
                require(zeros == 0, f"{zeros} of {_COUNT} numbers of {name} are 0 or less")
            _require_distribution(f"{name} in {short(dtype)}", drawn.double(), share, torch.finfo(dtype))
            if dtype == torch.float64:
                _require_53_bits(f"{name} in {short(dtype)}", drawn)
    _require_chosen(device)
    _require_parameters_by_element(device)
    into = torch.zeros(_COUNT, device=device)
    for name, (draw, shares) in _COUNTED.items():
        if _offered(lambda d=draw: d(into.clone())):  # type: ignore[misc]
            _require_shares(name, draw(into.clone()).cpu(), shares)


def _require_chosen(device: str) -> None:
    """gumbel_softmax(hard=True) chooses one place of each row, as often as the logits say."""
    logits = torch.tensor([[0.0, math.log(3), -math.inf]], device=device).expand(20_000, 3)
    if not _offered(lambda: torch.nn.functional.gumbel_softmax(logits, hard=True)):
        return
    chosen = torch.nn.functional.gumbel_softmax(logits, hard=True).cpu()
    ones = (chosen > 0.5).double()
    require(bool((ones.sum(1) == 1).all()), "gumbel_softmax(hard=True) chooses no place, or several")
    shares = ones.mean(0).tolist()
    apart = max(abs(share - wanted) for share, wanted in zip(shares, (0.25, 0.75, 0.0), strict=True))
    require(apart < 0.03, f"gumbel_softmax(hard=True) chooses places in the shares {shares}")


def _require_parameters_by_element(device: str) -> None:
    """Each element is drawn with its own parameters: those of its neighbours, and of other rows, differ."""
    for shape in ((5003,), (7, 715), (5, 11, 91)):
        for name, (draw, wanted) in _draws_with_parameters(device, shape).items():
            if not _offered(draw):
                continue
            wrong = int((draw().cpu() != wanted.cpu()).sum())
            # A draw of float32 near its mean may equal it.
            require(
                wrong < 100,
                f"{wrong} of {wanted.numel()} numbers of {name}, of shape {shape}, have another element's "
                "parameter",
            )


def _draws_with_parameters(
    device: str, shape: tuple[int, ...]
) -> dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor]]:
    """By name, draws whose numbers tell their parameters, and what is told if these are right."""
    places = torch.arange(math.prod(shape)).view(shape)
    first = (places % 3 == 0).float().to(device)
    means = (places % 7 * 100.0).to(device)
    draws: dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {
        "torch.bernoulli of chances": (lambda: torch.bernoulli(first), first),
        "bernoulli_ of chances": (lambda: torch.empty_like(first).bernoulli_(first), first),
        "torch.poisson of rates": (lambda: torch.poisson(first * 900).clamp(400, 401) - 400, first),
        "torch.binomial of chances": (lambda: torch.binomial(torch.full_like(first, 9), first), first * 9),
        "torch.multinomial of rows": (
            lambda: torch.multinomial(torch.stack([1 - first, first], -1).view(-1, 2), 1).view(shape),
            first,
        ),
        "torch.normal of means and deviations": (
            lambda: (torch.normal(means, first) - means).abs().gt(0).float(),
            first,
        ),
        "torch.normal of deviations": (lambda: torch.normal(0.0, first).abs().gt(0).float(), first),
        "torch.normal of means": (lambda: (torch.normal(means, 1.0) / 100).round() * 100, means),
    }
    if len(shape) > 1:
        rows = first[..., :1]
        draws |= {
            "torch.bernoulli of transposed chances": (lambda: torch.bernoulli(first.mT).mT, first),
            "bernoulli_ of chances of rows": (
                lambda: torch.empty_like(first).bernoulli_(rows),
                rows.expand(shape),
            ),
        }
    return draws


def _require_distribution(name: str, drawn: torch.Tensor, share: _Share, limits: torch.finfo) -> None:
    """Compares the shares up to each number with the distribution's; the ends by the largest and smallest."""
    eps, ends = limits.eps, torch.tensor([limits.min, limits.max], dtype=torch.float64)
    below_least, below_largest = share(ends).tolist()
    if (below_least + 1 - below_largest) * len(drawn) > _RARE:  # a number of such a size rounds to infinity
        drawn = drawn.clamp(limits.min, limits.max)
    require(bool(drawn.isfinite().all()), f"{name} gives numbers that are not finite")
    ordered = drawn.sort().values
    found = torch.searchsorted(ordered, ordered, right=True).double() / len(ordered)
    below = torch.searchsorted(ordered, ordered, right=False).double() / len(ordered)
    width = 4 * eps * ordered.abs()  # numbers of 16 bits are rounded
    wanted, slightly_less = share(ordered + width), share(ordered - width)
    apart = float(torch.maximum(slightly_less - found, below - wanted).max())
    require(apart <= _APART, f"the shares of {name} are off by {apart:.3f}")
    for end, outside in (
        ("least", share(ordered[:1] + width[:1])),
        ("largest", 1 - share(ordered[-1:] - width[-1:])),
    ):
        chance = float(outside) * len(ordered)
        require(
            chance < 40 or eps > 1e-4,  # few numbers of 16 bits are near an end
            f"the {end} of {len(ordered)} numbers of {name} is "
            f"{float(ordered[0 if end == 'least' else -1]):.6g}, beyond which {chance:.0f} are expected",
        )


def _require_53_bits(name: str, drawn: torch.Tensor) -> None:
    """Numbers of float64 are not made of fewer bits: of 24 bits, some 40 of so many would be equal."""
    reduced = int((drawn.float().double() == drawn).sum())
    require(reduced < len(drawn) // 100, f"{reduced} of {len(drawn)} numbers of {name} are those of float32")
    repeated = len(drawn) - drawn.unique().numel()
    require(repeated < 10, f"{repeated} of {len(drawn)} numbers of {name} repeat others")


def _require_shares(name: str, drawn: torch.Tensor, shares: list[float]) -> None:
    whole = drawn.double().round()
    require(bool((whole == drawn.double()).all()), f"{name} gives numbers that are not whole")
    require(float(whole.min()) >= 0, f"{name} gives {float(whole.min())}")
    counts = torch.bincount(whole.flatten().long(), minlength=len(shares)).double()
    require(
        len(counts) == len(shares) or sum(shares) < 1 - 1e-9,
        f"{name} gives {len(counts) - 1}, beyond the end",
    )
    for number, share in enumerate(shares):
        found = float(counts[number]) / drawn.numel()
        allowed = 7 * math.sqrt(max(share * (1 - share), 0.0) / drawn.numel())
        require(
            abs(found - share) <= allowed + (1e-4 if 0 < share < 1 else 0.0),
            f"the share of {number} in {name} is {found:.4f}, not {share:.4f}",
        )


@check(
    "manual_seed",
    "device_name",
    promise="Drawn numbers do not depend on others or repeat, and each element of a tensor is drawn.",
    once=True,
    of="operators",
)
def draws_are_independent(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    accelerator.manual_seed(20_261_128)
    draws: dict[str, Callable[[int], torch.Tensor]] = {
        "torch.rand": lambda n: torch.rand(n, device=device) - 0.5,
        "torch.randn": lambda n: torch.randn(n, device=device),
        "torch.nn.functional.dropout": lambda n: (
            torch.nn.functional.dropout(torch.ones(n, device=device), 0.5) - 1
        ),
    }
    for name, draw in draws.items():
        drawn = draw(_COUNT).cpu().double()
        for distance in (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, _COUNT // 2):
            first, second = drawn[:-distance], drawn[distance:]
            together = float((first * second).mean() / (drawn.square().mean()))
            require(
                abs(together) < 0.05,
                f"numbers of {name} that are {distance} apart depend on each other: {together:.2f}",
            )
        again = draw(_COUNT).cpu().double()
        together = float((drawn * again).mean() / drawn.square().mean())
        require(abs(together) < 0.05, f"two draws of {name} in a row depend on each other: {together:.2f}")
        rows = torch.stack([draw(64) for _ in range(_DRAWS)]).cpu()
        different = len(rows.unique(dim=0))
        require(
            different == _DRAWS, f"of {_DRAWS} draws of {name} in a row {_DRAWS - different} repeat others"
        )
    _require_rows_are_independent(device)
    _require_no_period(device)
    _require_last_is_drawn(accelerator, device)
    for length in (1, 2, 3, 5, 7, 15, 17, 31, 33, 63, 65, 127, 129, 1003, 70_001):
        others = _drawn_everywhere(length, device)
        for what, drawn in _drawn_everywhere(length, device).items():
            flat = drawn.cpu().flatten()
            if what != "torch.randperm":
                ends = [float(t.flatten()[-1]) for t in (drawn, others[what])]
                require(ends[0] != ends[1], f"{what} of {length} elements ends with {ends[0]} twice")
                is_drawn_before = length < 200 and bool((flat[:-1] == flat[-1]).any())
                require(not is_drawn_before, f"{what} of {length} elements ends with one of the others")
            require(
                bool((flat != -9).all()),
                f"{what} of {length} elements leaves element {int((flat == -9).int().argmax())} as it was",
            )
            numbers = flat.unique().numel()
            least = length - 1 if what == "torch.randperm" else 0.985 * length - 1
            require(
                numbers > least,
                f"{what} of {length} elements gives {numbers} different numbers",
            )
            tail = flat[-min(length, 4) :]
            require(bool(tail.isfinite().all()), f"{what} of {length} elements ends with {tail.tolist()}")
    places = torch.randperm(70_001, device=device).cpu()
    kept = int((places == torch.arange(len(places))).sum())
    require(kept < 20, f"torch.randperm of {len(places)} leaves {kept} numbers in their places")
    for low, high in ((0, 1 << 33), (-(1 << 40), 1 << 40), (0, 1 << 62), (1 << 53, (1 << 53) + 8)):
        if not _offered(lambda n=low, m=high: torch.randint(n, m, (1,), device=device)):  # type: ignore[misc]
            continue
        drawn = torch.randint(low, high, (_COUNT,), device=device).cpu() - low
        name, width = f"torch.randint({low}, {high})", high - low
        require(
            int(drawn.min()) >= 0 and int(drawn.max()) < width,
            f"{name} gives {int(drawn.min()) + low} to {int(drawn.max()) + low}",
        )
        for what, share in (
            ("above the middle", (drawn >= width // 2).double().mean()),
            ("in the second and fourth quarter", (drawn // (width // 4) % 2).double().mean()),
            ("odd", (drawn % 2).double().mean()),
        ):
            require(abs(float(share) - 0.5) < 0.02, f"{float(share):.1%} of the numbers of {name} are {what}")
    whole = torch.full((8, 50), -9.0, device=device)
    whole[:, ::2].uniform_()
    untouched = whole[:, 1::2].cpu()
    require(bool((untouched == -9).all()), "uniform_() of every second column changes the others")
    drawn_in = int((whole[:, ::2].cpu() != -9).sum())
    require(drawn_in == 200, f"uniform_() of every second column draws {drawn_in} of its 200 numbers")


def _require_rows_are_independent(device: str) -> None:
    """Rows with the same chances are drawn apart."""
    chances = torch.ones(6, 64, device=device)
    draws: dict[str, Callable[[], torch.Tensor]] = {
        "torch.multinomial with replacement": lambda: torch.multinomial(chances, 40, replacement=True),
        "torch.multinomial without replacement": lambda: torch.multinomial(chances, 40),
        "torch.multinomial of one place": lambda: torch.multinomial(
            chances.repeat(4, 1), 1, replacement=True
        ).view(6, 4),
        "torch.bernoulli": lambda: torch.bernoulli(chances / 2),
        "torch.poisson": lambda: torch.poisson(chances * 9),
        "torch.normal": lambda: torch.normal(chances, chances),
        "torch.normal of means": lambda: torch.normal(chances, 2.0),
        "torch.normal of deviations": lambda: torch.normal(1.0, chances),
        "torch.randint of rows": lambda: torch.randint(1 << 20, (6, 64), device=device),
        "torch.rand_like": lambda: torch.rand_like(chances),
        "torch.nn.functional.dropout of rows": lambda: torch.nn.functional.dropout(chances),
        "torch.nn.functional.rrelu": lambda: torch.nn.functional.rrelu(-chances, training=True),
        "cauchy_ of rows": lambda: torch.empty(6, 64, device=device).cauchy_(),
        "log_normal_ of rows": lambda: torch.empty(6, 64, device=device).log_normal_(),
        "geometric_ of rows": lambda: torch.empty(6, 64, device=device).geometric_(0.1),
        "random_ of rows": lambda: torch.empty(6, 64, dtype=torch.int64, device=device).random_(),
        "torch.binomial": lambda: torch.binomial(chances * 9, chances / 2),
        "torch._standard_gamma": lambda: torch._standard_gamma(chances),
        "torch._sample_dirichlet": lambda: torch._sample_dirichlet(chances),
        "torch.rand of rows": lambda: torch.rand(6, 64, device=device),
        "torch.randn of rows": lambda: torch.randn(6, 64, device=device),
        "exponential_ of rows": lambda: torch.empty(6, 64, device=device).exponential_(),
        "normal_ of an expanded shape": lambda: torch.empty(64, 6, device=device).t().normal_(),
    }
    for name, draw in draws.items():
        if _offered(draw):
            different = len(draw().cpu().unique(dim=0))
            require(different > 4, f"{6 - different} of 6 rows of {name} repeat others")


def _require_last_is_drawn(accelerator: Accelerator, device: str) -> None:
    """The last of a few numbers is a new one, also where a device makes two or four at once."""
    for dtype in (*supported(accelerator), torch.int64, torch.int32):
        draws = _IN_PLACE if dtype.is_floating_point else {"random_": lambda x: x.random_(0, 1 << 20)}
        for name, draw in draws.items():
            if not _offered(lambda d=draw, t=dtype: d(torch.empty(2, dtype=t, device=device))):  # type: ignore[misc]
                continue
            for length in (1, 2, 3, 5, 1001):
                drawn = [draw(torch.full((length,), -9, dtype=dtype, device=device)).cpu() for _ in range(6)]
                ends = [t[-2:].tolist() for t in drawn]
                what = f"{name} of {length} {short(dtype)} numbers"
                is_drawn = any(end[-1] != ends[0][-1] for end in ends)
                require(is_drawn, f"{what} ends with {ends[0][-1]} each time")
                repeats = length > 1 and all(end[0] == end[1] for end in ends)
                require(not repeats, f"the last number of {what} repeats the one before it: {ends}")


_IN_PLACE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch.rand_like": torch.rand_like,
    "torch.randn_like": torch.randn_like,
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "exponential_": lambda x: x.exponential_(),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "torch.normal(means, deviations)": lambda x: torch.normal(torch.ones_like(x), torch.ones_like(x)),
}
"""Draws that hardly repeat a number, also in the smallest dtype."""


def _require_no_period(device: str) -> None:
    """No distance between two numbers of a large tensor makes one depend on the other."""
    ones = torch.ones(_PERIODS, device=device)
    draws: dict[str, Callable[[], torch.Tensor]] = {
        "torch.rand": lambda: torch.rand(_PERIODS, device=device),
        "torch.randn": lambda: torch.randn(_PERIODS, device=device),
        "torch.randint": lambda: torch.randint(0, 1 << 16, (_PERIODS,), device=device),
        "torch.randperm": lambda: torch.randperm(_PERIODS, device=device),
        "torch.bernoulli": lambda: torch.bernoulli(ones / 2),
        "torch.nn.functional.dropout": lambda: torch.nn.functional.dropout(ones, 0.5),
        "bernoulli_": lambda: torch.empty_like(ones).bernoulli_(0.5),
        "exponential_": lambda: torch.empty_like(ones).exponential_(),
        "random_": lambda: torch.empty_like(ones).random_(),
    }
    for name, draw in draws.items():
        if not _offered(draw):
            continue
        drawn = draw().cpu().float()
        # All distances at once: the correlation of a tensor with itself is the transform of its spectrum.
        spectrum = torch.fft.rfft(drawn - drawn.mean()).abs().square()
        together = torch.fft.irfft(spectrum, _PERIODS)
        together = (together / together[0])[1 : _PERIODS // 2].abs()
        distance = int(together.argmax()) + 1
        require(
            float(together[distance - 1]) < _TOGETHER,
            f"numbers of {name} of {_PERIODS} elements that are {distance} apart depend on each other: "
            f"{float(together[distance - 1]):.2f}",
        )


def _drawn_everywhere(length: int, device: str) -> dict[str, torch.Tensor]:
    def filled() -> torch.Tensor:
        return torch.full((length,), -9.0, device=device)

    gaps = torch.full((2 * length,), -9.0, device=device)[::2]
    return {
        "torch.rand": torch.rand(length, device=device),
        "torch.randn": torch.randn(length, device=device),
        "normal_": filled().normal_(),
        "uniform_": filled().uniform_(),
        "exponential_": filled().exponential_() if length > 1 else filled().uniform_(),
        "uniform_ of a strided tensor": gaps.uniform_(),
        "normal_ of a transposed matrix": torch.full((length, 2), -9.0, device=device).t().normal_(),
        "torch.randperm": torch.randperm(length, device=device).float(),
    }


def _of_any_length(device: str) -> dict[str, Callable[[int, torch.Generator | None], torch.Tensor]]:
    """Draws of so many numbers, of which a device may draw few in another way than many."""
    return {
        "torch.rand": lambda n, g: torch.rand(n, device=device, generator=g),
        "torch.randn": lambda n, g: torch.randn(n, device=device, generator=g),
        "torch.randint": lambda n, g: torch.randint(0, 1 << 20, (n,), device=device, generator=g),
        "torch.randperm": lambda n, g: torch.randperm(n, device=device, generator=g),
        "torch.multinomial": lambda n, g: torch.multinomial(
            torch.ones(n, device=device), n // 2, generator=g
        ),
        "random_": lambda n, g: torch.empty(n, device=device).random_(0, 9999, generator=g),
        "exponential_": lambda n, g: torch.empty(n, device=device).exponential_(generator=g),
    }


@check(
    "manual_seed",
    "default_generator",
    promise="A draw with a generator uses that generator alone, and repeats with its state or seed.",
    of="operators",
)
def generators_are_used(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    own = torch.Generator(device).manual_seed(5)
    ones = torch.ones(257, device=device)
    draws: dict[str, Callable[[torch.Generator | None], torch.Tensor]] = {
        **{
            f"{name} of {n} numbers": lambda g, d=draw, n=n: d(n, g)  # type: ignore[misc]
            for name, draw in _of_any_length(device).items()
            for n in (257, _COUNT)
        },
        "torch.normal": lambda g: torch.normal(ones, ones, generator=g),
        "torch.bernoulli": lambda g: torch.bernoulli(ones / 2, generator=g),
        "uniform_": lambda g: torch.empty(257, device=device).uniform_(generator=g),
        "normal_": lambda g: torch.empty(257, device=device).normal_(generator=g),
        "bernoulli_": lambda g: torch.empty(257, device=device).bernoulli_(0.5, generator=g),
        "trunc_normal_": lambda g: torch.nn.init.trunc_normal_(torch.empty(257, device=device), generator=g),
        "kaiming_uniform_": lambda g: torch.nn.init.kaiming_uniform_(
            torch.empty(257, 3, device=device), generator=g
        ),
    }
    for name, draw in draws.items():
        if not _offered(lambda d=draw: d(None)):  # type: ignore[misc]
            continue
        accelerator.manual_seed(1)
        before = accelerator.get_rng_state().clone()
        state = own.get_state()
        first = draw(own).cpu()
        require(
            equal(accelerator.get_rng_state(), before),
            f"{name} with a generator changes the default generator",
        )
        require(not equal(own.get_state(), state), f"{name} with a generator does not change its state")
        require(not equal(draw(own), first), f"{name} with a generator gives the same numbers twice")
        own.set_state(state)
        require(equal(draw(own), first), f"{name} with a restored generator gives other numbers")
        twin = torch.Generator(device)
        twin.set_state(state)
        require(
            equal(draw(twin), first), f"{name} with another generator of the same state gives other numbers"
        )
        own.manual_seed(5)
        seeded = draw(own).cpu()
        require(
            equal(draw(torch.Generator(device).manual_seed(5)), seeded),
            f"{name} with a new generator of the same seed gives other numbers",
        )
        accelerator.manual_seed(1)
        plain = draw(None).cpu()
        draw(own)
        accelerator.manual_seed(1)
        require(equal(draw(None), plain), f"{name} without a generator does not repeat after the same seed")
    told = own.initial_seed()
    require(told == 5, f"Generator.initial_seed() of one with the seed 5 is {told}")
    require(
        own.seed() == own.initial_seed(),
        "Generator.seed() returns another number than Generator.initial_seed()",
    )
    require(own.device == ones.device, f"a generator of {device} is on {own.device}")


@check(
    "manual_seed",
    "get_rng_state",
    "set_rng_state",
    "random",
    promise="Dropout scales what it keeps, for each form and chance, and its gradient has the same mask.",
    of="operators",
)
def dropout(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    functional = torch.nn.functional
    accelerator.manual_seed(3)
    for chance in (0.1, 0.5, 0.9):
        for dtype in supported(accelerator):
            values = torch.full((101, 99), 2.0, dtype=dtype, device=device, requires_grad=True)
            dropped = functional.dropout(values, chance)
            (gradient,) = torch.autograd.grad(dropped, values, torch.ones_like(dropped))
            mask = dropped.detach().cpu() != 0
            share = float(mask.double().mean())
            what = f"dropout({chance}) in {short(dtype)}"
            require(abs(share - (1 - chance)) < 0.03, f"{what} keeps {share:.3f} of the numbers")
            scaled = dropped.detach().cpu()[mask].double()
            require(
                bool(((scaled - 2 / (1 - chance)).abs() < 0.02 * scaled.abs()).all()),
                f"{what} of 2 gives {float(scaled.mean()):.3f}, not {2 / (1 - chance):.3f}",
            )
            wanted = mask.double() / (1 - chance)
            require(
                bool(((gradient.cpu().double() - wanted).abs() <= 0.02 * wanted).all()),
                f"the gradient of {what} has another mask or scale",
            )
        _require_random_slopes(device)
        images = torch.ones(64, 40, 3, 2, device=device)
        for name, drop in {
            "dropout2d": functional.dropout2d,
            "feature_alpha_dropout": functional.feature_alpha_dropout,
        }.items():
            if not _offered(lambda d=drop, x=images: d(x, 0.5)):  # type: ignore[misc]
                continue
            found = drop(images, chance, training=True).cpu()
            whole = (found == found[:, :, :1, :1]).all()
            require(bool(whole), f"{name}({chance}) drops parts of a channel")
            share = float((found[:, :, 0, 0] == found.max()).double().mean())
            require(abs(share - (1 - chance)) < 0.07, f"{name}({chance}) keeps {share:.3f} of the channels")
        normal = torch.randn(_COUNT, device=device)
        if _offered(lambda x=normal: functional.alpha_dropout(x, 0.5, training=True)):  # type: ignore[misc]
            kept = functional.alpha_dropout(normal, chance, training=True).cpu().double()
            require(
                abs(float(kept.mean())) < 0.05 and abs(float(kept.std()) - 1) < 0.05,
                f"alpha_dropout({chance}) of normal numbers has the mean {float(kept.mean()):.3f} and the "
                f"standard deviation {float(kept.std()):.3f}",
            )
        matrix = (torch.arange(1.0, 1600.0).reshape(41, 39) / 8).to(device)
        for lies, given in {"transposed": matrix.t(), "every second row": matrix[::2],
                            "expanded": matrix[:, :1].expand(41, 39)}.items():  # fmt: skip
            dropped = functional.dropout(given, chance).cpu().double()
            right = (dropped == 0) | ((dropped - given.cpu() / (1 - chance)).abs() <= 1e-3 * dropped.abs())
            require(
                bool(right.all()), f"dropout({chance}) of a matrix, {lies}, gives numbers of other places"
            )
            _require_one_mask(f"dropout({chance}) of a matrix, {lies},", given, _dropping(chance))
        _require_one_mask(f"alpha_dropout({chance})", matrix, _dropping_alpha(chance))
        lines = torch.ones(64, 40, 9, device=device)
        if _offered(lambda x=lines: functional.dropout1d(x, 0.5)):  # type: ignore[misc]
            found = functional.dropout1d(lines, chance).cpu()
            require(bool((found == found[:, :, :1]).all()), f"dropout1d({chance}) drops parts of a channel")
        _require_attention_drops(device, chance)
        before = accelerator.get_rng_state().clone()
        functional.dropout(matrix, chance, training=False)
        require(equal(accelerator.get_rng_state(), before), f"dropout({chance}) draws in evaluation")
        for training in (False, True):
            inplace = torch.ones(999, device=device)
            returned = functional.dropout(inplace, chance, training, inplace=True)
            require(returned is inplace, "dropout in place returns another tensor")
            changed = bool((inplace != 1).any())
            require(changed == training, f"dropout in place with training={training} changes {changed}")


def _dropping(chance: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.nn.functional.dropout(x, chance)


def _dropping_alpha(chance: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.nn.functional.alpha_dropout(x, chance, training=True)


def _require_one_mask(what: str, given: torch.Tensor, drop: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Fails the check unless gradients go where elements were kept, also the second time through a graph."""
    leaf = given.detach().requires_grad_()
    if not _offered(lambda: drop(leaf)):
        return
    dropped = drop(leaf)
    # What is dropped is the same number everywhere, which no other element becomes.
    at_zero = dropped.detach().cpu()
    lost = at_zero == at_zero.flatten().mode().values
    for turn in ("first", "second"):
        (slope,) = torch.autograd.grad(dropped, leaf, torch.ones_like(dropped), retain_graph=True)
        wrong = int(((slope.cpu() == 0) != lost).sum())
        require(
            wrong == 0 or not bool(lost.any()),
            f"the {turn} gradient of {what} has another mask at {wrong} of {lost.numel()} places",
        )


def _require_random_slopes(device: str) -> None:
    """Fails the check unless rrelu has a slope of its own for each negative number, and its gradient too."""
    x = (torch.arange(-50.0, 51.0) / 8).to(device)
    for dtype in (torch.float32,):
        for in_place in (False, True):
            leaf = x.to(dtype).requires_grad_()
            name = f"rrelu(training=True, inplace={in_place})"
            if not _offered(lambda t=leaf: torch.nn.functional.rrelu(t * 1, 0.25, 0.75, True, False)):  # type: ignore[misc]
                return
            result = torch.nn.functional.rrelu(leaf * 1, 0.25, 0.75, True, in_place)
            (slope,) = torch.autograd.grad(result, leaf, torch.ones_like(result))
            given, found, told = (t.detach().cpu() for t in (x, result, slope))
            require(
                bool((told[given > 0] == 1).all()), f"the gradient of {name} of positive numbers is not 1"
            )
            own = found[given < 0] / given[given < 0]
            in_range = bool(((own >= 0.2499) & (own <= 0.7501)).all())
            require(in_range, f"the slopes of {name} are {float(own.min()):.3f} to {float(own.max()):.3f}")
            apart = float((told[given < 0] - own).abs().max())
            require(apart < 1e-3, f"the gradient of {name} has other slopes than the result, by {apart:.1e}")
            require(own.unique().numel() > 5, f"{name} has one slope for all numbers")


def _require_attention_drops(device: str, chance: float) -> None:
    """Fails the check unless attention drops its weights: of equal scores and values, what is left tells."""
    functional = torch.nn.functional
    scores, values = (
        torch.zeros(4, 64, 64, 16, device=device),
        torch.eye(64, device=device).expand(4, 64, 64, 64),
    )
    if not _offered(lambda: functional.scaled_dot_product_attention(scores, scores, values, dropout_p=0.5)):
        return
    weights = functional.scaled_dot_product_attention(scores, scores, values, dropout_p=chance).cpu().double()
    kept = weights != 0
    share = float(kept.double().mean())
    what = f"scaled_dot_product_attention(dropout_p={chance})"
    require(abs(share - (1 - chance)) < 0.03, f"{what} keeps {share:.3f} of the weights")
    wanted = 1 / 64 / (1 - chance)
    right = (weights[kept] - wanted).abs() <= 0.02 * wanted
    require(
        bool(right.all()),
        f"{what} of weights of 1/64 gives {float(weights[kept].mean()):.5f}, not {wanted:.5f}",
    )


def _fail(accelerator: Accelerator, observed: str) -> NoReturn:
    raise BrokenPromiseError(f"{observed}{_why_otherwise(accelerator)}")


def _why_otherwise(accelerator: Accelerator) -> str:
    """Which of the functions that torch's checkpoints call is at fault, as text; empty if each is right."""
    module = accelerator.torch_module
    if is_host(accelerator) or not hasattr(module, "get_rng_state"):
        return ""
    if getattr(module, "_initialized", True) is not True:
        return ": torch's module says that the device is not initialised, as is_initialized() does"
    for index, name in enumerate(device_names(accelerator)):
        with accelerator.device(index):
            generator = accelerator.default_generator(index)
            torch.rand(index + 1, device=name)
            state, wanted = module.get_rng_state().clone(), generator.get_state().clone()
            if not equal(state, wanted):
                return f": get_rng_state() of torch's module, on {name}, is not the state of its generator"
            torch.rand(3, device=name)
            module.set_rng_state(state)
            if not equal(generator.get_state(), wanted):
                return (
                    f": set_rng_state() of torch's module, on {name}, leaves its generator in another state"
                )
    return ""


@check(
    "get_rng_state",
    "set_rng_state",
    "random",
    promise="torch.utils.checkpoint and fork_rng repeat a device's random numbers.",
)
def recomputed_draws_repeat(accelerator: Accelerator) -> None:
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    device = accelerator.current_device_name()
    for reentrant in (False, True):
        for preserve in (True, False):
            accelerator.manual_seed(11)
            values = torch.ones(501, device=device, requires_grad=True)
            seen: list[torch.Tensor] = []

            def block(x: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
                mask = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
                seen.append(mask.detach().cpu())
                return (x * mask).sin()

            result = checkpoint(block, values, use_reentrant=reentrant, preserve_rng_state=preserve)
            torch.rand(3, device=device)
            after = accelerator.get_rng_state().clone()
            result.sum().backward()
            what = f"a checkpointed block, use_reentrant={reentrant}, preserve_rng_state={preserve}"
            require(len(seen) == 2, f"{what}, is computed {len(seen)} times, not 2")
            if preserve:
                if not equal(seen[0], seen[1]):
                    _fail(accelerator, f"{what}, draws other numbers when it is computed again")
                if not equal(accelerator.get_rng_state(), after):
                    _fail(accelerator, f"{what}, changes the state in its backward pass")
            else:
                require(not equal(seen[0], seen[1]), f"{what}, draws the same numbers again")
    layers = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4))).to(device)
    given = torch.ones(2, 6, device=device, requires_grad=True)
    plain = torch.autograd.grad(layers(given).sum(), given)[0]
    parts = checkpoint_sequential(layers, 2, given, use_reentrant=False)
    (found,) = torch.autograd.grad(parts.sum(), given)
    require(equal(found, plain), "checkpoint_sequential gives another gradient")
    if not is_host(accelerator):
        accelerator.manual_seed_all(4)
        torch.rand(1, device=device)
        states = [state.clone() for state in accelerator.get_rng_state_all()]
        with torch.random.fork_rng(device_type=accelerator.device_type):
            torch.manual_seed(99)
            torch.rand(5, device=device)
        for index, (now, before) in enumerate(zip(accelerator.get_rng_state_all(), states, strict=True)):
            if not equal(now, before):
                _fail(accelerator, f"torch.random.fork_rng does not restore the state of device {index}")
