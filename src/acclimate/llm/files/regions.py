"""Regions of tensors, and what a region becomes when the tensor gets another shape."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

Region = tuple[tuple[int, int], ...]
"""The ``(start, stop)`` of each dimension."""


@dataclass(frozen=True)
class Regrouping:
    """How to get a region of the new shape from a region of the original shape."""

    covering: Region
    """A region of the original shape that contains all needed elements."""
    grouped: tuple[int, ...]
    """The covering region's shape with each group of dimensions, whose elements stay together, flattened."""
    within: Region
    """The wanted elements of each group."""
    opened: tuple[int, ...]
    """The shape of the wanted elements, with the new dimensions of the groups."""
    inside: Region
    """The wanted region of that shape."""
    is_exact: bool
    """Whether the covering region contains nothing else, in the same order."""


def regroup(before: tuple[int, ...], after: tuple[int, ...], region: Region) -> Regrouping:
    """Returns how to read a region of shape ``after`` from a tensor of shape ``before``.

    Dimensions are matched in groups of equal products. In each group, the first new dimension determines the
    needed rows of the first old dimension; other dimensions are read whole.
    """
    covering: list[tuple[int, int]] = []
    grouped: list[int] = []
    within: list[tuple[int, int]] = []
    opened: list[int] = []
    inside: list[tuple[int, int]] = []
    for old, new in _groups(before, after):
        sizes, bounds = [after[dim] for dim in new], [region[dim] for dim in new]
        lead = next((place for place, size in enumerate(sizes) if size > 1), 0)  # before it are only ones
        start, stop = bounds[lead] if bounds else (0, 1)
        inner = prod(sizes[lead + 1 :])
        flat = (start * inner, stop * inner)
        old_sizes = [before[dim] for dim in old]
        old_lead = next((place for place, size in enumerate(old_sizes) if size > 1), 0)
        old_inner = prod(old_sizes[old_lead + 1 :])
        first, last = flat[0] // old_inner, -(-flat[1] // old_inner)
        covering += [
            (first, last) if place == old_lead else (0, size) for place, size in enumerate(old_sizes)
        ]
        grouped.append((last - first) * old_inner)
        within.append((flat[0] - first * old_inner, flat[1] - first * old_inner))
        opened += [stop - start if place == lead else size for place, size in enumerate(sizes)]
        inside += [(0, stop - start) if place == lead else bound for place, bound in enumerate(bounds)]
    is_exact = all(bounds == (0, size) for bounds, size in zip(within, grouped, strict=True)) and all(
        bounds == (0, size) for bounds, size in zip(inside, opened, strict=True)
    )
    return Regrouping(tuple(covering), tuple(grouped), tuple(within), tuple(opened), tuple(inside), is_exact)


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Pairs the shortest runs of old and new dimensions that have equal products."""
    groups: list[tuple[list[int], list[int]]] = []
    old_at = new_at = 0
    while old_at < len(before) or new_at < len(after):
        old, new = [], []
        old_size = new_size = 1
        while True:
            if old_at < len(before) and (old_size <= new_size or new_at == len(after)):
                old_size *= before[old_at]
                old.append(old_at)
                old_at += 1
            elif new_at < len(after):
                new_size *= after[new_at]
                new.append(new_at)
                new_at += 1
            if old_size == new_size and (old or new):
                break
        groups.append((old, new))
    return groups
