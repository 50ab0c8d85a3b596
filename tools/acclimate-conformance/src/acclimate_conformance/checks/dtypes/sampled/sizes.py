"""Operators on tensors of lengths that are no multiple of a block, and of very many rows or columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import short
from acclimate_conformance.checks.dtypes.sampled.comparing import OF_PRODUCTS, Findings, attempt, difference
from acclimate_conformance.checks.dtypes.sampled.places import HOST, Place, tensors_in
from acclimate_conformance.checks.dtypes.sampled.samples import name_of, operators, promised_part

_OF_OTHERS = (129, 1003, 70_001)
_LENGTHS = (1, 3, 5, 7, 15, 17, 31, 33, 63, 65, 127, 129, 256, 257, 1003, 1024)
_LARGE = 70_001
"""More than fits in 16 bits, which is how many blocks some devices start in one dimension."""


class Given:
    """The inputs of one call at a place.

    Args:
        place: where they are.
        dtype: of floating-point inputs.
        trains: whether these require gradients.
    """

    def __init__(self, place: Place, dtype: torch.dtype = torch.float32, trains: bool = True) -> None:
        self.place, self.dtype, self._trains = place, dtype, trains
        self.leaves: list[torch.Tensor] = []
        self._generator = torch.Generator().manual_seed(23)

    def floats(self, *shape: int) -> torch.Tensor:
        """Numbers around zero."""
        values = torch.randn(*shape, generator=self._generator)
        if self.dtype.is_complex:
            values = torch.complex(values, torch.randn(*shape, generator=self._generator))
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            values = values.abs().mul(20) if self.dtype is not torch.bool else values > 0
        values = values.to(self.dtype)
        there = self.place.whole(values).requires_grad_(self._trains)
        self.leaves.append(there)
        return there

    def places(self, *shape: int, below: int) -> torch.Tensor:
        """Whole numbers from 0 on."""
        return self.place.whole(torch.randint(0, max(below, 1), shape, generator=self._generator))

    def truths(self, *shape: int) -> torch.Tensor:
        """Truth values."""
        return self.place.whole(torch.rand(*shape, generator=self._generator) > 0.4)

    def shuffled(self, length: int) -> torch.Tensor:
        """Whole numbers from 0 on, each once."""
        return self.place.whole(torch.randperm(length, generator=self._generator))


def _seven(given: Given, length: int) -> torch.Tensor:
    return given.floats(2, 1, 3, 2, min(length, 9), 1, 2)


def _with_its_places(values: torch.Tensor, choose: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    """Chosen numbers, and what is at the places that are told: of equal ones any may be chosen."""
    chosen, places = choose(values)
    return [chosen, values.gather(-1, places)]


def _with_its_end(sequence: torch.Tensor, end: float) -> list[torch.Tensor]:
    """A sequence, and whether its last number is the end, but for a few units in the last place."""
    return [sequence, (sequence[-1] - end).abs() <= 4 * torch.finfo(sequence.dtype).eps * abs(end)]


Sized = Callable[[Given, int], Any]
SIZED: dict[str, Sized] = {
    "torch.softmax": lambda g, n: g.floats(3, n).softmax(-1),
    "torch.softmax over the first dimension": lambda g, n: g.floats(n, 3).softmax(0),
    "torch.log_softmax": lambda g, n: g.floats(3, n).log_softmax(-1),
    "torch.logsumexp": lambda g, n: g.floats(3, n).logsumexp(-1),
    "torch.cumsum": lambda g, n: [g.floats(n).cumsum(0), g.floats(2, n).cumsum(-1), g.floats(n, 2).cumsum(0)],
    "torch.cumprod": lambda g, n: (1 + g.floats(2, n) / 99).cumprod(-1),
    "torch.cummax": lambda g, n: [*g.floats(2, n).cummax(-1)],
    "torch.sort": lambda g, n: [
        *g.floats(2, n).sort(dim=-1, stable=True),
        *g.floats(n, 2).sort(dim=0, descending=True, stable=True),
    ],
    "torch.argsort": lambda g, n: g.places(n, below=5).argsort(stable=True),
    "torch.topk": lambda g, n: [
        _with_its_places(g.floats(2, n), lambda x: x.topk(min(n, 7))),
        *g.shuffled(n).float().topk((n + 1) // 2, largest=False),
    ],
    "torch.kthvalue": lambda g, n: [
        _with_its_places(g.floats(2, n), lambda x: x.kthvalue((n + 1) // 2, keepdim=True)),
        *g.shuffled(n).float().kthvalue((n + 1) // 2),
        g.floats(n, 3).kthvalue((n + 3) // 4, 0).values,
    ],
    # With one number that is the most frequent: of several, any may be told.
    "torch.mode": lambda g, n: [
        torch.cat([g.places(n, below=9), g.places(n + 1, below=1) + 4]).mode().values,
        torch.cat([g.places(n, 3, below=9), g.places(n + 1, 3, below=1) + 4]).mode(0, True).values,
    ],
    "torch.max": lambda g, n: [*g.floats(3, n).max(-1), *g.floats(n, 3).max(0), g.floats(n).max()],
    "torch.min": lambda g, n: [*g.floats(3, n).min(-1), *g.floats(n, 3).min(0), g.floats(n).min()],
    "torch.argmax": lambda g, n: [
        g.floats(3, n).argmax(-1),
        g.floats(n).argmin(),
        g.places(n, below=3).argmax(),
    ],
    "torch.unique": lambda g, n: [*g.places(n, below=9).unique(return_inverse=True, return_counts=True)],
    "torch.unique_consecutive": lambda g, n: [
        *g.places(n, below=3).unique_consecutive(return_inverse=True, return_counts=True)
    ],
    "torch.logcumsumexp": lambda g, n: (g.floats(2, n) + 90).logcumsumexp(-1),
    "torch.bincount": lambda g, n: [
        g.places(n, below=6).bincount(minlength=9),
        g.places(n, below=6).bincount(g.floats(n)),
    ],
    "torch.searchsorted": lambda g, n: torch.searchsorted(g.floats(n).sort().values, g.floats(9)),
    "torch.isin": lambda g, n: [
        torch.isin(g.places(n, below=n), g.places(n // 2 + 1, below=n), invert=invert)
        for invert in (False, True)
    ],
    "torch.nonzero": lambda g, n: [g.truths(n).nonzero(), g.truths(2, n).nonzero()],
    "torch.masked_select": lambda g, n: g.floats(2, n).masked_select(g.truths(2, n)),
    "torch.masked_fill": lambda g, n: g.floats(2, n).masked_fill(g.truths(n), -3),
    "torch.masked_scatter": lambda g, n: g.floats(2, n).masked_scatter(g.truths(2, n), g.floats(2, n)),
    "torch.where": lambda g, n: torch.where(g.truths(2, n), g.floats(2, n), g.floats(n)),
    "torch.index_select": lambda g, n: [
        g.floats(9, n).index_select(0, g.places(4, below=9)),
        g.floats(9, 2).index_select(0, g.places(n, below=9)),
        g.floats(3, n).index_select(1, g.places(n, below=n)),
    ],
    "torch.gather": lambda g, n: [
        g.floats(3, n).gather(1, g.places(3, n, below=n)),
        g.floats(n, 3).gather(0, g.places(n, 3, below=n)),
    ],
    "torch.scatter": lambda g, n: g.floats(n).scatter(0, g.shuffled(n), g.floats(n)),
    "torch.scatter_add": lambda g, n: g.floats(5).scatter_add(0, g.places(n, below=5), g.floats(n)),
    "torch.scatter_reduce": lambda g, n: [
        g.floats(5).scatter_reduce(0, g.places(n, below=5), g.floats(n), how, include_self=own)
        for how in ("sum", "amax", "amin", "mean")
        for own in (True, False)
    ],
    "torch.index_add": lambda g, n: [
        g.floats(5, 2).index_add(0, g.places(n, below=5), g.floats(n, 2)),
        g.floats(2, 5).index_add(1, g.places(n, below=5), g.floats(2, n), alpha=2),
    ],
    "torch.index_copy": lambda g, n: g.floats(n, 2).index_copy(0, g.shuffled(n), g.floats(n, 2)),
    "torch.index_put": lambda g, n: [
        g.floats(5, 3).index_put((g.places(n, below=5),), g.floats(n, 3), accumulate=True),
        g.floats(n).index_put((g.shuffled(n),), g.floats(n)),
        g.floats(4, n).index_put((g.places(n, below=4), g.shuffled(n)), g.floats(n)),
    ],
    "indexing": lambda g, n: [
        g.floats(n)[g.places(n, below=n)],
        g.floats(n, 3)[g.places(4, 2, below=n)],
        g.floats(n)[g.truths(n)],
        g.floats(3, n)[:, g.places(5, below=n)],
        g.floats(n, 4)[g.places(5, below=n), g.places(5, below=4)],
        g.floats(n)[-1],
        g.floats(n)[::2],
        g.floats(2, n)[..., -1:],
    ],
    "torch.take_along_dim": lambda g, n: g.floats(2, n).take_along_dim(g.places(2, n, below=n), 1),
    "torch.repeat_interleave": lambda g, n: g.floats(n).repeat_interleave(g.places(n, below=4)),
    "torch.cat": lambda g, n: [
        torch.cat([g.floats(n), g.floats(3), g.floats(n)]),
        torch.cat([g.floats(2, n), g.floats(2, 5)], 1),
        torch.cat([g.floats(3, 2) for _ in range(min(n, 300))], 1),
        torch.cat([g.floats(2, 1).t(), *(g.floats(1, 2) for _ in range(min(n, 1100)))]),
    ],
    "torch.stack": lambda g, n: [torch.stack([g.floats(n), g.floats(n)], d) for d in (0, 1)],
    "torch.split": lambda g, n: [*g.floats(n).split((n + 1) // 2), *g.floats(2, n).chunk(3, 1)],
    "torch.flip": lambda g, n: [g.floats(n).flip(0), g.floats(2, n).flip(0, 1)],
    "torch.roll": lambda g, n: [g.floats(n).roll(3), g.floats(2, n).roll(-1, 1)],
    "torch.tril": lambda g, n: [g.floats(3, n).tril(1), g.floats(n, 3).triu(-1), g.floats(2, 3, n).triu(1)],
    "torch.Tensor.contiguous": lambda g, n: [
        g.floats(n, 3).t().contiguous(),
        g.floats(2, n, 3).permute(1, 2, 0).contiguous(),
    ],
    "torch.Tensor.copy_": lambda g, n: torch.zeros(n, 2, device=g.place.device).copy_(g.floats(2, n).t()),
    "torch.nn.functional.pad": lambda g, n: [
        functional.pad(g.floats(2, n), (1, 2)),
        functional.pad(g.floats(2, 3, n), (0, n - 1), "reflect"),
        functional.pad(g.floats(2, 3, n), (2, 0), "replicate"),
        functional.pad(g.floats(n), (-1, 3), value=1.5),
    ],
    "torch.nn.functional.layer_norm": lambda g, n: [
        functional.layer_norm(g.floats(3, n), (n,), g.floats(n), g.floats(n)),
        functional.layer_norm(g.floats(n, 8), (8,), g.floats(8), g.floats(8)),
        functional.layer_norm(g.floats(n, 2, 4), (2, 4), g.floats(2, 4), g.floats(2, 4)),
    ],
    "torch.nn.functional.rms_norm": lambda g, n: [
        functional.rms_norm(g.floats(3, n), (n,), g.floats(n), 1e-5),
        functional.rms_norm(g.floats(n, 8), (8,), g.floats(8)),
    ],
    "torch.nn.functional.group_norm": lambda g, n: functional.group_norm(
        g.floats(2, 6, n), 3, g.floats(6), g.floats(6)
    ),
    "torch.nn.functional.batch_norm": lambda g, n: functional.batch_norm(
        g.floats(n + 1, 3, 2), None, None, g.floats(3), g.floats(3), training=True
    ),
    "torch.nn.functional.linear": lambda g, n: [
        functional.linear(g.floats(3, n), g.floats(5, n), g.floats(5)),
        functional.linear(g.floats(n, 8), g.floats(5, 8), g.floats(5)),
        functional.linear(g.floats(3, 8), g.floats(n, 8), g.floats(n)),
    ],
    "torch.matmul": lambda g, n: [
        g.floats(3, n) @ g.floats(n, 5),
        g.floats(n, 6) @ g.floats(6, 5),
        g.floats(3, 6) @ g.floats(6, n),
        g.floats(3, n) @ g.floats(n),
        g.floats(n) @ g.floats(n),
        g.floats(n, 6) @ g.floats(6),
        g.floats(n, 3).t() @ g.floats(5, n).t(),
    ],
    "torch.bmm": lambda g, n: [
        torch.bmm(g.floats(2, 3, n), g.floats(2, n, 5)),
        torch.bmm(g.floats(n, 3, 4), g.floats(n, 4, 2)),
        torch.bmm(g.floats(2, n, 3).transpose(1, 2), g.floats(2, n, 5)),
    ],
    "torch.baddbmm": lambda g, n: torch.baddbmm(
        g.floats(1, 1, 5), g.floats(2, 3, n), g.floats(2, n, 5), beta=0.5, alpha=2
    ),
    "torch.addmm": lambda g, n: torch.addmm(g.floats(5), g.floats(3, n), g.floats(n, 5), beta=2, alpha=0.5),
    "torch.einsum": lambda g, n: [
        torch.einsum("bhqd,bhkd->bhqk", g.floats(1, 2, 3, n), g.floats(1, 2, 4, n)),
        torch.einsum("ij,jk,k->i", g.floats(3, n), g.floats(n, 4), g.floats(4)),
        torch.einsum("...i,...i", g.floats(2, n), g.floats(2, n)),
        torch.einsum("ii->i", g.floats(7, 7)),
    ],
    "torch.nn.functional.embedding": lambda g, n: [
        functional.embedding(g.places(5, 2, below=9), g.floats(9, n)),
        functional.embedding(g.places(n, below=9), g.floats(9, 4), padding_idx=3),
        functional.embedding(g.places(6, below=n), g.floats(n, 3)),
    ],
    "torch.nn.functional.embedding_bag": lambda g, n: functional.embedding_bag(
        g.places(n, below=9), g.floats(9, 4), g.place.whole(torch.tensor([0, n // 2])), mode="mean"
    ),
    "torch.nn.functional.cross_entropy": lambda g, n: [
        functional.cross_entropy(g.floats(3, n), g.places(3, below=n)),
        functional.cross_entropy(
            g.floats(n, 7), g.places(n, below=7), g.floats(7).abs(), label_smoothing=0.1
        ),
        functional.cross_entropy(g.floats(n, 7), g.places(n, below=7), ignore_index=2, reduction="sum"),
        functional.cross_entropy(g.floats(2, 5, n), g.places(2, n, below=5)),
        functional.cross_entropy(g.floats(n, 7), g.floats(n, 7).softmax(-1)),
    ],
    "torch.nn.functional.mse_loss": lambda g, n: functional.mse_loss(g.floats(n), g.floats(n)),
    "torch.nn.functional.binary_cross_entropy_with_logits": lambda g, n: (
        functional.binary_cross_entropy_with_logits(g.floats(n), g.truths(n).float())
    ),
    "torch.nn.functional.kl_div": lambda g, n: functional.kl_div(
        g.floats(2, n).log_softmax(-1), g.floats(2, n).softmax(-1), reduction="batchmean"
    ),
    "torch.nn.functional.conv1d": lambda g, n: [
        functional.conv1d(g.floats(2, 4, n), g.floats(6, 2, 3), g.floats(6), padding=2, groups=2),
        functional.conv1d(g.floats(1, 3, n + 4), g.floats(2, 3, 2), stride=2, dilation=3),
    ],
    "torch.nn.functional.conv2d": lambda g, n: [
        functional.conv2d(g.floats(1, 3, 4, n), g.floats(5, 3, 3, 3), g.floats(5), padding=1),
        functional.conv2d(
            g.floats(1, 3, n, 5).to(memory_format=torch.channels_last), g.floats(2, 3, 1, 3), stride=(2, 1)
        ),
    ],
    "torch.nn.functional.max_pool1d": lambda g, n: functional.max_pool1d(g.floats(2, 3, n + 2), 3, 2, 1),
    "torch.nn.functional.avg_pool2d": lambda g, n: functional.avg_pool2d(g.floats(1, 2, 4, n + 2), 3, 2, 1),
    "torch.nn.functional.adaptive_avg_pool1d": lambda g, n: functional.adaptive_avg_pool1d(
        g.floats(2, 3, n), 5
    ),
    "torch.nn.functional.interpolate": lambda g, n: [
        functional.interpolate(g.floats(1, 2, n), size=2 * n + 1, mode=how) for how in ("linear", "nearest")
    ],
    "torch.nn.functional.glu": lambda g, n: functional.glu(g.floats(3, 2 * n)),
    "torch.nn.functional.one_hot": lambda g, n: functional.one_hot(g.places(n, below=7), 9),
    "torch.cdist": lambda g, n: [
        torch.cdist(g.floats(3, n), g.floats(4, n)),
        torch.cdist(g.floats(n, 3), g.floats(4, 3)),
    ],
    "numbers of the host beside tensors": lambda g, n: [
        g.floats(n) * torch.tensor(2.5),
        torch.tensor(3) - g.floats(2, n),
        g.floats(n).add(torch.tensor(2), alpha=3),
        g.places(n, below=9) * torch.tensor(0.5),
        torch.where(g.truths(n), g.floats(n), torch.tensor(0.5)),
        g.floats(n).masked_fill(g.truths(n), torch.tensor(-1.0)),
        g.floats(n) > torch.tensor(0.25),
    ],
    "operators of seven dimensions": lambda g, n: [
        _seven(g, n).permute(6, 4, 2, 0, 1, 5, 3) + _seven(g, n).permute(6, 4, 2, 3, 1, 5, 0),
        _seven(g, n).sum((0, 2, 4)),
        _seven(g, n).amax((1, 3, 5)),
        _seven(g, n).permute(6, 4, 2, 0, 1, 5, 3).contiguous(),
        _seven(g, n).transpose(0, 4).exp(),
        _seven(g, n).flip(0, 4),
    ],
    "operators of ten dimensions": lambda g, n: [
        _seven(g, n)[None, :, None, ..., None].permute(9, 4, 2, 0, 1, 5, 3, 8, 7, 6) + 1,
        _seven(g, n)[None, :, None, ..., None]
        .expand(2, 2, 2, 3, 2, -1, 1, 2, 1, 2)
        .permute(9, 4, 2, 0, 1, 5, 3, 8, 7, 6)
        * _seven(g, n)[None, :, None, ..., None].permute(9, 4, 2, 0, 1, 5, 3, 8, 7, 6),
    ],
    # Rows and columns as kernels of 8 bits ask for them.
    "torch._int_mm": lambda g, n: [
        torch._int_mm(
            (g.places(24, 8 * min(n, 65), below=256) - 128).to(torch.int8),
            (g.places(8 * min(n, 65), 16, below=256) - 128).to(torch.int8),
        ),
        torch._int_mm(
            (g.places(24, 8 * min(n, 65), below=1) - 128).to(torch.int8),
            (g.places(8 * min(n, 65), 16, below=2) * 255 - 128).to(torch.int8),
        ),
    ],
    "torch._weight_int8pack_mm": lambda g, n: torch._weight_int8pack_mm(
        g.floats(3, 32 * min(n, 9)).detach(),
        (g.places(32, 32 * min(n, 9), below=256) - 128).to(torch.int8),
        g.floats(32).detach(),
    ),
    "torch.addcmul": lambda g, n: torch.addcmul(g.floats(n), g.floats(2, n), g.floats(n), value=0.5),
    "torch.outer": lambda g, n: torch.outer(g.floats(n), g.floats(3)),
    "torch.var_mean": lambda g, n: [*torch.var_mean(g.floats(3, n + 1), -1), g.floats(n + 1).std()],
    "torch.norm": lambda g, n: [g.floats(n).norm(), g.floats(3, n).norm(dim=-1), g.floats(n).norm(1)],
    "torch.arange": lambda g, n: [
        torch.arange(n, device=g.place.device),
        torch.arange(1, n * 0.5, 0.5, device=g.place.device),
        torch.arange(0, 1, 1 / n, device=g.place.device)[:n],
        torch.arange(n, dtype=g.dtype, device=g.place.device),
    ],
    "torch.full": lambda g, n: [
        torch.full((n,), 3.5, device=g.place.device),
        torch.ones(n, device=g.place.device),
    ],
    "torch.linspace": lambda g, n: _with_its_end(torch.linspace(-1, 1, n, device=g.place.device), 1),
    "torch.logspace": lambda g, n: torch.logspace(-1, 1, n, base=2, device=g.place.device),
    "torch.bitwise_and": lambda g, n: [g.places(n, below=99) & 13, g.places(n, below=99) << 2],
    "torch.sum of integers": lambda g, n: [g.places(n, below=99).sum(), g.places(n, below=9).int().cumsum(0)],
    "torch.any": lambda g, n: [g.truths(n).any(), g.truths(3, n).all(-1), g.truths(n).sum()],
}
"""By the operator, calls in which one dimension has a given length."""
_ROWS_ONLY = (
    "torch._int_mm",
    "torch._weight_int8pack_mm",
    "torch.cdist",
    "torch.einsum",
    "torch.repeat_interleave",
    "torch.baddbmm",
    "torch.outer",
    "operators of seven dimensions",
    "operators of ten dimensions",
)
_MAY_BE_REFUSED = ("operators of ten dimensions",)
"""Which devices with a limit of dimensions refuse."""
"""Too slow or too large with very many elements."""


_TRAIN_MANY_ROWS = (
    "torch.nn.functional.layer_norm",
    "torch.nn.functional.rms_norm",
    "torch.nn.functional.group_norm",
    "torch.nn.functional.linear",
    "torch.nn.functional.embedding",
    "torch.index_add",
    "torch.softmax",
    "torch.log_softmax",
    "torch.logsumexp",
    "torch.cumsum",
    "torch.masked_scatter",
    "torch.masked_select",
    "torch.gather",
    "torch.index_select",
    "torch.index_put",
    "torch.nn.functional.cross_entropy",
    "torch.nn.functional.kl_div",
    "torch.nn.functional.glu",
    "torch.var_mean",
    "torch.norm",
    "torch.cat",
    "torch.repeat_interleave",
)
"""Operators whose gradients are tried with very many rows or columns, over which some add up."""
_MOVE = (
    "torch.cumsum",
    "torch.sort",
    "torch.nonzero",
    "torch.masked_select",
    "torch.masked_fill",
    "torch.masked_scatter",
    "torch.where",
    "torch.index_select",
    "torch.gather",
    "torch.scatter",
    "torch.index_copy",
    "torch.index_put",
    "indexing",
    "torch.take_along_dim",
    "torch.repeat_interleave",
    "torch.cat",
    "torch.stack",
    "torch.split",
    "torch.flip",
    "torch.roll",
    "torch.tril",
    "torch.Tensor.contiguous",
    "torch.nn.functional.pad",
)
"""Operators that move or add up elements of any dtype, as many bytes at once as a device can."""
_MOVED = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128)
_ROUND_EACH_STEP = ("torch.cumprod", "torch.cumsum")
"""Operators that may round to 16 bits after each of many steps, as torch's kernels for CUDA do."""


def _after_steps(steps: int) -> Callable[[Any, Any], str]:
    """How results differ that were rounded after each step: the errors add up as a walk at random does."""
    allowed = {
        dtype: max(2 * least, 2 * torch.finfo(dtype).eps * math.sqrt(steps))
        for dtype, least in OF_PRODUCTS.items()
        if not dtype.is_complex
    }
    return lambda found, wanted: difference(found, wanted, allowed)


def operators_of_any_length(accelerator: Accelerator, found: Findings) -> None:
    for name, function in SIZED.items():
        large = () if name in _ROWS_ONLY or "conv" in name else (_LARGE,)
        for length in (*_LENGTHS, *large):
            _compare(found, name, f"{name}, of length {length}", function, length, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        for name, function in SIZED.items() if dtype in accelerator.supported_dtypes() else ():
            for length in (5, 33, 129, 1003):
                _compare(found, name, f"{name}, of length {length}", function, length, dtype)
    for dtype, name in product(_MOVED, _MOVE):
        if name in SIZED:
            _compare_moved(found, name, dtype)
    _elementwise(found)


def _compare_moved(found: Findings, name: str, dtype: torch.dtype) -> None:
    """Compares an operator in a dtype that a device may lack."""

    def short_one(place: Place) -> Any:
        return SIZED[name](Given(place, dtype, False), 3)

    if attempt(short_one, Place(HOST))[1] is not None:
        return
    if found.called(f"{name}, of length 3 in {short(dtype)}", short_one)[1] is not None:
        return
    for length in (1, 7, 17, 129, 1003, _LARGE):
        _compare(found, name, f"{name}, of length {length}", SIZED[name], length, dtype)


_USUAL = 5
"""A length that no operator refuses for what it is."""


def _compare(found: Findings, name: str, what: str, function: Sized, length: int, dtype: torch.dtype) -> None:
    trains = dtype is torch.float32 and (length <= 1024 or name in _TRAIN_MANY_ROWS)

    def run(place: Place) -> Any:
        given = Given(place, dtype, trains)
        result = function(given, length)
        return [result, _gradients(result, given.leaves) if trains else []]

    rounds = name in _ROUND_EACH_STEP and dtype in (torch.bfloat16, torch.float16)
    near = _after_steps(length) if rounds else None
    found.compare(
        name, f"{what} in {short(dtype)}", run, near=near, may_be_refused=name in _MAY_BE_REFUSED,
        usual=lambda place: function(Given(place, dtype, trains), _USUAL),
    )  # fmt: skip


def _gradients(result: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients for the inputs, by which each element of the results has its weight."""
    results = [t for t in tensors_in(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not results:
        return []
    weights = [
        (torch.arange(1, t.numel() + 1).reshape(t.shape) % 7 - 2.5).to(t.dtype).to(t.device) for t in results
    ]
    return list(torch.autograd.grad(results, leaves, weights, allow_unused=True))


def _elementwise(found: Findings) -> None:
    """torch's operators that work by element or reduce, on any length."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo

    for op in operators():
        if torch.float32 not in op.supported_dtypes(HOST) or op.name.startswith(("__r", "masked")):
            continue
        for length in (*_LENGTHS, _LARGE):
            # Made on the host: a device that rounds a number in another way gives an operator another one.
            numbers = torch.randn(3, length, generator=torch.Generator().manual_seed(23))
            shares = numbers[:2].sigmoid()
            calls: list[tuple[tuple[torch.Tensor, ...], dict[str, int]]] = []
            if isinstance(op, UnaryUfuncInfo):
                calls = [((shares[0] / 2 + 0.25,), {})]
            elif isinstance(op, BinaryUfuncInfo):
                calls = [((shares[0], shares[1] + 0.5), {})]
            elif isinstance(op, ReductionOpInfo):
                around_one = numbers / 40 + 1
                # The last two show best whether a tail is left out.
                around_one[:, -2:] = torch.tensor([-2.0, 3.0])[-length:]
                calls = [
                    ((around_one[0],), {}),
                    ((around_one,), {"dim": -1}),
                    ((around_one.t(),), {"dim": 0}),
                ]
            for given, options in calls:
                for dtype in (torch.float32, torch.bfloat16, torch.int64):
                    if dtype is not torch.float32 and not (
                        isinstance(op, ReductionOpInfo)
                        and length in _OF_OTHERS
                        and dtype in op.supported_dtypes(HOST)
                        and (dtype is torch.int64 or dtype in found.accelerator.supported_dtypes())
                    ):
                        continue
                    of = [(t * 9 if dtype is torch.int64 else t).to(dtype) for t in given]

                    def run(place: Place, op: Any = op, given: Any = of, options: Any = options) -> Any:
                        result = op(*map(place.whole, given), **options)
                        return promised_part(op, result)

                    found.compare(name_of(op), f"{name_of(op)} of {length} {short(dtype)} numbers", run)
        if found.enough:
            return


# -- attention -----------------------------------------------------------------------------------


def attention_with_every_option(accelerator: Accelerator, found: Findings) -> None:
    name = "torch.nn.functional.scaled_dot_product_attention"
    for dtype in accelerator.supported_dtypes():
        for number, (what, keys, call) in enumerate(_attentions(dtype is torch.float32)):
            # Of one key, the gradients of scores are the noise of a difference that would be 0.
            trains = dtype is torch.float32 and number % 2 == 0 and keys > 1

            def run(place: Place, call: Any = call, trains: bool = trains, dtype: torch.dtype = dtype) -> Any:
                given = Given(place, dtype, trains)
                result = call(given)
                return [result, _gradients(result, given.leaves) if trains else []]

            found.compare(name, f"{name} {what} in {short(dtype)}", run)


_OF_ANY_LENGTH = (
    "transposed", "from an odd place", "with gaps between rows", "in every second element",
    "of a longer batch",
)  # fmt: skip
_OF_ONE_LENGTH = (*_OF_ANY_LENGTH, "of one projection")
"""How queries, keys and values lie; the last if a layer makes all three at once."""


def _attentions(thorough: bool) -> Iterator[tuple[str, int, Callable[[Given], Any]]]:
    """Calls, each with a text and the number of its keys."""
    sizes = [
        (1, 1, 8),
        (1, 9, 16),
        (7, 9, 16),
        (9, 7, 40),
        (33, 33, 64),
        (65, 129, 80),
        (5, 17, 128),
        (129, 129, 24),
    ]
    masks = (
        "none", "causal", "truths", "numbers", "of one row", "of each batch", "of a head", "expanded",
        "of one row for all",
    )  # fmt: skip
    for (queries, keys, width), mask in product(sizes if thorough else sizes[1:5:2], masks):
        for heads, groups in ((2, 2), (4, 2)) if thorough else ((4, 2),):
            alone = (None,) if heads == groups else (0.3,)
            for scale in (None, 0.3) if mask in ("none", "causal") else alone:
                others = _OF_ONE_LENGTH if queries == keys and heads == groups else _OF_ANY_LENGTH
                turn = queries + width + len(mask) + heads
                in_turn = ("in order", others[turn % len(others)])
                for lies in in_turn if queries == keys else in_turn[turn % 2 :][:1]:
                    what = (
                        f"of {queries} queries, {keys} keys, {heads}/{groups} heads of {width}, mask {mask}"
                    )
                    what += f", scale {scale}, {lies}"

                    def call(
                        g: Given, q: int = queries, k: int = keys, w: int = width, m: str = mask,
                        h: int = heads, s: int = groups, scale: float | None = scale, lies: str = lies,
                    ) -> Any:  # fmt: skip
                        def made(length: int, count: int) -> torch.Tensor:
                            if lies == "transposed":
                                return g.floats(2, length, count, w).transpose(1, 2)
                            if lies == "from an odd place":
                                return g.floats(2 * count * length * w + 3)[3:].view(2, count, length, w)
                            if lies == "with gaps between rows":
                                return g.floats(2, count, length, w + 3)[..., :w]
                            if lies == "in every second element":
                                return g.floats(2, count, length, 2 * w)[..., ::2]
                            if lies == "of a longer batch":
                                return g.floats(3, count, length + 2, w)[1:, :, 1:-1]
                            return g.floats(2, count, length, w)

                        if lies == "of one projection":
                            query, key, value = g.floats(2, q, 3, h, w).permute(2, 0, 3, 1, 4).unbind()
                        else:
                            query, key, value = made(q, h), made(k, s), made(k, s)
                        given: Any = None
                        if m == "truths":
                            given = g.truths(q, k)
                            given = given | (torch.arange(k, device=given.device) == 0)
                        elif m == "numbers":
                            given = g.floats(2, 1, q, k)
                        elif m == "of one row":
                            given = g.floats(1, k)
                        elif m == "of each batch":
                            given = g.truths(2, 1, 1, k) | (
                                g.places(k, below=1) == torch.arange(k, device=query.device)
                            )
                        elif m == "of a head":
                            given = g.floats(1, h, q, k)
                        elif m == "expanded":
                            given = g.floats(2, 1, 1, k).expand(2, h, q, k)
                        elif m == "of one row for all":
                            given = g.floats(1, 1, q, k)
                        return functional.scaled_dot_product_attention(
                            query,
                            key,
                            value,
                            attn_mask=given,
                            is_causal=m == "causal",
                            scale=scale,
                            enable_gqa=h != s,
                        )

                    yield what, keys, call
