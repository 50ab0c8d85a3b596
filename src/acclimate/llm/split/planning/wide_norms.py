"""Finds normalizations over all columns of a split linear module; ranks must sum their statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from acclimate.llm.split.layers.norm_formulas import formula_of
from acclimate.llm.split.planning.regions import Region
from acclimate.llm.split.tracing.trace import Trace


def wide_norms(trace: Trace, block: str, sources: list[str]) -> dict[str, str]:
    """Returns a block's normalizations that take all columns of one source, each with that source."""
    found: dict[str, str] = {}
    for name, module in trace.modules.items():
        if not name.startswith(block + ".") or name not in trace.blocks or name in trace.linears:
            continue
        first = trace.blocks[name][0]
        given = first.args[0] if first.args else None
        if not isinstance(given, Tensor) or not given.requires_grad or formula_of(module) is None:
            continue
        outputs = [trace.calls[source][0].output for source in sources]
        gradients = torch.autograd.grad(
            given, outputs, trace.numbers(*given.shape).to(given.dtype), retain_graph=True, allow_unused=True
        )
        feeding = [s for s, g in zip(sources, gradients, strict=True) if g is not None and g.any()]
        # Only the source's own output counts: after a residual is added, the statistics differ.
        if len(feeding) == 1 and _are_close(given, trace.calls[feeding[0]][0].output):
            found[name] = feeding[0]
    return found if len(set(found.values())) == len(found) else {}


def norms_between(trace: Trace, region: Region) -> list[str]:
    """Returns the normalizations over all columns between the sources and the sink or its twins.

    Their input depends on all sources, like that of a normalization after attention.
    """
    found = []
    outputs = [trace.calls[source][0].output for source in region.sources]
    tables = (module for module in trace.modules.values() if isinstance(module, nn.Embedding))
    others = [
        call.output for name, calls in trace.calls.items() if name not in region.sources for call in calls
    ]
    others += [*trace.entries, *(table.weight for table in tables)]
    sink = trace.calls[region.sink][0].input
    for name in sorted({owner.rpartition(".")[0] for owner in region.parameters}):
        if not name.startswith(region.block + ".") or name not in trace.blocks:
            continue
        first = trace.blocks[name][0]
        given = first.args[0] if len(first.args) == 1 and not first.kwargs else None
        if not isinstance(given, Tensor) or not given.requires_grad or given.shape[-1] != sink.shape[-1]:
            continue
        if formula_of(trace.modules[name]) is None:
            continue
        # A sum with the residual stream, which all ranks have whole, is not part of the region.
        if _reaches(trace, outputs, given) and not _reaches(trace, others, given):
            found.append(name)
    return found


def _reaches(trace: Trace, leaves: list[Tensor], given: Tensor) -> bool:
    """Whether a tensor depends on any of the leaves."""
    leaves = [leaf for leaf in leaves if leaf.requires_grad and leaf.is_floating_point()]
    if not leaves:
        return False
    numbers = trace.numbers(*given.shape).to(given.dtype)
    gradients = torch.autograd.grad(given, leaves, numbers, retain_graph=True, allow_unused=True)
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def _are_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-5)
