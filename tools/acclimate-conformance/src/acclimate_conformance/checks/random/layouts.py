"""A check of every form of drawing, with a generator or without, into tensors of every layout and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import BrokenPromiseError, equal, require, short
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import supported

_Draw = Callable[[torch.Tensor, "torch.Generator | None"], torch.Tensor]
_BEFORE = 101
"""What the memory holds before a draw: a number that no form draws, in any dtype."""
_ENOUGH = 30
"""So many numbers are not drawn twice, even of two values: once in 10^9 times."""


def _of(numbers: torch.Tensor, value: float) -> torch.Tensor:
    """A parameter for each of the numbers, which lies as they do."""
    return torch.full_like(numbers, value)


_INTO: dict[str, _Draw] = {
    "uniform_": lambda t, g: t.uniform_(generator=g),
    "normal_": lambda t, g: t.normal_(1, 2, generator=g),
    "exponential_": lambda t, g: t.exponential_(2, generator=g),
    "cauchy_": lambda t, g: t.cauchy_(generator=g),
    "log_normal_": lambda t, g: t.log_normal_(0, 0.5, generator=g),
    "geometric_": lambda t, g: t.geometric_(0.2, generator=g),
    "random_": lambda t, g: t.random_(0, 99, generator=g),
    "bernoulli_": lambda t, g: t.bernoulli_(0.5, generator=g),
    "bernoulli_ of chances": lambda t, g: t.bernoulli_(_of(t, 0.5), generator=g),
    "rand with out=": lambda t, g: torch.rand(t.shape, generator=g, out=t),
    "randn with out=": lambda t, g: torch.randn(t.shape, generator=g, out=t),
    "randint with out=": lambda t, g: torch.randint(0, 99, t.shape, generator=g, out=t),
    "normal with out=": lambda t, g: torch.normal(_of(t, 1), _of(t, 2), generator=g, out=t),
    "normal of means with out=": lambda t, g: torch.normal(_of(t, 1), 2.0, generator=g, out=t),
    "normal of deviations with out=": lambda t, g: torch.normal(1.0, _of(t, 2), generator=g, out=t),
    "bernoulli with out=": lambda t, g: torch.bernoulli(_of(t, 0.5), generator=g, out=t),
    "uniform_ of nn.init": lambda t, g: torch.nn.init.uniform_(t, generator=g),
    "normal_ of nn.init": lambda t, g: torch.nn.init.normal_(t, generator=g),
    "trunc_normal_ of nn.init": lambda t, g: torch.nn.init.trunc_normal_(t, generator=g),
    "xavier_uniform_ of nn.init": lambda t, g: torch.nn.init.xavier_uniform_(t, generator=g),
    "xavier_normal_ of nn.init": lambda t, g: torch.nn.init.xavier_normal_(t, generator=g),
    "kaiming_uniform_ of nn.init": lambda t, g: torch.nn.init.kaiming_uniform_(t, generator=g),
    "kaiming_normal_ of nn.init": lambda t, g: torch.nn.init.kaiming_normal_(t, generator=g),
}
"""Forms that fill a tensor, by operator."""
_FROM: dict[str, _Draw] = {
    "normal": lambda t, g: torch.normal(t, t, generator=g),
    "bernoulli": lambda t, g: torch.bernoulli(t / (2 * _BEFORE), generator=g),
    "bernoulli of probabilities": lambda t, g: torch.bernoulli(t, 0.5, generator=g),
    "poisson": lambda t, g: torch.poisson(t, generator=g),
    "binomial": lambda t, g: torch.binomial(t, _of(t, 0.5), generator=g),
    "_standard_gamma": lambda t, g: torch._standard_gamma(t, generator=g),
    "rrelu": lambda t, g: torch.rrelu(-t, training=True, generator=g),
    "multinomial": lambda t, g: torch.multinomial(t.reshape(-1, t.shape[-1]), t.shape[-1] // 2, generator=g),
    "multinomial with replacement": lambda t, g: torch.multinomial(
        t.reshape(-1, t.shape[-1]), 9, replacement=True, generator=g
    ),
}
"""Forms that draw from parameters, which lie in any layout."""
_OF_THE_DEFAULT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda t: torch.randint_like(t, 99),
    "dropout": lambda t: torch.nn.functional.dropout(t, 0.5),
    "dropout in place": lambda t: torch.nn.functional.dropout(t, 0.5, inplace=True),
    "alpha_dropout": lambda t: torch.nn.functional.alpha_dropout(t, 0.5, training=True),
    "feature_dropout": lambda t: torch.feature_dropout(t, 0.5, True),
    "native_dropout": lambda t: torch.native_dropout(t, 0.5, True)[0],
}
"""Forms that take no generator."""
_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda whole: whole.view(64, 63)[:32].view(32, 63),
    "at an odd offset": lambda whole: whole[3:1004].view(13, 77),
    "transposed": lambda whole: whole[:2021].view(43, 47).t(),
    "every second element": lambda whole: whole.view(64, 63)[:, ::2],
    "every second row": lambda whole: whole.view(64, 63)[1::2],
    "a column": lambda whole: whole.view(64, 63)[:, 5],
    "with channels last": lambda whole: whole[:1980].view(4, 11, 9, 5).permute(0, 3, 1, 2),
    "in another order": lambda whole: whole[:1001].view(7, 11, 13).permute(1, 2, 0),
    "with gaps in each dimension": lambda whole: whole.as_strided((5, 6, 7), (301, 41, 3), 2),
    "a single number": lambda whole: whole[17],
    "of one element": lambda whole: whole[9:10],
    "without elements": lambda whole: whole[5:5].view(0, 3),
}
"""Parts of a row of numbers."""
_LENGTH = 4032
_taken: dict[tuple[str, torch.dtype, str], bool] = {}
"""What the host takes, by form, dtype and layout."""
_FEW_LAYOUTS = ("transposed", "with gaps in each dimension", "a single number")


@check(
    "default_generator", "get_rng_state", "set_rng_state",
    promise="Each form of drawing, in each layout and dtype, fills its elements alone, from the generator "
    "that it is given alone, and repeats with its state; without one from the default generator.",
    of="operators", once=True,
)  # fmt: skip
def draws_in_every_layout(accelerator: Accelerator) -> None:
    broken: dict[str, str] = {}
    for operator, examine in _examined(accelerator):
        try:
            examine()
        except BrokenPromiseError as seen:
            broken.setdefault(operator, str(seen))
    for operator, told in broken.items():
        # What most forms do not keep is not an operator's.
        is_its_own = len(broken) <= len(_INTO) // 2
        raise BrokenPromiseError(f"the operator {operator}: {told}" if is_its_own else told)


def _examined(accelerator: Accelerator) -> Iterator[tuple[str, Callable[[], None]]]:
    """By operator, a form in a layout and a dtype, examined when it is called."""
    dtypes: list[torch.dtype] = [*supported(accelerator), torch.int64, torch.int32, torch.uint8, torch.bool]
    forms: dict[str, _Draw] = {**_INTO, **_FROM}
    forms |= {name: lambda t, g, draw=draw: draw(t) for name, draw in _OF_THE_DEFAULT.items()}  # type: ignore[misc]
    for name, draw in forms.items():
        for dtype in dtypes:
            if not _takes(draw, torch.ones(4, 6, dtype=dtype, device="cpu")):
                continue
            if not _takes(draw, torch.ones(4, 6, dtype=dtype, device=accelerator.current_device_name())):
                continue  # it has no such operator, as other checks tell
            for layout in _LAYOUTS if dtype == torch.float32 else _FEW_LAYOUTS:
                case = _Case(accelerator, name, draw, dtype, layout)
                yield name.split()[0], case.examine


def _takes(draw: _Draw, given: torch.Tensor) -> bool:
    try:
        draw(given, None)
    except Exception:  # noqa: BLE001 - what torch refuses, or a device lacks
        return False
    return True


class _Case:
    """One form in one layout and dtype."""

    def __init__(
        self, accelerator: Accelerator, name: str, draw: _Draw, dtype: torch.dtype, layout: str
    ) -> None:
        self._accelerator, self._name, self._draw, self._dtype = accelerator, name, draw, dtype
        self._layout = layout
        self._told = f"{name} of {short(dtype)} numbers, {layout}"
        self._device = accelerator.current_device_name()
        self._takes_a_generator = name not in _OF_THE_DEFAULT
        self._fills = name in _INTO or name.endswith("in place")

    def examine(self) -> None:
        """Fails if something else than its numbers and its generator changes, or if it does not repeat."""
        if not self._is_taken():
            return
        own = torch.Generator(self._device).manual_seed(5)
        state = own.get_state()
        self._restore(state)
        first, is_drawn = self._drawn(None)
        require(
            not is_drawn or not equal(self._state(), state),
            f"{self._told}, without a generator, does not change the default generator",
        )
        require(equal(own.get_state(), state), f"{self._told}, without a generator, changes another one")
        again, _ = self._drawn(None)
        self._require_others(again, first, "without a generator gives the same numbers twice")
        self._restore(state)
        again, _ = self._drawn(None)
        require(equal(again, first), f"{self._told}, gives other numbers with a restored default generator")
        if not self._takes_a_generator:
            return
        default = self._state().clone()
        given, is_drawn = self._drawn(own)
        require(
            equal(self._state(), default),
            f"{self._told}, with a generator, changes the default generator",
        )
        require(
            not is_drawn or not equal(own.get_state(), state),
            f"{self._told}, with a generator, does not change its state",
        )
        require(
            equal(given, first),
            f"{self._told}, gives other numbers with a generator in the state that the default one had",
        )
        again, _ = self._drawn(own)
        self._require_others(again, given, "with a generator gives the same numbers twice")
        own.set_state(state)
        again, _ = self._drawn(own)
        require(equal(again, given), f"{self._told}, gives other numbers with a restored generator")

    def _is_taken(self) -> bool:
        """Whether torch takes this layout: some forms need two dimensions, or some elements."""
        key = self._name, self._dtype, self._layout
        if key not in _taken:
            whole = torch.full((_LENGTH,), _BEFORE, device="cpu").to(self._dtype)
            _taken[key] = _takes(self._draw, self._part(whole))
        return _taken[key]

    def _state(self) -> torch.Tensor:
        """The default generator's, without its being recorded, which takes longer than a draw."""
        state: torch.Tensor = type(self._accelerator).get_rng_state(self._accelerator)
        return state

    def _restore(self, state: torch.Tensor) -> None:
        type(self._accelerator).set_rng_state(self._accelerator, state)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return _LAYOUTS[self._layout](whole)

    def _drawn(self, generator: torch.Generator | None) -> tuple[torch.Tensor, bool]:
        """The numbers of a draw, and whether there are some; the memory around them must stay as it is."""
        whole = torch.full((_LENGTH,), _BEFORE, device=self._device).to(self._dtype)
        part = self._part(whole)
        numbers = self._draw(part, generator).clone()
        told = numbers.cpu()
        if self._fills:
            there = self._part(whole).cpu()
            require(equal(there, told), f"{self._told}, returns other numbers than it writes")
            if self._dtype != torch.bool and self._name in _INTO:
                left = int((there == _BEFORE).sum())
                require(left <= there.numel() // 50, f"{self._told}, leaves {left} numbers as they were")
        within = torch.zeros(_LENGTH, dtype=torch.bool)
        if self._fills:
            self._part(within).fill_(True)
        before = torch.full((_LENGTH,), _BEFORE).to(self._dtype)
        kept = torch.equal(torch.where(within, before, whole.cpu()), before)
        require(kept, f"{self._told}, changes the memory around them")
        return told, bool(told.numel())

    def _require_others(self, numbers: torch.Tensor, earlier: torch.Tensor, seen: str) -> None:
        if numbers.numel() >= _ENOUGH:
            require(not equal(numbers, earlier), f"{self._told}, {seen}")
