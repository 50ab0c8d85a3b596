"""Of the planted faults, those of `make test`: one for each check. `make test-all` has the others too."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping


def one_for_each(tables: Iterable[Mapping[type, str]], long: Collection[str]) -> set[type]:
    """Returns the first fault of each check that the tables name, but for those of the long names."""
    first: dict[str, type] = {}
    for table in tables:
        for fault, check in table.items():
            if fault.__name__ not in long:
                first.setdefault(check, fault)
    return set(first.values())
