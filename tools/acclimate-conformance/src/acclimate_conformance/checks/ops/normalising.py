"""Checks of an op that normalises rows, as an extension's package may have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import NotOfferedError, equal, require, require_close, short
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import supported
from acclimate_conformance.checks.ops.builders import builder_of, usable_builders

_SHAPES = (
    (1, 1), (3, 7), (2, 3, 33), (5, 256), (2, 1024), (3, 1025), (2, 2048), (1, 5003), (2, 40_003), (300, 96),
    (0, 8),
)  # fmt: skip
"""The last dimension is normalised: below, at and beyond the sizes that a block of threads takes at once."""


def _require_any_layout(op: Any, dtype: torch.dtype, device: str, name: str) -> None:
    """Rows with gaps, from an odd place, in another order, of one repeated row, and a weight with gaps."""
    base = (torch.arange(320.0) % 37 - 12).view(8, 40).to(dtype)
    layouts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "every second column": lambda x: x[:, ::2], "transposed": lambda x: x.t(),
        "from an odd place": lambda x: x[1:, 3:],
        "of batches in another order": lambda x: x.view(2, 4, 40).transpose(0, 1),
        "of one repeated row": lambda x: x[2:3].expand(5, 40),
    }  # fmt: skip
    for layout, view in layouts.items():
        x = view(base)
        weights = torch.linspace(-1, 2, 2 * x.shape[-1]).to(dtype)[::2]
        try:
            found = op(view(base.to(device)), weights.to(device), 1e-6)
        except (RuntimeError, ValueError):  # an op may ask for rows in a row
            continue
        wanted = functional.rms_norm(x.double(), x.shape[-1:], weights.double(), 1e-6)
        require_close(found, wanted, dtype, f"rms_norm() of {name} of a tensor {layout}")


@check(
    "create_op_builder", "op_builders",
    promise="An op called rms_norm normalises rows of any length like torch's, in each dtype that it takes.",
    timeout_s=600, once=True,
)  # fmt: skip
def normalising_ops_compute(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    called = [name for name in accelerator.op_builders if "RMSNorm" in name]
    absent = "it has no op builder that is called after RMSNorm, or none can be built here"
    usable = usable_builders(accelerator, called, absent)
    refused: list[str] = []
    computed = False
    for name in usable:
        op = getattr(builder_of(accelerator, name).load(), "rms_norm", None)
        if op is None:
            refused.append(f"{name} has no rms_norm()")
            continue
        for dtype in supported(accelerator):
            try:
                op(torch.ones(2, 8, dtype=dtype, device=device), torch.ones(8, dtype=dtype, device=device))
            except (RuntimeError, ValueError, TypeError):
                refused.append(f"{name} takes no {short(dtype)}")
                continue
            computed = True
            _require_any_layout(op, dtype, device, name)
            for shape in _SHAPES:
                for eps in (1e-6, 0.25):
                    generator = torch.Generator().manual_seed(len(shape))
                    # Its columns grow, so that each of them counts.
                    x = torch.randn(shape, generator=generator) * torch.linspace(0.1, 4, shape[-1])
                    weight = torch.randn(shape[-1], generator=generator).to(dtype)
                    x = x.to(dtype)
                    given = x.to(device)
                    normed = op(given, weight.to(device), eps)
                    what = f"rms_norm() of {name}, of shape {shape} with eps {eps},"
                    require(normed.shape == x.shape and normed.dtype == dtype, f"{what} is {normed.dtype}")
                    require(equal(given, x), f"{what} changes its input")
                    wanted = functional.rms_norm(x.double(), shape[-1:], weight.double(), eps)
                    if x.numel():
                        require_close(normed, wanted, dtype, what)
    if not computed:
        raise NotOfferedError("; ".join(refused))
    return "; ".join(refused) or None
