"""Parameters of a test of which `make test` tries a few, and `make test-all` every one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet


def quick(values: Mapping[str, Any] | tuple[str, ...], *names: str) -> list[ParameterSet]:
    """Returns a parameter for each value, called by its key or by itself; all but those named are slow.

    Raises:
        ValueError: a name is not among them.
    """
    found = values if isinstance(values, Mapping) else {value: value for value in values}
    unknown = set(names) - set(found)
    if unknown:
        raise ValueError(f"no parameter is called {', '.join(sorted(unknown))}")
    return [
        pytest.param(value, id=name, marks=() if name in names else pytest.mark.slow)
        for name, value in found.items()
    ]


def few_of(cases: Iterable[Any], step: int) -> list[ParameterSet]:
    """Returns a parameter for each case of a table; all but the first of every ``step`` of them are slow.

    For tables of many cases that differ in what they say and not in how it is found.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow if place % step else ()
        )
        for place, case in enumerate(cases)
    ]
