"""Layers of models whose results are known without torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from acclimate_conformance.checks.dtypes.closed_forms import Known, On

_BAGS = {
    "the first is empty": ([0, 0, 2, 3], [[], [0, 2], [1], []]),
    "the second is empty": ([0, 2, 2, 2], [[0, 2], [], [], [1]]),
}
"""The start of each bag, and the places in it."""
_LN3 = math.log(3)
_TABLE = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def _bags(mode: str, last: bool, weighted: bool, kind: str) -> Known:
    starts, members = _BAGS[kind]
    places = [place for bag in members for place in bag]
    weights = [2.0, -1.0, 4.0] if weighted else [1.0, 1.0, 1.0]
    wanted, done = [], 0
    for bag in members:
        rows = [
            [number * weights[done + turn] for number in _TABLE[place]] for turn, place in enumerate(bag)
        ] or [[0.0, 0.0]]
        done += len(bag)
        columns = list(zip(*rows, strict=True))
        combine: dict[str, Callable[[Any], float]] = {
            "sum": sum, "max": max, "mean": lambda column: sum(column) / len(column)
        }  # fmt: skip
        wanted.append([combine[mode](column) for column in columns])

    def call(on: On) -> torch.Tensor:
        return functional.embedding_bag(
            on.whole(places), on(_TABLE), on.whole([*starts, *([3] if last else [])]), mode=mode,
            per_sample_weights=on(weights) if weighted else None, include_last_offset=last,
        )  # fmt: skip

    return call, wanted


_SCALED: dict[tuple[str, int, int, bool | None], list[float]] = {
    ("linear", 5, 3, True): [0, 2, 4],
    ("linear", 5, 9, True): [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4],
    ("linear", 3, 1, True): [0],
    ("linear", 4, 2, False): [0.5, 2.5],
    ("linear", 2, 4, False): [0, 0.25, 0.75, 1],
    ("nearest", 5, 3, None): [0, 1, 3],
    ("nearest", 3, 6, None): [0, 0, 1, 1, 2, 2],
    ("nearest-exact", 5, 3, None): [0, 2, 4],
    ("area", 4, 2, None): [0.5, 2.5],
}
"""By mode, length, new length and align_corners: what becomes of the numbers from 0 on."""
_MODES = {"linear": ("linear", "bilinear", "trilinear")}


def _scaled(key: tuple[str, int, int, bool | None], dimensions: int, along: int) -> Known:
    mode, length, new, corners = key
    shape = [1, 1, *(length if axis == along else 2 for axis in range(dimensions))]
    sizes = [new if axis == along else 2 for axis in range(dimensions)]

    def ramp(numbers: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return numbers.reshape([-1 if axis == along else 1 for axis in range(dimensions)]).expand(*sizes)

    def call(on: On) -> torch.Tensor:
        image = ramp(torch.arange(length, dtype=on.dtype), shape[2:]).expand(shape).contiguous()
        name = _MODES.get(mode, (mode,) * 3)[dimensions - 1]
        return functional.interpolate(image.to(on.device), sizes, mode=name, align_corners=corners)

    return call, [[ramp(torch.tensor(_SCALED[key]), sizes).tolist()]]


_RAMP = [[4.0 * row + column for column in range(4)] for row in range(4)]
_ROW = [[[[0.0, 1.0, 2.0, 3.0]]]]


def _sampled(on: On, *places: float, **options: Any) -> torch.Tensor:
    """A row of the numbers from 0 to 3, at these places of which -1 and 1 are its ends."""
    return functional.grid_sample(on(_ROW), on([[[[place, 0.0] for place in places]]]), **options)


def _statistics_of_batches(on: On) -> list[torch.Tensor]:
    """Of a batch of two samples and one of one, as SyncBatchNorm puts them together."""
    batches = on([[1], [3]]), on([[8]])
    found = [torch.batch_norm_stats(batch, 1 / 3) for batch in batches]
    means, deviations = (torch.stack(parts) for parts in zip(*found, strict=True))
    kept = torch.zeros_like(means[0]), torch.zeros_like(means[0])
    counts = on([2, 1], means.dtype)
    together = torch.batch_norm_gather_stats_with_counts(
        batches[0], means, deviations, *kept, 0.5, 1 / 3, counts
    )
    return [*together, *kept]


def _gradients_of_batches(on: On) -> list[torch.Tensor]:
    """Of two samples with a mean of 2, as SyncBatchNorm computes them on each of several devices."""
    kind = torch.float32 if on.dtype.itemsize == 2 else on.dtype
    x, slope = on([[1], [3]]), on([[1], [3]])
    mean, inverse, weight, bias = (on([number], kind) for number in (2, 2, 2, 1))
    sums = torch.batch_norm_backward_reduce(slope, x, mean, inverse, weight, True, True, True)
    back = [
        torch.batch_norm_backward_elemt(
            slope, x, mean, inverse, weight, sums[0] * copies, sums[1] * copies, on([2] * copies, torch.int32)
        )
        for copies in (1, 3)
    ]
    return [torch.batch_norm_elemt(x, weight, bias, mean, inverse, 1e-5), *sums, *back]


def _normed(on: On, places: list[int]) -> list[torch.Tensor]:
    """What is looked up of a table whose rows are normed, and the table, of which other rows stay."""
    table = on([[6, 8], [3, 0], [90, 90]])
    return [functional.embedding(on.whole(places), table, max_norm=5, norm_type=1), table]


def _of_unfrozen(on: On, layer: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a convolution of 3 x 3 pixels, for each choice of what needs one, in one order."""
    found = []
    for wanted in product((True, False), repeat=3):
        given = [on([[[[0, 1, 2], [3, 4, 5], [6, 7, 8]]]]), on([[[[1, 2], [3, 4]]]]), on([5])]
        for tensor, needs in zip(given, wanted, strict=True):
            tensor.requires_grad_(needs)
        if any(wanted):
            layer(*given).sum().backward()
        for tensor, needs in zip(given, wanted, strict=True):
            if needs and tensor.grad is not None:
                found.append(tensor.grad)
    return found


_UNFROZEN = [
    ([[[[1, 3, 2], [4, 10, 6], [3, 7, 4]]]], [[[[8, 12], [20, 24]]]], [4])[place]
    for wanted in product((True, False), repeat=3)
    for place in range(3)
    if wanted[place]
]


LAYERS: dict[str, Known] = {
    "gradients of a convolution with frozen parts": (
        lambda on: _of_unfrozen(on, functional.conv2d),
        _UNFROZEN,
    ),
    "root mean squares without an eps": (
        lambda on: [
            functional.rms_norm(x, (2,)) - functional.rms_norm(x, (2,), eps=torch.finfo(x.dtype).eps)
            for x in (on([[3e-4, 4e-4]], torch.float32),)
        ],
        [[[0, 0]]],
    ),
    "norms of lists": (
        lambda on: [
            *torch._foreach_norm([on([3, 4]), on([0, -2])], math.inf),
            *torch._foreach_norm([on([3, 4]), on([0, -2])], 1),
            *torch._foreach_norm([on([3, 4]), on([]), on([0, -2]), on([[6], [8]])]),
        ],
        [4, 2, 7, 2, 5, 0, 2, 10],
    ),
    # Each output is a mean over the inputs near it, weighted by a triangle as wide as the reduction.
    "interpolate(antialias=True)": (
        lambda on: torch.nn.functional.interpolate(
            on.image([0, 1, 2, 3]), size=(1, 2), mode="bilinear", antialias=True
        ),
        [[[[5 / 7, 16 / 7]]]],
    ),
    **{
        f"embedding_bag(mode={mode!r}, include_last_offset={last}{', per_sample_weights' * weighted}), where "
        f"{kind}": _bags(mode, last, weighted, kind)
        for mode, last, weighted, kind in product(("sum", "mean", "max"), (False, True), (False, True), _BAGS)
        if mode == "sum" or not weighted
    },
    "embedding_bag(padding_idx=…, mode='mean')": (
        lambda on: [
            functional.embedding_bag(on.whole([[0, 1], [1, 1], [2, 0]]), on(_TABLE), mode=mode, padding_idx=1)
            for mode in ("mean", "max")
        ],
        [[[1, 2], [0, 0], [3, 4]], [[1, 2], [0, 0], [5, 6]]],
    ),
    "embedding(max_norm=…), in its table": (
        lambda on: _normed(on, [1, 1, 0, 1]),
        [[[3, 0], [3, 0], [30 / (14 + 1e-7), 40 / (14 + 1e-7)], [3, 0]],
         [[30 / (14 + 1e-7), 40 / (14 + 1e-7)], [3, 0], [90, 90]]],
    ),
    "embedding_bag(padding_idx=…)": (
        lambda on: functional.embedding_bag(
            on.whole([[0, 1], [1, 1]]), on(_TABLE), mode="sum", padding_idx=1
        ),
        [[1, 2], [0, 0]],
    ),
    "embedding(max_norm=…)": (
        lambda on: functional.embedding(on.whole([1, 0]), on([[6, 8], [3, 0]]), max_norm=5, norm_type=1),
        [[3, 0], [30 / (14 + 1e-7), 40 / (14 + 1e-7)]],
    ),
    **{
        f"interpolate({key[1]} to {key[2]}, mode={key[0]!r}, align_corners={key[3]}), of {n} dimensions, "
        f"along {along}": _scaled(key, n, along)
        for key in _SCALED
        for n in (1, 2, 3)
        for along in range(n)
    },
    "interpolate(mode='bicubic')": (
        lambda on: functional.interpolate(
            on.image(*[[0.0, 1, 2, 3, 4]] * 2), (2, 3), mode="bicubic", align_corners=True
        ),
        [[[[0, 2, 4], [0, 2, 4]]]],
    ),
    "grid_sample": (
        lambda on: [
            _sampled(on, -1, 0, 1, align_corners=True),
            _sampled(on, -1, 0, 1, align_corners=False),
            _sampled(on, -1, 0, 1, align_corners=False, padding_mode="border"),
            _sampled(on, -1.5, 1.5, align_corners=False, padding_mode="reflection"),
            _sampled(on, -0.5, 0.5, mode="nearest", align_corners=False),
            _sampled(on, 2, align_corners=True),
            _sampled(on, 3.5, 4, -5.5, 6, align_corners=True, padding_mode="reflection"),
            _sampled(on, 3.5, -5.75, align_corners=False, padding_mode="reflection"),
        ],
        [
            [[[[0, 1.5, 3]]]], [[[[0, 1.5, 1.5]]]], [[[[0, 1.5, 3]]]], [[[[0.5, 2.5]]]], [[[[0, 2]]]],
            [[[[0]]]], [[[[0.75, 1.5, 0.75, 1.5]]]], [[[[0.5, 1]]]],
        ],
    ),
    "grid_sample of places that are not numbers": (  # torch documents that NaN is taken for -1
        lambda on: _sampled(on, math.nan, 0, align_corners=True, padding_mode="border"),
        [[[[0, 1.5]]]],
    ),
    "affine_grid": (
        lambda on: [
            functional.affine_grid(on([[[1, 0, 0], [0, 1, 0]]]), [1, 1, 1, 2], align_corners=corners)
            for corners in (True, False)
        ],
        [[[[[-1, 0], [1, 0]]]], [[[[-0.5, 0], [0.5, 0]]]]],
    ),
    "average pooling": (
        lambda on: [
            functional.avg_pool1d(on([[[2, 4, 6]]]), 2, 2, 1),
            functional.avg_pool1d(on([[[2, 4, 6]]]), 2, 2, 1, count_include_pad=False),
            functional.avg_pool1d(on([[[2, 4, 6]]]), 2, ceil_mode=True),
            functional.avg_pool2d(on.image([2, 4], [6, 8]), 2, divisor_override=5),
            functional.avg_pool2d(on.image([2, 4, 6]), (1, 2), ceil_mode=True),
            functional.adaptive_avg_pool1d(on([[[1, 2, 3, 4, 5]]]), 3),
            functional.lp_pool1d(on([[[3, 4, 0, 5]]]), 2, 2),
        ],
        [
            [[[1, 5]]], [[[2, 5]]], [[[3, 6]]], [[[[4]]]], [[[[3, 6]]]], [[[1.5, 3, 4.5]]],
            [[[5, 5]]],
        ],
    ),
    "avg_pool3d": (
        lambda on: functional.avg_pool3d(
            on([[[[[2, 4, 6]]]]]), (1, 1, 2), ceil_mode=True, divisor_override=1
        ),
        [[[[[6, 6]]]]],
    ),
    "maximum pooling": (
        lambda on: [
            *functional.max_pool1d(on([[[-1, -2, -3, -4]]]), 2, 2, 1, return_indices=True),
            functional.max_pool1d(on([[[1, 2, 3, 4]]]), 2, 1, dilation=2),
            functional.max_pool1d(on([[[1, 2, 3]]]), 2, ceil_mode=True),
            functional.max_pool2d(on.image([1, 2, 3], [4, 5, 6], [7, 8, 9]), 2, 2, 1, ceil_mode=True),
            *functional.max_pool2d(on.image(*_RAMP), 2, 1, dilation=2, return_indices=True),
            functional.fold(on([[[1, 2, 3]] * 3]), (1, 5), (1, 3), dilation=1),
            functional.fold(on([[[1]] * 3]), (1, 5), (1, 3), dilation=2),
            functional.fold(on([[[1, 1], [10, 10]]]), (1, 4), (1, 2), dilation=2),
            *functional.max_pool2d(on.image([1, 5], [7, 3]), 2, return_indices=True),
            functional.max_unpool1d(on([[[5, 6]]]), on.whole([[[1, 2]]]), [2]),
            *functional.adaptive_max_pool1d(on([[[1, 5, 3]]]), 2, return_indices=True),
        ],
        [
            [[[-1, -2, -4]]], [[[0, 1, 3]]], [[[3, 4]]], [[[2, 3]]], [[[[1, 3], [7, 9]]]],
            [[[[10, 11], [14, 15]]]],
            [[[[10, 11], [14, 15]]]], [[[[1, 3, 6, 5, 3]]]], [[[[1, 0, 1, 0, 1]]]], [[[[1, 1, 10, 10]]]],
            [[[[7]]]], [[[[2]]]], [[[0, 5, 6, 0]]],
            [[[5, 5]]], [[[1, 1]]],
        ],
    ),
    "padding": (
        lambda on: [
            functional.pad(on([[[1, 2, 3]]]), (2, 1), how) for how in ("reflect", "replicate", "circular")
        ]
        + [functional.pad(on([1, 2, 3]), (-1, 2), value=7)],
        [[[[3, 2, 1, 2, 3, 2]]], [[[1, 1, 1, 2, 3, 3]]], [[[2, 3, 1, 2, 3, 1]]], [2, 3, 7, 7]],
    ),
    "convolutions": (
        lambda on: [
            functional.conv1d(on([[[1, 2, 3, 4]]]), on([[[1, 2]]]), on([1]), 2, 1, 2),
            functional.conv1d(on([[[1, 2], [3, 4]]]), on([[[1]], [[2]], [[3]], [[4]]]), groups=2),
            functional.conv1d(on([[[1, 2, 3]]]), on([[[1, 1]]]), padding="same"),
            functional.conv_transpose1d(on([[[1, 2]]]), on([[[1, 2, 4]]]), on([1]), 2, 1, 1),
            functional.conv2d(on.image([1, 2], [3, 4]), on.image([1], [2]), padding=(1, 0)),
            functional.conv2d(on.image([1, 2], [3, 4]), on.image([1, 2], [3, 4]), padding="same"),
            functional.conv2d(on.image([1, 2, 3]), on.image([1, 1]), padding="same", dilation=3),
        ],
        [
            [[[5, 11]]], [[[1, 2], [2, 4], [9, 12], [12, 16]]], [[[3, 5, 3]]], [[[3, 7, 5, 9]]],
            [[[[2, 4], [7, 10], [3, 4]]]], [[[[30, 14], [11, 4]]]], [[[[3, 1, 2]]]],
        ],
    ),
    "losses with options": (
        lambda on: [
            functional.smooth_l1_loss(on([0, 0]), on([1, 4]), reduction="none", beta=2),
            functional.binary_cross_entropy(on([0, 1]), on([1, 0])),
            functional.binary_cross_entropy(on([0, 1]), on([1, 0]), reduction="sum"),
            functional.multilabel_margin_loss(on([[0.25, 0.5, 0.75]]), on.whole([[2, -1, 1]])),
            functional.cross_entropy(
                on([[0, 0], [0, 0], [0, 0]]), on.whole([1, 0, 1]), on([1, 3]), ignore_index=1,
                label_smoothing=0.5
            ),
            functional.kl_div(on([[0, 0]]), on([[0, 1]]), reduction="batchmean"),
            functional.ctc_loss(
                on([[[0, 0, 0]]] * 2).log_softmax(-1), on.whole([[0]]), torch.tensor([2]),
                torch.tensor([0]), 2,
                "none",
            ),
            functional.huber_loss(on([0, 0]), on([1, 4]), reduction="none", delta=2),
            functional.cross_entropy(on([[0, 0], [0, 0]]), on.whole([1, -100])),
            functional.cross_entropy(on([[0, 0], [0, math.log(3)]]), on.whole([1, 0]), on([1, 3])),
            functional.nll_loss(on([[1, 2], [3, 4]]), on.whole([1, 0]), on([1, 3]), reduction="sum"),
            functional.nll_loss(on([[1, 2], [3, 4]]), on.whole([1, 0]), ignore_index=0),
            functional.binary_cross_entropy(on([0, 1, 0.5]), on([1, 0, 1]), reduction="none"),
            functional.hinge_embedding_loss(on([1, 3]), on([-1, 1]), 3, reduction="none"),
            functional.margin_ranking_loss(on([1, 2]), on([2, 1]), on([1, 1]), 4, reduction="none"),
            functional.cosine_embedding_loss(on([[1, 0]]), on([[1, 0]]), on([-1]), 0.25),
            functional.triplet_margin_loss(on([[0]]), on([[3]]), on([[1]]), 2, 1, eps=0),
            functional.poisson_nll_loss(on([2, 4]), on([3, 0]), log_input=False, reduction="sum", eps=0),
            functional.gaussian_nll_loss(on([0, 2]), on([2, 2]), on([1, 1]), reduction="none"),
            functional.kl_div(on([0, 0]), on([0, 1]), reduction="sum"),
            functional.kl_div(on([0, 0]), on([0, 1]), reduction="sum", log_target=True),
        ],
        [
            [0.25, 3], 100, 200, (0.5 + 0.75) / 3, 1.5 * math.log(2), 0, [2 * _LN3], [0.5, 6],
            math.log(2), (3 * math.log(2) + math.log(4)) / 4, -9, -2,
            [100, 100, math.log(2)], [2, 3], [5, 3], 0.75, 4, 6 - 3 * math.log(2), [2, 0], 0, math.e,
        ],
    ),
    "gradients of batches of different sizes": (
        _gradients_of_batches,
        [[[-3], [5]], [4], [2], [4], [4], [[12], [-12]], [[12], [-12]]],
    ),
    "statistics of batches of different sizes": (_statistics_of_batches, [[4], [1 / 3], [2], [6.5]]),
    "multi_margin_loss": (lambda on: functional.multi_margin_loss(on([[1, 2]]), on.whole([0]), 2), 2),
    "normalisation": (
        lambda on: [
            functional.layer_norm(on([[1, 3]]), (2,), on([2, 3]), on([1, 1]), 3),
            functional.layer_norm(on([[2, 2]]), (2,), eps=1e-8),
            functional.rms_norm(on([[0, 0]]), (2,), eps=1e-8),
            functional.group_norm(on([[2, 2]]), 1, eps=1e-8),
            functional.batch_norm(on([[2], [2]]), None, None, training=True, eps=1e-8),
            functional.batch_norm(on([[1], [3]]), on([1]), on([3]), None, on([1]), eps=1),
            functional.batch_norm(on([[1], [3]]), on([1]), on([3]), on([2]), None, eps=1),
            functional.batch_norm(on([[1], [3]]), None, None, None, on([1]), training=True, eps=3),
            functional.layer_norm(on([[1, 3]]), (2,), None, on([1, 1]), 3),
            functional.group_norm(on([[1, 3], [0, 8]]), 1, None, on([1, 1]), eps=9),
            functional.rms_norm(on([[1, 3]]), (2,), on([2, 3]), 4),
            functional.group_norm(on([[1, 3], [0, 8]]), 1, eps=9),
            functional.group_norm(on([[[1, 3], [1, 3], [0, 8], [0, 8]]]), 2, eps=9),
            functional.instance_norm(on([[[1, 3], [0, 8]]]), eps=9),
            functional.batch_norm(on([[1], [3]]), on([1]), on([3]), on([2]), on([1]), eps=1),
            functional.batch_norm(on([[1], [3]]), None, None, training=True, eps=3),
            functional.local_response_norm(on([[[1, 2]]]), 1, alpha=3, beta=1, k=1),
        ],
        [
            [[0, 2.5]], [[0, 0]], [[0, 0]], [[0, 0]], [[0], [0]], [[1], [2]], [[0], [2]], [[0.5], [1.5]],
            [[0.5, 1.5]], [[1 - 1 / math.sqrt(10), 1 + 1 / math.sqrt(10)], [0.2, 1.8]],
            [[2 / 3, 3]], [[-1 / math.sqrt(10), 1 / math.sqrt(10)], [-0.8, 0.8]],
            [[[-1 / math.sqrt(10), 1 / math.sqrt(10)]] * 2 + [[-0.8, 0.8]] * 2],
            [[[-1 / math.sqrt(10), 1 / math.sqrt(10)], [-0.8, 0.8]]],
            [[1], [3]], [[-0.5], [0.5]], [[[0.25, 2 / 13]]],
        ],
    ),
}  # fmt: skip
"""Of models' layers: bags that are empty, images that shrink, and windows that go beyond the end."""
