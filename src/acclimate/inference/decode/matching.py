"""Finds the operation that turns one recorded tensor into another, by trying the known ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.inference.decode.description import ACTIVATIONS, Norm, NotRepresentedError, Part, Product

_SLACK = 4.0
"""The largest difference, in units in the last place, between a few rounded operations in other orders."""


def tolerance(dtype: torch.dtype) -> float:
    """Returns the largest relative difference of results that count as equal."""
    return _SLACK * torch.finfo(dtype).eps


def distance(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, relative to the largest expected value."""
    if found.shape != expected.shape:
        return math.inf
    if torch.equal(found, expected):
        return 0.0
    gap = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30)
    return float(gap) if gap == gap else math.inf


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether results are equal except for rounding."""
    return distance(found, expected) <= tolerance(expected.dtype)


def is_sum(parts: Sequence[Tensor], result: Tensor) -> bool:
    """Whether a tensor is the sum of others except for rounding.

    Each element has its own tolerance: trained models have a few elements that are 1,000 times larger than
    the others, so a common tolerance would hide a missing summand.
    """
    if any(part.shape != result.shape for part in parts):
        return False
    wide = [part.double() for part in parts]
    limit = tolerance(result.dtype) * sum(part.abs() for part in wide)
    return bool(((sum(wide) - result.double()).abs() <= limit).all())


def numbers_of(config: Any) -> list[float]:
    """Returns the numbers in a model's configuration, and values that models commonly derive from them."""
    found = {1.0}
    for value in config.to_dict().values():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value:
            found |= {float(value), 1 / float(value)}
            if value > 0:
                found |= {math.sqrt(value), 1 / math.sqrt(value)}
    return sorted(found, key=lambda each: (each != 1.0, abs(each - 1.0)))


def multiplier(x: Tensor, y: Tensor, candidates: Iterable[float]) -> float | None:
    """Returns the factor that turns ``x`` into ``y``; ``None``: none does."""
    if torch.equal(x, y):
        return 1.0
    if x.shape != y.shape:
        return None
    a, b = x.double(), y.double()
    square = float((a * a).sum())
    if square == 0.0:
        return None
    estimate = float((a * b).sum()) / square
    limit = 8 * torch.finfo(y.dtype).eps
    likely = [c for c in candidates if abs(c - estimate) <= limit * max(abs(estimate), 1e-30)]
    rounded = [float(torch.tensor(c, dtype=y.dtype)) for c in likely]
    choices = [*likely, *rounded, estimate]
    gaps = [distance((x.float() * c).to(y.dtype), y) for c in choices]
    best = min(range(len(choices)), key=lambda i: gaps[i])
    return choices[best] if gaps[best] <= tolerance(y.dtype) else None


def norm_of(module: nn.Module, x: Tensor, y: Tensor) -> Norm | None:
    """Returns the normalization that a module computes, from one call; ``None`` if it is unknown."""
    own = dict(module.named_parameters())
    weights = [p for n, p in own.items() if "bias" not in n.rsplit(".", 1)[-1]]
    biases = [p for n, p in own.items() if "bias" in n.rsplit(".", 1)[-1]]
    if len(weights) > 1 or len(biases) > 1 or x.shape != y.shape:
        return None
    weight = weights[0].detach() if weights else None
    bias = biases[0].detach() if biases else None
    if weight is not None and tuple(weight.shape) != tuple(x.shape[x.dim() - weight.dim() :]):
        return None
    eps = {float(v) for n, v in vars(module).items() if isinstance(v, float) and 0 < v < 0.1}
    best: tuple[float, Norm] | None = None
    for value in sorted(eps | ({1e-5, 1e-6} if not eps else set())):
        for kind in ("rms", "layer"):
            for adds_one in (False, True) if weight is not None else (False,):
                for first in (True, False):
                    norm = Norm(kind, weight, bias, value, adds_one, first)
                    gap = distance(norm(x), y)
                    if best is None or gap < best[0]:
                        best = gap, norm
                    if gap == 0.0:
                        return norm
    return best[1] if best is not None and best[0] <= tolerance(y.dtype) else None


def activation_of(gate: Tensor | None, up: Tensor, result: Tensor) -> str | None:
    """Returns the name of the activation in an MLP; ``None``: it is another one."""
    best: tuple[float, str] | None = None
    for name, function in ACTIVATIONS.items():
        found = function(up) if gate is None else function(gate) * up
        gap = distance(found, result)
        if best is None or gap < best[0]:
            best = gap, name
    return best[1] if best is not None and best[0] <= tolerance(result.dtype) else None


def _blocks_in(source: Tensor, size: int) -> Tensor | None:
    """Cuts the last dimension of tokens x columns: blocks x tokens x size."""
    if source.shape[-1] % size:
        return None
    return source.reshape(source.shape[0], -1, size).transpose(0, 1)


def find_blocks(
    heads: Tensor, source: Tensor, change: Callable[[Tensor], Tensor] = lambda x: x
) -> list[int] | None:
    """Returns for each head its block of columns in ``source``; ``None`` if a head is not in it.

    Args:
        heads: heads x tokens x size.
        source: tokens x columns.
        change: the function that turns blocks (blocks x tokens x size) into heads.
    """
    blocks = _blocks_in(source, heads.shape[-1])
    if blocks is None:
        return None
    changed = change(blocks)
    largest = heads.float().abs().max().clamp(min=1e-30)
    found = []
    for head in heads:
        gaps = (changed.float() - head.float()).abs().amax((1, 2)) / largest
        best = int(gaps.argmin())
        if not gaps[best] <= tolerance(heads.dtype):
            return None
        found.append(best)
    return found if len(set(found)) == len(found) else None


def product_of(module: nn.Module, blocks: Sequence[int], size: int) -> Product:
    """Returns a product of blocks of columns; adjacent ones are one part."""
    parts: list[Part] = []
    for block in blocks:
        last = parts[-1] if parts else None
        if last is not None and last.first + last.count == block * size:
            parts[-1] = Part(module, last.first, last.count + size)
        else:
            parts.append(Part(module, block * size, size))
    return Product(tuple(parts))


def check_mask(rule: Callable[..., Any] | None, window: int | None) -> None:
    """Checks that a mask is causal: a query sees itself and earlier keys, at most ``window`` in all.

    Raises:
        NotRepresentedError: it is another mask.
    """
    if rule is None or (window is not None and window < 1):
        raise NotRepresentedError("attention has no mask that can be read")
    around = {0, 1, 2, 5, 17, 64, 257, 1000, 5000, 40000}
    for edge in [] if window is None else [window]:
        around |= {edge - 2, edge - 1, edge, edge + 1, 2 * edge + 3}
    near = sorted(place for place in around if place >= 0)
    keys = sorted({p + d for p in near for d in (-1, 0, 1)} | {
        q - e for q in near for e in ([] if window is None else [window - 1, window, window + 1])
    })  # fmt: skip
    keys = [key for key in keys if key >= 0]
    q = torch.tensor(near)[:, None]
    k = torch.tensor(keys)[None]
    expected = (k <= q) if window is None else (k <= q) & (k > q - window)
    zero = torch.zeros((), dtype=torch.long)
    found = rule(zero, zero, q, k)
    if not isinstance(found, Tensor) or not torch.equal(found.expand_as(expected), expected):
        raise NotRepresentedError("attention has a mask other than causal or a sliding window")
