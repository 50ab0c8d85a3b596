"""Checks of data types at their edges: overflow, subnormal numbers, integers that wrap, and tails."""

from __future__ import annotations

from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import equal, note_of_lacks, require, short
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import numbers, supported
from acclimate_conformance.checks.dtypes.exactness import same_bits

_INF, _NAN = float("inf"), float("nan")
_Operation = Callable[[torch.Tensor], torch.Tensor]
_LENGTHS = (1, 3, 5, 7, 15, 17, 33, 65, 129, 1003, 4097)
"""Lengths around those of vectors and blocks, and none a multiple of either."""


@check(
    "supported_dtypes",
    promise="Casts and sums that overflow give infinity, and infinity and NaN stay what they are.",
)  # fmt: skip
def overflow(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    dtypes = supported(accelerator)
    for dtype in dtypes:
        most = torch.finfo(dtype).max
        values = torch.tensor([most, -most, 1.0, 0.0, -0.0, _INF, -_INF, _NAN], dtype=dtype)
        there = values.to(device)
        operations: dict[str, _Operation] = {
            "x + x": lambda x: x + x, "x * 4": lambda x: x * 4, "x - 3 x": lambda x: x - 3 * x,
            "1 / x": lambda x: 1 / x, "x / 0": lambda x: x / torch.zeros_like(x), "x * x": lambda x: x * x,
            "isinf(x)": torch.isinf, "isnan(x)": torch.isnan, "isfinite(x)": torch.isfinite,
            "x == x": lambda x: x == x, "x < inf": lambda x: x < _INF, "sign(x)": torch.sign,
            "maximum(x, 1)": lambda x: torch.maximum(x, torch.ones_like(x)),
            "x + x, in place": lambda x: x.clone().add_(x), "x.sum()": lambda x: x[:2].abs().sum(),
            "x.max()": lambda x: x.max(), "clamp(x)": lambda x: x.clamp(-1, 1),
            "nan_to_num(x)": lambda x: x.nan_to_num(0.0, 1.0, -1.0),
        }  # fmt: skip
        for what, compute in operations.items():
            _require_same(compute(there), compute(values), f"{what} for {values.tolist()} in {short(dtype)}")
        for target in dtypes:
            beyond = torch.tensor([3e38, -3e38, 1e6, 65519.0, 65520.0, -65520.0, _INF, _NAN]).to(dtype)
            what = f"a cast of {beyond.tolist()} from {short(dtype)} to {short(target)}"
            _require_same(beyond.to(device).to(target), beyond.to(target), what)


@check(
    "supported_dtypes",
    promise="Copies and casts keep subnormal numbers; operators compute with them or take them for zero.",
)  # fmt: skip
def subnormal_numbers(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    dtypes = supported(accelerator)
    for dtype in dtypes:
        limits = torch.finfo(dtype)
        least = torch.tensor(limits.smallest_normal, dtype=torch.float64)
        exact = torch.stack([least, least / 2, least * limits.eps, -least / 4, least * 3 / 4])
        values = exact.to(dtype)
        there = values.to(device)
        for how, found in {
            "copied": there, "cloned": there.clone(), "joined": torch.cat([there, there])[: len(values)],
            "indexed": there[torch.arange(len(values), device=device)], "negated twice": there.neg().neg(),
        }.items():  # fmt: skip
            require(
                same_bits(found, values), f"{values.tolist()} {how} in {short(dtype)} are {found.tolist()}"
            )
        for wider in dtypes:
            if torch.finfo(wider).smallest_normal < limits.smallest_normal * limits.eps:
                cast = there.to(wider)
                require(
                    equal(cast.double(), values.double()),
                    f"a cast of {values.tolist()} to {short(wider)} gives {cast.tolist()}",
                )
                back = cast.to(dtype)
                require(same_bits(back, values), f"a cast to {short(dtype)} gives {back.tolist()}")
        doubled, wanted = (there + there).cpu().double(), values.double() * 2
        near = (doubled == wanted) | ((doubled == 0) & (values.double().abs() < float(least)))
        require(bool(near.all()), f"{values.tolist()} doubled in {short(dtype)} are {doubled.tolist()}")


@check(
    "supported_dtypes", "IntTensor", "LongTensor", "ByteTensor",
    promise="Integers wrap around, divide towards minus infinity or zero as asked, and shift like torch's.",
)  # fmt: skip
def integers_at_their_edges(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    operations: dict[str, _Operation] = {
        "x + 1": lambda x: x + 1, "x * 3": lambda x: x * 3, "x // 7": lambda x: x // 7,
        "x % 7": lambda x: x % 7, "x / 7, rounded to 0": lambda x: torch.div(x, 7, rounding_mode="trunc"),
        "x & 5": lambda x: x & 5, "x << 1": lambda x: x << 1, "x >> 1": lambda x: x >> 1,
        "abs(x)": lambda x: x.abs(), "a sum": lambda x: x.sum(), "a running sum": lambda x: x.cumsum(0),
        "a sort": lambda x: x.sort().values, "x > 0": lambda x: x > 0, "argmax": lambda x: x.argmax(),
        "a cast to bool": lambda x: x.to(torch.bool), "a cast to int32": lambda x: x.to(torch.int32),
        "a cast to uint8": lambda x: x.to(torch.uint8), "a product": lambda x: x[-3:].prod(),
    }  # fmt: skip
    lacking = set()
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        limits = torch.iinfo(dtype)
        small = [-7, -1, -8] if limits.min < 0 else [7, 1, 8]
        values = torch.tensor([limits.min, limits.max, limits.max - 1, 0, *small, 3], dtype=dtype)
        there = values.to(device)
        for what, compute in operations.items():
            _require_same(compute(there), compute(values), f"{what} for {values.tolist()} in {short(dtype)}")
        for what, compute in _ORDERS.items():
            try:
                found = compute(there)
            except NotImplementedError:
                lacking.add(what)
                continue
            _require_same(found, compute(values), f"{what} for {values.tolist()} in {short(dtype)}")
        for extreme in (limits.max, limits.min):
            many = torch.full((3, 70), extreme, dtype=dtype)
            many_there = many.to(device)
            for what, compute in _BEYOND.items():
                found, wanted = compute(many_there), compute(many)
                _require_same(found, wanted, f"{what} for 3 times 70 {extreme} in {short(dtype)}")
    return note_of_lacks(lacking)


_MILLIONS = 2**31 // 255 + 1003
"""How many of the largest number of 8 bits int32 does not hold the sum of."""
_ORDERS: dict[str, _Operation] = {
    "topk": lambda x: x.topk(3).values,
    "the smallest of topk": lambda x: x.topk(3, largest=False).values,
    "the place of the smallest of topk": lambda x: x[:3].topk(2, largest=False).indices,
    "a descending sort": lambda x: x.sort(descending=True).values,
    "a stable sort": lambda x: x.sort(stable=True).indices,
    "a stable, descending sort": lambda x: x.sort(stable=True, descending=True).indices,
    "argsort": lambda x: x[:3].argsort(),
    "argmin": lambda x: x[:3].argmin(),
    "min": lambda x: x.min(),
    "min of a dimension": lambda x: x.min(0).values,
    "max": lambda x: x.max(),
    "amin and amax": lambda x: torch.stack([x.amin(0), x.amax(0)]),
    "aminmax": lambda x: torch.stack(list(x.aminmax())),
    "kthvalue": lambda x: x.kthvalue(1).values,
    "median": lambda x: x.median(),
    "cummin": lambda x: x.flip(0).cummin(0).values,
    "cummax": lambda x: x.cummax(0).values,
    "minimum and maximum": lambda x: torch.stack([x.minimum(x.flip(0)), x.maximum(x.flip(0))]),
    "unique": lambda x: x.unique(),
    "comparisons": lambda x: torch.stack([x < x.flip(0), x >= x.flip(0), x == x.flip(0)]),
}
"""Operators that compare: the smallest number of a dtype has no negative, and differences wrap around."""
_BEYOND: dict[str, _Operation] = {
    "a sum": lambda x: x.sum(),
    "a sum of rows": lambda x: x.sum(0),
    "a sum of columns": lambda x: x.sum(-1),
    "a sum of every dimension": lambda x: x.sum((0, 1), keepdim=True),
    "nansum": lambda x: x.nansum(),
    "a sum in int64": lambda x: x.sum(-1, dtype=torch.int64),
    "a running sum": lambda x: x.cumsum(-1),
    "a product": lambda x: x[:, :2].prod(-1),
    "a running product": lambda x: x[:, :3].cumprod(-1),
    "a sum that stays in its dtype": lambda x: x.sum(dtype=x.dtype),
    "a sum in place": lambda x: x.clone().add_(x),
    "index_add": lambda x: x.index_add(0, _first_row(x), x),
    "scatter_add": lambda x: x.scatter_add(1, torch.zeros_like(x, dtype=torch.int64), x),
    "trace": lambda x: x[:, :3].trace(),
    "count_nonzero": lambda x: x.count_nonzero(),
    "a sum of millions": lambda x: (
        x[:1, :1].expand(_MILLIONS, 1).contiguous().sum() if x.itemsize < 4 else x.sum()
    ),
}
"""Operators on numbers whose sum or product is beyond their dtype: torch adds integers up in int64."""


def _first_row(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(x), dtype=torch.int64, device=x.device)


@check(
    "supported_dtypes",
    promise="Operators and copies treat every element of a tensor of any length, from any place in memory.",
    timeout_s=240,
)  # fmt: skip
def tails(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    operations: dict[str, _Operation] = {
        "x + x": lambda x: x + x, "x * 2": lambda x: x * 2, "relu": torch.relu, "a copy": lambda x: x.clone(),
        "x < 1": lambda x: x < 1, "flip": lambda x: x.flip(0), "a cast": lambda x: x.float(),
        "masked_fill": lambda x: x.masked_fill(x > 1, 0), "amax": lambda x: x.amax(), "-x": lambda x: -x,
        "cat": lambda x: torch.cat([x, x]), "argmin": lambda x: x.argmin(),
        "fill": lambda x: torch.full_like(x, 3), "a sum of integers": lambda x: (x * 4).int().sum(),
        "where": lambda x: torch.where(x > 0, x, -x),
    }  # fmt: skip
    for dtype in supported(accelerator):
        for length in _LENGTHS:
            whole = numbers(length + 3, seed=length).to(dtype)
            whole_there = whole.to(device)
            for skip in (0, 1, 3):
                values, there = whole[skip : skip + length], whole_there[skip : skip + length]
                where = f"of {length} elements in {short(dtype)}, from element {skip} on"
                for what, compute in operations.items():
                    _require_same(compute(there), compute(values), f"{what} {where}")
                beside = torch.full((length + 3,), 9.0, dtype=dtype, device=device)
                beside[skip : skip + length].copy_(values)
                wanted = torch.full((length + 3,), 9.0, dtype=dtype)
                wanted[skip : skip + length] = values
                _require_same(beside, wanted, f"a copy into a part {where}")
                beside[skip : skip + length].zero_()
                wanted[skip : skip + length] = 0
                _require_same(beside, wanted, f"zeros in a part {where}")


def _require_same(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if found.shape != wanted.shape or not same_bits(found.reshape(-1), wanted.reshape(-1)):
        first, second = found.detach().cpu().flatten(), wanted.flatten()
        shape = f"{short(found.dtype)} of shape {tuple(found.shape)}"
        if first.shape == second.shape and first.dtype == second.dtype:
            differing = ~((first == second) | (first.isnan() & second.isnan()))
            place = int(differing.nonzero()[0]) if bool(differing.any()) else 0
            require(False, f"{what}: element {place} is {first[place].item()}, not {second[place].item()}")
        require(False, f"{what} gives {shape}, not {short(wanted.dtype)} of shape {tuple(wanted.shape)}")
    require(True, "")
