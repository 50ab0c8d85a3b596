"""Distributes a region's units over ranks, and checks that the block between its sources and its sink works.

A block runs compact if its code works with a rank's own heads, if necessary with other values of attributes
such as ``num_heads``. Otherwise it runs padded: it sees zeros in place of the other ranks' columns. Before
either is used, it is compared with the whole block on random numbers.
"""

from __future__ import annotations

import itertools

from acclimate.llm.split.planning.choices import Choice, choices_of, combinations, with_choices
from acclimate.llm.split.planning.column_orders import column_orders
from acclimate.llm.split.planning.regions import Layout, Region
from acclimate.llm.split.planning.shares import even_shares, kernel_multiple
from acclimate.llm.split.planning.trials import Trial
from acclimate.llm.split.tracing.trace import Trace

MOST_TRIALS = 256


def lay_out(trace: Trace, region: Region, size: int) -> Layout | None:
    """Returns a layout that reproduces the whole block's results, or ``None``."""
    units = region.units
    single = all(len(unit.sink) == 1 for unit in units)
    multiple = kernel_multiple(len(units), size) if single else 1
    shares = [units[share.start : share.stop] for share in even_shares(len(units), size, multiple)]
    rows = [tuple(sorted(column for unit in share for column in unit.sink)) for share in shares]
    trial = Trial(trace, region)
    for columns, repeats in column_orders(region, shares):
        layout = Layout(columns, rows, [not share for share in shares])
        choices = choices_of(trace, region, shares, repeats, columns)
        for chosen in itertools.islice(combinations(choices), MOST_TRIALS):
            if trial.holds(with_choices(layout, chosen)):
                needed = _without_unneeded(trial, layout, chosen)
                return _with_head_counts(trial, layout, needed, choices)
    distinct = {s: [tuple(sorted(set(group))) for group in columns[s]] for s in region.sources}
    padded = Layout(distinct, rows, [True] * size)
    return padded if trial.holds(padded) else None


def holds_for(trace: Trace, region: Region, layout: Layout) -> bool:
    """Whether a layout that works for a similar region also works for this one."""
    return Trial(trace, region).holds(layout)


def _without_unneeded(trial: Trial, layout: Layout, chosen: list[Choice]) -> list[Choice]:
    """Drops unneeded changes, which arise because unrelated numbers can have the same value."""
    for choice in chosen:
        place = choice.place
        named = isinstance(place, tuple) and "." not in place[1] and _is_of_heads(place[1])
        fewer = [picked for picked in chosen if picked is not choice]
        if not named and trial.holds(with_choices(layout, fewer)):
            chosen = fewer
    return chosen


def _with_head_counts(
    trial: Trial, layout: Layout, chosen: list[Choice], choices: list[list[Choice]]
) -> Layout:
    """Also changes head counts that this run did not use; a call with a mask, for example, may use them."""
    places = {choice.place for choice in chosen}
    for choice, *_ in choices:
        place = choice.place
        if place in places or not isinstance(place, tuple) or not _is_count_of_heads(place[1]):
            continue
        more = [*chosen, choice]
        if trial.holds(with_choices(layout, more)):
            chosen = more
    return with_choices(layout, chosen)


def _is_count_of_heads(name: str) -> bool:
    return _is_of_heads(name) and not any(hint in name for hint in (".", "dim", "size"))


def _is_of_heads(name: str) -> bool:
    return any(hint in name for hint in ("head", "kv", "key_value", "group"))
