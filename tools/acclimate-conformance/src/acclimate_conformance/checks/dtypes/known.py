"""Checks of operators against results that are known without torch, on a host too."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import BrokenPromiseError, note_of_lacks, require, short
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.claims import lacking
from acclimate_conformance.checks.dtypes.arithmetic import supported
from acclimate_conformance.checks.dtypes.closed_forms import (
    LARGE,
    NUMBERS,
    ORDER,
    PLACED,
    PRODUCTS,
    SMALL_AND_LARGE,
    Known,
    On,
)
from acclimate_conformance.checks.dtypes.closed_forms_of_layers import LAYERS
from acclimate_conformance.checks.dtypes.closed_forms_of_matrices import MATRICES
from acclimate_conformance.checks.dtypes.operators import naming, require_alike
from acclimate_conformance.checks.dtypes.sampled.comparing import is_refusal

_UNITS = 1024
"""How many units in the last place of float32 a function may be off: Vulkan allows thousands."""
_SHARE_OF_16_BITS = 4e-2
"""How far results of 16 bits may be off, where so many units would be all."""
_STEPS_OF_TORCH = 1e-11
"""How far epsilons that torch adds move results of float64."""


def _require_known(
    accelerator: Accelerator,
    dtypes: list[torch.dtype],
    exactly: Mapping[str, Known],
    nearly: Mapping[str, Known],
) -> str | None:
    """Fails the check unless calls give their numbers.

    Args:
        accelerator: the accelerator.
        dtypes: of floating-point numbers.
        exactly: calls whose numbers are right to a few units in the last place.
        nearly: calls with products, which devices may round more.
    """
    absent: set[str] = set()
    for dtype, table in product(dtypes, (exactly, nearly)):
        on = On(accelerator.current_device_name(), dtype)
        for name, (call, wanted) in table.items():
            what = f"{name} in {short(dtype)}"
            try:
                found = call(on)
            except Exception as error:
                if not is_refusal(error) and not lacking(accelerator, error):
                    raise BrokenPromiseError(f"{what} raises {describe(error, whole=True)}") from error
                if dtype is torch.float32:  # few operators are there in all others
                    absent.add(name)
                continue
            several = isinstance(found, list)
            pairs = zip(found if several else [found], wanted if several else [wanted], strict=True)
            for number, (result, numbers) in enumerate(pairs):
                with naming(partial(call, on), number):
                    if table is exactly or not result.dtype.is_floating_point:
                        _require_numbers(result, numbers, what)
                    else:
                        exact = torch.tensor(numbers, dtype=result.dtype)
                        require_alike(result, exact, what, by_element=False)
    return note_of_lacks(absent)


def _require_numbers(result: torch.Tensor, wanted: Any, what: str) -> None:
    found = result.detach().cpu()
    if not found.dtype.is_floating_point:
        require(found.tolist() == wanted, f"{what} gives {found.tolist()}, not {wanted}")
        return
    exact, given = torch.tensor(wanted, dtype=torch.float64), found.double()
    told = f"{what} gives {found.tolist()}, not {wanted}"
    require(found.shape == exact.shape, told)
    units = _UNITS * torch.finfo(found.dtype).eps
    slack = exact.abs() * min(max(units, _STEPS_OF_TORCH), _SHARE_OF_16_BITS)
    near = (
        (given == exact) | (given.isnan() & exact.isnan()) | ((given - exact).abs() <= slack.nan_to_num(0, 0))
    )
    require(bool(near.all()), told)


@check(
    "supported_dtypes",
    promise="Operators give the numbers that are known without torch, with each option and at their edges.",
)  # fmt: skip
def known_results(accelerator: Accelerator) -> str | None:
    return _require_known(
        accelerator, supported(accelerator), {**ORDER, **PLACED, **NUMBERS}, {**PRODUCTS, **LAYERS}
    )


@check(
    "supported_dtypes",
    promise="Operators on matrices use the triangle, side and norm that is asked for; functions of small and "
    "large numbers lose no digits.",
)  # fmt: skip
def known_results_of_precision(accelerator: Accelerator) -> str | None:
    dtypes = [dtype for dtype in supported(accelerator) if dtype.itemsize > 2]
    return _require_known(accelerator, dtypes, SMALL_AND_LARGE, MATRICES)


@check(
    "supported_dtypes", "LongTensor",
    promise="Integers that no floating-point dtype holds stay exact in products, sequences, sums and orders.",
)  # fmt: skip
def known_results_of_large_integers(accelerator: Accelerator) -> str | None:
    return _require_known(accelerator, [torch.float32], LARGE, {})
