"""Operators with options that models rarely pass: each is a function that runs on a device or the host."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Place = Callable[[torch.Tensor], torch.Tensor]
"""Moves a tensor to where the operator runs."""
Operation = Callable[[Place, torch.dtype], Any]
"""Runs an operator on tensors of a dtype; returns a tensor, or several."""

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_INF, _NAN = float("inf"), float("nan")
_EDGES = (
    0.0,
    -0.0,
    0.5,
    -0.5,
    0.25,
    1.0,
    -1.0,
    2.0,
    2.5,
    -2.5,
    3.75,
    10.0,
    -10.0,
    1000.0,
    -1000.0,
    _INF,
    -_INF,
    _NAN,
)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers from -3.75 to 3.75 in quarters, which every floating-point dtype holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-15, 16, shape, generator=generator) / 4


def _places(*shape: int, below: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


SIMPLE = (
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "ceil",
    "cos",
    "cosh",
    "deg2rad",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "frac",
    "isfinite",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "logical_not",
    "neg",
    "rad2deg",
    "reciprocal",
    "relu",
    "round",
    "rsqrt",
    "sgn",
    "sigmoid",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
)
ACTIVATIONS = (
    "elu",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "logsigmoid",
    "mish",
    "relu6",
    "selu",
    "silu",
    "softplus",
    "softsign",
)


def _at_edges(function: Callable[[torch.Tensor], torch.Tensor]) -> Operation:
    return lambda to, dtype: function(to(torch.tensor(_EDGES).to(dtype)))


def _of(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Operation:
    """An operator on tensors of these shapes."""

    def run(to: Place, dtype: torch.dtype) -> Any:
        given = [values(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]
        return function(*map(to, given), **options)

    return run


def _placed(function: Callable[..., Any], *shapes: tuple[int, ...], places: torch.Tensor) -> Operation:
    """An operator on tensors of these shapes and on a tensor of places."""

    def run(to: Place, dtype: torch.dtype) -> Any:
        given = [values(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]
        return function(*map(to, given), to(places))

    return run


POINTWISE: dict[str, Operation] = {
    **{f"torch.{name}": _at_edges(getattr(torch, name)) for name in SIMPLE},
    **{name: _at_edges(getattr(functional, name)) for name in ACTIVATIONS},
    "gelu approximated by tanh": _at_edges(lambda x: functional.gelu(x, approximate="tanh")),
    "elu with alpha 2": _at_edges(lambda x: functional.elu(x, 2.0)),
    "leaky_relu with slope 0.5": _at_edges(lambda x: functional.leaky_relu(x, 0.5)),
    "softplus with beta 2": _at_edges(lambda x: functional.softplus(x, 2, 4)),
    "threshold": _at_edges(lambda x: functional.threshold(x, 0.5, 9.0)),
    "hardtanh from -2 to 1": _at_edges(lambda x: functional.hardtanh(x, -2.0, 1.0)),
    "round to one decimal": _at_edges(lambda x: torch.round(x, decimals=1)),
    "logit with eps": _at_edges(lambda x: torch.logit(x, eps=0.25)),
    "nan_to_num": _at_edges(lambda x: torch.nan_to_num(x, 4.0, 5.0, -6.0)),
    "clamp below": _at_edges(lambda x: x.clamp(min=-1)),
    "clamp above": _at_edges(lambda x: x.clamp(max=0.5)),
    "clamp between a least number above the largest": _at_edges(
        lambda x: torch.stack(
            [
                x.clamp(2, -1),
                torch.clamp(x, 2, -1),
                x.clone().clamp_(2, -1),
                x.clamp(torch.full_like(x, 2), torch.full_like(x, -1)),
            ]
        )
    ),
    "clamp between two numbers": _at_edges(lambda x: x.clamp(-1, 2)),
    "clamp between tensors": _at_edges(lambda x: x.clamp(torch.full_like(x, -1), torch.full_like(x, 2))),
    "pow 2": _at_edges(lambda x: x**2),
    "pow 3": _at_edges(lambda x: x**3),
    "pow 0.5": _at_edges(lambda x: x**0.5),
    "pow -1": _at_edges(lambda x: x**-1),
    "pow 0": _at_edges(lambda x: x**0),
    "2 to the x": _at_edges(lambda x: 2.0**x),
    "a scalar minus x": _at_edges(lambda x: 3 - x),
    "a scalar over x": _at_edges(lambda x: 3 / x),
    "x over a scalar, rounded down": _at_edges(lambda x: torch.div(x, 0.75, rounding_mode="floor")),
    "remainder by -3": _at_edges(lambda x: torch.remainder(x, -3)),
    "fmod by -3": _at_edges(lambda x: torch.fmod(x, -3)),
    "comparisons with a scalar": _at_edges(
        lambda x: torch.stack([x > 0.5, x >= 0.5, x < 0.5, x <= 0.5, x == 0.5, x != 0.5])
    ),
}
"""Of one tensor: at zero, one, both infinities, NaN, and where functions are not defined."""


def _pairs(function: Callable[[torch.Tensor, torch.Tensor], Any]) -> Operation:
    """An operator on every pair of the edges."""

    def run(to: Place, dtype: torch.dtype) -> Any:
        edges = to(torch.tensor(_EDGES).to(dtype))
        return function(edges[:, None], edges[None, :])

    return run


PAIRS: dict[str, Operation] = {
    "add": _pairs(torch.add),
    "sub": _pairs(torch.sub),
    "mul": _pairs(torch.mul),
    "div": _pairs(torch.div),
    "add with alpha 2": _pairs(lambda a, b: torch.add(a, b, alpha=2)),
    "sub with alpha 3": _pairs(lambda a, b: torch.sub(a, b, alpha=3)),
    "rsub with alpha 2": _pairs(lambda a, b: torch.rsub(a, b, alpha=2)),
    "div rounded to zero": _pairs(lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "div rounded down": _pairs(lambda a, b: torch.div(a, b, rounding_mode="floor")),
    "remainder": _pairs(torch.remainder),
    "fmod": _pairs(torch.fmod),
    "maximum": _pairs(torch.maximum),
    "minimum": _pairs(torch.minimum),
    "fmax": _pairs(torch.fmax),
    "fmin": _pairs(torch.fmin),
    "atan2": _pairs(torch.atan2),
    "hypot": _pairs(torch.hypot),
    "copysign": _pairs(torch.copysign),
    "xlogy": _pairs(torch.xlogy),
    "logaddexp": _pairs(torch.logaddexp),
    "pow": _pairs(torch.pow),
    "heaviside": _pairs(torch.heaviside),
    "comparisons": _pairs(lambda a, b: torch.stack([a > b, a >= b, a < b, a <= b, a == b, a != b])),
    "logical operators": _pairs(
        lambda a, b: torch.stack([a.logical_and(b), a.logical_or(b), a.logical_xor(b)])
    ),
    "where": _pairs(lambda a, b: torch.where(a > b, a, b)),
    "where with scalars": _pairs(lambda a, b: torch.where(a > b, 1.5, b)),
    "isclose": _pairs(lambda a, b: torch.isclose(a, b, rtol=0.1, equal_nan=True)),
}
"""Of two tensors: every pair of the same numbers."""

_NUMBERS = (0.0, -0.0, 1.0, -2.5, 3, _INF, -_INF, _NAN)
"""Python's numbers, as the left or the right operand."""
_OF_TWO: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "rsub": torch.rsub,
    "rsub with alpha": lambda a, b: torch.rsub(a, b, alpha=2),
    "mul": torch.mul,
    "div": torch.div,
    "div rounded to zero": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "div rounded down": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "pow": torch.pow,
    "copysign": torch.copysign,
    "xlogy": torch.xlogy,
    "xlog1py": torch.special.xlog1py,
    "where": lambda a, b: torch.where((a if isinstance(a, torch.Tensor) else b) > 0, a, b),
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "ge": torch.ge,
    "clamp": lambda a, b: torch.clamp(a, min=b),
    "clamp_max": lambda a, b: torch.clamp(a, max=b),
    "masked_fill": lambda a, b: a.masked_fill(a > 0, b),
    "fill": torch.fill,
    "lerp": lambda a, b: torch.lerp(a, a + 1, b),
    "isin": torch.isin,
    "in place, mul_": lambda a, b: a.clone().mul_(b),
    "in place, div_": lambda a, b: a.clone().div_(b),
    "in place, pow_": lambda a, b: a.clone().pow_(b),
    "in place, remainder_": lambda a, b: a.clone().remainder_(b),
}


def _with_numbers(function: Callable[..., Any]) -> Operation:
    """An operator on the edges and each of Python's numbers, on the sides that torch takes numbers on."""

    def call(x: torch.Tensor, number: float, left: bool) -> Any:
        return function(number, x) if left else function(x, number)

    taken = []
    for left in (False, True):
        try:
            call(torch.ones(2), 1.0, left)
        except (TypeError, AttributeError, RuntimeError):
            continue
        taken.append(left)

    def run(to: Place, dtype: torch.dtype) -> Any:
        edges = to(torch.tensor(_EDGES).to(dtype))
        return [call(edges, number, left) for number in _NUMBERS for left in taken]

    return run


WITH_NUMBERS: dict[str, Operation] = {
    f"{name} with numbers of Python": _with_numbers(function) for name, function in _OF_TWO.items()
}
"""Of a tensor and a number of Python, at each edge."""

_M = (5, 67)
_NORMS: tuple[Callable[..., torch.Tensor], ...] = (torch.norm, torch.linalg.vector_norm)
_COLUMNS, _ROWS = _places(5, 9, below=67), torch.tensor([4, 0, 0, 3, 2, 2, 2])

_Three = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_WITH_FACTORS: tuple[_Three, ...] = (
    lambda c, a, b: c.add_(a, alpha=3),
    lambda c, a, b: c.add_(a[0], alpha=2),
    lambda c, a, b: c.add_(2, alpha=3),
    lambda c, a, b: c.sub_(a, alpha=2),
    lambda c, a, b: c.sub_(2, alpha=3),
    lambda c, a, b: c.addcmul_(a, b, value=2),
    lambda c, a, b: c.index_add_(0, torch.tensor([2, 0], device=c.device), a[:2], alpha=3),
)
"""Operators that write into their first operand, each with a factor that is not 1."""
_PRODUCTS_IN_PLACE: tuple[Callable[..., torch.Tensor], ...] = (
    lambda c, a, b, beta, alpha: c.addmm_(a, b, beta=beta, alpha=alpha),
    lambda c, a, b, beta, alpha: c[0].addmv_(a, b[0], beta=beta, alpha=alpha),
    lambda c, a, b, beta, alpha: c.addr_(a[0], b[0], beta=beta, alpha=alpha),
    lambda c, a, b, beta, alpha: c.addbmm_(a[None], b[None], beta=beta, alpha=alpha),
    lambda c, a, b, beta, alpha: c[None].baddbmm_(a[None], b[None], beta=beta, alpha=alpha),
)
"""Products of matrices and vectors that are added to what their first operand holds."""

REDUCTIONS: dict[str, Operation] = {
    f"{name} over {what}{', keeping it' if keep else ''}": _of(
        lambda x, name=name, dim=dim, keep=keep: getattr(torch, name)(x, dim, keep), _M
    )
    for name in ("sum", "mean", "amax", "amin", "std", "var", "logsumexp", "nansum", "nanmean", "norm_of")
    if hasattr(torch, name)
    for what, dim in (("the first dimension", 0), ("the last dimension", -1), ("both dimensions", (0, 1)))
    for keep in (False, True)
} | {
    f"{name} over {what}{', keeping it' if keep else ''}": _of(
        lambda x, name=name, dim=dim, keep=keep: getattr(torch, name)(x, dim, keepdim=keep), _M
    )
    for name in ("argmax", "argmin", "all", "any", "prod", "median")
    for what, dim in (("the first dimension", 0), ("the last dimension", -1))
    for keep in (False, True)
    if name not in ("argmax", "argmin", "median")  # whose place is free among equal numbers
}
REDUCTIONS |= {
    "sum in float32": _of(lambda x: x.sum(-1, dtype=torch.float32), _M),
    "mean in float32": _of(lambda x: x.mean(0, dtype=torch.float32), _M),
    "prod of everything": _of(lambda x: (x / 2)[:, :7].prod(), _M),
    "var without correction": _of(lambda x: x.var(-1, correction=0), _M),
    "std and mean": _of(lambda x: torch.std_mean(x, -1, keepdim=True), _M),
    "the largest and the smallest": _of(torch.aminmax, _M),
    "a maximum with its value": _of(lambda x: x.max(-1, keepdim=True).values, _M),
    "norms": _of(lambda x: [norm(x, p, -1) for p in (0, 1, 2, 3, _INF, -_INF) for norm in _NORMS], (5, 7)),
    "a running sum from the first row": _of(lambda x: x.cumsum(0), _M),
    "a running product": _of(lambda x: (x / 4).cumprod(-1), _M),
    "a running maximum": _of(lambda x: x.cummax(-1).values, _M),
    "softmax over the first dimension": _of(lambda x: functional.softmax(x, 0), _M),
    "softmax in float32": _of(lambda x: functional.softmax(x, -1, dtype=torch.float32), _M),
    "log_softmax over the first dimension": _of(lambda x: functional.log_softmax(x, 0), _M),
    "count_nonzero": _of(lambda x: [torch.count_nonzero(x), torch.count_nonzero(x, 0)], _M),
    "any and all of a long row, decided by the last": lambda to, dtype: [
        [row.any(), row.all()]
        for row in (to(torch.arange(1003).eq(1002).to(dtype)), to(torch.arange(1003).ne(1002).to(dtype)))
    ],
    "long rows, decided by their last element": lambda to, dtype: [
        [
            x.any(1),
            x.all(1),
            x.amax(1),
            x.amin(1),
            x.argmax(1),
            x.argmin(1),
            x.sum(1),
            x.max(1),
            x.min(1),
            x.count_nonzero(1),
        ]
        for last in (3, -3)
        for length in (65, 129, 1003)
        for x in (to(functional.pad(torch.zeros(2, length), (0, 1), value=last).to(dtype)),)
    ],
    "products of nothing": _of(
        lambda a, b: [
            torch.mm(a[0], b[0]),
            torch.bmm(a, b),
            torch.mv(a[0], b[0, :, 0]),
            torch.dot(a[0, 0], b[0, :, 0]),
            torch.einsum("bij,bjk->ik", a, b),
            functional.linear(a, b[0].t()),
        ],
        (2, 3, 0),
        (2, 0, 4),
    ),
    "products of nothing that are added": _of(
        lambda a, b, c: [
            part
            for beta in (2, 0)
            for part in (
                torch.addmm(c[0], a[0], b[0], beta=beta),
                torch.addmm(c[0, 0], a[0], b[0], beta=beta, alpha=3),
                torch.baddbmm(c, a, b, beta=beta),
                torch.addbmm(c[0], a, b, beta=beta),
                torch.addmv(c[0, :, 0], a[0], b[0, :, 0], beta=beta),
                c[0].clone().addmm_(a[0], b[0], beta=beta),
                c.clone().baddbmm_(a, b, beta=beta),
                functional.linear(a, b[0].t(), c[0, 0]),
            )
        ],
        (2, 3, 0),
        (2, 0, 4),
        (2, 3, 4),
    ),
    "reductions over a dimension of nothing": _of(
        lambda x: [
            f(y, dim)
            for y, dim in ((x, 1), (x.t(), 0), (x.t(), 1), (x[None], 2), (x[None], (1, 2)))
            for f in (
                torch.sum,
                torch.nansum,
                torch.mean,
                torch.logsumexp,
                torch.count_nonzero,
                torch.all,
                torch.any,
                lambda x, dim: torch.linalg.vector_norm(x, 2, dim),
                lambda x, dim: torch.all(x > 0, dim),
                lambda x, dim: torch.any(x > 0, dim),
                lambda x, dim: torch.sum(x > 0, dim),
                lambda x, dim: torch.all(x.to(torch.uint8), dim),
            )
        ],
        (3, 0),
    ),
    "other calls over a dimension of nothing": _of(
        lambda x: [
            x.prod(1),
            x.t().prod(0),
            x.cumsum(1),
            x.cumprod(1),
            x.softmax(1),
            x.log_softmax(1),
            x.sort(1).values,
            x.argsort(1),
            (x > 0).prod(1),
            x.int().prod(1),
            x.int().sum(1),
            x.bool().all(1),
            x.bool().any(1),
            x.flip(1),
            x.roll(1, 1),
            x.repeat(2, 2),
            torch.cat([x, x], 1),
            x.nonzero(),
            x.unique(),
        ],
        (3, 0),
    ),
    "reductions of nothing": _of(
        lambda x: [x.sum(), x.prod(), x.all(), x.any(), x.sum(0), x.sum(-1), x.mean()], (0, 3)
    ),
    "sums over each dimension of five": _of(
        lambda x: [f(x, d) for f in (torch.sum, torch.mean, torch.amax) for d in (-1, -3, 1, (-2, 0))],
        (2, 3, 4, 2, 5),
    ),
    "reductions over several dimensions, named from the end": _of(
        lambda x: [
            *(
                f(x, dims)
                for f in (torch.sum, torch.mean, torch.amax, torch.amin, torch.var, torch.std, torch.nansum)
                for dims in ((-1, -2), (-3, -1))
            ),
            *(f(x, (-1, -2)) for f in (torch.logsumexp, torch.all, torch.any, torch.count_nonzero)),
            torch.linalg.vector_norm(x, 3, (-1, -2)),
            torch.flip(x, (-1, -3)),
            torch.roll(x, (1, -2), (-1, -2)),
        ],
        (2, 3, 4),
    ),
    "the first of equal largest and smallest": _of(lambda x: [x.argmax(), x.argmin()], _M),
    "means of many numbers whose sum is large": _of(
        lambda x: [
            f(y)
            for y in (torch.full_like(x, 3), torch.full_like(x.t(), 3, memory_format=torch.contiguous_format))
            for f in (
                torch.mean,
                torch.nanmean,
                lambda y: y.mean(0),
                lambda y: y.mean(-1),
                lambda y: y.sum(-1, dtype=torch.float32),
                lambda y: torch.var_mean(y, 0)[1],
            )
        ],
        (70_001, 1),
    ),
    "softmax of large numbers": _of(
        lambda x: [
            functional.softmax(x * 300, -1),
            functional.log_softmax(x * 300, -1),
            (x * 300).logsumexp(-1),
        ],
        _M,
    ),
    "long rows of large numbers": _of(
        lambda x: [
            f(y, dim)
            for y, dim in ((x * 300, -1), (x.t() * 300, 0))
            for f in (torch.softmax, torch.log_softmax, torch.logsumexp, torch.amax, torch.var)
        ],
        (3, 1003),
    ),
    "numbers far from zero, whose sums of squares lose digits": _of(
        lambda x: [x.sub(200).std(-1), x.add(200).var(0), functional.layer_norm(x.add(90), x.shape[1:])],
        (3, 1003),
    ),
    "numbers in float32 that are further from zero": lambda to, _: [
        f(values(3, 1003).add(4000.0), to)
        for f in (
            lambda x, to: to(x.t().contiguous()).var(0),
            lambda x, to: to(x.t().contiguous()).std(0, correction=2),
            lambda x, to: to(x).var(),
            lambda x, to: to(x.reshape(3, 17, 59)).var((0, 2)),
            lambda x, to: to(x).var(-1),
            lambda x, to: to(x.t()).std(0),
            lambda x, to: torch.var_mean(to(x), 1)[0],
            lambda x, to: functional.layer_norm(to(x), (1003,)),
            lambda x, to: functional.group_norm(to(x).reshape(1, 3, 1003), 3),
            lambda x, to: functional.batch_norm(to(x.t()), None, None, training=True),
        )
    ],
    "sums of integers and truth values": lambda to, dtype: [
        [x.sum(), x.sum(0), x.cumsum(0), x.prod(), x.sum(dtype=torch.float32)]
        for x in (
            to(torch.tensor([True, True, False, True])),
            *(to(torch.tensor([100, 27, 3, 1], dtype=kind)) for kind in _INTEGERS),
        )
    ],
    "einsum": _of(lambda a, b: torch.einsum("ij,kj->ik", a, b), (5, 7), (3, 7)),
    "addmm with alpha and beta": _of(
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (5, 3), (5, 7), (7, 3)
    ),
    "addmm with beta 0 of NaN": _of(
        lambda c, a, b: torch.addmm(c * _NAN, a, b, beta=0), (5, 3), (5, 7), (7, 3)
    ),
    "baddbmm": _of(
        lambda c, a, b: torch.baddbmm(c, a, b, beta=2, alpha=0.5), (2, 5, 3), (2, 5, 7), (2, 7, 3)
    ),
    "addmv and addr": _of(
        lambda c, a, b: [torch.addmv(c, a, b, alpha=2), torch.addr(a, c, b, beta=2)], (5,), (5, 7), (7,)
    ),
    "addcmul and addcdiv with a value": _of(
        lambda a, b, c: [torch.addcmul(a, b, c, value=2), torch.addcdiv(a, b, c.abs() + 1, value=0.5)],
        (4, 5),
        (4, 5),
        (4, 5),
    ),
    "lerp": _of(lambda a, b: [torch.lerp(a, b, 0.25), torch.lerp(a, b, a.abs() / 8)], (4, 5), (4, 5)),
    "cdist": _of(torch.cdist, (4, 5), (3, 5)),
    "products in place, with alpha and beta": _of(
        lambda c, a, b: [
            call(c.clone(), a, b, beta, alpha)
            for call in _PRODUCTS_IN_PLACE
            for beta, alpha in ((2, 3), (0, 2))
        ],
        (4, 4),
        (4, 4),
        (4, 4),
    ),
    "in place, with alpha, value and weight": _of(
        lambda c, a, b: [
            *(call(c.clone(), a, b) for call in _WITH_FACTORS),
            c.clone().addcdiv_(a, b.abs() + 1, value=0.5),
            c.clone().lerp_(a, 0.25),
            c.clone().lerp_(a, b),
        ],
        (4, 4),
        (4, 4),
        (4, 4),
    ),
    "outer products and cross": _of(
        lambda a, b: [torch.cross(a, b, dim=-1), torch.kron(a, b)], (2, 3), (2, 3)
    ),
}
"""Over dimensions, with and without keeping them, in other dtypes, and products with factors."""


def _special(rows: int, columns: int) -> torch.Tensor:
    """Numbers with a row and a column of each kind: NaN, infinity, both infinities, zeros of both signs."""
    x = values(rows, columns, seed=3)
    x[0, 1], x[1, 0], x[2, 2] = _NAN, _INF, -_INF
    x[3], x[:, 3] = -_INF, -_INF
    x[4, ::2], x[4, 1::2] = 0.0, -0.0
    x[5, 1], x[5, -1], x[1, 4], x[4, 4] = _NAN, _NAN, _NAN, _NAN
    return x


_Reduce = Callable[[torch.Tensor, Any], Any]


def _norm_of(degree: float) -> _Reduce:
    return lambda x, d: torch.linalg.vector_norm(x, degree, d)


_ALONG: dict[str, _Reduce] = {
    "sum": torch.sum,
    "nansum": torch.nansum,
    "mean": torch.mean,
    "nanmean": torch.nanmean,
    "amax": torch.amax,
    "amin": torch.amin,
    "var": torch.var,
    "std": torch.std,
    "logsumexp": torch.logsumexp,
    "all": torch.all,
    "any": torch.any,
    "count_nonzero": torch.count_nonzero,
    **{f"norm of {p}": _norm_of(p) for p in (1.0, 2.0, 3.0, _INF, -_INF)},
}
"""Reductions over one dimension or several."""
_ALONG_ONE: dict[str, _Reduce] = {
    "max": lambda x, d: x.max(d),
    "min": lambda x, d: x.min(d),
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "aminmax": lambda x, d: torch.aminmax(x, dim=d),
    "prod": torch.prod,
    "cumsum": torch.cumsum,
    "cumprod": lambda x, d: torch.cumprod(x / 4, d),
    "cummax": lambda x, d: x.cummax(d).values,
    "cummin": lambda x, d: x.cummin(d).values,
    "logcumsumexp": torch.logcumsumexp,
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "median": lambda x, d: x.median(d).values,
    "nanmedian": lambda x, d: x.nanmedian(d).values,
    "sort": lambda x, d: x.sort(d).values,
    "sort, descending": lambda x, d: x.sort(d, descending=True).values,
    "topk": lambda x, d: x.topk(3, d).values,
    "topk, the smallest": lambda x, d: x.topk(3, d, largest=False).values,
    "kthvalue": lambda x, d: x.kthvalue(2, d).values,
    "quantile": lambda x, d: torch.quantile(x, 0.25, d),
    "nanquantile": lambda x, d: torch.nanquantile(x, 0.25, d),
    "renorm": lambda x, d: torch.renorm(x.nan_to_num(0, 1, 2), 2, d, 1.0),
    "diff": lambda x, d: torch.diff(x, dim=d),
    "unique rows": lambda x, d: x.nan_to_num(0, 1, 2).unique(dim=d),
}
"""Operators along one dimension."""


def _along(reduce: _Reduce, several: bool) -> Operation:
    def run(to: Place, dtype: torch.dtype) -> Any:
        x = to(_special(6, 7).to(dtype))
        cube = to(torch.stack([_special(6, 7), _special(6, 7).flip(1)]).to(dtype))
        found = [reduce(y, d) for y in (x, x.t(), x[:, ::2]) for d in (0, -1)] + [reduce(cube, 1)]
        if several:
            found += [reduce(x, (0, 1)), reduce(cube, (0, 2)), reduce(cube, (1, 2)), reduce(cube, (-3, -2))]
            # Of five dimensions, three that are not adjacent, in any order, and others that are.
            five = to(_special(8, 9).reshape(2, 4, 3, 1, 3).to(dtype))
            found += [reduce(five, dims) for dims in ((0, 2, 4), (-1, 0, -3), (1, 3), (4, 1), (0, 1, 3, -1))]
        return found

    return run


def _along_many(reduce: _Reduce) -> Operation:
    """Of long rows with equal numbers, and with NaN twice, far from each other."""

    def run(to: Place, dtype: torch.dtype) -> Any:
        plain = (torch.arange(5003) % 101 + 20).float()
        rows = torch.stack([plain, plain.flip(0), plain, torch.full((5003,), -_INF)])
        rows = rows.to(dtype)
        # In the dtype: torch's conversion of NaN may set its sign, by which a sort by bits puts it first.
        rows[2, [700, 4999]] = _NAN
        x = to(rows)
        return [reduce(y, d) for y, d in ((x, 1), (x.t().contiguous(), 0))]

    return run


SPECIAL: dict[str, Operation] = {
    **{f"{name} of NaN and infinity": _along(reduce, True) for name, reduce in _ALONG.items()},
    **{f"{name} of NaN and infinity": _along(reduce, False) for name, reduce in _ALONG_ONE.items()},
    **{
        f"{name} of long rows": _along_many(reduce)
        for name, reduce in {**_ALONG, **_ALONG_ONE}.items()
        if name not in ("prod", "cumprod", "cumsum", "renorm", "unique rows", "std", "var")
    },
}
"""Reductions of special numbers, over each dimension, and of long rows."""

_WITH_MASKS: tuple[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda x, mask, y: x.masked_fill(mask, -2.0),
    lambda x, mask, y: x.masked_fill(mask, y[..., 0].sum()),
    lambda x, mask, y: x.clone().masked_fill_(mask, -2.0),
    lambda x, mask, y: x.clone().masked_fill_(mask, y[..., 0].sum()),
    lambda x, mask, y: x.masked_scatter(mask, y),
    lambda x, mask, y: x.clone().masked_scatter_(mask, y),
    lambda x, mask, y: x.masked_select(mask),
    lambda x, mask, y: torch.where(mask, x, y),
    lambda x, mask, y: torch.where(mask, x, -2.0),
)
"""Calls that take a mask, which may have fewer dimensions, or a length of 1 in some of them."""

_I, _J = torch.tensor([0, 3]), torch.tensor([4, 1])
_Key = Callable[[Place], Any]
_KEYS: dict[str, _Key] = {
    "[:, i]": lambda to: (slice(None), to(_I)),
    "[i, :, j]": lambda to: (to(_I), slice(None), to(_J)),
    "[:, i, :, j]": lambda to: (slice(None), to(_I), slice(None), to(_J)),
    "[:, i, j]": lambda to: (slice(None), to(_I), to(_J)),
    "[i, 2, j]": lambda to: (to(_I), 2, to(_J)),
    "[i, :, 2]": lambda to: (to(_I), slice(None), 2),
    "[2, :, j]": lambda to: (2, slice(None), to(_J)),
    "[i as a column, j]": lambda to: (to(_I)[:, None], to(_J)),
    "[..., i]": lambda to: (..., to(_I)),
    "[i, ..., j]": lambda to: (to(_I), ..., to(_J)),
    "[None, i]": lambda to: (None, to(_I)),
    "[i, None, j]": lambda to: (to(_I), None, to(_J)),
    "[i - 4]": lambda to: (to(_I) - 4,),
    "[a mask]": lambda to: (to(torch.tensor([True, False, False, True])),),
    "[:, a mask]": lambda to: (slice(None), to(torch.tensor([True, False, True, True, False]))),
    "[a mask, j]": lambda to: (to(torch.tensor([True, False, False, True])), to(_J)),
    "[a mask, :, j]": lambda to: (to(torch.tensor([True, False, False, True])), slice(None), to(_J)),
    "[a mask of two dimensions]": lambda to: (to(torch.arange(20).reshape(4, 5) % 3 == 0),),
    "[:, a mask of two dimensions]": lambda to: (slice(None), to(torch.arange(30).reshape(5, 6) % 4 == 1)),
    "[a list]": lambda to: ([0, 3],),
    "[:, [1, 4]]": lambda to: (slice(None), [1, 4]),
    "[::2, i]": lambda to: (slice(None, None, 2), to(_I)),
    "[1:, -2]": lambda to: (slice(1, None), -2),
    "[..., 1::2]": lambda to: (..., slice(1, None, 2)),
    "[a number of the device]": lambda to: (to(torch.tensor(2)),),
    "[True]": lambda to: (True,),
    "[a mask of nothing]": lambda to: (to(torch.tensor([False] * 4)),),
    "[no place]": lambda to: (to(torch.tensor([], dtype=torch.int64)),),
    "[a matrix of places]": lambda to: (to(torch.tensor([[0, 1], [3, 2]])),),
    "[int32 places]": lambda to: (to(_I.int()),),
}
"""Ways to name elements of a tensor of four dimensions."""


def _indexed(key: _Key) -> Operation:
    """What is read, and what writes of several kinds leave."""

    def run(to: Place, dtype: torch.dtype) -> Any:
        x = to(values(4, 5, 6, 7).to(dtype))
        places = key(to)
        read = x[places]
        column = to(values(*read.shape[-1:], seed=8).to(dtype)) if read.dim() else read
        whole = to(values(*read.shape, seed=9).to(dtype))
        writes: tuple[Callable[[torch.Tensor], Any], ...] = (
            lambda y: y.__setitem__(places, 2.5),
            lambda y: y.__setitem__(places, whole),
            lambda y: y.__setitem__(places, column),
            lambda y: y.__setitem__(places, whole[:1] if whole.dim() > 1 else whole),
            lambda y: y.transpose(0, 1).contiguous().transpose(0, 1).__setitem__(places, whole),
        )
        found = [read]
        for write in writes:
            y = x.clone()
            write(y)
            found.append(y)
        strided = torch.stack([x, x], -1)[..., 0]
        strided[places] = whole
        return [*found, strided, x.transpose(2, 3).contiguous().transpose(2, 3)[places]]

    return run


def _split_into_gaps(x: torch.Tensor) -> list[torch.Tensor]:
    """The memory of tensors that get the parts of a matrix, or its rows in several chunks."""
    x = x.detach()
    columns = [x.new_full((5, width, 2), 7.0) for width in (10, 50, 7)]
    torch.split_with_sizes_copy(x, [10, 50, 7], 1, out=[part[..., 0] for part in columns])
    rows = [x.new_full((1, 67, 2), 7.0) for _ in range(5)]
    torch.split_copy(x, 1, out=[part[..., 0] for part in rows])
    apart = [x.new_full((67, 2), 7.0) for _ in range(5)]
    torch.unbind_copy(x, out=[part[..., 0] for part in apart])
    joined = x.new_full((3, 2 * 67 + 2 * 3), 7.0)
    torch._chunk_cat([x, x[:, :3]], 0, 3, out=joined)
    return [*columns, *rows, *apart, joined]


PLACES: dict[str, Operation] = {
    **{f"indexing by {name}": _indexed(key) for name, key in _KEYS.items()},
    "places counted from both ends": _of(
        lambda x, y: [
            x.index_put((torch.tensor([-1, 4, 0, -5, 4], device=x.device),), y, accumulate=True),
            x.index_put((torch.tensor([-1, 3, 0], device=x.device),), y[:3]),
            x.put(torch.tensor([-1, 334, 0, -335], device=x.device), y[:4, 0], accumulate=True),
            x.take(torch.tensor([-1, 334, 0, -335], device=x.device)),
            x.index_fill(0, torch.tensor([-1, 4, 1], device=x.device), 2.0),
        ],
        (5, 67),
        (5, 67),
    ),
    "gather": _placed(lambda x, i: x.gather(1, i), _M, places=_COLUMNS),
    "scatter of a number": _placed(lambda x, i: x.scatter(1, i, 2.5), _M, places=_COLUMNS),
    "scatter_add": _placed(lambda x, y, i: x.scatter_add(1, i, y), _M, (5, 9), places=_COLUMNS),
    "scatter_reduce": _placed(
        lambda x, y, i: [x.scatter_reduce(1, i, y, how) for how in ("amax", "amin", "prod", "mean")],
        _M,
        (5, 9),
        places=_COLUMNS,
    ),
    "index_select": _placed(lambda x, i: [x.index_select(0, i), x[i], x[:, i]], _M, places=_ROWS),
    "negative places": _placed(lambda x, i: [x[i - 5], x[-1], x[:, -2]], _M, places=_ROWS),
    "index_add with alpha": _placed(lambda x, y, i: x.index_add(0, i, y, alpha=2), _M, (7, 67), places=_ROWS),
    "index_fill": _placed(lambda x, i: x.index_fill(0, i, 2.0), _M, places=_ROWS),
    "index_copy": _placed(lambda x, y, i: x.index_copy(0, i[:2], y[:2]), _M, (7, 67), places=_ROWS),
    "index_put of places that repeat, added up": _placed(
        lambda x, y, i: x.index_put((i,), y, accumulate=True), _M, (7, 67), places=_ROWS
    ),
    "index_put of places in two dimensions": _placed(
        lambda x, y, i: x.index_put((i[:2], i[2:4]), y), _M, (2,), places=_ROWS
    ),
    "take and take_along_dim": _placed(
        lambda x, i: [x.take(i * 9), torch.take_along_dim(x, i[:, None] % 4, 1)], (7, 67), places=_ROWS
    ),
    "masked_select and masked_fill": _of(
        lambda x: [x.masked_select(x > 0), x.masked_fill(x > 0, -2), x[x < 0], x[(x > 0).any(1)]], _M
    ),
    "masked_scatter": _of(lambda x, y: x.masked_scatter(x > 0, y), _M, _M),
    "masks that are broadcast": _of(
        lambda x, y: [
            call(x, mask, y)
            for mask in (x[:1] > 0, x[:, :1] > 0, x[0] > 0, x[0, 0] > 9, x[:1, :1] > -9, x[0, :1] > -9)
            for call in _WITH_MASKS
        ],
        _M,
        _M,
    ),
    "masks that are broadcast over the first, the middle and the last dimension": _of(
        lambda x, y: [
            call(x, mask, y)
            for mask in (x[:1] > 0, x[:, :1] > 0, x[..., :1] > 0, x[0] > 0, x[0, 0] > 0, x[:1, :, :1] > 0)
            for call in _WITH_MASKS
        ],
        (2, 3, 5),
        (2, 3, 5),
    ),
    "nonzero": _of(lambda x: [x.nonzero(), torch.nonzero(x > 1, as_tuple=True)], _M),
    "topk": _of(lambda x: [x.topk(9, 1, big).values for big in (True, False)], _M),
    "topk of the first dimension": _of(lambda x: x.topk(3, 0).values, _M),
    "sort": _of(lambda x: [x.sort(dim, down).values for dim in (0, 1) for down in (False, True)], _M),
    "a stable sort": _of(
        lambda x: [tuple(x.sort(dim=1, stable=True, descending=down)) for down in (False, True)], _M
    ),
    "argsort": _of(lambda x: x.argsort(dim=-1, stable=True), _M),
    "places of numbers that are all different": lambda to, dtype: [
        [
            x.topk(5, 1),
            x.topk(5, 1, largest=False),
            x.sort(1),
            x.argsort(1, descending=True),
            x.max(1),
            x.min(1, keepdim=True),
            x.kthvalue(4, 1),
            x.median(1),
            x.argmax(1),
            x.argmin(1, keepdim=True),
            x.cummax(1),
        ]
        for x in (to(_different().to(dtype)),)
    ],
    "kthvalue": _of(lambda x: x.kthvalue(3, 1).values, _M),
    "unique": _of(lambda x: torch.unique(x, return_inverse=True, return_counts=True), _M),
    "searchsorted": _of(
        lambda x, y: [torch.searchsorted(x.sort().values, y, right=right) for right in (False, True)],
        (67,),
        (5,),
    ),
    "bucketize": _of(lambda x: torch.bucketize(x, x.flatten()[:9].sort().values, right=True), _M),
    "triu and tril": _of(lambda x: [f(x, k) for f in (torch.triu, torch.tril) for k in (-2, 0, 3)], (9, 7)),
    "triu and tril of a batch": _of(
        lambda x: [torch.triu(x), torch.tril(x, -1), x.clone().triu_(1)], (3, 5, 7)
    ),
    "diagonals": _of(lambda x: [x.diagonal(1), torch.diag(x[0], -1), x.trace(), torch.diag_embed(x)], (5, 5)),
    "roll, flip and rot90": _of(
        lambda x: [x.roll(3, 1), x.roll((-1, 2), (0, 1)), x.flip(1), x.rot90(1, (0, 1)), x.roll(4)], _M
    ),
    "into tensors given as out with gaps, of numbers that differ": lambda to, dtype: [
        _into_gaps(to, dtype, call, count)
        for call, count in (
            (lambda x, out: torch.topk(x, 3, 1, out=out), 3),
            (lambda x, out: torch.topk(x, 3, 1, False, out=out), 3),
            (lambda x, out: torch.sort(x, 1, out=out), 67),
            (lambda x, out: torch.kthvalue(x, 4, 1, out=out), None),
            (lambda x, out: torch.median(x, 1, out=out), None),
            (lambda x, out: torch.max(x, 1, out=out), None),
            (lambda x, out: torch.min(x, 1, out=out), None),
            (lambda x, out: torch.cummax(x, 1, out=out), 67),
            (lambda x, out: torch.cummin(x, 1, out=out), 67),
        )
    ],
    "parts copied into tensors given as out with gaps": _of(_split_into_gaps, _M),
    "repeat and tile": _of(
        lambda x: [x.repeat(2, 3), x.tile(2), x.repeat_interleave(3, 1), x.expand(2, 5, 67) * 2], _M
    ),
    "cat and stack": _of(
        lambda x, y: [torch.cat([x, y, x[:0]]), torch.cat([x, y], -1), torch.stack([x, y], 1)], _M, _M
    ),
    "cat of two dtypes": _of(
        lambda x: [
            torch.cat([x.int(), x]),
            torch.cat([x, x.float()]),
            torch.stack([x.int(), x.long()]),
        ],
        _M,
    ),
    "where with a row, a column and a number": _of(
        lambda x: [
            torch.where(x[0] > 0, x, -x),
            torch.where(x[:, :1] > 0, x, 2.0),
            torch.where(x > 0, x[0], x[:, :1]),
        ],
        _M,
    ),
    "a mask on a transposed matrix": _of(
        lambda x: [
            x.t()[x.t() > 0],
            x.t().masked_select(x.t() > 0),
            x[:, ::2][x[:, ::2] > 0],
            x.t().nonzero(),
        ],
        _M,
    ),
    "operators on transposed and strided matrices": _of(
        lambda x: [
            f(y)
            for y in (x.t(), x[:, 1::3], x[:1].expand(4, -1))
            for f in (torch.neg, torch.triu, torch.relu, torch.square, torch.sum, torch.sigmoid)
        ],
        _M,
    ),
    "split and unbind": _of(lambda x: [*x.split([10, 50, 7], 1), *x.chunk(3, 1), *x.unbind(0)], _M),
    "unfold and as_strided": _of(lambda x: [x.unfold(1, 5, 3), x.as_strided((3, 4), (7, 2), 5)], _M),
    "pad": _of(
        lambda x: [
            functional.pad(x[None], (2, 3), how) for how in ("constant", "reflect", "replicate", "circular")
        ],
        _M,
    ),
    "pad with a number": _of(lambda x: functional.pad(x, (1, -2, 3, 0), value=2.5), _M),
    "writes to every second column": _of(lambda x: [_written(x, w) for w in range(5)], _M),
    "writes to a transposed matrix": _of(lambda x: [_written(x.t(), w) for w in range(5)], _M),
    "results in every second column": _of(lambda x: _written(x, 5), _M),
}
"""That read or write at places, or move elements."""


def _different() -> torch.Tensor:
    """Rows of numbers that differ, which every floating-point dtype holds exactly."""
    rows = [torch.randperm(67, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    return (torch.stack(rows) - 33) / 4


def _into_gaps(to: Place, dtype: torch.dtype, call: Callable[..., Any], count: int | None) -> Any:
    """The memory of two tensors with gaps, after an operator wrote its numbers and places into them."""
    x = to(_different().to(dtype))
    shape = (3, 2) if count is None else (3, count, 2)
    values, places = torch.full(shape, 7, dtype=dtype), torch.full(shape, 7)
    beside = to(values), to(places)
    call(x, (beside[0][..., 0], beside[1][..., 0]))
    return list(beside)


def _written(x: torch.Tensor, way: int) -> torch.Tensor:
    """A copy whose every second column was written to in place."""
    whole = x.clone(memory_format=torch.preserve_format)
    part = whole[:, ::2]
    if way == 0:
        part.fill_(2.5)
    elif way == 1:
        part.zero_()
    elif way == 2:
        part.mul_(2).add_(1)
    elif way == 3:
        part.copy_(part.clone().flip(1))
    elif way == 4:
        part.masked_fill_(part > 0, -1)
    else:
        torch.add(part, 1, out=part)
    return whole


_X, _IMAGE = (4, 6, 16), (2, 4, 9, 11)


def _ramp(x: torch.Tensor) -> torch.Tensor:
    """What makes the numbers of each image differ, of which the largest is then at one place."""
    count = x.shape[-2] * x.shape[-1]
    return (torch.arange(count, device=x.device) % 37 / 128).to(x.dtype).view(x.shape[-2:])


def _shares(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(7))


def _with_float32_statistics(x: torch.Tensor) -> list[torch.Tensor]:
    """Results and running statistics of many small steps, of which 16 bits would lose each."""
    kept = torch.ones(4, device=x.device), torch.ones(4, device=x.device)
    for _ in range(20):
        result = functional.batch_norm(x, *kept, training=True, momentum=0.002)
    return [result, *kept]


def _quantized_with_ranges(x: torch.Tensor) -> list[torch.Tensor]:
    """Of two calls, which move the range that they quantise to."""
    found: list[torch.Tensor] = []
    for rows in (1, 4):
        least, most = torch.full((rows,), -1.0, device=x.device), torch.full((rows,), 0.5, device=x.device)
        scale = torch.ones(rows, device=x.device)
        zero = torch.zeros(rows, dtype=torch.int32, device=x.device)
        on = torch.ones(1, dtype=torch.int64, device=x.device)
        for factor in (1, 2):
            found.append(
                torch.fused_moving_avg_obs_fake_quant(
                    x * factor, on, on, least, most, scale, zero, 0.25, 0, 15, 0 if rows > 1 else -1, rows > 1
                )
            )
        found += [least, most, scale, zero]
    return found


def _fake_quantized(x: torch.Tensor) -> list[torch.Tensor]:
    """Of numbers beyond, at and within the ends of a range of 16 steps."""
    steps = [0.25, 0.5, 0.125, 1.0]
    scales = torch.tensor(steps, device=x.device)
    zeros = torch.tensor([0, 1, 0, -1], dtype=torch.int32, device=x.device)
    return [
        torch.fake_quantize_per_tensor_affine(x, 0.25, 0, -8, 7),
        torch.fake_quantize_per_tensor_affine(x, 0.5, 2, 0, 15),
        torch.fake_quantize_per_tensor_affine(x, scales[:1], zeros[:1], -8, 7),
        torch.fake_quantize_per_channel_affine(x, scales, zeros, 0, -8, 7),
        torch.fake_quantize_per_channel_affine(x.t(), scales, zeros, 1, -8, 7),
    ]


_TARGETS = torch.tensor([3, 0, 15, 7])

_Layer = Callable[..., torch.Tensor]
_OF_IMAGES: dict[str, tuple[_Layer, tuple[tuple[int, ...], ...]]] = {
    "conv2d": (lambda x, w, b: functional.conv2d(x, w, b, (2, 1), 1), ((2, 3, 7, 5), (4, 3, 3, 3), (4,))),
    "conv2d of single places": (functional.conv2d, ((2, 3, 7, 5), (4, 3, 1, 1), (4,))),
    "conv2d of one place": (functional.conv2d, ((2, 3, 1, 1), (4, 3, 1, 1), (4,))),
    "conv2d by channel": (
        lambda x, w, b: functional.conv2d(x, w, b, padding=1, groups=3),
        ((2, 3, 7, 5), (6, 1, 3, 3), (6,)),
    ),
    "conv2d of groups": (
        lambda x, w, b: functional.conv2d(x, w, b, groups=2),
        ((2, 4, 7, 5), (6, 2, 3, 3), (6,)),
    ),
    "conv_transpose2d": (
        lambda x, w, b: functional.conv_transpose2d(x, w, b, 2, 1, 1),
        ((2, 3, 4, 5), (3, 4, 3, 3), (4,)),
    ),
    "max_pool2d": (lambda x: functional.max_pool2d(x, 3, 2, 1), ((2, 3, 7, 5),)),
    "max_pool2d, its places": (
        lambda x: functional.max_pool2d(x + _ramp(x), 3, 2, 1, return_indices=True)[1],
        ((2, 3, 7, 5),),
    ),
    "adaptive_max_pool2d, its places": (
        lambda x: functional.adaptive_max_pool2d(x + _ramp(x), (3, 4), return_indices=True)[1],
        ((2, 3, 7, 5),),
    ),
    "avg_pool2d": (lambda x: functional.avg_pool2d(x, 3, 2, 1, True, False), ((2, 3, 7, 5),)),
    "adaptive_avg_pool2d": (lambda x: functional.adaptive_avg_pool2d(x, (3, 4)), ((2, 3, 7, 5),)),
    "adaptive_max_pool2d": (lambda x: functional.adaptive_max_pool2d(x, (3, 4)), ((2, 3, 7, 5),)),
    "batch_norm in training": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, True),
        ((3, 4, 5, 2), (4,), (4,)),
    ),
    "batch_norm with statistics": (
        lambda x, w, b, m, v: functional.batch_norm(x, m.detach(), v.detach().abs() + 1, w, b),
        ((3, 4, 5, 2), (4,), (4,), (4,), (4,)),
    ),
    "group_norm": (lambda x, w, b: functional.group_norm(x, 2, w, b), ((3, 4, 5, 2), (4,), (4,))),
    "instance_norm": (
        lambda x, w, b: functional.instance_norm(x, weight=w, bias=b),
        ((3, 4, 5, 2), (4,), (4,)),
    ),
    "prelu": (functional.prelu, ((2, 3, 7, 5), (3,))),
    "bilinear interpolate": (
        lambda x: functional.interpolate(x, (4, 9), mode="bilinear", align_corners=False),
        ((2, 3, 7, 5),),
    ),
    "nearest interpolate": (lambda x: functional.interpolate(x, (10, 3)), ((2, 3, 7, 5),)),
    "bicubic interpolate": (
        lambda x: functional.interpolate(x, (4, 9), mode="bicubic", align_corners=True),
        ((2, 3, 7, 5),),
    ),
    "pixel_shuffle": (lambda x: functional.pixel_shuffle(x, 2), ((2, 8, 3, 5),)),
    "reflecting pad": (lambda x: functional.pad(x, (2, 1, 1, 2), "reflect"), ((2, 3, 7, 5),)),
    "replicating pad": (lambda x: functional.pad(x, (2, 1, 1, 2), "replicate"), ((2, 3, 7, 5),)),
    "constant pad": (lambda x: functional.pad(x, (2, -1, 1, 2), value=1.5), ((2, 3, 7, 5),)),
    "grid_sample": (
        lambda x, g: functional.grid_sample(x, g.permute(0, 2, 3, 1) / 3, align_corners=False),
        ((2, 3, 7, 5), (2, 2, 4, 3)),
    ),
    "softmax of channels": (lambda x: x.softmax(1), ((2, 3, 7, 5),)),
    "glu": (lambda x: functional.glu(x, 1), ((2, 4, 7, 5),)),
    "a mean of each channel": (lambda x: x.mean((2, 3), keepdim=True), ((2, 3, 7, 5),)),
    "cat of channels": (lambda x, y: torch.cat([x, y.contiguous()], 1), ((2, 3, 7, 5), (2, 2, 7, 5))),
    "silu": (functional.silu, ((2, 3, 7, 5),)),
}
"""Layers of images, with the shapes of what they are given."""


def _with_channels_last(layer: _Layer, shapes: tuple[tuple[int, ...], ...]) -> Operation:
    """A layer whose images, weights and incoming gradient have channels last."""

    def run(to: Place, dtype: torch.dtype) -> Any:
        given = [to(values(*shape, seed=n).to(dtype)) for n, shape in enumerate(shapes)]
        result = layer(
            *(t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in given)
        )
        return result.permute(0, 2, 3, 1).contiguous()

    return run


LAYERS: dict[str, Operation] = {
    "layer_norm without weights": _of(lambda x: functional.layer_norm(x, (16,), eps=0.1), _X),
    "layer_norm of two dimensions": _of(
        lambda x, w, b: functional.layer_norm(x, (6, 16), w, b), _X, (6, 16), (6, 16)
    ),
    "layers of many rows": _of(
        lambda x, w, b: [
            functional.layer_norm(x, (16,), w[0], b[:16]),
            functional.linear(x, w, b),
            functional.embedding(x[:, 0].detach().abs().long(), x),
            functional.rms_norm(x, (16,), w[1]),
            functional.cross_entropy(x, x.detach().argmax(1)),
        ],
        (131, 16),
        (40, 16),
        (40,),
    ),
    "rms_norm": _of(lambda x, w: functional.rms_norm(x, (16,), w, 0.01), _X, (16,)),
    "group_norm": _of(lambda x, w, b: functional.group_norm(x, 2, w, b), _IMAGE, (4,), (4,)),
    "batch_norm in training": _of(
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True), _IMAGE, (4,), (4,)
    ),
    "batch_norm with statistics": _of(
        lambda x, m, v: functional.batch_norm(x, m.detach(), v.detach().abs() + 1, eps=0.1),
        _IMAGE,
        (4,),
        (4,),
    ),
    "softmax with a masked row": _of(
        lambda x: functional.softmax(x.masked_fill(x > 0, -_INF), -1).nan_to_num(9.0), (6, 8)
    ),
    "embedding": _placed(lambda w, i: functional.embedding(i, w), (16, 5), places=_TARGETS),
    "embedding with options": _placed(
        lambda w, i: [
            functional.embedding(i[::2] % 2, w, scale_grad_by_freq=True),
            functional.embedding(torch.stack([i % 3, i % 2]), w, scale_grad_by_freq=True),
            functional.embedding(torch.stack([i % 3, i % 2]), w, 1, scale_grad_by_freq=True),
            functional.embedding(i, w, padding_idx=7),
        ],
        (16, 5),
        places=_TARGETS,
    ),
    "embedding_bag": _placed(
        lambda w, i: functional.embedding_bag(i[None], w, mode="sum"), (16, 5), places=_TARGETS
    ),
    "embedding_bag with offsets": _placed(
        lambda w, i: [
            functional.embedding_bag(
                i, w, torch.tensor([0, 3, 4], device=i.device), mode=how, include_last_offset=last
            )
            for how in ("sum", "mean")
            for last in (True, False)
        ],
        (16, 5),
        places=_TARGETS % 4,
    ),
    "one_hot": _placed(lambda i: functional.one_hot(i, 20), places=_TARGETS),
    "cross_entropy": _placed(
        lambda x, w, i: [
            functional.cross_entropy(x, i),
            functional.cross_entropy(x, i, reduction="sum"),
            functional.cross_entropy(x, i, w.detach().abs() + 1, reduction="none"),
            functional.cross_entropy(x, i, ignore_index=7),
            functional.cross_entropy(x, i, label_smoothing=0.25),
        ],
        (4, 16),
        (16,),
        places=_TARGETS,
    ),
    "nll_loss": _placed(
        lambda x, i: functional.nll_loss(functional.log_softmax(x, -1), i, ignore_index=0),
        (4, 16),
        places=_TARGETS,
    ),
    "losses": _of(
        lambda x, y: [
            loss(x, y, reduction=how)
            for loss in (
                functional.mse_loss,
                functional.l1_loss,
                functional.smooth_l1_loss,
                functional.huber_loss,
            )
            for how in ("mean", "sum", "none")
        ],
        (5, 7),
        (5, 7),
    ),
    "huber_loss with delta": _of(lambda x, y: functional.huber_loss(x, y, delta=0.5), (5, 7), (5, 7)),
    "activations in place": _of(
        lambda x: [
            functional.elu(x * 1, 0.5, inplace=True),
            functional.celu(x * 1, 0.5, inplace=True),
            functional.selu(x * 1, inplace=True),
            functional.leaky_relu(x * 1, 0.25, inplace=True),
            functional.hardtanh(x * 1, -0.5, 0.75, inplace=True),
            functional.threshold(x * 1, 0.1, 0.75, inplace=True),
            functional.relu6(x * 4, inplace=True),
            functional.silu(x * 1, inplace=True),
            functional.hardswish(x * 1, inplace=True),
        ],
        _X,
    ),
    "ctc_loss of several lengths": _of(
        lambda x: [
            functional.ctc_loss(
                x.log_softmax(-1),
                torch.tensor([[1, 2, 2], [3, 1, 0]], device=x.device),
                torch.tensor(lengths),
                torch.tensor([3, 2]),
                reduction=how,
                zero_infinity=zeros,
            )
            for lengths, zeros in (([7, 4], False), ([7, 1], True))
            for how in ("mean", "sum", "none")
        ],
        (7, 2, 5),
    ),
    "pools of volumes": _of(
        lambda x: [
            functional.max_pool3d(x, (2, 3, 2), (1, 2, 3), (0, 1, 1)),
            functional.avg_pool3d(x, (2, 3, 2), (1, 2, 3), (0, 1, 1), count_include_pad=False),
        ],
        (1, 2, 4, 7, 6),
    ),
    "binary_cross_entropy_with_logits": _of(
        lambda x, y, w: functional.binary_cross_entropy_with_logits(
            x, (y > 0).to(x.dtype), pos_weight=w.detach().abs() + 1
        ),
        (5, 7),
        (5, 7),
        (7,),
    ),
    "kl_div": _of(
        lambda x, y: functional.kl_div(
            functional.log_softmax(x, -1), functional.softmax(y, -1), reduction="batchmean"
        ),
        (5, 7),
        (5, 7),
    ),
    "cosine_similarity and normalize": _of(
        lambda x, y: [functional.cosine_similarity(x, y, 0), functional.normalize(x, dim=1)], (5, 7), (5, 7)
    ),
    "glu and prelu": _of(
        lambda x, w: [functional.glu(x, 1), functional.prelu(x.transpose(1, 2), w)], (4, 6, 16), (16,)
    ),
    "linear": _of(lambda x, w, b: [functional.linear(x, w), functional.linear(x, w, b)], _X, (5, 16), (5,)),
    "bilinear": _of(functional.bilinear, (4, 3), (4, 5), (2, 3, 5)),
    "conv1d": _of(
        lambda x, w, b: functional.conv1d(x, w, b, stride=2, padding=3, dilation=2, groups=2),
        (2, 6, 16),
        (4, 3, 3),
        (4,),
    ),
    "conv2d": _of(
        lambda x, w, b: [
            functional.conv2d(x, w, b, stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
            functional.conv2d(x, w, padding="same"),
        ],
        _IMAGE,
        (5, 4, 3, 3),
        (5,),
    ),
    "conv2d of single places": _of(
        lambda x, w, b, d: [
            functional.conv2d(x, w, b, stride=2),
            functional.conv2d(x, w, padding=1),
            functional.conv2d(x, d, stride=(1, 2), groups=4),
        ],
        _IMAGE,
        (5, 4, 1, 1),
        (5,),
        (8, 1, 1, 1),
    ),
    "conv_transpose2d": _of(
        lambda x, w: functional.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
        _IMAGE,
        (4, 3, 3, 3),
    ),
    "max_pool2d": _of(
        lambda x: [functional.max_pool2d(x, 3, 2, 1), functional.max_pool2d(x, 2, ceil_mode=True)], _IMAGE
    ),
    "avg_pool2d": _of(
        lambda x: [functional.avg_pool2d(x, 3, 2, 1, count_include_pad=inner) for inner in (True, False)],
        _IMAGE,
    ),
    "adaptive_avg_pool2d": _of(lambda x: functional.adaptive_avg_pool2d(x, (3, 4)), _IMAGE),
    "interpolate": _of(
        lambda x: [
            functional.interpolate(x, scale_factor=2, mode="nearest"),
            functional.interpolate(x, (5, 20), mode="bilinear", align_corners=True),
            functional.interpolate(x, (5, 20), mode="bilinear", align_corners=False),
        ],
        _IMAGE,
    ),
    "pixel_shuffle": _of(lambda x: functional.pixel_shuffle(x, 2), _IMAGE),
    "attention": _of(
        lambda q, k, v: [
            functional.scaled_dot_product_attention(q, k, v),
            functional.scaled_dot_product_attention(q, k, v, scale=0.1),
            functional.scaled_dot_product_attention(q, q, q, is_causal=True),
            functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        ],
        (2, 3, 7, 16),
        (2, 3, 9, 16),
        (2, 3, 9, 16),
    ),
    "attention of many keys with large scores, and a loss of many classes": _of(
        lambda q, k, i: [
            functional.scaled_dot_product_attention(q * 30, k, k),
            functional.cross_entropy(i * 200, i.detach().argmax(-1)),
        ],
        (1, 2, 3, 16),
        (1, 2, 1003, 16),
        (4, 1003),
    ),
    "attention with a mask": _of(
        lambda q, k, v, m: [
            functional.scaled_dot_product_attention(q, k, v, attn_mask=m),
            functional.scaled_dot_product_attention(q, k, v, attn_mask=m > -1),
        ],
        (2, 3, 7, 16),
        (2, 3, 9, 16),
        (2, 3, 9, 16),
        (7, 9),
    ),
    "attention with rows of which all keys are masked": _of(
        lambda q, k, v, m: [
            functional.scaled_dot_product_attention(q, k, v, (m > -1) & (m[:, :1] < 2)),
            functional.scaled_dot_product_attention(
                q, k, v, torch.zeros_like(m.detach()).masked_fill(m[:, :1] >= 2, -_INF)
            ),
        ],
        (2, 3, 7, 16),
        (2, 3, 9, 16),
        (2, 3, 9, 16),
        (7, 9),
    ),
    "attention of grouped heads": _of(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (2, 4, 7, 16),
        (2, 2, 9, 16),
        (2, 2, 9, 16),
    ),
    "cross_entropy with several options at once": _placed(
        lambda x, w, i: [
            functional.cross_entropy(
                x,
                i % 16,
                w.detach().abs() + 1 if weighted else None,
                ignore_index=ignored,
                reduction=how,
                label_smoothing=smoothing,
            )
            for weighted, ignored, smoothing, how in product(
                (False, True), (0, 7, -100), (0.0, 0.25), ("mean", "sum", "none")
            )
        ],
        (4, 16),
        (16,),
        places=_TARGETS,
    ),
    "losses of images that ignore a class": _placed(
        lambda x, w, i: [
            part
            for ignored in (0, 2, -100)
            for part in (
                *(
                    functional.nll_loss(y, j, w.detach().abs() + 1, ignore_index=ignored, reduction=how)
                    for y, j in ((x, i), (x.flatten(2), i.flatten(1)))
                    for how in ("mean", "sum")
                ),
                functional.cross_entropy(x, i, ignore_index=ignored),
                functional.cross_entropy(x, i, w.detach().abs() + 1, ignore_index=ignored, reduction="sum"),
                functional.nll_loss(x, i, w.detach().abs() + 1, ignore_index=ignored, reduction="none"),
                functional.nll_loss(x.flatten(2), i.flatten(1), ignore_index=ignored),
            )
        ],
        (2, 4, 3, 5),
        (4,),
        places=_places(2, 3, 5, below=4),
    ),
    "binary_cross_entropy at its ends": lambda to, dtype: [
        functional.binary_cross_entropy(
            to(torch.tensor([0.0, 1.0, 0.25, 0.0, 1.0]).to(dtype)),
            to(torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0]).to(dtype)).detach(),
            reduction=how,
        )
        for how in ("mean", "sum", "none")
    ],
    "ctc_loss with another blank": _of(
        lambda x: [
            functional.ctc_loss(
                x.log_softmax(-1),
                torch.tensor(targets, device=x.device),
                torch.tensor([7, 6]),
                torch.tensor(lengths),
                blank=4,
                reduction=how,
            )
            for targets, lengths in (([[1, 2, 2], [3, 0, 0]], [3, 2]), ([1, 2, 2, 3, 0], [3, 2]))
            for how in ("mean", "none")
        ],
        (7, 2, 5),
    ),
    "ctc_loss of an empty target": _of(
        lambda x: [
            functional.ctc_loss(
                x.log_softmax(-1),
                torch.tensor([[1, 2], [1, 1]], device=x.device),
                torch.tensor([7, 5]),
                torch.tensor([2, 0]),
                reduction="none",
                zero_infinity=zeros,
            )
            for zeros in (False, True)
        ],
        (7, 2, 5),
    ),
    "multilabel_margin_loss with what follows its end": _placed(
        lambda x, i: [functional.multilabel_margin_loss(x, i, reduction=how) for how in ("mean", "none")],
        (2, 4),
        places=torch.tensor([[3, -1, 1, 0], [0, 2, -1, 3]]),
    ),
    "embedding_bag with weights of samples": _placed(
        lambda w, p, i: [
            functional.embedding_bag(
                i,
                w,
                torch.tensor(offsets, device=i.device),
                mode="sum",
                per_sample_weights=p,
                include_last_offset=last,
            )
            for offsets, last in (([0, 3, 4], True), ([0, 3], False), ([0, 0, 2], False))
        ],
        (16, 5),
        (4,),
        places=_TARGETS % 4,
    ),
    "batch_norm with statistics of float32": _of(_with_float32_statistics, (3, 4, 5)),
    "fractional pools of chosen regions": _of(
        lambda x: [
            *functional.fractional_max_pool2d(
                x, 2, output_size=3, _random_samples=_shares(2, 4, 2).to(x), return_indices=True
            ),
            functional.fractional_max_pool2d(
                x, (2, 3), output_ratio=(0.5, 0.5), _random_samples=_shares(2, 4, 2).to(x)
            ),
            functional.fractional_max_pool3d(
                x[:, None], 2, output_size=(2, 3, 4), _random_samples=_shares(2, 1, 3).to(x)
            ),
        ],
        _IMAGE,
    ),
    "cells of recurrent layers, each result alone": _of(
        lambda x, h, w, u: [
            torch.lstm_cell(x, [h, h], w.repeat(4, 1), u.repeat(4, 1))[0],
            torch.lstm_cell(x, [h, h], w.repeat(4, 1), u.repeat(4, 1), w[:, 0].repeat(4), u[:, 0].repeat(4))[
                1
            ],
            torch.gru_cell(x, h, w.repeat(3, 1), u.repeat(3, 1), w[:, 0].repeat(3), u[:, 0].repeat(3)),
            torch.rnn_tanh_cell(x, h, w, u),
            torch.rnn_relu_cell(x, h, w, u),
        ],
        (3, 5),
        (3, 4),
        (4, 5),
        (4, 4),
    ),
    "draws of gamma and Dirichlet numbers, how they change": _of(
        lambda x: [
            torch._standard_gamma_grad(x.detach().abs() + 0.1, x.detach().flip(0).abs() + 0.05),
            torch._dirichlet_grad(
                x.detach().abs().softmax(-1),
                x.detach().abs() + 0.3,
                (x.detach().abs() + 0.3).sum(-1, True).expand_as(x),
            ),
        ],
        (4, 6),
    ),
    "fake_quantize at the ends of its range": lambda to, dtype: _fake_quantized(
        to(((torch.arange(24.0) - 12) / 4).view(4, 6).to(dtype))
    ),
    "fake_quantize with ranges that follow": _of(_quantized_with_ranges, (4, 6)),
    "a convolution over time, and means of powers of volumes": _of(
        lambda x, w, b: [
            torch.conv_tbc(x, w, b, 1),
            functional.lp_pool3d(x.abs()[None, None] + 0.5, 2, (2, 1, 2)),
            torch.norm_except_dim(w, 2, 1),
        ],
        (5, 2, 4),
        (3, 4, 2),
        (2,),
    ),
    "weight_norm": _of(
        lambda v, g, h: [torch._weight_norm(v, g, 0), torch._weight_norm(v, h, 1)], (4, 6), (4, 1), (1, 6)
    ),
    "group_norm of vectors": _of(lambda x, w, b: functional.group_norm(x, 3, w, b), (7, 6), (6,), (6,)),
    "conv2d with rows that no window reads": _of(
        lambda x, w, b: [
            functional.conv2d(x, w, b, stride=(4, 3)),
            functional.conv2d(x, w, stride=3, padding=1),
            functional.conv2d(x, w, b, stride=(5, 4), dilation=2),
        ],
        _IMAGE,
        (5, 4, 3, 3),
        (5,),
    ),
    "convolutions of many groups": _of(
        lambda x, w, y, v: [
            functional.conv1d(x, w, groups=70),
            functional.conv2d(y, v, padding=1, groups=66),
            functional.conv_transpose1d(x, w, groups=70),
        ],
        (1, 140, 5),
        (140, 2, 3),
        (1, 132, 3, 3),
        (66, 2, 3, 3),
    ),
    "conv_transpose2d with several options": _of(
        lambda x, w, b: functional.conv_transpose2d(x, w, b, (2, 3), (1, 0), (1, 2), 2, (2, 1)),
        (2, 4, 3, 4),
        (4, 3, 3, 2),
        (6,),
    ),
    "fold and unfold": _of(
        lambda x, y: [
            functional.unfold(x, (2, 3), dilation=(2, 1), padding=1, stride=(1, 2)),
            functional.unfold(x, 3, dilation=2),
            functional.fold(y, (6, 7), 3, dilation=2),
            functional.fold(y[:, :, :6], (6, 6), 3, stride=(1, 2), dilation=2, padding=(0, 1)),
        ],
        (2, 3, 6, 7),
        (2, 18, 6),
    ),
    "pools with several options": _of(
        lambda x: [
            *functional.max_pool2d(x, 3, 1, dilation=2, return_indices=True),
            *functional.max_pool2d(x, (2, 3), 2, 1, ceil_mode=True, return_indices=True),
            functional.max_pool2d(x, 3, 2, 1, dilation=(1, 2), ceil_mode=True),
            functional.avg_pool2d(x, 3, 2, 1, divisor_override=5),
            functional.avg_pool2d(x, (2, 3), 2, 1, ceil_mode=True, count_include_pad=False),
            functional.lp_pool2d(x.abs() + 1, 2, (2, 3), ceil_mode=True),
            *functional.adaptive_max_pool2d(x, (4, 3), return_indices=True),
            functional.max_unpool2d(
                *functional.max_pool2d(x, 2, return_indices=True), (2, 2), output_size=[9, 11]
            ),
        ],
        _IMAGE,
    ),
    "interpolate with several options": _of(
        lambda x: [
            functional.interpolate(x, scale_factor=(1.7, 0.6), mode="bilinear", align_corners=False),
            functional.interpolate(
                x, scale_factor=1.3, mode="bicubic", align_corners=False, recompute_scale_factor=True
            ),
            functional.interpolate(x, scale_factor=1.7, mode="nearest-exact"),
            functional.interpolate(x, (4, 5), mode="bilinear", antialias=True),
            functional.interpolate(x, (4, 5), mode="bicubic", antialias=True),
            functional.interpolate(x, (20, 5), mode="bicubic", antialias=True, align_corners=True),
            functional.interpolate(x, (4, 15), mode="bicubic", align_corners=True),
        ],
        _IMAGE,
    ),
    "grid_sample with a grid that has a gradient": _of(
        lambda x, g: [
            functional.grid_sample(x.detach(), g / 3, mode, padding, align_corners=False)
            for mode in ("bilinear", "bicubic")
            for padding in ("zeros", "border", "reflection")
        ],
        (2, 3, 4, 5),
        (2, 3, 2, 2),
    ),
    "pad of volumes": _of(
        lambda x: [
            functional.pad(x, (2, 1, 1, 2, 1, 1), "replicate"),
            functional.pad(x, (2, 1, 1, 2, 1, 1), "reflect"),
            functional.pad(x, (2, 1, 1, 2, 1, 1), "circular"),
            functional.pad(x, (-1, 2, 1, -1, 0, 1), value=2.5),
        ],
        (1, 2, 3, 4, 5),
    ),
    "attention with values of another width": _of(
        lambda q, k, v: [
            functional.scaled_dot_product_attention(q, k, value, scale=scale, is_causal=causal)
            for value in (v, v.transpose(1, 2).contiguous().transpose(1, 2))
            for scale in (None, 0.3)
            for causal in (False, True)
        ],
        (2, 3, 7, 16),
        (2, 3, 9, 16),
        (2, 3, 9, 24),
    ),
    "attention with a mask that broadcasts": _of(
        lambda q, k, v, m, n: [
            functional.scaled_dot_product_attention(q, k, v, m),
            functional.scaled_dot_product_attention(q, k, v, n, scale=0.3),
        ],
        (2, 3, 7, 16),
        (2, 3, 9, 16),
        (2, 3, 9, 16),
        (1, 1, 7, 9),
        (1, 3, 1, 9),
    ),
    "packed sequences": _of(
        lambda x: [
            part
            for first in (False, True)
            for packed in (
                pack_padded_sequence(
                    x.transpose(0, 1) if first else x, torch.tensor([2, 5, 1]), first, enforce_sorted=False
                ),
            )
            for part in (
                packed.data * 2,
                *pad_packed_sequence(packed, first, padding_value=-1.5, total_length=6),
            )
        ],
        (5, 3, 4),
    ),
    **{f"{name}, with channels last": _with_channels_last(*call) for name, call in _OF_IMAGES.items()},
    "dropout of nothing and of everything": _of(
        lambda x: [functional.dropout(x, 0.0), functional.dropout(x, 1.0), functional.dropout(x, 0.5, False)],
        _X,
    ),
}
"""Of models' layers, with options that are not the default."""

_Pair = Callable[[torch.Tensor, torch.Tensor], Any]


def _of_integers(function: _Pair) -> Operation:
    def run(to: Place, dtype: torch.dtype) -> Any:
        first, second = [0, 1, 7, 12, 100, 5], [3, 1, 2, 5, 7, 5]
        return function(to(torch.tensor(first, dtype=dtype)), to(torch.tensor(second, dtype=dtype)))

    return run


_ON_INTEGERS: dict[str, _Pair] = {
    "add with alpha 2": lambda a, b: torch.add(a, b, alpha=2),
    "sub with alpha 3": lambda a, b: torch.sub(a, b, alpha=3),
    "a scalar minus x": lambda a, b: 120 - a,
    "a division": lambda a, b: a / b,
    "a division rounded down": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "pow": lambda a, b: b**2,
    "pow of negative exponents": lambda a, b: (
        [
            torch.pow((a % 3).to(a.dtype) - 1, -(b % 4).to(a.dtype)),
            torch.pow(
                torch.tensor([1, 0, 2, 1], dtype=a.dtype, device=a.device), (b[:4] * 0 - 1).to(a.dtype)
            ),
        ]
        if a.dtype.is_signed and a.dtype is not torch.bool
        else []
    ),
    "in place, with alpha and value": lambda a, b: [
        call(a.repeat(4, 1), b.repeat(4, 1), a.repeat(4, 1)) for call in _WITH_FACTORS
    ],
    "gcd and lcm": lambda a, b: [torch.gcd(a, b), torch.lcm(a % 16, b)],
    "bitwise operators": lambda a, b: [a & b, a | b, a ^ b, ~a, b << 1, a >> 2],
    "logical operators": lambda a, b: [a.logical_and(b), a.logical_or(b), a.logical_not()],
    "comparisons": lambda a, b: torch.stack([a > b, a >= b, a < b, a <= b, a == b, a != b]),
    "comparisons with numbers that are no integers": lambda a, b: [
        part
        for number in (5.5, 0.25, -0.5, 12.75, _INF, -_INF, _NAN)
        for part in (
            a > number,
            a >= number,
            a < number,
            a <= number,
            a == number,
            a != number,
            a.clone().gt_(number),
            a.clone().le_(number),
            a.clone().eq_(number),
        )
    ],
    "remainders and quotients of numbers that are no integers": lambda a, b: [
        a % 2.5,
        a.fmod(2.5),
        torch.div(a, 2.5, rounding_mode="floor"),
        a.clamp(0.5, 6.5),
        a.pow(0.5),
        torch.where(a > b, a, 2.5),
        torch.lerp(a.float(), b.float(), 0.75),
    ],
    "maximum and minimum": lambda a, b: [torch.maximum(a, b), torch.minimum(a, b), a.clamp(2, 9)],
    "a sum with a floating-point number": lambda a, b: [a + 0.5, a * 2.5, a.float() + b],
    "a sum with a truth value": lambda a, b: [a + (b > 2), a * (b > 2), (a > 2) + (b > 2)],
    "a sum with another dtype": lambda a, b: [a + b.long(), a * b.short(), a + b.float()],
    "sums and products": lambda a, b: [a.sum(), a.prod(), a.cumsum(0), a.max(), a.min(), a.argmax()],
    "a mean in float32": lambda a, b: a.mean(dtype=torch.float32),
    "sorted": lambda a, b: [a.sort(descending=True).values, a.unique(), b.bincount(), a.topk(2).values],
    "as places": lambda a, b: [torch.arange(8, device=a.device)[b.long()], a[b.long() % 6]],
    "all and any": lambda a, b: [a.all(), a.any(), a.count_nonzero(), b.all()],
    "all, any and sums over several dimensions": lambda a, b: [
        reduce(a.reshape(3, 2), dims)
        for reduce in (torch.all, torch.any, torch.sum, torch.amax, torch.count_nonzero)
        for dims in ((0, 1), (-1,), [1], (1, 0))
    ],
}
INTEGERS: dict[str, Operation] = {name: _of_integers(function) for name, function in _ON_INTEGERS.items()}
"""Of integers."""

_OfLarge = Callable[[torch.Tensor, torch.Tensor, int], Any]


def _of_large(function: _OfLarge, base: int) -> Operation:
    def run(to: Place, dtype: torch.dtype) -> Any:
        first = torch.arange(base - 3, base + 8, dtype=dtype)
        return function(to(first), to(first.flip(0).roll(2)[::2].contiguous()), base)

    return run


_ON_LARGE: dict[str, _OfLarge] = {
    "powers": lambda a, b, base: [
        a**1,
        (a - base) ** 7 * 1001,
        (a[:1] * 0 + 3) ** 17,
        a.pow(torch.ones_like(a)),
    ],
    "sums": lambda a, b, base: [a + 1, a - b[:1], a.sum(), a.cumsum(0), a.cummax(0).values, torch.diff(a)],
    "a dot product": lambda a, b, base: torch.dot(a, a - a + 1),
    "products": lambda a, b, base: [a * 3, a[:1] * b, torch.addcmul(a, a - a + 1, a - a + 3)],
    "divisions": lambda a, b, base: [a // 3, a % 1001, torch.div(a, 7, rounding_mode="trunc"), a.fmod(1001)],
    "the largest and the smallest": lambda a, b, base: [
        a.max(),
        a.min(),
        a.argmax(),
        b.argmin(),
        a.clamp(base + 1, base + 3),
        torch.maximum(a[:6], b),
        torch.aminmax(b),
        b.amax(0),
        a.median(),
    ],
    "an order": lambda a, b, base: [
        b.sort().values,
        b.argsort(),
        b.topk(3).values,
        b.kthvalue(2).values,
        torch.searchsorted(a, b),
        torch.bucketize(b, a, right=True),
    ],
    "those that are equal": lambda a, b, base: [
        torch.unique(a, return_inverse=True, return_counts=True),
        torch.unique(a, sorted=False).sort().values,
        torch.unique_consecutive(a, return_counts=True),
        torch.isin(a, b),
        torch.isin(b, base + 1),
        a[:, None] == b,
        a == base + 1,
    ],
    "places": lambda a, b, base: [
        a.gather(0, b.long() % 11),
        a.scatter(0, b.long() % 11, b),
        a.scatter_add(0, b.long() % 11, b),
        a.scatter_reduce(0, b.long() % 11, b, "amax"),
        a.index_add(0, b.long() % 11, b),
        a.index_put((b.long() % 11,), b, accumulate=True),
        a.take(b.long() % 11),
        a.masked_fill(a > base, base + 1),
        torch.where(a > base, a, base + 1),
        a.roll(2),
        a.flip(0),
        a.repeat_interleave(2),
        a.abs(),
        -a,
    ],
    "bits": lambda a, b, base: [
        a & 1023,
        a | 1,
        a ^ 5,
        a >> 1,
        a << 1,
        torch.gcd(a, a - 1),
        torch.lcm(a[:2], a[:2]),
    ],
}
LARGE_INTEGERS: dict[torch.dtype, dict[str, Operation]] = {
    dtype: {
        f"{name} of integers above 2**{bits}": _of_large(function, 2**bits)
        for bits in beyond
        for name, function in _ON_LARGE.items()
    }
    for dtype, beyond in ((torch.int32, (24,)), (torch.int64, (24, 53)))
}
"""Of integers that float32 or float64 does not hold, and of which neighbours fall together there."""

_BESIDE_NUMBERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": torch.add,
    "sub": lambda x, y: [x - y, y - x],
    "mul": lambda x, y: [x * y, y * x],
    "div": torch.div,
    "pow": torch.pow,
    "remainder": torch.remainder,
    "maximum": torch.maximum,
    "atan2": torch.atan2,
    "comparisons": lambda x, y: [x == y, x < y, y < x],
    "where": lambda x, y: torch.where(x > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(x > 0, y),
    "bitwise_and": torch.bitwise_and,
    "add_": lambda x, y: x.clone().add_(y),
    "mul_": lambda x, y: x.clone().mul_(y),
}


def _beside(function: Callable[[torch.Tensor, torch.Tensor], Any], number: torch.dtype) -> Operation:
    def run(to: Place, dtype: torch.dtype) -> Any:
        return function(to(torch.tensor([0, 1, 3]).to(dtype)), torch.tensor(2, dtype=number))

    return run


NUMBERS_OF_THE_HOST: dict[torch.dtype, dict[str, Operation]] = {
    number: {
        f"{name} with a {str(number).removeprefix('torch.')} number of the host": _beside(function, number)
        for name, function in _BESIDE_NUMBERS.items()
    }
    for number in (torch.float64, torch.float32, torch.float16, *_INTEGERS, torch.bool)
}
"""By its dtype, of a tensor and a host's tensor without dimensions, which widens the result only if it is of
a higher kind."""

MADE: dict[str, Callable[[str], Any]] = {
    "arange": lambda device: [
        torch.arange(0, 1, 0.1, device=device),
        torch.arange(7, -3, -2, device=device),
        torch.arange(5.0, device=device),
        torch.arange(2, 40, 3, device=device, dtype=torch.int32),
    ],
    "linspace and logspace": lambda device: [
        torch.linspace(-1, 2, 13, device=device),
        torch.linspace(3, 1, 1, device=device),
        torch.logspace(0, 2, 5, base=2, device=device),
    ],
    "full, ones and zeros": lambda device: [
        torch.full((3, 5), 2.5, device=device),
        torch.full((3,), 7, device=device),
        torch.full((2,), True, device=device),
        torch.ones(3, 5, device=device, dtype=torch.int8),
        torch.zeros(0, 4, device=device),
        torch.zeros((), device=device),
    ],
    "eye": lambda device: [torch.eye(3, 5, device=device), torch.eye(4, device=device, dtype=torch.int64)],
    "like another": lambda device: [
        torch.full_like(torch.ones(3, 5, device=device).t(), 2),
        torch.ones_like(torch.zeros(2, device=device).int()),
        torch.zeros(3, device=device).new_full((2, 2), 4),
        torch.zeros(3, device=device).new_tensor([1.5, 2]),
        torch.zeros(3, device=device).new_zeros(2, 3),
        torch.zeros(3, device=device).new_ones((4,), dtype=torch.int16),
        torch.zeros_like(torch.ones(2, 3), device=device),
        torch.ones_like(torch.ones(2, 3), device=device),
        torch.full_like(torch.ones(2, 3), 4, device=device),
        torch.ones(3).new_full((2,), 5, device=device),
        torch.ones(3).new_zeros((2,), device=device),
        torch.ones(3).new_tensor([6.0], device=device),
    ],
    "from data": lambda device: [
        torch.tensor([[1, 2], [3, 4]], device=device),
        torch.tensor([1.5, 2], device=device, dtype=torch.float32),
        torch.as_tensor([True, False], device=device),
        torch.tensor(3, device=device),
        torch.tensor([], device=device),
        torch.asarray([1, 2], device=device),
        torch.as_tensor(torch.arange(3), device=device),
        torch.arange(3).to(device),
        torch.nn.Linear(2, 3, device=device).weight * 0,
    ],
    "indices of triangles": lambda device: [
        torch.tril_indices(4, 5, -1, device=device),
        torch.triu_indices(4, 5, 1, device=device),
    ],
    "windows": lambda device: [torch.hann_window(9, device=device), torch.bartlett_window(8, device=device)],
}
"""That make tensors on a device."""
DRAWN: dict[str, Callable[[str], Any]] = {
    "rand and randn": lambda device: [
        torch.rand(3, device=device),
        torch.randn(2, 3, device=device),
        torch.rand_like(torch.ones(2), device=device),
        torch.randn_like(torch.ones(2), device=device),
        torch.normal(0.0, 1.0, (3,), device=device),
    ],
    "randint and randperm": lambda device: [
        torch.randint(5, (3,), device=device),
        torch.randint(2, 5, (3,), device=device),
        torch.randint_like(torch.ones(2), 5, device=device),
        torch.randperm(7, device=device),
    ],
    "empty": lambda device: [
        torch.empty(3, device=device),
        torch.empty_strided((2, 3), (1, 2), device=device),
        torch.empty_like(torch.ones(2), device=device),
        torch.ones(2).new_empty((3,), device=device),
        torch.ones(2).new_empty_strided((2, 3), (1, 2), device=device),
        torch.empty(1, 2, 3, 4, device=device, memory_format=torch.channels_last),
    ],
}
"""The same of numbers that may be any."""
MADE_ANYWHERE: dict[str, Callable[[], torch.Tensor]] = {
    "arange": lambda: torch.arange(3),
    "arange of floats": lambda: torch.arange(0, 1, 0.25),
    "linspace": lambda: torch.linspace(0, 1, 3),
    "empty": lambda: torch.empty(2),
    "zeros": lambda: torch.zeros(2),
    "full": lambda: torch.full((2,), 3),
    "eye": lambda: torch.eye(2),
    "tensor": lambda: torch.tensor([1, 2]),
    "rand": lambda: torch.rand(2),
    "randn": lambda: torch.randn(2),
    "randint": lambda: torch.randint(3, (2,)),
    "randperm": lambda: torch.randperm(3),
    "hann_window": lambda: torch.hann_window(4),
    "a weight of Linear": lambda: torch.nn.Linear(2, 3).weight,
}
"""That make tensors on the default device."""
