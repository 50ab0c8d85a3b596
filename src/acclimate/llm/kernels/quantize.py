"""Quantises weights while they are loaded: with a scale for each row, or for each 32 columns."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from acclimate.llm.kernels.formats import BLOCK_COLUMNS, WeightFormat
from acclimate.llm.kernels.layout import Parts

_MOST_BLOCK_SCALE = 255
# How much of a block's range the codes span: a smaller range has finer steps, and clips more values.
_RANGES = (1.0, 0.96, 0.92, 0.88, 0.83, 0.77)


def quantize_rows(weight: Tensor, kind: WeightFormat) -> Parts:
    """Returns the codes and scales of some rows of a weight."""
    weight = functional.pad(weight.float(), (0, kind.padded(weight.shape[1]) - weight.shape[1]))
    return _QUANTIZERS[kind.scales](weight, kind)


def _inverse(values: Tensor) -> Tensor:
    return torch.where(values > 0, 1 / values, 0)


def _quantize_whole_rows(weight: Tensor, kind: WeightFormat) -> Parts:
    most = kind.offset - 1
    scale = (
        weight.abs().amax(dim=1, keepdim=True) / most if weight.shape[1] else weight.new_zeros(len(weight), 1)
    )
    codes = (weight * _inverse(scale)).round_().clamp_(-most, most).add_(most + 1)
    return Parts(codes.to(torch.uint8), {"scale": scale})


def _quantize_blocks(weight: Tensor, kind: WeightFormat) -> Parts:
    """Chooses for each block the step and minimum with the smallest error, then rounds both to 8 bits.

    A row's largest step and its largest minimum get the code 255. The values' codes are chosen last, for the
    rounded steps and minimums.
    """
    most_code = (1 << kind.bits) - 1
    blocks = weight.view(len(weight), -1, BLOCK_COLUMNS)
    if not blocks.numel():
        empty = weight.new_zeros(len(weight), 1)
        none = weight.new_zeros(len(weight), 0)
        return Parts(
            weight.to(torch.uint8),
            {"scale": empty, "low_scale": empty, "block_scale": none, "block_low": none},
        )
    low = blocks.amin(dim=2, keepdim=True).clamp_(max=0)
    high = blocks.amax(dim=2, keepdim=True).clamp_(min=0)
    # An error in a large value counts more: it mostly meets a large input.
    importance = blocks.abs() + blocks.square().mean(dim=2, keepdim=True).sqrt()
    best_step, best_low = (high - low) / most_code, -low
    least = torch.full_like(low, torch.inf)
    for part in _RANGES:
        step = (high - low) * (part / most_code)
        start = low * part
        codes = ((blocks - start) * _inverse(step)).round_().clamp_(0, most_code)
        step, start = _fit(blocks, codes, importance, step, start)
        error = ((codes * step + start - blocks).square_() * importance).sum(dim=2, keepdim=True)
        better = error < least
        best_step = torch.where(better, step, best_step)
        best_low = torch.where(better, -start, best_low)
        least = torch.where(better, error, least)
    scale, block_scale = _as_bytes(best_step.squeeze(2))
    low_scale, block_low = _as_bytes(best_low.squeeze(2))
    step, start = (scale * block_scale).unsqueeze(2), (low_scale * block_low).unsqueeze(2)
    codes = ((blocks + start) * _inverse(step)).round_().clamp_(0, most_code)
    return Parts(
        codes.view_as(weight).to(torch.uint8),
        {"scale": scale, "low_scale": low_scale, "block_scale": block_scale.to(torch.uint8),
         "block_low": block_low.to(torch.uint8)},
    )  # fmt: skip


def _quantize_with_zeros(weight: Tensor, kind: WeightFormat) -> Parts:
    """Gives each block the codes from its smallest value to its largest, and zero a code of its own."""
    most_code = (1 << kind.bits) - 1
    blocks = weight.view(len(weight), weight.shape[1] // BLOCK_COLUMNS, BLOCK_COLUMNS)
    low = blocks.amin(dim=2, keepdim=True).clamp_(max=0)
    high = blocks.amax(dim=2, keepdim=True).clamp_(min=0)
    scale = ((high - low) / most_code).clamp_(max=torch.finfo(torch.float16).max).half().float()
    zero = (-low * _inverse(scale)).round_().clamp_(0, most_code)
    codes = (blocks * _inverse(scale)).round_().add_(zero).clamp_(0, most_code)
    fields = {"scale": scale.squeeze(2).half(), "zero": (zero.squeeze(2) - kind.offset).to(torch.int8)}
    return Parts(codes.view_as(weight).to(torch.uint8), fields)


def _fit(
    blocks: Tensor, codes: Tensor, weights: Tensor, step: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the step and minimum with the smallest error for given codes; the minimum is at most zero."""
    total = weights.sum(dim=2, keepdim=True)
    by_code = weights * codes
    codes_1 = by_code.sum(dim=2, keepdim=True)
    codes_2 = (by_code * codes).sum(dim=2, keepdim=True)
    values = (weights * blocks).sum(dim=2, keepdim=True)
    products = (by_code * blocks).sum(dim=2, keepdim=True)
    spread = total * codes_2 - codes_1.square()
    fitted = (total * products - values * codes_1) / spread
    low = (codes_2 * values - codes_1 * products) / spread
    # A minimum above zero cannot be stored: then the line goes through zero.
    through_zero = low > 0
    fitted = torch.where(through_zero, products / codes_2, fitted)
    low = torch.where(through_zero, 0, low)
    is_usable = (spread > 0) & (fitted > 0)
    return torch.where(is_usable, fitted, step), torch.where(is_usable, low, start)


def _as_bytes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a row's factor and each block's whole number up to 255."""
    scale = values.amax(dim=1, keepdim=True) / _MOST_BLOCK_SCALE
    return scale, (values * _inverse(scale)).round_().clamp_(0, _MOST_BLOCK_SCALE)


_QUANTIZERS = {
    "row": _quantize_whole_rows,
    "row_and_block": _quantize_blocks,
    "block_and_zero": _quantize_with_zeros,
}
