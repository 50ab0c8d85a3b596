"""Checks of conversions and copies: every pair of dtypes, lazy views, and sources that change afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    device_names,
    equal,
    is_host,
    refused,
    require,
    short,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import supported
from acclimate_conformance.checks.dtypes.exactness import same_bits

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_NUMBERS = [0.0, 0.25, 0.5, 0.9, 1.0, 1.5, 2.75, 3.0, 100.0, 127.0]
_LARGE = [1e5, -7e4, 65504.0, 3e38, -3e38, 1e-6, 6e-8, 1e-38, float("inf"), -float("inf"), float("nan")]
"""Of a floating-point number, which a detour through a smaller dtype would lose."""
_LARGE_INTEGERS = [2**53 + 1, -(2**40) - 1, 2**62 + 1, -(2**63), 70_000, 0]
_EXACT = [0, 1, 2**24 + 1, -(2**24) - 1, 2**31 - 1]
_LENGTH = 20_011
_LATER_S = 0.1  # in which a copy that goes on in another thread shows


@check(
    "supported_dtypes", "synchronize",
    promise="Conversions between all dtypes are torch's: on the device, on the way to it, and back.",
)  # fmt: skip
def conversions(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    kinds = (*supported(accelerator), *_WHOLE, *filter(partial(_is_stored, device), _UNSIGNED))
    for source in kinds:
        numbers = torch.tensor(_NUMBERS).to(source)
        exact = torch.tensor(_EXACT if source in (torch.int64, torch.int32) else _NUMBERS).to(source)
        large = torch.tensor(_LARGE if source.is_floating_point else _LARGE_INTEGERS).to(source)
        if source in _UNSIGNED:  # around half of the largest number, from which on signed ones are negative
            most = torch.iinfo(source).max
            exact = torch.tensor([0, 1, most // 2, most // 2 + 1, most - 1, most], dtype=source)
        for values in (numbers, exact, large):
            for target in kinds:
                if source.is_floating_point and target in (torch.int8, torch.uint8) and values is exact:
                    continue  # undefined beyond the range of the integer
                if source.is_floating_point and target in (*_WHOLE[:-1], *_UNSIGNED) and values is large:
                    continue
                wanted = values.to(target)
                of = f"of {values.tolist()} from {short(source)} to {short(target)}"
                on_it = torch.empty(len(values), dtype=target, device=device)
                back = torch.empty(len(values), dtype=target)
                ways: dict[str, Callable[[], torch.Tensor]] = {
                    "on the device": lambda v=values, t=target: v.to(device).to(t),  # type: ignore[misc]
                    "on the way to the device": lambda v=values, t=target: v.to(device, t),  # type: ignore[misc]
                    "on the way back": lambda v=values, t=target: v.to(device).to("cpu", t),  # type: ignore[misc]
                    "by copy_() to the device": lambda v=values, o=on_it: o.copy_(v),  # type: ignore[misc]
                    "by copy_() to the host": lambda v=values, b=back: b.copy_(v.to(device)),  # type: ignore[misc]
                }
                for how, convert in ways.items():
                    found = convert().cpu()
                    require(
                        same_bits(found, wanted), f"a conversion {of}, {how}, is {found.tolist()}, not "
                        f"{wanted.tolist()}",
                    )  # fmt: skip


def _is_stored(device: str, dtype: torch.dtype) -> bool:
    """Whether the device holds numbers of a dtype that torch asks of no device."""
    with suppress(Exception):  # a device may raise any error
        torch.ones(2, dtype=torch.uint8).to(dtype).to(device).to(torch.int64).cpu()
        return True
    return False


def _without_waiting(accelerator: Accelerator) -> Callable[[torch.Tensor], torch.Tensor]:
    def copied(x: torch.Tensor) -> torch.Tensor:
        there = x.to("cpu", non_blocking=True)
        accelerator.synchronize()
        return there

    return copied


def _like(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


def _wider(tensor: torch.Tensor) -> torch.dtype:
    """Another dtype that holds the numbers of float32 and complex64 in the examples."""
    return torch.complex64 if tensor.is_complex() else torch.float16


@check(
    "supported_dtypes", "synchronize",
    promise="Copies of conjugated and negated views have the view's elements, in each of torch's ways.",
)  # fmt: skip
def copies_of_lazy_views(accelerator: Accelerator) -> None:
    values = torch.tensor([1 + 2j, -3 - 0.5j, 4j])
    for name in device_names(accelerator):
        there = values.to(name)
        views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "a conjugated view": torch.conj, "its imaginary part": lambda x: x.conj().imag,
            "a conjugated transposed view": lambda x: x.reshape(1, 3).mH, "a real view": torch.view_as_real,
        }  # fmt: skip
        for what, view in views.items():
            wanted = view(values).resolve_conj().resolve_neg().clone()
            ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
                "cpu()": lambda x: x.cpu(), "to(the host, non_blocking=True)": _without_waiting(accelerator),
                "clone()": lambda x: x.clone().cpu(),
                "resolve_conj()": lambda x: x.resolve_conj().resolve_neg().cpu(),
                "contiguous()": lambda x: x.contiguous().cpu(),
                "copy_()": lambda x: torch.empty_like(x.cpu()).copy_(x),
                "an operator": lambda x: (x * 1).cpu(),
                "to(another dtype)": lambda x: x.to(_wider(x)).cpu().to(x.dtype),
                "to() of another device": lambda x: x.to(device_names(accelerator)[-1]).cpu(),
                "copy_() to another device": lambda x: torch.zeros(
                    x.shape, dtype=x.dtype, device=device_names(accelerator)[-1]
                ).copy_(x, non_blocking=True).cpu(),
                "copy_() on the device": lambda x: torch.empty(x.shape, **_like(x)).copy_(x).cpu(),
                "copy_() to a column": lambda x: torch.empty(*x.shape, 2, **_like(x))[..., 0].copy_(x).cpu(),
                "cat": lambda x: torch.cat([x, x])[: len(x)].cpu(),
                "indexing": lambda x: x[torch.arange(len(x), device=x.device)].cpu(),
                "tolist()": lambda x: torch.tensor(x.tolist(), dtype=x.dtype),
            }  # fmt: skip
            for how, copy in ways.items():
                found = copy(view(there)).resolve_conj().resolve_neg()
                require(equal(found, wanted), f"{what} on {name}, by {how}, is {found.tolist()}")
        onto = torch.zeros_like(values).to(name)
        onto.conj().copy_(there)
        require(equal(onto, values.conj()), f"a copy into a conjugated view on {name} gives {onto.tolist()}")


@check(
    "synchronize", "current_device_name",
    promise="A copy from or to ordinary memory, non-blocking too, may be followed by changes of its source.",
    of="tensors",
)  # fmt: skip
def ordinary_memory_can_change(accelerator: Accelerator) -> None:
    if is_host(accelerator):
        raise NotOfferedError("its memory is the host's, to which nothing is copied")
    device = accelerator.current_device_name()
    copies: list[tuple[torch.Tensor, str]] = []
    for length in (100, _LENGTH):
        for non_blocking in (False, True):
            values = torch.arange(float(length))
            there = values.to(device, non_blocking=non_blocking)
            into = torch.zeros(length, device=device)
            into.copy_(values, non_blocking=non_blocking)
            values.zero_()
            what = f"a copy of {length} numbers with non_blocking={non_blocking}"
            accelerator.synchronize()
            for found in (there, into):
                require(
                    equal(found, torch.arange(float(length))),
                    f"{what} from ordinary memory has what was written there afterwards",
                )
            copies.append((into, what))
            back = torch.zeros(length)
            back.copy_(there, non_blocking=non_blocking)
            accelerator.synchronize()
            there.zero_()
            accelerator.synchronize()
            require(equal(back, torch.arange(float(length))), f"{what} to ordinary memory is wrong")
            copies.append((back, what))
    time.sleep(_LATER_S)
    for copy, what in copies:
        require(equal(copy, torch.arange(float(len(copy)))), f"{what} has other numbers {_LATER_S:g} s later")


@check(
    "supported_dtypes", "current_device_name",
    promise="Operators raise an error for shapes that do not fit, for tensors on different devices, and for "
    "matrices that have no inverse.",
)  # fmt: skip
def wrong_shapes_are_refused(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    table, square = torch.ones(3, 2, device=device), torch.ones(3, 3, device=device)
    calls: dict[str, Callable[[], object]] = {
        "a product of shapes that do not fit": lambda: table @ square,
        "a sum of shapes that do not fit": lambda: table + torch.ones(4, device=device),
        "a view of another number of elements": lambda: table.view(5),
        "cat of shapes that do not fit": lambda: torch.cat([table, square]),
        "a reduction over a dimension that is absent": lambda: table.sum(2),
        "a place beyond the end": lambda: table[7],
        "an inverse of a singular matrix": lambda: torch.linalg.inv(torch.ones(2, 2, device=device)),
        "a solution with a singular matrix": lambda: torch.linalg.solve(0 * square, table),
        "cholesky of a matrix that is not positive": lambda: torch.linalg.cholesky(-square),
    }
    if not is_host(accelerator):
        calls["a sum with a tensor on the host"] = lambda: table + torch.ones(3, 2)
    for what, call in calls.items():
        with refused(what, RuntimeError, IndexError):
            call()
    for name, function in _NEED_INVERSES.items():
        regular = torch.eye(3)
        for what, batch in {
            "a matrix": torch.zeros(3, 3),
            "the second of three matrices": torch.stack([regular, torch.zeros(3, 3), regular]),
            "the last of four matrices": torch.stack([regular, regular, regular, 0 * regular]).view(
                2, 2, 3, 3
            ),
        }.items():
            with suppress(RuntimeError):  # this release of torch may take it
                function(batch)
                continue
            with refused(f"{name}, where {what} is singular,", RuntimeError):
                function(batch.to(device))


_NEED_INVERSES: dict[str, Callable[[torch.Tensor], object]] = {
    "torch.linalg.inv": torch.linalg.inv,
    "torch.linalg.inv_ex with check_errors": lambda x: torch.linalg.inv_ex(x, check_errors=True),
    "torch.linalg.solve": lambda x: torch.linalg.solve(x, torch.ones_like(x)),
    "torch.linalg.solve of rows": lambda x: torch.linalg.solve(x, torch.ones_like(x), left=False),
    "torch.linalg.solve_ex with check_errors": lambda x: torch.linalg.solve_ex(
        x, torch.ones_like(x), check_errors=True
    ),
    "torch.linalg.cholesky": torch.linalg.cholesky,
    "torch.linalg.cholesky_ex with check_errors": lambda x: torch.linalg.cholesky_ex(x, check_errors=True),
    "torch.linalg.lu_factor": torch.linalg.lu_factor,
    "torch.linalg.lu_factor_ex with check_errors": lambda x: torch.linalg.lu_factor_ex(x, check_errors=True),
    "torch.linalg.ldl_factor": torch.linalg.ldl_factor,
    "torch.linalg.ldl_factor_ex with check_errors": lambda x: torch.linalg.ldl_factor_ex(
        x, check_errors=True
    ),
    "torch.linalg.matrix_power of -1": lambda x: torch.linalg.matrix_power(x, -1),
}
"""Of a matrix or a batch of them, none of which may be singular."""
