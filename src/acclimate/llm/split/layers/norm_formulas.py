"""The formulas of normalizations; a split one uses the statistics of all ranks (``changes.py`` sums them)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Formula = Literal["rms", "rms+1", "layer"]
_FORMULAS: tuple[Formula, ...] = ("rms", "rms+1", "layer")


def _epsilon_of(module: nn.Module) -> float:
    """Returns the small number that a normalization adds to the mean square."""
    for name in ("eps", "variance_epsilon", "epsilon", "norm_eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return 0.0


def formula_of(module: nn.Module) -> Formula | None:
    """Returns the formula that gives a normalization's results on random numbers, or ``None``."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or any(True for _ in module.children()):
        return None
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 4, len(weight), generator=random, dtype=torch.float64).to(weight.dtype)
    with torch.no_grad():
        found = module.forward(inputs)  # without hooks, because one of them records calls
        for formula in _FORMULAS:
            mean, square = inputs.mean(-1, keepdim=True), inputs.square().mean(-1, keepdim=True)
            expected = normalize(module, formula, inputs, mean, square)
            if isinstance(found, Tensor) and torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
                return formula
    return None


def normalize(module: nn.Module, formula: Formula, inputs: Tensor, mean: Tensor, square: Tensor) -> Tensor:
    """Normalizes by given statistics, with the module's own weight, bias and epsilon."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    dtype = inputs.dtype
    wide = inputs.to(torch.promote_types(dtype, torch.float32))
    if formula == "layer":
        wide = (wide - mean) * torch.rsqrt(square - mean.square() + _epsilon_of(module))
    else:
        wide = wide * torch.rsqrt(square + _epsilon_of(module))
    if formula == "rms+1":
        wide = wide * (1.0 + weight)  # type: ignore[operator]
    elif weight is not None:
        wide = wide * weight
    return (wide if bias is None else wide + bias).to(dtype)
