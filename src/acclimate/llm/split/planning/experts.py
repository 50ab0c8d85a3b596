"""Splits the weights of many experts: each rank has a part of every expert's hidden columns.

So every rank does the same work for a token, whichever experts the router chooses, and the ranks' outputs sum
to the whole output. Trials on random numbers find which dimension holds the hidden columns, and whether gate
and up are two halves or alternate.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from acclimate.llm.split.planning.layouts import TOLERANCE, even_shares, kernel_multiple
from acclimate.llm.split.tracing.calls import detached
from acclimate.llm.split.tracing.trace import Trace

MOST_TRIALS = 512
LARGE = 1 << 26


@dataclass
class ExpertLayout:
    """Each parameter's split dimension and each rank's indices; each attribute's value on each rank."""

    parameters: dict[str, tuple[int, list[tuple[int, ...]]]]
    attributes: dict[str, list[int]]


@dataclass(frozen=True)
class _Way:
    """One way to split one parameter: along a dimension that holds the hidden columns once or twice."""

    dim: int
    form: str

    def indices(self, hidden: int, own: range, rank: int, length: int) -> tuple[int, ...]:
        if self.form == "once":
            return tuple(range(length)) if rank == 0 else ()
        if self.form == "plain":
            return tuple(own)
        if self.form == "halves":
            return (*own, *(hidden + column for column in own))
        return tuple(place for column in own for place in (2 * column, 2 * column + 1))


def lay_out_experts(trace: Trace, name: str, size: int) -> ExpertLayout | None:
    """Returns how to split the experts of a module, or ``None`` if no split reproduced the whole output."""
    module = trace.modules[name]
    own = dict(module.named_parameters(recurse=False))
    outputs = trace.calls[name][0].input.shape[-1]
    trial = _Trial(trace, name)
    for hidden, ways, attributes in itertools.islice(_ways(module, own, outputs), MOST_TRIALS):
        layout = _layout(own, hidden, ways, attributes, size)
        if trial.holds(layout, ways, size):
            return layout
    return None


class _Trial:
    """A comparison of the sum of the ranks' outputs with the whole module's, on random numbers."""

    def __init__(self, trace: Trace, name: str) -> None:
        module = trace.modules[name]
        self._module = copy.copy(module)
        self._module.__dict__ = {key: value for key, value in vars(module).items() if key != "forward"}
        own = module.named_parameters(recurse=False)
        self._parameters = {key: nn.Parameter(_weights(trace, parameter)) for key, parameter in own}
        first = trace.blocks[name][0]
        # Grouped matrix products exist only for dtypes of 32 bits or fewer.
        self._args, self._kwargs = pytree.tree_map(
            lambda given: given.float() if isinstance(given, Tensor) and given.is_floating_point() else given,
            detached((first.args, first.kwargs)),
        )
        self._whole = self._run(self._parameters, {})

    def holds(self, layout: ExpertLayout, ways: dict[str, _Way], size: int) -> bool:
        """Whether the outputs of all ranks sum to the whole output."""
        if self._whole is None:
            return False
        total = torch.zeros_like(self._whole)
        for rank in range(size):
            attributes = {key: values[rank] for key, values in layout.attributes.items()}
            found = self._run(self._shards(layout, ways, rank), attributes)
            if found is None or found.shape != total.shape:
                return False
            total = total + found
        limit = TOLERANCE * max(1.0, float(self._whole.abs().max()))
        return bool(((total - self._whole).abs() <= limit).all())

    def _run(self, weights: dict[str, nn.Parameter], attributes: dict[str, int]) -> Tensor | None:
        part = copy.copy(self._module)
        part.__dict__ = {**vars(self._module), **attributes, "_parameters": weights}
        # A wrong split may raise any exception.
        with contextlib.suppress(Exception), torch.no_grad():
            found = part(*self._args, **self._kwargs)
            return found if isinstance(found, Tensor) else None
        return None

    def _shards(self, layout: ExpertLayout, ways: dict[str, _Way], rank: int) -> dict[str, nn.Parameter]:
        """Returns a rank's weights; a bias that only one rank adds is zero on the others."""
        shards = dict(self._parameters)
        for key, (dim, indices) in layout.parameters.items():
            whole = self._parameters[key].detach()
            if ways[key].form == "once" and rank:
                shards[key] = nn.Parameter(torch.zeros_like(whole))
            else:
                index = torch.tensor(indices[rank], dtype=torch.long)
                shards[key] = nn.Parameter(whole.index_select(dim, index))
        return shards


def _weights(trace: Trace, p: Tensor) -> Tensor:
    if p.numel() <= LARGE:
        return torch.randn(p.shape, generator=trace.random).div_(p.shape[-1] ** 0.5)
    # The layout is the same for every expert, so all experts share the memory of one here.
    one = torch.randn(p.shape[1:], generator=trace.random)
    return one.div_(p.shape[-1] ** 0.5).expand(p.shape)


def _ways(
    module: nn.Module, own: dict[str, nn.Parameter], outputs: int
) -> Iterator[tuple[int, dict[str, _Way], dict[str, int]]]:
    weights = {key: p for key, p in own.items() if p.dim() == 3}
    for hidden in sorted({length for p in weights.values() for length in p.shape[1:]}):
        options: list[list[tuple[str, _Way]]] = []
        for key, p in own.items():
            found = []
            for dim in range(1, p.dim()):
                if p.shape[dim] == hidden:
                    found.append((key, _Way(dim, "plain")))
                elif p.shape[dim] == 2 * hidden:
                    found += [(key, _Way(dim, "halves")), (key, _Way(dim, "alternating"))]
            if p.dim() == 2 and p.shape[1] == outputs:
                found.append((key, _Way(1, "once")))
            options.append(found)
        if not all(options):
            continue
        changed = {
            k: v // hidden for k, v in vars(module).items() if type(v) is int and v in (hidden, 2 * hidden)
        }
        for combination in itertools.product(*options):
            for attributes in (changed, {}) if changed else ({},):
                yield hidden, dict(combination), attributes


def _aligned(hidden: int, size: int) -> int:
    """Returns the multiple of columns for rows of a multiple of 16 bytes, which grouped products need."""
    multiple = max(kernel_multiple(hidden, size), 8)
    return multiple if hidden % multiple == 0 and hidden // multiple >= size else 1


def _layout(
    own: dict[str, nn.Parameter], hidden: int, ways: dict[str, _Way], attributes: dict[str, int], size: int
) -> ExpertLayout:
    shares = even_shares(hidden, size, _aligned(hidden, size))
    parameters = {
        key: (
            way.dim,
            [way.indices(hidden, share, rank, own[key].shape[way.dim]) for rank, share in enumerate(shares)],
        )
        for key, way in ways.items()
    }
    return ExpertLayout(
        parameters, {key: [times * len(share) for share in shares] for key, times in attributes.items()}
    )
