"""Checks of data types with hard values: their extremes, long sums, and copies between devices."""

from __future__ import annotations

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import equal, require, several_devices, short
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import supported
from acclimate_conformance.checks.dtypes.shapes import REARRANGED

_CLASSES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "IntTensor": torch.int32, "LongTensor": torch.int64,
    "ByteTensor": torch.uint8,
}  # fmt: skip
_LENGTH = 8192
# Of a sum of that many positive numbers; adding up in the dtype itself is off by far more.
_SUM_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 1e-3, torch.float64: 1e-10}


def extremes(dtype: torch.dtype) -> list[float]:
    """Values that need every bit of a dtype, and its special ones."""
    if dtype is torch.bool:
        return [False, True]
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        bits = limits.bits - 1
        return [limits.min, limits.max, limits.max - 1, 0, *(2**k + 1 for k in range(3, bits, 5))]
    found = torch.finfo(dtype)
    return [found.max, found.min, found.tiny, 1 + found.eps, -0.0, float("inf"), -float("inf"), float("nan")]


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes; any NaN is as good as another."""
    first, second = found.detach().cpu(), wanted.detach().cpu()
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.is_floating_point():
        defined = ~second.isnan()
        if not torch.equal(first.isnan(), second.isnan()):
            return False
        first, second = first[defined], second[defined]
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


@check(
    "supported_dtypes", *(name for name in _CLASSES if name != 'BFloat16Tensor'),
    promise="Tensor classes and copies keep the extreme values of each dtype, bit by bit.",
)  # fmt: skip
def extreme_values(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    dtypes = accelerator.supported_dtypes()
    # Copies first: a class is not at fault for what they lose.
    for dtype in (*dtypes, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        values = torch.tensor(extremes(dtype), dtype=dtype)
        there = values.to(device)
        for how, found in (("copied", there), ("cloned", there.clone()), ("joined", torch.cat([there]))):
            require(
                same_bits(found, values), f"{values.tolist()} in {short(dtype)}, {how}, are {found.tolist()}"
            )
    for name, dtype in _CLASSES.items():
        if hasattr(accelerator, name) and (dtype in dtypes or not dtype.is_floating_point):
            data = extremes(dtype)
            made = getattr(accelerator, name)(data)
            require(
                same_bits(made, torch.tensor(data, dtype=dtype)),
                f"{name}({data}) holds {made.cpu().tolist()}",
            )


@check(
    "supported_dtypes",
    promise="Products with an inner dimension of a model's size add up more precisely than their dtype.",
)  # fmt: skip
def long_products(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    generator = torch.Generator().manual_seed(0)
    left, right = torch.rand(4, _LENGTH, generator=generator), torch.rand(_LENGTH, 4, generator=generator)
    for dtype in supported(accelerator):
        rows, columns = left.to(dtype), right.to(dtype)
        exact = rows.double() @ columns.double()
        for what, found in (
            ("a product", rows.to(device) @ columns.to(device)),
            ("a linear layer", torch.nn.functional.linear(rows.to(device), columns.t().to(device))),
        ):
            apart = float((found.cpu().double() / exact - 1).abs().max())
            allowed = _SUM_TOLERANCE.get(dtype, 0.1)
            require(
                apart <= allowed,
                f"{what} over {_LENGTH} {short(dtype)} numbers is off by {apart:.1e}, not {allowed:.0e}",
            )
    if torch.get_float32_matmul_precision() == "highest":
        _require_digits_of_float32(device)


_DIGITS = 2.0**-14
"""How far a number of float32 may be off, that a product keeps: TF32 cuts it by up to 2**-11."""


def _require_digits_of_float32(device: str) -> None:
    """Fails the check unless products with an identity give back float32 numbers with most of their digits.

    Sums of many products hide how each was rounded.
    """
    generator = torch.Generator().manual_seed(1)
    for size in (3, 40, 129, 320):
        values = 1 + torch.rand(size, size, generator=generator)
        given, identity = values.to(device), torch.eye(size, device=device)
        zeros = torch.zeros(size, size, device=device)
        for what, found in {
            "a product with an identity": given @ identity,
            "a product of an identity": identity @ given,
            "a product of vectors": torch.stack([identity @ column for column in given.unbind(1)[:3]], 1),
            "a linear layer": torch.nn.functional.linear(given, identity),
            "a linear layer with a bias": torch.nn.functional.linear(identity, given.t(), zeros[0]),
            "addmm": torch.addmm(zeros, given, identity),
            "a batched product": torch.bmm(given[None], identity[None])[0],
            "a batched product that is added": torch.baddbmm(zeros[None], identity[None], given[None])[0],
            "an einsum": torch.einsum("ij,kj->ik", identity, given.t()),
        }.items():
            apart = float((found.cpu().double() / values[:, : found.shape[1]].double() - 1).abs().max())
            require(
                apart <= _DIGITS,
                f"{what} of {size} x {size} float32 numbers is off by {apart:.1e}, though "
                "torch.get_float32_matmul_precision() is 'highest'",
            )


_BEYOND_FLOATS = {torch.int64: 2**53 + 1, torch.int32: 2**24 + 1}
"""Integers that float64 or float32 do not hold."""


@check(
    "supported_dtypes", "synchronize",
    promise="Tensors of every dtype and layout keep their values when they are copied from device to device.",
)  # fmt: skip
def copies_between_devices(accelerator: Accelerator) -> None:
    names = several_devices(accelerator)
    for dtype in (*supported(accelerator), torch.int64, torch.int32, torch.uint8, torch.bool):
        whole = (torch.arange(61 * 97) % 251).reshape(61, 97)
        # With all digits of the dtype, which a detour through a smaller one loses.
        values = (whole.double() / 7).to(dtype) if dtype.is_floating_point else whole.to(dtype)
        values = values + _BEYOND_FLOATS.get(dtype, 0)
        for source, target in ((names[0], names[-1]), (names[-1], names[0])):
            there = values.to(source)
            for what, rearranged in REARRANGED.items():
                given, wanted = rearranged(there), rearranged(values)
                copied = torch.empty_like(wanted, device=target)
                copied.copy_(given)
                beside = torch.zeros(*wanted.shape, 2, dtype=dtype, device=target)[..., 0]
                beside.copy_(given)
                for how, found in (
                    ("to()", given.to(target)),
                    ("copy_()", copied),
                    ("a strided copy_()", beside),
                ):
                    require(
                        equal(found, wanted),
                        f"{short(dtype)} {what}: {how} from {source} to {target} changes the values",
                    )
