"""Runs a block as one rank would, and compares the input of the sink with the whole block's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.llm.split.planning.regions import Layout, Region
from acclimate.llm.split.tracing.trace import Trace

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
