"""Calls of operators whose results are known without torch: by hand, or from Python's own numbers.

A host has nothing to be compared with but these. Each option is used away from its default, with parts that
are empty, edges that count or not, weights outside of 0 to 1, and integers that float32 does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch.nn import functional


class On:
    """Makes tensors on a device.

    Args:
        device: the device.
        dtype: of floating-point numbers.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, data: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """These numbers, in the floating-point dtype if no other is asked for."""
        return torch.tensor(data, dtype=dtype or self.dtype).to(self.device)

    def whole(self, data: Any) -> torch.Tensor:
        """These integers."""
        return self(data, torch.int64)

    def truths(self, data: Any) -> torch.Tensor:
        """These truth values."""
        return self(data, torch.bool)

    def image(self, *rows: Sequence[float]) -> torch.Tensor:
        """One image of one channel."""
        return self([[rows]])


Known = tuple[Callable[[On], Any], Any]
"""A call, and the numbers that it gives: for each of its tensors if it gives a list."""
_INF, _NAN = math.inf, math.nan
_SORTED, _SOUGHT = [1.0, 2.0, 2.0, 3.0], [0.0, 2.0, 3.0, 4.0]
_LEFT, _RIGHT = [0, 1, 3, 4], [0, 3, 4, 4]
_LN3 = math.log(3)

ORDER: dict[str, Known] = {
    "searchsorted(right=…)": (
        lambda on: [torch.searchsorted(on(_SORTED), on(_SOUGHT), right=right) for right in (False, True)],
        [_LEFT, _RIGHT],
    ),
    "searchsorted(side=…)": (
        lambda on: [torch.searchsorted(on(_SORTED), on(_SOUGHT), side=side) for side in ("left", "right")],
        [_LEFT, _RIGHT],
    ),
    "isin, of a number": (
        lambda on: [
            torch.isin(2, on([2, 5])),
            torch.isin(3, on([2, 5])),
            torch.isin(3, on([2, 5]), invert=True),
            torch.isin(on([1, 2, 3]), 2, invert=True),
            torch.isin(on([1, 2, 3, 2]), on([5, 2, 5]), invert=True),
        ],
        [True, False, True, [True, False, True], [True, False, True, False]],
    ),
    "bucketize of a number": (
        lambda on: [
            torch.bucketize(2.0, on(_SORTED)),
            torch.bucketize(2.0, on(_SORTED), right=True),
            torch.bucketize(9, on(_SORTED)),
        ],
        [1, 3, 4],
    ),
    "unique rows": (
        lambda on: [
            *torch.unique_consecutive(
                on([[1, 2], [1, 2], [0, 2], [1, 2]]), return_inverse=True, return_counts=True, dim=0
            ),
            *torch.unique(on([[1, 2], [1, 2], [0, 2]]), return_inverse=True, return_counts=True, dim=0),
        ],
        [[[1, 2], [0, 2], [1, 2]], [0, 0, 1, 2], [2, 1, 1], [[0, 2], [1, 2]], [1, 1, 0], [1, 2]],
    ),
    "searchsorted(sorter=…) in each row": (
        lambda on: torch.searchsorted(
            on([[2.0, 1.0, 3.0], [5.0, 9.0, 1.0]]),
            on([[2.0], [5.0]]),
            sorter=on.whole([[1, 0, 2], [2, 0, 1]]),
            right=True,
            out_int32=True,
        ),
        [[2], [2]],
    ),
    "groups of equal numbers that fill blocks": (
        lambda on: [
            *torch.unique_consecutive(
                on(([1] * 100 + [2] * 156) * 2), return_inverse=False, return_counts=True
            ),
            torch.unique_consecutive(on([3] * 256), return_counts=True)[1],
            torch.unique(on([1, 0] * 512), return_counts=True)[1],
        ],
        [[1, 2, 1, 2], [100, 156, 100, 156], [256], [512, 512]],
    ),
    "segments": (
        lambda on: [
            torch.segment_reduce(on([1, 2, 3, 4]), how, lengths=on.whole([3, 0, 1]), initial=initial)
            for how, initial in (("sum", 0), ("max", -9), ("min", 9), ("prod", 2))
        ],
        [[6, 0, 4], [3, -9, 4], [1, 9, 4], [12, 2, 8]],
    ),
    "searchsorted of a number": (
        lambda on: [
            torch.searchsorted(on(_SORTED), 2.0),
            torch.searchsorted(on(_SORTED), 2.0, right=True),
            torch.searchsorted(on(_SORTED), 2.0, side="right", out_int32=True),
        ],
        [1, 3, 3],
    ),
    "searchsorted(sorter=…)": (
        lambda on: torch.searchsorted(
            on([2.0, 1.0, 3.0, 2.0]), on(_SOUGHT), side="right", sorter=on.whole([1, 0, 3, 2])
        ),
        _RIGHT,
    ),
    "searchsorted in each row": (
        lambda on: torch.searchsorted(on([_SORTED, [3, 3, 5, 9]]), on([[2], [3]]), side="right"),
        [[3], [2]],
    ),
    "bucketize": (
        lambda on: [
            torch.bucketize(on(_SOUGHT), on(_SORTED), right=right, out_int32=small)
            for right, small in product((False, True), (False, True))
        ],
        [_LEFT, _LEFT, _RIGHT, _RIGHT],
    ),
    "histc": (
        lambda on: [
            torch.histc(on([0, 0.25, 0.5, 1, 1, 2, -1]), 2, 0, 1),
            torch.histc(on([-1.0, 0, 1, 3]), 4, -1, 3),
            torch.histc(on([1.0, 2, 3]), 2),
            torch.histc(on([3.0, 3, 3, 3, 3]), 4),
        ],
        [[2, 3], [1, 1, 1, 1], [1, 2], [0, 0, 5, 0]],
    ),
    "histogram": (
        lambda on: [
            torch.histogram(on([0, 0.25, 0.5, 1, 1, 2]), 2, range=(0, 1)).hist,
            torch.histogram(on([0.0, 1, 2, 4]), on([0, 1, 4]), weight=on([1, 2, 4, 8])).hist,
            torch.histogram(on([0.0, 1, 2, 4]), on([0, 1, 4]), density=True).hist,
        ],
        [[2, 3], [1, 14], [0.25, 0.25]],
    ),
    "bincount": (
        lambda on: [
            torch.bincount(on.whole([1, 3, 1]), minlength=6),
            torch.bincount(on.whole([1, 3, 1]), on([0.5, 2, 4], torch.float32)),
            torch.bincount(on.whole([]), minlength=2),
        ],
        [[0, 2, 0, 1, 0, 0], [0, 4.5, 0, 2], [0, 0]],
    ),
    "bincount with whole numbers as weights": (
        lambda on: (
            torch.bincount(on.whole([1, 0, 1]), on.whole([2, 3, 4])).to(torch.int64)
            if on.dtype is not torch.float64
            else torch.bincount(on.whole([1, 0, 1]), on.whole([2, 3, 4]))
            .to(on.whole([]))
            .add(0 if torch.bincount(on.whole([1]), on.whole([2])).dtype is torch.float64 else -99)
        ),
        [3, 6],
    ),
    "the first of equal numbers": (
        lambda on: [on([1, 3, 3, 0, 0]).argmax(), on([[1, 3, 3, 0, 0]]).argmin(1, keepdim=True)],
        [1, [[3]]],
    ),
    "medians and quantiles": (
        lambda on: [
            on([4, 1, 3, 2]).median(),
            on([4, _NAN, 3, 2, 1]).median(),
            on([4, _NAN, 3, 2, 1]).nanmedian(),
            on([5, 1, 3]).kthvalue(3).values,
        ],
        [2, _NAN, 2, 5],
    ),
    "topk": (
        lambda on: [
            *on([[5, 1, 3, 2]]).topk(3, largest=False),
            *on([[5], [1], [3]]).topk(2, 0),
        ],
        [[[1, 2, 3]], [[1, 3, 2]], [[5], [3]], [[0], [2]]],
    ),
    "unique": (
        lambda on: [
            *on([3, 1, 3, 2]).unique(return_inverse=True, return_counts=True),
            *on([3, 3, 1, 3]).unique_consecutive(return_inverse=True, return_counts=True),
            *on([[2, 1], [0, 1], [2, 1]]).unique(dim=0, return_counts=True),
        ],
        [[1, 2, 3], [2, 0, 2, 1], [1, 1, 2], [3, 1, 3], [0, 0, 1, 2], [2, 1, 1], [[0, 1], [2, 1]], [1, 2]],
    ),
    "isin": (
        lambda on: [
            torch.isin(on([1, 2, 3]), on([2, 5])),
            torch.isin(on([1, 2, 3]), on([2, 5]), invert=True, assume_unique=True),
            torch.isin(on([1, 2, 3]), 2),
        ],
        [[False, True, False], [True, False, True], [False, True, False]],
    ),
}
"""Of the order of numbers: sides, edges that count, and ties."""

_SOURCES = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
_AT_NO_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scatter": lambda x, places, none: x.scatter(0, places, none),
    "scatter of a number": lambda x, places, none: x.scatter(0, places, 9),
    "scatter_add": lambda x, places, none: x.scatter_add(0, places, none),
    "scatter_reduce": lambda x, places, none: x.scatter_reduce(0, places, none, "sum", include_self=False),
    "index_add": lambda x, places, none: x.index_add(0, places, none),
    "index_copy": lambda x, places, none: x.index_copy(0, places, none),
    "index_fill": lambda x, places, none: x.index_fill(0, places, 9),
    "index_reduce": lambda x, places, none: x.index_reduce(0, places, none, "amax", include_self=False),
    "index_put": lambda x, places, none: x.index_put((places,), none),
    "index_put of sums": lambda x, places, none: x.index_put((places,), none, accumulate=True),
    "put": lambda x, places, none: x.put(places, none),
    "masked_fill": lambda x, places, none: x.masked_fill(x > 9, 9),
    "masked_scatter": lambda x, places, none: x.masked_scatter(x > 9, x),
    "in place, scatter_": lambda x, places, none: x.scatter_(0, places, none),
    "in place, index_add_": lambda x, places, none: x.index_add_(0, places, none),
    "in place, index_copy_": lambda x, places, none: x.index_copy_(0, places, none),
    "in place, index_fill_": lambda x, places, none: x.index_fill_(0, places, 9),
    "in place, put_": lambda x, places, none: x.put_(places, none),
}
"""Writes that change nothing."""


def _written_where(x: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    x[mask] = value
    return x


PLACED: dict[str, Known] = {
    "the bytes of truth values": (
        lambda on: [
            on([0, 0, 1], torch.bool)
            .index_put_((on([0, 0, 2], torch.int64),), on([1, 1, 1], torch.bool), accumulate=True)
            .view(torch.uint8),
            on([0, 2, -3]).bool().view(torch.uint8),
            on([0, 2, 256], torch.int32).bool().view(torch.uint8),
            on([0, 2, -3]).logical_not().view(torch.uint8),
            (on([1, 0, 1], torch.bool) | on([1, 1, 0], torch.bool)).view(torch.uint8),
            (on([1, 0, 1], torch.bool) + on([1, 0, 0], torch.bool)).view(torch.uint8),
        ],
        [[1, 0, 1], [0, 1, 1], [0, 1, 1], [1, 0, 0], [1, 1, 1], [1, 0, 1]],
    ),
    "nonzero_static": (
        lambda on: [
            torch.nonzero_static(on([0, 1, 0, 2]), size=3, fill_value=-7),
            torch.nonzero_static(on([[0, 1], [3, 0]]), size=1),
        ],
        [[[1], [3], [-7]], [[0, 1]]],
    ),
    "nonzero_static of nothing": (
        lambda on: [
            torch.nonzero_static(on([0, 0]), size=2, fill_value=5),
            torch.nonzero_static(on([[0, 0]]), size=1, fill_value=-7),
            torch.nonzero_static(on([1, 1]), size=0),
        ],
        [[[5], [5]], [[-7, -7]], []],
    ),
    "shifts": (
        lambda on: [
            on.whole([1, 5]) << on.whole([3, 0]),
            on.whole([1, 5]) << 2,
            on.whole([9, -9]) >> on.whole([1, 2]),
            on.whole([9, -9]) >> 1,
            on.whole([1, 5]).__ilshift__(1),
            on.whole([9, -9]).__irshift__(on.whole([1, 2])),
        ],
        [[8, 5], [4, 20], [4, -3], [4, -5], [2, 10], [4, -3]],
    ),
    "put": (
        lambda on: [
            on([1, 1, 1, 1]).put(on.whole([0, 2, 0, -1]), on([1, 2, 3, 4]), accumulate=True),
            on([1, 1, 1, 1]).put(on.whole([2, -1]), on([5, 6])),
            on([[1, 1], [1, 1]]).put_(on.whole([[2], [2]]), on([[5], [6]]), accumulate=True),
        ],
        [[5, 1, 3, 5], [1, 1, 5, 6], [[1, 1], [12, 1]]],
    ),
    "take": (
        lambda on: [
            on([[5, 6], [7, 8]]).take(on.whole([3, 0, -2])),
            on([[5, 6], [7, 8]]).take_along_dim(on.whole([[1, 0]]), 0),
        ],
        [[8, 5, 7], [[7, 6]]],
    ),
    "index_copy": (
        lambda on: [
            on([0, 0, 0]).index_copy(0, on.whole([2, 0, 1]), on([5, 6, 7])),
            on([[0, 0, 0]]).index_copy(1, on.whole([2, 0]), on([[5, 6]])),
            on([[0], [0], [4]]).index_copy_(0, on.whole([1, 0]), on([[5], [6]])),
        ],
        [[6, 7, 5], [[6, 0, 5]], [[6], [5], [4]]],
    ),
    "index_add": (
        lambda on: [
            on([0, 0, 0]).index_add(0, on.whole([2, 0, 2]), on([1, 2, 4]), alpha=3),
            on([[1, 1, 1]]).index_add_(-1, on.whole([2, 1]), on([[5, 6]]), alpha=-1),
        ],
        [[6, 0, 15], [[1, -5, -4]]],
    ),
    "index_fill": (
        lambda on: [
            on([1, 1, 1]).index_fill(0, on.whole([2, -3]), 9),
            on([[1, 1, 1]]).index_fill(-1, on.whole([1]), on(5)),
        ],
        [[9, 1, 9], [[1, 5, 1]]],
    ),
    "index_select": (lambda on: on([[1, 2, 3]]).index_select(-1, on.whole([2, 0, 2])), [[3, 1, 3]]),
    "index_put": (
        lambda on: [
            on([1, 1, 1]).index_put((on.whole([-1, 0, -1]),), on([2, 3, 4]), accumulate=True),
            on([[1, 1], [1, 1]]).index_put((on.truths([False, True]), on.whole([1])), on([5])),
            on([1, 1, 1]).index_put((on.whole([0, 0, 2]),), on(1), accumulate=True),
            on([1, 1, 1]).index_put((on.whole([0, 0, 2]),), on([2]), accumulate=True),
            on([1, 1, 1]).index_put_((on.whole([0, 0, 2]),), on(1), accumulate=True),
            on([[1, 1], [1, 1]]).index_put((on.whole([1, 1]),), on([2, 3]), accumulate=True),
        ],
        [
            [4, 1, 7], [[1, 1], [1, 5]], [3, 1, 2], [5, 1, 3], [3, 1, 2], [[1, 1], [5, 7]],
        ],
    ),
    "writes where a mask selects nothing": (
        lambda on: [
            _written_where(on([1, 2, 3]), on.truths([False] * 3), 9),
            _written_where(on([1, 2, 3]), on.truths([False] * 3), on(9)),
            _written_where(on([1, 2, 3]), on.truths([False] * 3), on([])),
            _written_where(on([[1, 2], [3, 4]]), on.truths([False] * 2), on([9, 9])),
            on([1, 2, 3]).masked_fill_(on.truths([False] * 3), on(9)),
            on([1, 2, 3]).index_put_((on.truths([False] * 3),), on(9), accumulate=True),
        ],
        [[1, 2, 3], [1, 2, 3], [1, 2, 3], [[1, 2], [3, 4]], [1, 2, 3], [1, 2, 3]],
    ),
    "scatter": (
        lambda on: [
            on([1, 1, 1]).scatter(0, on.whole([2, 0]), on([5, 6])),
            on([2, 2, 2]).scatter(0, on.whole([2, 2]), on([5, 6]), reduce="add"),
            on([2, 2, 2]).scatter(0, on.whole([2, 2]), on([5, 6]), reduce="multiply"),
            on([[1, 1, 1]]).scatter_add(1, on.whole([[2, 2, 0]]), on([[5, 6, 7]])),
            on([2, 2, 2]).scatter(0, on.whole([2, 0]), 3.0, reduce="add"),
            on([2, 2, 2]).scatter(0, on.whole([2, 0]), 3.0, reduce="multiply"),
            on([2, 2, 2]).scatter_(0, on.whole([2, 0]), 3.0, reduce="multiply"),
            on([2, 2, 2]).scatter_(0, on.whole([2, 0]), on([5, 6]), reduce="multiply"),
        ],
        [
            [6, 1, 5], [2, 2, 13], [2, 2, 60], [[8, 1, 12]], [5, 2, 5], [6, 2, 6], [6, 2, 6], [12, 2, 10],
        ],
    ),
    "sources that are larger than the places": (
        lambda on: [
            on([[0, 0, 0], [0, 0, 0]]).scatter(1, on.whole([[2, 0], [1, 0]]), on(_SOURCES)),
            on([[0, 0, 0], [0, 0, 0]]).scatter_add(1, on.whole([[2, 0], [1, 1]]), on(_SOURCES)),
            on([[0, 0, 0], [0, 0, 0]]).scatter_reduce(1, on.whole([[2, 0], [1, 1]]), on(_SOURCES), "sum"),
            on([[0, 0, 0], [0, 0, 0]]).scatter(0, on.whole([[1, 0]]), on(_SOURCES)),
            on([[1, 2, 3], [4, 5, 6]]).gather(1, on.whole([[2], [0]])),
            on([[1, 2, 3], [4, 5, 6]]).gather(0, on.whole([[1, 0]])),
        ],
        [
            [[2, 0, 1], [6, 5, 0]], [[2, 0, 1], [0, 11, 0]], [[2, 0, 1], [0, 11, 0]], [[0, 2, 0], [1, 0, 0]],
            [[3], [4]], [[4, 2]],
        ],
    ),
    **{
        f"{name}({how!r}, include_self={own})": (
            lambda on, name=name, how=how, own=own: getattr(on([2, 8, 7]), name)(  # type: ignore[misc]
                0, on.whole([0, 1, 0, 1]), on([6, 4, 4, 2]), how, include_self=own
            ),
            [*wanted, 7],
        )
        for name in ("scatter_reduce", "index_reduce")
        for how, own, wanted in (
            ("prod", True, [48, 64]), ("prod", False, [24, 8]), ("mean", True, [4, 14 / 3]),
            ("mean", False, [5, 3]), ("amax", True, [6, 8]), ("amax", False, [6, 4]),
            ("amin", True, [2, 2]), ("amin", False, [4, 2]), ("sum", True, [12, 14]), ("sum", False, [10, 6]),
        )
        if (name, how) != ("index_reduce", "sum")
    },
    **{
        f"{name} at no place": (lambda on, write=write: write(on([1, 2, 3]), on.whole([]), on([])), [1, 2, 3])  # type: ignore[misc]
        for name, write in _AT_NO_PLACE.items()
    },
    "reads at no place": (
        lambda on: [
            on([1, 2, 3]).gather(0, on.whole([])),
            on([1, 2, 3]).index_select(0, on.whole([])),
            on([1, 2, 3]).take(on.whole([])),
            on([1, 2, 3])[on.whole([])],
            on([1, 2, 3]).masked_select(on.truths([False] * 3)),
            on([1, 2, 3]).repeat_interleave(on.whole([0, 0, 0])),
            functional.embedding(on.whole([]), on([[1], [2]])).flatten(),
        ],
        [[]] * 7,
    ),
    "masked_scatter": (
        lambda on: on([[0, 0], [0, 0]]).masked_scatter(on.truths([True, False]), on([1, 2, 3])),
        [[1, 0], [2, 0]],
    ),
    "copies of views": (
        lambda on: [
            torch.slice_copy(on([1, 2, 3, 4, 5]), 0, 1, 5, 2),
            torch.select_copy(on([[1, 2], [3, 4]]), 1, 1),
            torch.detach_copy(on([1, 2])),
            torch.view_as_real_copy(on([1 + 2j], torch.complex64)),
            torch.transpose_copy(on([[1, 2], [3, 4]]), 0, 1),
            torch.permute_copy(on([[1, 2], [3, 4]]), (1, 0)),
            torch.expand_copy(on([[1], [2]]), (2, 2)),
            torch.diagonal_copy(on([[1, 2], [3, 4]]), 1),
            torch.unfold_copy(on([1, 2, 3]), 0, 2, 1),
            torch.as_strided_copy(on([1, 2, 3]), (2, 2), (1, 1)),
            torch.alias_copy(on([1, 2])),
            torch.native_channel_shuffle(on([[[[1]], [[2]], [[3]], [[4]]]]), 2).flatten(),
        ],
        [
            [2, 4], [2, 4], [1, 2], [[1, 2]], [[1, 3], [2, 4]], [[1, 3], [2, 4]], [[1, 1], [2, 2]], [2],
            [[1, 2], [2, 3]], [[1, 2], [2, 3]], [1, 2], [1, 3, 2, 4],
        ],
    ),
    "parts replaced": (
        lambda on: [
            torch.slice_scatter(on([0, 0, 0, 0, 0]), on([5, 6]), 0, 1, 4, 2),
            torch.select_scatter(on([[0, 0], [0, 0]]), on([5, 6]), 1, -1),
            torch.diagonal_scatter(on([[0, 0], [0, 0]]), on([5]), 1),
            on([[0, 0], [0, 0], [0, 0], [0, 0]]).fill_diagonal_(3, wrap=True),
        ],
        [[0, 5, 0, 6, 0], [[0, 5], [0, 6]], [[0, 5], [0, 0]], [[3, 0], [0, 3], [0, 0], [3, 0]]],
    ),
    "differences": (
        lambda on: [
            torch.diff(on([1, 4, 9, 16]), 2),
            torch.diff(on([4, 9]), prepend=on([1]), append=on([10])),
            torch.trapezoid(on([1, 3, 5]), dx=2),
            torch.trapezoid(on([1, 3, 5]), on([0, 1, 3])),
            torch.cumulative_trapezoid(on([1, 3, 5]), dx=2),
        ],
        [[2, 2], [3, 5, 1], 12, 10, [4, 12]],
    ),
    "moved elements": (
        lambda on: [
            on([1, 2, 3, 4]).roll(-1),
            on([1, 2, 3, 4]).roll(-7),
            on([1, 2, 3, 4]).roll(9),
            on([[1, 2], [3, 4], [5, 6]]).roll((-7, 5), (0, 1)),
            on([[1, 2], [3, 4]]).roll(-5),
            on([1, 2, 3]).repeat_interleave(on.whole([2, 1, 0]), output_size=3),
            on([1, 2, 3]).repeat_interleave(on([2, 1, 0], torch.int32)),
            torch.repeat_interleave(on([2, 0, 1], torch.int32)),
            on([[1, 2]]).repeat_interleave(on([1, 2], torch.int32), 1),
            on([1, 2, 3]).repeat_interleave(on.whole([0, 2, 0])),
            on([[1, 2, 3]]).repeat_interleave(on.whole([0, 2, 0]), 1, output_size=2),
            on([[1, 2], [3, 4]]).roll((1, 1), (0, 1)),
            on([[1, 2], [3, 4]]).rot90(-1),
            on([1, 2]).repeat_interleave(on.whole([0, 3])),
            torch.diag_embed(on([1, 2]), 1, 1, 0),
            torch.vander(on([2, 3]), 3, increasing=True),
            *on([1, 2, 3]).tensor_split((0, 2)),
        ],
        [
            [2, 3, 4, 1], [4, 1, 2, 3], [4, 1, 2, 3], [[4, 3], [6, 5], [2, 1]], [[2, 3], [4, 1]],
            [1, 1, 2], [1, 1, 2], [0, 0, 2], [[1, 2, 2]], [2, 2],
            [[2, 2]], [[4, 3], [2, 1]], [[3, 1], [4, 2]], [2, 2, 2],
            [[0, 0, 0], [1, 0, 0], [0, 2, 0]], [[1, 2, 4], [1, 3, 9]], [], [1, 2], [3],
        ],
    ),
}  # fmt: skip
"""That write and read at places: in their order, added up where they repeat, and counted from the end."""


_CLAMPED = 48
_EDGES = [[[[0, 255, 0, 255, 255, 0]] * 3 + [[255, 0, 0, 0, 255, 255]] * 3]]


def _scaled_images(on: On) -> list[torch.Tensor]:
    """Whether images of 8 bits become what those of float32 become, from 0 to 255."""
    found = []
    for mode, options in (
        ("nearest", {}), ("bilinear", {}), ("bicubic", {}), ("bilinear", {"antialias": True}),
        ("bicubic", {"antialias": True}),
    ):  # fmt: skip
        small, wide = (
            functional.interpolate(on(_EDGES, kind), (9, 4), mode=mode, **options).float()
            for kind in (torch.uint8, torch.float32)
        )
        # A device may round and clamp rows before columns, but a number beyond the ends stays at the end.
        found.append(((small - wide.clamp(0, 255)).abs() <= _CLAMPED).all())
    return found


def _slope(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The gradient of the sum of a function's results."""
    x.requires_grad_()
    (slope,) = torch.autograd.grad(function(x).sum(), x)
    return slope


NUMBERS: dict[str, Known] = {
    "lerp": (
        lambda on: [
            *(torch.lerp(on([0, 1]), on([4, 3]), w) for w in (2.0, -1.0, 0.25, 1.0, 0.0)),
            torch.lerp(on([0, 0, 0]), on([4, 4, 4]), on([2, -1, 0.25])),
            on([0, 1]).lerp_(on([4, 3]), 1.5),
            torch.lerp(on([30000, 0.25]), on([1, 30000]), 1.0),
            torch.lerp(on([30000, 0.25]), on([1, 30000]), on([1, 1])),
            on([30000, 0.25]).lerp_(on([1, 30000]), 0.0),
        ],
        [
            [8, 5], [-4, -1], [1, 1.5], [4, 3], [0, 1], [8, -4, 1], [6, 4], [1, 30000], [1, 30000],
            [30000, 0.25],
        ],
    ),
    "logaddexp": (
        lambda on: torch.logaddexp(
            on([-_INF, _INF, _INF, -_INF, 0, _NAN]), on([-_INF, _INF, -_INF, 2, 0, -_INF])
        ),
        [-_INF, _INF, _INF, 2, math.log(2), _NAN],
    ),
    "logaddexp2": (
        lambda on: torch.logaddexp2(on([-_INF, _INF, -_INF, 3]), on([-_INF, -_INF, 2, 3])),
        [-_INF, _INF, 2, 4],
    ),
    "logsumexp": (
        lambda on: [
            on([[-_INF, -_INF], [0, -_INF], [_INF, -_INF]]).logsumexp(1),
            on([[0, 0], [0, 0]]).logsumexp((0, 1), keepdim=True),
        ],
        [[-_INF, 0, _INF], [[math.log(4)]]],
    ),
    "logcumsumexp": (
        lambda on: on([-_INF, -_INF, 0, -_INF, 0]).logcumsumexp(0), [-_INF, -_INF, 0, 0, math.log(2)]
    ),
    "xlogy": (
        lambda on: [
            torch.xlogy(on([0, 0, 0, 1, 2]), on([0, _INF, _NAN, 0, 1])),
            torch.special.xlog1py(on([0, 0, 1, 2]), on([-1, _NAN, -1, 0])),
            torch.special.entr(on([0, 1, -1])),
        ],
        [[0, 0, _NAN, -_INF, 0], [0, _NAN, -_INF, 0], [0, 0, -_INF]],
    ),
    "hypot and atan2": (
        lambda on: [
            torch.hypot(on([3, _INF, 0]), on([4, _NAN, 0])),
            torch.atan2(on([0, -0.0, 1, 1]), on([-1, -1, 0, -1])),
        ],
        [[5, _INF, 0], [math.pi, -math.pi, math.pi / 2, 3 * math.pi / 4]],
    ),
    "pow": (
        lambda on: [
            torch.pow(on([-2, -2, 0, 0, _NAN, 1, 4]), on([3, -1, 0, -1, 0, _NAN, 0.5])),
            torch.pow(on([-2, 3]), 3),
            torch.pow(-2, on([3, 2])),
        ],
        [[-8, -0.5, 1, _INF, 1, 1, 2], [-8, 27], [-8, 4]],
    ),
    "float_power": (lambda on: torch.float_power(on([-2, 3]), 2).to(on.dtype), [4, 9]),
    "remainders": (
        lambda on: [
            torch.remainder(on([7, -7, 7, -7]), on([3, 3, -3, -3])),
            torch.fmod(on([7, -7, 7, -7]), on([3, 3, -3, -3])),
            *(torch.div(on([7, -7]), 2, rounding_mode=how) for how in (None, "trunc", "floor")),
            torch.remainder(7, on([-3])),
            on([1.0, -1.0, 0.5], torch.float32) // on([0.1, 0.1, 0.1], torch.float32),
            torch.div(on([1.0, 0.5], torch.float32), 0.1, rounding_mode="floor"),
            torch.floor_divide(on([-1.0], torch.float32), 0.1),
        ],
        [
            [1, 2, -2, -1], [1, -1, 1, -1], [3.5, -3.5], [3, -3], [3, -4], [-2], [9, -10, 4], [9, 4], [-10],
        ],
    ),
    "signs": (
        lambda on: [
            torch.copysign(on([1, 1, -1]), on([-0.0, 0.0, 2])),
            torch.copysign(on([1, -2]), -0.0),
            torch.heaviside(on([-1, 0, 1]), on([5, 5, 5])),
            torch.signbit(on([-0.0, 0.0, -1])),
            torch.maximum(on([_NAN, 1, -_INF]), on([1, _NAN, _INF])),
            torch.minimum(on([_NAN, 1, -_INF]), on([1, _NAN, _INF])),
            torch.fmax(on([_NAN, 1, _NAN]), on([1, _NAN, _NAN])),
            torch.fmin(on([_NAN, 1, 2]), on([1, _NAN, 1])),
        ],
        [
            [-1, 1, 1], [-1, -2], [0, 5, 1], [True, False, True],
            [_NAN, _NAN, _INF], [_NAN, _NAN, -_INF], [1, 1, _NAN], [1, 1, 1],
        ],
    ),
    "round": (
        lambda on: [
            torch.round(on([0.5, 1.5, 2.5, -0.5, -1.5])),
            torch.round(on([124, 156]), decimals=-1),
            torch.round(on([0.75, 0.21875]), decimals=1),
            torch.round(on([250, 350, -250], torch.float32), decimals=-2),
            on([25, 35, -25], torch.float32).round_(decimals=-1),
            torch.round(on([2500.0, 3500.0], torch.float32), decimals=-3),
        ],
        [[0, 2, 2, 0, -2], [120, 160], [0.8, 0.2], [200, 400, -200], [20, 40, -20], [2000, 4000]],
    ),
    "the next number": (
        lambda on: [
            torch.nextafter(on([1, -1, 2]), on([2, 0, 1])) - on([1, -1, 2]) == on(
                [torch.finfo(on.dtype).eps, torch.finfo(on.dtype).eps / 2, -torch.finfo(on.dtype).eps]
            ),
            torch.nextafter(on([1, _INF, 0.5]), on([1, 0, 0.5])) == on([1, torch.finfo(on.dtype).max, 0.5]),
        ],
        [[True] * 3, [True] * 3],
    ),
    "images of 8 bits that are scaled": (_scaled_images, [True] * 5),
    "mantissas and exponents": (
        lambda on: [
            *torch.frexp(on([8, -0.75, 0, 1, 1e4])),
            torch.ldexp(on([0.5, -0.75]), on.whole([4, 0])),
        ],
        [[0.5, -0.75, 0, 0.5, 1e4 / 2**14], [4, 0, 0, 1, 14], [8, -0.75]],
    ),
    "clamp": (
        lambda on: [
            on([-2, 0, 2, _NAN]).clamp(-1, 1),
            on([-2, 0, 2]).clamp(2, -1),
            on([-2, 0, 2]).clamp(min=on([0, 1, 3])),
            on([-2, 0, 2]).clamp(max=on([0, -1, 3])),
            on([_NAN, _INF, -_INF]).nan_to_num(4, 5, 6),
        ],
        [[-1, 0, 1, _NAN], [-1, -1, -1], [0, 1, 3], [-2, -1, 2], [4, 5, 6]],
    ),
    "nan_to_num without options": (
        lambda on: torch.cat(
            [
                on([_NAN, 2]).nan_to_num() == on([0, 2]),
                on([_INF, -_INF]).nan_to_num().abs() == torch.finfo(on.dtype).max,
                on([_INF, -_INF]).nan_to_num(posinf=3) == on([3, -torch.finfo(on.dtype).max]),
                on([_INF, -_INF]).nan_to_num_(neginf=3) == on([torch.finfo(on.dtype).max, 3]),
            ]
        ),
        [True] * 8,
    ),
    "gradients on either side of thresholds": (
        lambda on: [
            _slope(lambda x: functional.softplus(x, beta=0.5, threshold=1), on([1.5, 3])),
            _slope(lambda x: functional.softplus(x, beta=2, threshold=4), on([1.5, 3])),
            _slope(lambda x: functional.threshold(x, 1, 9), on([0.5, 1, 2])),
            _slope(lambda x: functional.hardshrink(x, 1), on([-2, 0.5, 2])),
            _slope(lambda x: functional.softshrink(x, 1), on([-2, 0.5, 2])),
            _slope(lambda x: functional.hardtanh(x, -2, 1), on([-3, -1.5, 0, 1.5])),
            _slope(lambda x: functional.leaky_relu(x, 0.25), on([-4, 4])),
            _slope(functional.relu6, on([-1, 5, 7])),
            _slope(functional.hardsigmoid, on([-4, 0, 4], torch.float32)),
            _slope(functional.hardswish, on([-4, 1.5, 4], torch.float32)),
            _slope(lambda x: functional.elu(x, 3), on([-1, 2])),
            _slope(lambda x: functional.celu(x, 2), on([-1, 2])),
            _slope(lambda x: functional.rrelu(x, 0.25, 0.75), on([-4, 4])),
            _slope(functional.logsigmoid, on([-100, 0])),
            _slope(lambda x: functional.huber_loss(x, 0 * x, delta=2, reduction="sum"), on([1, 5, -5])),
            _slope(lambda x: functional.smooth_l1_loss(x, 0 * x, beta=2, reduction="sum"), on([1, 5, -5])),
            _slope(lambda x: x.clamp(-1, 2), on([-2, 0, 3])),
            _slope(lambda x: torch.logit(x, eps=0.25), on([0.125, 0.5, 0.75, 0.875])),
        ],
        [
            [1 / (1 + math.exp(-0.75)), 1], [1 / (1 + math.exp(-3)), 1], [0, 0, 1], [1, 0, 1], [1, 0, 1],
            [0, 1, 1, 0], [0.25, 1], [0, 1, 0], [0, 1 / 6, 0], [0, 1, 1], [3 / math.e, 1],
            [math.exp(-0.5), 1], [0.5, 1], [1, 0.5], [1, 2, -2], [0.5, 1, -1], [0, 1, 0],
            [0, 4, 16 / 3, 0],
        ],
    ),
    "gradients of the distances of equal points": (
        lambda on: [
            _slope(lambda x: torch.cdist(x, on([[1, 2], [5, 2]]), 1), on([[1, 2], [5, 4]])),
            _slope(lambda x: torch.cdist(x, on([[1, 2], [5, 2]])), on([[1, 2], [5, 4]])),
            _slope(lambda x: functional.pdist(x, 1), on([[1, 2], [1, 2]])),
            _slope(functional.pdist, on([[1, 2], [1, 2]])),
            _slope(lambda x: torch.dist(x, on([1, 2])), on([1, 2])),
            _slope(torch.linalg.vector_norm, on([0, 0])),
        ],
        [
            [[-1, 0], [1, 2]], [[-1, 0], [4 / math.sqrt(20), 1 + 2 / math.sqrt(20)]], [[0, 0], [0, 0]],
            [[0, 0], [0, 0]], [0, 0], [0, 0],
        ],
    ),
    "activations beyond their thresholds": (
        lambda on: [
            functional.softplus(on([100, -0.0]), beta=2, threshold=10),
            functional.threshold(on([0.5, 1, 2]), 1, 9),
            functional.hardshrink(on([-2, -1, 0.5, 2]), 1),
            functional.softshrink(on([-2, -1, 0.5, 3]), 1),
            functional.hardtanh(on([-3, 0, 3, _NAN]), -2, 1),
            functional.leaky_relu(on([-4, 4]), 0.25),
            functional.relu6(on([-1, 5, 7])),
            # torch's CUDA has a constant of float32 in those of float64.
            functional.hardsigmoid(on([-3, 0, 3], torch.float32)),
            functional.hardswish(on([-3, 0, 3], torch.float32)),
            functional.logsigmoid(on([-100, 0])),
            functional.elu(on([-100, 2]), 3),
            functional.celu(on([-100, 2]), 3),
            functional.rrelu(on([-4, 4]), 0.25, 0.75),
            functional.glu(on([[2, 4, 0, 100]])),
            functional.softsign(on([3, -1])),
            functional.tanhshrink(on([0, 100])),
        ],
        [
            [100, math.log(2) / 2], [9, 9, 2], [-2, 0, 0, 2], [-1, 0, 0, 2], [-2, 0, 1, _NAN], [-1, 4],
            [0, 5, 6], [0, 0.5, 1], [0, 0, 3], [-100, -math.log(2)], [-3, 2], [-3, 2], [-2, 4], [[1, 4]],
            [0.75, -0.5], [0, 99],
        ],
    ),
    "addcmul and addcdiv": (
        lambda on: [
            torch.addcmul(on([1, 2]), on([3, 4]), on([5, 6]), value=0.5),
            torch.addcdiv(on([1, 2]), on([6, 8]), on([3, 4]), value=-2),
            on([1, 2]).addcmul_(on([3, 4]), on([5, 6]), value=-1),
            torch.add(on([1, 2]), on([3, 4]), alpha=-2),
            torch.sub(on([1, 2]), on([3, 4]), alpha=2),
            torch.rsub(on([1, 2]), on([3, 4]), alpha=2),
        ],
        [[8.5, 14], [-3, -2], [-14, -22], [-5, -6], [-5, -6], [1, 0]],
    ),
    "variances": (
        lambda on: [
            *(on([1, 3, 5, 7]).var(0, correction=c) for c in (0, 1, 2)),
            on([1, 3, 5, 7]).var(unbiased=False),
            on([1, 3]).var(0, correction=3),
            on([1, 3]).std(0, correction=2),
            on([[1, 3], [5, 7]]).std((0, 1), correction=0, keepdim=True),
            *torch.var_mean(on([1, 3, 5, 7]), 0, correction=2),
            *torch.std_mean(on([1, 3]), 0, correction=0),
        ],
        [5, 20 / 3, 10, 5, _INF, _INF, [[math.sqrt(5)]], 10, 4, 1, 2],
    ),
    "norms": (
        lambda on: [
            *(torch.linalg.vector_norm(on([3, -4, 0]), p) for p in (0, 1, 2, _INF, -_INF)),
            *(torch.norm(on([[3, -4]]), p, 1, True) for p in (1, 2, _INF)),
            torch.renorm(on([[3, 4], [1, 0]]), 2, 0, 2.5),
            functional.normalize(on([[3, -4]]), _INF, 1),
            torch.dist(on([1, 2]), on([4, -2]), 1),
        ],
        [
            2, 7, 5, 4, 0, [[7]], [[5]], [[4]], [[7.5 / (5 + 1e-7), 10 / (5 + 1e-7)], [1, 0]],
            [[0.75, -1]], 7,
        ],
    ),
    "cdist": (
        lambda on: [torch.cdist(on([[0, 0]]), on([[3, -4]]), p) for p in (1.0, 2.0, _INF)],
        [[[7]], [[5]], [[4]]],
    ),
    "reductions of nothing and of NaN": (
        lambda on: [
            on([]).sum(),
            on([]).prod(),
            on([[]]).sum(1),
            on([[]]).logsumexp(1),
            on([]).all(),
            on([]).any(),
            on([1, _NAN, 3]).nansum(),
            on([1, _NAN, 3]).nanmean(),
            on([1, _NAN, 3]).amax(),
            on([_NAN, 3]).cummax(0).values,
        ],
        [0, 1, [0], [-_INF], True, False, 4, 2, _NAN, [_NAN, _NAN]],
    ),
    "covariances": (
        lambda on: [
            torch.cov(on([1, 3, 5, 7]), correction=0),
            torch.cov(on([1, 3]), fweights=on.whole([1, 3])),
            torch.corrcoef(on([[1, 2, 3], [3, 2, 1]])),
        ],
        [5, 1, [[1, -1], [-1, 1]]],
    ),
}  # fmt: skip
"""Of numbers: infinite, not defined, beyond thresholds and outside of ranges, with each option."""


def _with_factors(
    name: str, first: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]
) -> dict[str, Known]:
    """A product of ones that is added to twos, by each factor and in place."""
    shape = {"addmm": (2, 3), "addmv": (2,), "addr": (2, 3), "baddbmm": (2, 2, 3), "addbmm": (2, 3)}[name]
    # Of ones, each sum has as many terms as the dimensions that it goes over.
    terms = {"addmm": 4, "addmv": 4, "addr": 1, "baddbmm": 4, "addbmm": 8}[name]

    def call(on: On, beta: float, alpha: float, in_place: bool) -> torch.Tensor:
        def of(shape: tuple[int, ...], value: float) -> torch.Tensor:
            return torch.full(shape, value, dtype=on.dtype, device=on.device)

        given = of(shape if in_place else first, _NAN if beta == 0 else 2.0)
        function = getattr(given, f"{name}_" if in_place else name)
        result: torch.Tensor = function(of(left, 1.0), of(right, 1.0), beta=beta, alpha=alpha)
        return result

    return {
        f"{name}{'_' if in_place else ''}(beta={beta}, alpha={alpha})": (
            lambda on, given=(beta, alpha, in_place): call(on, *given),  # type: ignore[misc]
            torch.full(shape, 2.0 * beta + alpha * terms).tolist(),
        )
        for beta, alpha in product((1, 0.5, 0, -2), (1, 0.5, -3))
        for in_place in (False, True)
    }


def _attention(scale: float | None, mask: str, causal: bool = False) -> Known:
    """Of one query of 2 and keys of 0 and 1: the second value is 8, so the result is 8 times its weight."""
    factor = (1 / math.sqrt(8)) if scale is None else scale
    odds = math.exp(2 * factor) / (3 if mask == "numbers" else 1)
    weight = 0.0 if mask == "truths" or causal else odds / (1 + odds)

    def call(on: On) -> torch.Tensor:
        row = [0.0] * 8

        def of(*numbers: float) -> torch.Tensor:
            return on([[[[number, *row[1:]] for number in numbers]]]).expand(2, 3, -1, -1)

        given = {"truths": on.truths([[True, False]]), "numbers": on([[_LN3, 0.0]]), "none": None}[mask]
        result = functional.scaled_dot_product_attention(
            of(2.0), of(0.0, 1.0), of(0.0, 8.0), given, is_causal=causal, scale=scale
        )
        return result[..., 0]

    return call, torch.full((2, 3, 1), 8 * weight, dtype=torch.float64).tolist()


def _scaled(on: On) -> list[torch.Tensor]:
    """Products of 32 times 2 and 3 in float8, with scales, and with a bias that has none."""
    left = torch.full((16, 32), 2.0).to(torch.float8_e4m3fn).to(on.device)
    right = torch.full((48, 32), 3.0).to(torch.float8_e4m3fn).to(on.device).t()
    scales = on(0.5, torch.float32), on(0.25, torch.float32)
    bias = torch.arange(48.0).to(torch.bfloat16).to(on.device)
    return [
        torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16)[0],
        torch._scaled_mm(left, right, *scales, bias, out_dtype=torch.bfloat16)[1],
    ]


PRODUCTS: dict[str, Known] = {
    "products in float8 with scales": (_scaled, [[24] * 48, [24 + n for n in range(48)]]),
    **_with_factors("addmm", (3,), (2, 4), (4, 3)),
    **_with_factors("addmv", (2,), (2, 4), (4,)),
    **_with_factors("addr", (2, 3), (2,), (3,)),
    **_with_factors("baddbmm", (1, 3), (2, 2, 4), (2, 4, 3)),
    **_with_factors("addbmm", (2, 3), (2, 2, 4), (2, 4, 3)),
    "products of conjugated matrices": (
        lambda on: [
            product
            for x in (on([[1 + 2j, 3j], [4, 5 - 1j]], torch.complex64),)
            for product in (
                x.conj() @ x,
                x @ x.conj(),
                x.mH @ x,
                torch.bmm(x[None].conj(), x[None]),
                torch.addmm(x.conj(), x.conj(), x),
                torch.vdot(x[0], x[1]),
                torch.dot(x[0].conj(), x[1]),
                torch.mv(x.conj(), x[0]),
                torch.einsum("ij,kj->ik", x, x.conj()),
                x.conj() * x,
            )
        ],
        [
            [[5 - 12j, 3 - 12j], [24 + 12j, 26 + 12j]],
            [[5 + 12j, 3 + 12j], [24 - 12j, 26 - 12j]],
            [[21, 26 - 1j], [26 + 1j, 35]],
            [[[5 - 12j, 3 - 12j], [24 + 12j, 26 + 12j]]],
            [[6 - 14j, 3 - 15j], [28 + 12j, 31 + 13j]],
            1 - 23j,
            1 - 23j,
            [14, 1 + 23j],
            [[14, 1 + 23j], [1 - 23j, 42]],
            [[5, 9], [16, 26]],
        ],
    ),
    **{
        f"attention(mask={mask}, scale={scale}, is_causal={causal})": _attention(scale, mask, causal)
        for mask, causal in (("none", False), ("none", True), ("truths", False), ("numbers", False))
        for scale in (None, 1.0, 0.25, _LN3 / 2, 0.0)
        if scale != 0.0 or not causal  # a masked score of minus infinity times zero
    },
}
"""With factors: products that are added to something, and attention."""

_MODES = (
    "use_mm_for_euclid_dist_if_necessary",
    "use_mm_for_euclid_dist",
    "donot_use_mm_for_euclid_dist",
)
_SMALL = [1e-4, -1e-6, 1e-9, -1e-12, 1e-20, 1e-30]
_FAR = [8000, 8001, 8002, 8005]
"""Numbers whose squares float32 does not hold: a variance is no difference of sums of them."""
_FAR_NORMALISED = [(number - 8002) / math.sqrt(3.5 + 0.5) for number in _FAR]
_NEARLY_ITSELF: dict[str, Callable[[float], float]] = {
    "log1p": math.log1p, "expm1": math.expm1, "sin": math.sin, "tan": math.tan, "asin": math.asin,
    "atan": math.atan, "sinh": math.sinh, "tanh": math.tanh, "asinh": math.asinh, "atanh": math.atanh,
    "erf": math.erf, "sqrt": lambda x: math.sqrt(x) if x >= 0 else _NAN,
}  # fmt: skip

_ANGLES = [1003.0, 65537.0, 131071.0, 1000001.0, 16777215.0]


def _below_the_axis(on: On) -> torch.Tensor:
    """-4 with an imaginary part of each zero."""
    return torch.view_as_complex(on([[-4.0, 0.0], [-4.0, -0.0]], torch.float32))


SMALL_AND_LARGE: dict[str, Known] = {
    **{
        f"{name} of small numbers": (
            lambda on, name=name: getattr(torch, name)(on(_SMALL)),  # type: ignore[misc]
            [function(x) for x in _SMALL],
        )
        for name, function in _NEARLY_ITSELF.items()
    },
    "quantile": (
        lambda on: [
            torch.quantile(on([3, 0, 1, 9]), 0.5, interpolation=how)
            for how in ("linear", "lower", "higher", "midpoint")
        ]
        + [torch.nanquantile(on([3, _NAN, 1, 9]), 0.5), torch.quantile(on([[3, 1]]), 1.0, 1, True)],
        [2, 1, 3, 2, 3, [[3]]],
    ),
    "logaddexp of distant numbers": (
        lambda on: torch.logaddexp(on([0, -20, 1e4]), on([-20, 0, 1e4])),
        [math.log1p(math.exp(-20)), math.log1p(math.exp(-20)), 1e4 + math.log(2)],
    ),
    "erfc, sigmoid and softplus of distant numbers": (
        lambda on: [
            torch.erfc(on([5, 9])),
            torch.sigmoid(on([-30, -80])),
            functional.softplus(on([-20, -50])),
            functional.logsigmoid(on([20, 50])),
            torch.exp(on([-80, 80])),
        ],
        [
            [math.erfc(5), math.erfc(9)], [1 / (1 + math.exp(30)), 1 / (1 + math.exp(80))],
            [math.log1p(math.exp(-20)), math.exp(-50)], [-math.log1p(math.exp(-20)), -math.exp(-50)],
            [math.exp(-80), math.exp(80)],
        ],
    ),
    "variances far from zero": (
        lambda on: [
            result
            for x in (on([_FAR, [-n for n in _FAR], _FAR[::-1]]),)
            for result in (
                x.var(-1),
                x.t().var(0, correction=0),
                x.t().contiguous().var(0, correction=0),
                x[0].var(),
                x.std(-1, keepdim=True),
                *torch.var_mean(x, -1),
                torch.cov(x[:1]),
                functional.layer_norm(x, (4,), eps=0.5),
                functional.group_norm(x[:, :, None], 1, eps=0.5)[..., 0],
                functional.batch_norm(x.t().contiguous(), None, None, training=True, eps=0.5).t(),
                functional.instance_norm(x[None], eps=0.5)[0],
            )
        ],
        [
            [14 / 3] * 3,
            [3.5] * 3,
            [3.5] * 3,
            14 / 3,
            [[math.sqrt(14 / 3)]] * 3,
            [14 / 3] * 3,
            [8002, -8002, 8002],
            14 / 3,
            *[[_FAR_NORMALISED, [-n for n in _FAR_NORMALISED], _FAR_NORMALISED[::-1]]] * 4,
        ],
    ),
    "shares and sums of distant numbers": (
        lambda on: [
            torch.log_softmax(on([1e4, 1e4, -1e4]), 0)[:2],
            torch.softmax(on([[-1e4], [-1e4]]), 0),
            functional.cross_entropy(on([[1e4, 1e4]]), on.whole([1])),
            torch.logcumsumexp(on([1e3, 1e3, 1e3]), 0),
            torch.logaddexp2(on([2e3]), on([2e3])),
            functional.binary_cross_entropy_with_logits(on([90.0, -90.0]), on([1.0, 1.0]), reduction="none"),
            torch.special.xlog1py(on([2.0]), on([2.0**-20])),
            functional.softplus(on([1e4])),
        ],
        [
            [-math.log(2)] * 2, [[0.5], [0.5]], math.log(2),
            [1e3, 1e3 + math.log(2), 1e3 + math.log(3)], [2001], [math.exp(-90), 90],
            [2 * math.log1p(2.0**-20)], [1e4],
        ],
    ),
    "distances of rows that are nearly equal": (
        lambda on: [
            torch.cdist(x, x).isnan().any()
            for x in (torch.arange(90.0).reshape(30, 3).to(on.dtype).mul(1e-3).add(7).to(on.device),)
        ]
        + [
            torch.cdist(x, x, compute_mode=how).ge(0).logical_not().any()
            for how in _MODES
            for x in (on([[7.1] * 5] * 30),)
        ],
        [False, False, False, False],
    ),
    "log_ndtr": (lambda on: torch.special.log_ndtr(on([-20])), [-203.91715537109727]),
    # Rotary embeddings turn by angles as large as the length of a text.
    "sines of large angles": (
        lambda on: [
            torch.sin(on(_ANGLES, torch.float32)),
            torch.cos(on(_ANGLES, torch.float32)),
            torch.tan(on(_ANGLES, torch.float32)),
        ],
        [[f(angle) for angle in _ANGLES] for f in (math.sin, math.cos, math.tan)],
    ),
    "square roots and logarithms below the negative axis": (
        lambda on: [
            # A device may compute roots by angles: their part that is 0 is rounding noise.
            torch.view_as_real(torch.sqrt(_below_the_axis(on))).round(decimals=5) + 0.0,
            torch.view_as_real(torch.log(_below_the_axis(on))),
            torch.angle(_below_the_axis(on)),
            torch.view_as_real(torch.sgn(on([0, 3 - 4j], torch.complex64))),
        ],
        [
            [[0, 2], [0, -2]], [[math.log(4), math.pi], [math.log(4), -math.pi]], [math.pi, -math.pi],
            [[0, 0], [0.6, -0.8]],
        ],
    ),
    "hypot and functions of large numbers": (
        lambda on: [
            torch.hypot(on([3e30, 3e-30]), on([4e30, 4e-30])),
            torch.asinh(on([1e30, -1e30])),
            torch.acosh(on([1e30])),
            torch.log1p(on([1e30])),
            torch.softmax(on([1e30, 1e30, -1e30]), 0),
            torch.logsumexp(on([1e4, 1e4]), 0),
        ],
        [
            [5e30, 5e-30], [math.asinh(1e30), -math.asinh(1e30)], [math.acosh(1e30)], [math.log1p(1e30)],
            [0.5, 0.5, 0], 1e4 + math.log(2),
        ],
    ),
}  # fmt: skip
"""Of numbers of which no digit may be lost, or whose squares or powers are beyond what float32 holds."""


def _of_large(base: int) -> dict[str, Known]:
    """Of integers that fall together with their neighbours in a floating-point dtype."""
    a, b, c = base + 1, base + 3, base + 5
    return {
        "products of matrices": (
            lambda on: [
                torch.mm(on.whole([[a, b]]), on.whole([[1], [2]])),
                on.whole([[a, b]]) @ on.whole([1, 2]),
                torch.mv(on.whole([[a, b]]), on.whole([1, 2])),
                torch.dot(on.whole([a, b]), on.whole([1, 2])),
                torch.vdot(on.whole([a, b]), on.whole([1, 2])),
                torch.inner(on.whole([a, b]), on.whole([1, 2])),
                torch.bmm(on.whole([[[a, b]]]), on.whole([[[1], [2]]])),
                on.whole([[[a, b]], [[b, c]]]) @ on.whole([[1], [2]]),
                torch.addmm(on.whole([[a]]), on.whole([[a, b]]), on.whole([[1], [2]]), beta=3, alpha=2),
                torch.baddbmm(on.whole([[[a]]]), on.whole([[[a, b]]]), on.whole([[[1], [2]]])),
                torch.addmv(on.whole([a]), on.whole([[a, b]]), on.whole([1, 2])),
                torch.einsum("ij,j->i", on.whole([[a, b]]), on.whole([1, 2])),
                torch.tensordot(on.whole([[a, b]]), on.whole([[1], [2]]), 1),
                torch.linalg.multi_dot([on.whole([[a, b]]), on.whole([[1], [2]]), on.whole([[1]])]),
            ],
            [
                [[a + 2 * b]], [a + 2 * b], [a + 2 * b], a + 2 * b, a + 2 * b, a + 2 * b, [[[a + 2 * b]]],
                [[[a + 2 * b]], [[b + 2 * c]]], [[5 * a + 4 * b]], [[[2 * a + 2 * b]]], [2 * a + 2 * b],
                [a + 2 * b], [[a + 2 * b]], [[a + 2 * b]],
            ],
        ),
        "outer products": (
            lambda on: [
                torch.addr(on.whole([[a, b]]), on.whole([1]), on.whole([a, b])),
                torch.outer(on.whole([a, b]), on.whole([1, 3])),
                torch.kron(on.whole([a, b]), on.whole([1, 3])),
            ],
            [[[2 * a, 2 * b]], [[a, 3 * a], [b, 3 * b]], [a, 3 * a, b, 3 * b]],
        ),
        "numbers in order": (
            lambda on: [
                torch.arange(a, a + 5, device=on.device),
                torch.arange(c, a, -2, device=on.device),
                torch.arange(a, a + 9, 4, dtype=torch.int64, device=on.device),
                torch.full((2,), a, device=on.device),
                torch.full_like(on.whole([1]), a),
                on.whole([1]).new_full((1,), a),
                on.whole([1]).fill_(a),
                torch.empty(1, dtype=torch.int64, device=on.device).fill_(on.whole(a)),
                torch.scalar_tensor(a, dtype=torch.int64, device=on.device),
            ],
            [
                list(range(a, a + 5)), [c, b], [a, a + 4, a + 8], [a, a], [a], [a], [a], [a], a,
            ],
        ),
        "sums and products": (
            lambda on: [
                on.whole([a, 2]).sum(),
                on.whole([[a, 2], [b, 3]]).sum(0),
                on.whole([a, 2]).cumsum(0),
                on.whole([a, 3]).prod(),
                on.whole([[a, 3]]).prod(1),
                on.whole([a, 3]).cumprod(0),
                on.whole([a]).add(on.whole([2]), alpha=3),
                on.whole([c]) - a,
                on.whole([a]) * 3,
                torch.addcmul(on.whole([a]), on.whole([b]), on.whole([2]), value=3),
                on.whole([a]).index_add(0, on.whole([0, 0]), on.whole([a, b]), alpha=2),
                on.whole([[a, 2], [b, 3]]).trace(),
                on.whole([a, b]).count_nonzero(),
            ],
            [
                a + 2, [a + b, 5], [a, a + 2], 3 * a, [3 * a], [a, 3 * a], [a + 6], [4], [3 * a],
                [a + 6 * b], [3 * a + 2 * b], a + 3, 2,
            ],
        ),
        "divisions and bits": (
            lambda on: [
                on.whole([a]) // 2,
                on.whole([-a]) // 2,
                on.whole([a]) % 1001,
                on.whole([-a]).fmod(1001),
                torch.div(on.whole([-a]), 2, rounding_mode="trunc"),
                torch.gcd(on.whole([3 * a]), on.whole([2 * a])),
                torch.bitwise_xor(on.whole([a]), 5),
                on.whole([a]) >> 1,
                on.whole([a]) ** 1,
                on.whole([-a]).abs(),
                on.whole([a]).neg(),
            ],
            [
                [a // 2], [-a // 2], [a % 1001], [-(a % 1001)], [-(a // 2)], [a], [a ^ 5], [a >> 1], [a], [a],
                [-a],
            ],
        ),
        "an order": (
            lambda on: [
                *on.whole([b, a, c]).sort(),
                *on.whole([b, a, c]).topk(2),
                *on.whole([b, a, c]).max(0),
                *on.whole([b, a, c]).kthvalue(2),
                on.whole([b, a, c]).median(),
                torch.maximum(on.whole([a]), on.whole([a + 1])),
                on.whole([a, c]).clamp(a + 1, b),
                torch.searchsorted(on.whole([a, b, c]), on.whole([a + 1, b]), side="right"),
                on.whole([a, a + 1, a]).unique(),
                torch.isin(on.whole([a, b]), on.whole([a + 1, b])),
                on.whole([a]) == a + 1,
                on.whole([a]) < on.whole([a + 1]),
                on.whole([[b, a, c]]).argmin(1),
                torch.where(on.truths([True, False]), on.whole([a, a]), b),
                on.whole([0, 1]).masked_fill(on.truths([True, False]), a),
            ],
            [
                [a, b, c], [1, 0, 2], [c, b], [2, 0], c, 2, b, 0, b, [a + 1], [a + 1, b], [1, 2], [a, a + 1],
                [False, True], [False], [True], [1], [a, b], [a, 1],
            ],
        ),
    }  # fmt: skip


LARGE: dict[str, Known] = {
    f"{name} of integers above 2**{bits}": known
    for bits in (24, 53)
    for name, known in _of_large(2**bits).items()
}
"""Of integers that float32, or float64, does not hold."""
