"""Distributes a region's units over ranks, and checks that the block between its sources and its sink works.

Ranks get numbers of items that suit kernels. A block runs compact if its code works with a rank's own heads,
if necessary with other values of attributes such as ``num_heads``. Otherwise it runs padded: it sees zeros in
place of the other ranks' columns. Before either is used, it is compared with the whole block on random
numbers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.llm.split.planning.choices import Choice, choices_of, column_orders, combinations, with_choices
from acclimate.llm.split.planning.regions import Layout, Region
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


TOLERANCE = 1e-4


class Trial:
    """A comparison of a region's block on each rank with the whole block, on random numbers."""

    def __init__(self, trace: Trace, region: Region) -> None:
        self._trace = trace
        self._region = region
        leaves = {region.leaf(source): trace.calls[source][0].output for source in region.sources}
        self._outputs = {
            leaf: torch.randn(tensor.shape, generator=trace.random, dtype=torch.float64).to(tensor.dtype)
            for leaf, tensor in leaves.items()
        }
        self._sinks = (region.sink, *region.twins)
        with torch.no_grad():
            seen = trace.replay(region.block, self._outputs, through=region.through).seen
        self._whole = [seen[name][0] for name in self._sinks]

    def holds(self, layout: Layout) -> bool:
        """Whether every rank's sinks get the rank's columns of what they get in the whole block."""
        return all(self._holds_on(layout, rank) for rank in range(len(layout.expands)))

    def _holds_on(self, layout: Layout, rank: int) -> bool:
        outputs = {}
        for source in self._region.sources:
            leaf = self._region.leaf(source)
            columns = list(layout.columns[source][rank])
            own = self._outputs[leaf][..., columns]
            if layout.expands[rank]:
                zeros = torch.zeros_like(self._outputs[leaf])
                own = zeros.index_copy(-1, torch.tensor(columns, dtype=torch.long), own)
            outputs[leaf] = own
        values: dict[tuple[str, str], Any] = {
            key: attribute[rank] for key, attribute in layout.attributes.items()
        }
        # With wrong values a block may raise any exception, which only means that the values are wrong.
        with (
            contextlib.suppress(Exception),
            torch.no_grad(),
            self._trace.changed(values),
            self._parameters(layout, rank),
        ):
            arguments = self._arguments(layout, rank)
            replay = self._trace.replay(self._region.block, outputs, arguments, self._region.through)
            rows = list(layout.rows[rank])
            return all(
                _is_part(replay.seen[name][0], whole, rows, padded=layout.expands[rank])
                for name, whole in zip(self._sinks, self._whole, strict=True)
            )
        return False

    @contextlib.contextmanager
    def _parameters(self, layout: Layout, rank: int) -> Iterator[None]:
        undo: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        try:
            for name, (dim, indices) in layout.parameters.items():
                owner, _, last = name.rpartition(".")
                module = self._trace.modules[owner]
                before = module._parameters[last]
                undo.append((module, last, before))
                if before is not None:
                    part = before.detach().index_select(dim, torch.tensor(indices[rank], dtype=torch.long))
                    module._parameters[last] = nn.Parameter(part)
            yield
        finally:
            for module, last, before in undo:
                module._parameters[last] = before

    def _arguments(self, layout: Layout, rank: int) -> Callable[..., Any] | None:
        if not layout.arguments:
            return None

        def select(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            positional, named = list(args), dict(kwargs)
            for key, (dim, indices) in layout.arguments.items():
                owner: Any = positional if isinstance(key, int) else named
                owner[key] = owner[key].index_select(dim, torch.tensor(indices[rank], dtype=torch.long))
            return tuple(positional), named

        return select


def _is_part(seen: Tensor, whole: Tensor, rows: list[int], padded: bool) -> bool:
    if padded:
        seen = seen[..., rows]
    expected = whole[..., rows]
    scale = max(1.0, float(whole.abs().max()))
    return seen.shape == expected.shape and bool(((seen - expected).abs() <= TOLERANCE * scale).all())


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
