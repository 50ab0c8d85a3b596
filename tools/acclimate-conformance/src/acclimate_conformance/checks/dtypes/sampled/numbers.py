"""Operators on every number of a small dtype, on hard numbers of others, and how results are rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import short
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings
from acclimate_conformance.checks.dtypes.sampled.places import HOST, Place, tensors_in
from acclimate_conformance.checks.dtypes.sampled.samples import (
    NOT_FLOATING,
    defined,
    name_of,
    operators,
    samples_of,
)

_Function = Callable[..., torch.Tensor]
_SMALL = (torch.bfloat16, torch.float16, torch.int16, torch.int8, torch.uint8, torch.bool)
_FLOAT8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_POWERS_OF_TWO = (torch.float8_e8m0fnu,) if hasattr(torch, "float8_e8m0fnu") else ()
"""Has no zero; its numbers are the scales of blocks of smaller ones."""
_USUAL = {torch.float32, torch.int64, torch.int32, torch.bool, *_UNSIGNED, *_POWERS_OF_TWO}
"""Between which and unsigned integers conversions are tried."""
_EXACT = (
    "add",
    "sub",
    "mul",
    "neg",
    "abs",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "ceil",
    "floor",
    "trunc",
    "round",
    "sign",
    "sgn",
    "square",
    "nn.functional.relu",
    "positive",
    "frac",
    "copysign",
    "heaviside",
    "clamp_max",
    "clamp_min",
    "isnan",
    "isinf",
    "isfinite",
    "isposinf",
    "isneginf",
    "signbit",
    "logical_not",
    "nan_to_num",
)
"""Operators of which IEEE 754 or torch defines every bit of a result."""
_CHOOSE = ("maximum", "minimum", "fmax", "fmin", "clamp_max", "clamp_min", "nn.functional.relu")
"""Operators that give one of two numbers, and of zeros of both signs either: relu takes 0 or its input."""
_OF_ANGLES = ("sin", "cos", "tan", "sinc", "special", "digamma", "lgamma", "polygamma", "mvlgamma", "i0")
"""How the names begin of operators whose precision for large arguments is a matter of the vendor's."""
_MANY = 1 << 16


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """Each number of a dtype of 8 or 16 bits, or as many of a larger one, of all magnitudes."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    size = torch.empty(0, dtype=dtype).element_size()
    if size == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if size == 2:
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    whole = {4: torch.int32, 8: torch.int64}[size]
    limits = torch.iinfo(whole)
    generator = torch.Generator().manual_seed(11)
    return torch.randint(limits.min, limits.max, (_MANY,), dtype=whole, generator=generator).view(dtype)


def _ordinary(values: torch.Tensor) -> torch.Tensor:
    """Those that are no subnormal numbers, for which a device may take zero."""
    if not values.is_floating_point():
        return values
    least = torch.finfo(values.dtype).smallest_normal
    return values[(values == 0) | (values.abs() >= least) | values.isnan()]


def _moderate(values: torch.Tensor, most: float) -> torch.Tensor:
    return values[values.abs() <= most] if values.is_floating_point() else values


def every_small_number(accelerator: Accelerator, found: Findings) -> None:
    from torch.testing._internal.opinfo.core import UnaryUfuncInfo

    dtypes = [
        *_floating(accelerator),
        *(d for d in _SMALL if not d.is_floating_point),
        torch.int64,
        torch.int32,
    ]
    for op in operators():
        if not isinstance(op, UnaryUfuncInfo):
            continue
        for dtype in dtypes:
            if dtype not in op.supported_dtypes(HOST):
                continue
            values = _ordinary(every_number(dtype))
            values = values[defined(op, values)]
            if op.name == "signbit":  # IEEE 754 gives the sign of NaN no meaning
                values = values[~values.isnan()]
            if op.name not in _EXACT:
                values = _moderate(values, 100.0 if op.name.startswith(_OF_ANGLES) else 1e30)
            domain = op.domain
            if values.is_floating_point() and op.name not in _EXACT and any(b is not None for b in domain):
                low, high = (b if b is not None else s for b, s in zip(domain, (-1e30, 1e30), strict=True))
                values = values[(values >= low) & (values <= high)]
            near: _Near = _all_bits if op.name in _EXACT else _nearly
            if op.name in _CHOOSE:
                near = _either_zero(near, values == 0)
            unlike = _UNLIKE_IN_STEPS if op.name.startswith(_IN_STEPS) else _UNLIKE
            first = next((s.kwargs for s in samples_of(op, dtype, 1)), {})
            for options in (first, {}) if first else ({},):
                if "decimals" in options and dtype.itemsize == 2:
                    continue  # 16 bits do not hold x * 10**decimals, so that halves arise, or infinity
                told = "".join(f", {name}={value!r}" for name, value in options.items())
                what = f"{name_of(op)}(x{told}) in {short(dtype)}"
                run = _of(op, options, values, floats=op.promotes_int_to_float)
                found.compare(name_of(op), what, run, near=_shown(near, values, unlike=unlike))
        if found.enough:
            return


def _floating(accelerator: Accelerator) -> list[torch.dtype]:
    return [torch.float32, *(d for d in accelerator.supported_dtypes() if d != torch.float32)]


def _of(
    op: Any, options: dict[str, Any], *values: torch.Tensor, floats: bool = False
) -> Callable[[Place], Any]:
    """A call of an operator, which may make integers floating-point numbers."""

    def run(place: Place) -> Any:
        given = [v.double() if floats and place.exact else v for v in values]
        return op(*map(place.whole, given), **place.put(options))

    return run


_Near = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _shown(near: _Near, *given: torch.Tensor, unlike: float | None = None) -> Callable[[Any, Any], str]:
    """Says for which number a result is wrong.

    Args:
        near: tells where two tensors are near enough.
        given: the inputs.
        unlike: what share of results of 16 bits may be beside the nearest number.
    """

    def say(found: Any, wanted: Any) -> str:
        for actual, expected in zip(tensors_in(found), tensors_in(wanted), strict=True):
            if actual.dtype != expected.dtype or actual.shape != expected.shape:
                return f"it is {short(actual.dtype)}{list(actual.shape)}, not {short(expected.dtype)}"
            ours, theirs = actual.cpu(), expected
            wrong = ~near(ours, theirs)
            if bool(wrong.any()):
                place = tuple(int(i) for i in wrong.nonzero()[0])
                of = " and ".join(str(torch.broadcast_to(v, theirs.shape)[place].item()) for v in given)
                return f"of {of} it is {ours[place].item()}, not {theirs[place].item()}"
            share = float(_rounded_otherwise(ours, theirs))
            if share > (unlike or _UNLIKE):
                return f"{share:.0%} of the results are not the nearest number"
        return ""

    return say


_UNLIKE = 0.12
"""What share of results of 16 bits may be beside the nearest number; cutting digits off gives half."""
_UNLIKE_IN_STEPS = 0.35
"""The same of operators of several steps, of which a device may round each."""
_IN_STEPS = ("special", "nn.functional")
"""How the names begin of such operators of one number."""


def _rounded_otherwise(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    if theirs.dtype not in (torch.bfloat16, torch.float16) or theirs.numel() < 100:
        return torch.zeros(())
    return ((ours != theirs) & ~(ours.isnan() & theirs.isnan())).double().mean()


def _all_bits(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Where two tensors hold the same numbers; also of the same sign, if they are zero."""
    if theirs.is_complex():
        return _all_bits(torch.view_as_real(ours), torch.view_as_real(theirs)).all(-1)
    if not theirs.is_floating_point():
        return ours == theirs
    subnormal = theirs.abs() < torch.finfo(theirs.dtype).smallest_normal
    same = (ours == theirs) & ((theirs != 0) | (ours.signbit() == theirs.signbit()))
    return same | (ours.isnan() & theirs.isnan()) | (subnormal & (theirs != 0) & (ours == 0))


def _either_zero(near: _Near, zeros: torch.Tensor) -> _Near:
    """The same, but for the sign of results of two zeros."""
    return lambda ours, theirs: near(ours, theirs) | (zeros & (ours == 0) & (theirs == 0))


def _nearly(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Where two tensors hold the same numbers but for the last digits."""
    if theirs.is_complex():
        return _nearly(torch.view_as_real(ours), torch.view_as_real(theirs)).all(-1)
    if not theirs.is_floating_point():
        return ours == theirs
    limits = torch.finfo(theirs.dtype)
    close, exact = ours.double(), theirs.double()
    relative = max(
        4 * limits.eps, {torch.float32: 1e-4, torch.float64: 64 * limits.eps}.get(theirs.dtype, 0.0)
    )
    slack = relative * exact.abs() + max(4 * limits.smallest_normal, relative / 10)
    beyond = exact.isinf() & (close.abs() >= 0.98 * limits.max) & (close.sign() == exact.sign())
    near = torch.where(exact.isfinite(), (close - exact).abs() <= slack, beyond)
    at_the_end = close.isinf() & (exact.abs() >= 0.98 * limits.max)
    return near | at_the_end | (close.isnan() & exact.isnan())


_UNITS = 4
"""How many units in the last place floating-point results of integers may be off."""


def _to_the_last_digit(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Where two tensors hold the same numbers but for a few units in the last place.

    For results of integers in a floating-point dtype: libraries of functions differ in the last digit.
    """
    if not theirs.is_floating_point():
        return ours == theirs
    limits = torch.finfo(theirs.dtype)
    close, exact = ours.double(), theirs.double()
    slack = (_UNITS * limits.eps * exact.abs()).nan_to_num(0, 0) + limits.smallest_normal
    return (close == exact) | ((close - exact).abs() <= slack) | (close.isnan() & exact.isnan())


# -- two numbers ---------------------------------------------------------------------------------


def pairs_of_numbers(accelerator: Accelerator, found: Findings) -> None:
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo

    whole = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    for op in operators():
        if not isinstance(op, BinaryUfuncInfo) or op.name.startswith(("__r", "special")):
            continue
        for dtype in (*_floating(accelerator), *whole):
            if dtype not in op.supported_dtypes(HOST):
                continue
            first, second = _pair(dtype, op.name)
            exact = op.name in _EXACT or op.always_returns_bool
            becomes_float = op.promotes_int_to_float and not dtype.is_floating_point
            for options in _options(op, dtype):
                told = "".join(f", {name}={value!r}" for name, value in options.items())
                what = f"{name_of(op)}(x, y{told}) in {short(dtype)}"
                near: _Near = _all_bits if exact and not options else _nearly
                if becomes_float and not exact:
                    near = _to_the_last_digit
                left, right = first[:, None], second[None, :]
                if op.name in _CHOOSE and dtype.is_floating_point:
                    near = _either_zero(near, (left == 0) & (right == 0))
                if "alpha" in options and dtype.is_floating_point:
                    # Whether alpha * y overflows depends on whether it is added in the same step.
                    right = right[:, right[0].abs() != torch.finfo(dtype).max]
                run = _of(op, options, left, right, floats=becomes_float)
                found.compare(name_of(op), what, run, near=_shown(near, left, right))
        if found.enough:
            return


def _options(op: Any, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The options of torch's samples that are no tensors, and none."""
    found: list[dict[str, Any]] = [{}] if op.name != "div" or not op.variant_test_name else []
    for sample in samples_of(op, dtype, 30):
        if sample.kwargs and sample.kwargs not in found and len(found) < 4:
            found.append(sample.kwargs)
    return found


def _pair(dtype: torch.dtype, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if dtype is torch.bool:
        return every_number(dtype), every_number(dtype)
    if name in ("gcd", "lcm"):  # of which C leaves the least number of a dtype undefined
        return torch.arange(100).to(dtype), torch.arange(1, 100).to(dtype)
    if dtype in (torch.int8, torch.uint8) and "shift" not in name and "pow" not in name:
        return every_number(dtype), _without_zero(every_number(dtype), name)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        many = [*range(-9, 20), 31, 32, 33, 63, 64, 100, 127, 128, 255, 256, 1000, limits.max, limits.min,
                limits.max - 1, limits.min + 1, limits.max // 3, limits.min // 3]  # fmt: skip
        values = torch.tensor([v for v in many if limits.min <= v <= limits.max], dtype=dtype)
        if "shift" in name:
            return values, torch.arange(limits.bits - 1).to(dtype)
        if name == "pow" and limits.min < 0:
            return values, torch.arange(-3, 9).to(dtype)
        if name in ("pow", "float_power"):
            return values, torch.arange(9).to(dtype)
        return values, _without_zero(values, name)
    generator = torch.Generator().manual_seed(5)
    random = (torch.randn(150, generator=generator) * 4).to(dtype)
    # Of tenths no quotient is exact: 1 // 0.1 is 9, as 0.1 is a little more in binary.
    halves = torch.cat([torch.arange(-6, 7) / 2, torch.arange(1, 12) / 10]).to(dtype)
    ends = torch.finfo(dtype)
    special = torch.tensor(
        [
            float("inf"),
            -float("inf"),
            float("nan"),
            -0.0,
            ends.max,
            -ends.max,
            1000.0,
            1 + ends.eps,
            1 - ends.eps / 2,
            ends.smallest_normal,
        ]
    ).to(dtype)
    values = (
        torch.cat([random, halves, special]) if name in _DEFINED_EVERYWHERE else torch.cat([random, halves])
    )
    return values, values.flip(0)


_DEFINED_EVERYWHERE = (
    *_EXACT,
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_xor",
    "isclose",
    "true_divide",
    "nextafter",
)


def _without_zero(values: torch.Tensor, name: str) -> torch.Tensor:
    divides = ("div", "remainder", "fmod", "floor_divide", "true_divide")
    if name.startswith(divides):
        return values[(values != 0) & (values != -1)]  # the quotient of the least number and -1 is undefined
    return values


# -- conversions ---------------------------------------------------------------------------------


def every_conversion(accelerator: Accelerator, found: Findings) -> None:
    _compare_moves(found)
    dtypes = [*_floating(accelerator), *NOT_FLOATING, *_UNSIGNED]
    for source in (*dtypes, *_FLOAT8, *_POWERS_OF_TWO):
        for target in (*dtypes, *_FLOAT8):
            if {source, target} & {*_UNSIGNED, *_POWERS_OF_TWO} and not {source, target} <= _USUAL:
                continue
            values = _convertible(source, target)
            what = f"a conversion from {short(source)} to {short(target)}"
            ways: dict[str, Callable[[Place], Any]] = {
                "by to()": lambda p, v=values, t=target: p.whole(v).to(t),  # type: ignore[misc]
                "by copy_()": lambda p, v=values, t=target: torch.zeros(  # type: ignore[misc]
                    v.shape, dtype=t, device=p.device
                ).copy_(p.whole(v)),
                "on the way to the device": lambda p, v=values, t=target: v.to(p.device, t),  # type: ignore[misc]
                "on the way back": lambda p, v=values, t=target: p.whole(v).to(HOST, t),  # type: ignore[misc]
                "of every second element": lambda p, v=values, t=target: p.whole(  # type: ignore[misc]
                    torch.stack([v, v.flip(0)], -1)
                )[..., 0].to(t),
                "of transposed numbers": lambda p, v=values, t=target: _matrix(p.whole(v)).t().to(t),  # type: ignore[misc]
                "by copy_() to every second element": lambda p, v=values, t=target: torch.zeros(  # type: ignore[misc]
                    *v.shape, 2, dtype=t, device=p.device
                )[..., 0].copy_(p.whole(v)),
            }
            for how, run in ways.items():
                given = _matrix(values).t() if "transposed" in how else values
                found.compare(what, f"{what} {how}", _as_bits(run, target), near=_shown(_all_bits, given))
            if found.enough:
                return


_Moved = Callable[[torch.Tensor, Callable[[list[int]], torch.Tensor]], torch.Tensor]
_MOVES: dict[str, _Moved] = {
    "a transposed copy": lambda x, at: x.t().contiguous(),
    "a copy of every second column": lambda x, at: x[:, ::2].clone(),
    "a copy into a transposed matrix": lambda x, at: torch.zeros_like(x).t().copy_(x.t()),
    "cat": lambda x, at: torch.cat([x, x], 1),
    "stack": lambda x, at: torch.stack([x, x], 2),
    "indexing": lambda x, at: x[at([2, 0, 2])],
    "index_select": lambda x, at: x.index_select(1, at([5, 0])),
    "index_put_": lambda x, at: x.clone().index_put_((at([1, 3]),), x[:2]),
    "flip": lambda x, at: x.flip(0),
    "roll": lambda x, at: x.roll(3, 1),
    "repeat": lambda x, at: x.repeat(2, 3),
    "where": lambda x, at: torch.where(at([0, 1, 0, 1, 1, 0, 1, 0]) > 0, x, x.flip(1)),
    "gather": lambda x, at: x.gather(1, at([3, 1, 7, 0])[:, None]),
    "masked_fill": lambda x, at: x.masked_fill(at([0, 1, 0, 1, 1, 0, 1, 0]) > 0, 2),
    "fill_": lambda x, at: x.clone().fill_(3),
    "full_like": lambda x, at: torch.full_like(x, 2),
    "pad": lambda x, at: torch.nn.functional.pad(x, (1, 2)),
    "a row written to a part": lambda x, at: x.clone().slice_scatter(x[:1], 0, 3, 4),
    "eq": lambda x, at: x == x.flip(1),
    "isnan": lambda x, at: x.isnan(),
    "unsqueeze and expand": lambda x, at: x[:, None].expand(-1, 2, -1).contiguous(),
}
"""Operators that move numbers of 8 bits, at places from 0 on, and change none."""


def _compare_moves(found: Findings) -> None:
    for dtype in (*_FLOAT8, *_POWERS_OF_TWO):
        for how, move in _MOVES.items():

            def run(place: Place, move: _Moved = move, dtype: torch.dtype = dtype) -> Any:
                matrix = every_number(dtype)[40:72].view(4, 8)
                return move(place.whole(matrix), lambda at: place.whole(torch.tensor(at))).cpu()

            def bits(place: Place, run: Callable[[Place], Any] = run) -> Any:
                moved = run(place)
                return moved if moved.dtype is torch.bool else moved.view(torch.uint8)

            what = f"{how} in {short(dtype)}"
            found.compare(what, what, bits, may_be_refused=True)


def _matrix(values: torch.Tensor) -> torch.Tensor:
    return values[: len(values) // 2 * 2].view(2, -1)


def _as_bits(run: Callable[[Place], Any], target: torch.dtype) -> Callable[[Place], Any]:
    """The result, of float8 as float32, with which the host can compare."""
    if target not in _FLOAT8:
        return run
    return lambda place: run(place).cpu().float()


def _convertible(source: torch.dtype, target: torch.dtype) -> torch.Tensor:
    """Numbers of a dtype of which the other is defined."""
    values = every_number(source)
    if source.is_floating_point and source.itemsize >= 4 and target.is_floating_point:
        # Random bits are of all magnitudes; most are beyond a small dtype.
        generator = torch.Generator().manual_seed(3)
        usual = torch.randn(4096, generator=generator, dtype=torch.float64) * 2.0 ** torch.randint(
            -24, 16, (4096,), generator=generator
        )
        values = torch.cat([values[:4096], usual.to(source), _between(target).to(source)])
        if source is torch.float32:  # NaN of any bits stays NaN
            payloads = [0x7F800001, 0x7FFFFFFF, 0x7F80FFFF, 0x7FC00000, 0x7F808000, 0x7FFF8000]
            signed = [bits - (1 << 31) for bits in payloads]
            values = torch.cat([values, torch.tensor([*payloads, *signed], dtype=torch.int32).view(source)])
    if source.itemsize > 2 and not source.is_floating_point:
        small = torch.arange(-300, 300).to(source)
        edges = torch.tensor([2**24 + 1, 2**24 + 3, -(2**24) - 1, 2**31 - 1, -(2**31)]).to(source)
        values = torch.cat([values[:4096], small, edges])
        if source is torch.int64:
            values = torch.cat([values, torch.tensor([2**53 + 1, 2**53 + 3, -(2**53) - 1, 2**63 - 1])])
    if source.is_floating_point and not target.is_floating_point and target is not torch.bool:
        limits = torch.iinfo(target)
        wide = values.double()
        # A smaller integer is what is left of int32 or int64, in C, and elsewhere undefined.
        values = values[(wide >= limits.min) & (wide < float(limits.max))]
        fractions = torch.tensor([0.5, -0.5, 1.5, 2.5, 0.99, -0.99, 3.0, 2.999, 100.25]).to(source)
        values = torch.cat([values, fractions if limits.min < 0 else fractions[fractions.double() >= 0]])
    return _ordinary_for(values, target)


def _ordinary_for(values: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    if values.dtype in (*_FLOAT8, *_POWERS_OF_TWO):
        return values
    return _ordinary(values)


def _between(target: torch.dtype) -> torch.Tensor:
    """Numbers halfway between two of a dtype, and beside those."""
    specials = torch.tensor([0.0, -0.0, 1.0, float("inf"), -float("inf"), float("nan")], dtype=torch.float64)
    if target in _FLOAT8:
        kept = every_number(target).double()
        kept = kept[kept.isfinite()].unique()
        middle = (kept[:-1] + kept[1:]) / 2
        return torch.cat([specials, middle, middle * (1 + 2.0**-14), middle * (1 - 2.0**-14)])
    if target.itemsize > 2:
        return specials
    all_of_it = every_number(target).double()
    kept = all_of_it[all_of_it.isfinite()].sort().values[::7]
    middle = (kept[:-1] + kept[1:]) / 2
    one = every_number(target)[1:32000:9].double()
    other = every_number(target)[2:32001:9].double()
    halves = (one + other) / 2
    return torch.cat([middle, halves[halves.isfinite()], halves[halves.isfinite()] * (1 + 2.0**-20)])


# -- rounding ------------------------------------------------------------------------------------


_ADD_TO_PRODUCTS = ("torch.addmm", "torch.baddbmm")
"""Operators that may add to a product that is rounded already, as cuBLAS does."""


def results_are_rounded(accelerator: Accelerator, found: Findings) -> None:
    functional = torch.nn.functional
    generator = torch.Generator().manual_seed(17)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, b, c, row = random(48, 96), random(48, 96), random(40, 96), random(96)
    cases: dict[str, tuple[_Function, tuple[torch.Tensor, ...]]] = {
        "torch.add": (torch.add, (a, b)),
        "torch.sub": (torch.sub, (a, b)),
        "torch.mul": (torch.mul, (a, b)),
        "torch.div": (torch.div, (a, b)),
        "torch.matmul": (lambda x, y: x @ y.t(), (a, c)),
        "torch.bmm": (lambda x, y: torch.bmm(x[None], y.t()[None]), (a, c)),
        "torch.addmm": (lambda x, y, z: torch.addmm(z[:40], x, y.t()), (a, c, row)),
        "torch.nn.functional.linear": (functional.linear, (a, c)),
        "torch.nn.functional.linear with a bias": (
            lambda x, w, z: functional.linear(x, w, z[:40]),
            (a, c, row),
        ),
        "torch.sum": (lambda x: x.sum(0), (random(50, 200),)),
        "torch.sum of the last dimension": (lambda x: x.sum(-1), (random(200, 50),)),
        "torch.mean": (lambda x: x.mean(-1), (random(200, 50),)),
        "torch.softmax": (lambda x: x.softmax(-1), (a,)),
        "torch.log_softmax": (lambda x: x.log_softmax(-1), (a,)),
        "torch.exp": (torch.exp, (a,)),
        "torch.sigmoid": (torch.sigmoid, (a,)),
        "torch.tanh": (torch.tanh, (a,)),
        "torch.sqrt": (lambda x: x.abs().sqrt(), (a,)),
        "torch.rsqrt": (lambda x: x.abs().rsqrt(), (a,)),
        "torch.reciprocal": (torch.reciprocal, (a,)),
        "torch.log": (lambda x: x.abs().log(), (a,)),
        "torch.nn.functional.gelu": (functional.gelu, (a,)),
        "torch.nn.functional.silu": (functional.silu, (a,)),
        "torch.nn.functional.layer_norm": (lambda x, w: functional.layer_norm(x, (96,), w, w), (a, row)),
        "torch.addcmul": (torch.addcmul, (a, b, b)),
        "torch.lerp": (lambda x, y: torch.lerp(x, y, 0.375), (a, b)),
        "torch.var": (lambda x: x.var(-1), (random(200, 50),)),
        "torch.nn.functional.conv1d": (functional.conv1d, (random(3, 6, 40), random(5, 6, 3))),
        "torch.nn.functional.conv2d": (functional.conv2d, (random(2, 4, 9, 9), random(5, 4, 3, 3))),
        "torch.baddbmm": (lambda x, y: torch.baddbmm(x[None, :, :40], x[None], y.t()[None]), (a, c)),
    }
    dtypes = [d for d in (torch.bfloat16, torch.float16) if d in accelerator.supported_dtypes()]
    for dtype in dtypes:
        for name, (function, given) in cases.items():
            values = [v.to(dtype) for v in given]
            exact = function(*(v.double() for v in values)).to(dtype)
            what = f"{name} of {short(dtype)}"

            def run(place: Place, function: _Function = function, values: list[torch.Tensor] = values) -> Any:
                return function(*map(place.whole, values)).cpu()

            def near(actual: Any, on_host: Any, exact: torch.Tensor = exact, name: str = name) -> str:
                if float((on_host != exact).double().mean()) > _UNLIKE / 2:
                    return ""  # the host rounds more than once
                share = float((actual != exact).double().mean())
                allowed = _UNLIKE_IN_STEPS if name in _ADD_TO_PRODUCTS else _UNLIKE
                return f"{share:.0%} of the results are not the nearest number" if share > allowed else ""

            found.compare(name, what, run, near=near)
