"""Pairs of values for tests, of which few are tried where slow tests are left out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest


def all_pairs(
    rows: Collection[Any], columns: Collection[Any], row_id: Callable[[Any], str] = str,
    column_id: Callable[[Any], str] = str,
) -> list[Any]:  # fmt: skip
    """Every value of the first with every one of the second.

    Where slow tests are left out, only as many pairs are left as it takes to have each value in one.
    """
    shorter = min(len(rows), len(columns))
    return [
        pytest.param(
            row,
            column,
            id=f"{row_id(row)}-{column_id(column)}",
            marks=() if (i - j) % shorter == 0 else pytest.mark.slow,
        )
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
