"""How many of a dimension's items each rank gets, at multiples that suit kernels."""

from __future__ import annotations

import itertools


def even_shares(count: int, size: int, multiple: int = 1) -> list[range]:
    """Divides ``count`` consecutive items among ranks as evenly as possible.

    All shares except one are multiples of ``multiple``.
    """
    blocks, rest = divmod(count, multiple)
    counts = [(blocks // size + (rank < blocks % size)) * multiple for rank in range(size)]
    counts[min(range(size), key=lambda rank: (counts[rank], rank))] += rest
    stops = list(itertools.accumulate(counts))
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def kernel_multiple(count: int, size: int) -> int:
    """Returns a multiple of columns that suits kernels, or 1 if it would make the ranks too uneven."""
    return next(
        (multiple for multiple in (64, 32, 16, 8) if count // multiple >= 4 * size and count % multiple == 0),
        1,
    )
