"""Explains why modules stay whole, and what a user can do if most of a model would stay whole."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from acclimate.llm.split.tracing.trace import Trace

_MOST_LISTED = 4


def kind_of(name: str) -> str:
    """Returns the pattern that matches a module's name in all layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def parents_of(name: str) -> list[str]:
    """Returns the names of a module's parents, outermost first, and its own name."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def reasons_of(
    trace: Trace,
    tensors: Mapping[str, Tensor],
    known: Mapping[str, str],
    left_out: Container[str],
) -> dict[str, str]:
    """Returns for each module with an unsplit matrix the reason, known or found here, largest matrix first.

    Modules in ``left_out`` are kept whole by the user.
    """
    found: dict[str, tuple[int, str]] = {}
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        module = trace.modules.get(owner)
        if owner in left_out or tensor.dim() < 2 or isinstance(module, nn.Embedding):
            continue
        if owner not in found or -tensor.numel() < found[owner][0]:
            found[owner] = (-tensor.numel(), known.get(owner) or _reason(trace, owner, last))
    return {name: reason for name, (_, reason) in sorted(found.items(), key=lambda entry: entry[1][0])}


def _reason(trace: Trace, owner: str, last: str) -> str:
    module = trace.modules.get(owner)
    opaque = [parent for parent in parents_of(owner) if type(trace.modules[parent]) in trace.opaque]
    if opaque:
        return f"{type(trace.modules[opaque[0]]).__name__} uses weights of linear modules directly"
    if isinstance(module, _ConvNd):
        return "convolutions are not split"
    kind = type(module).__name__
    return f"{kind} is not a linear module, and its use of {last} cannot be traced"


def refusal(kind: str, size: int, share: float, reasons: Mapping[str, str]) -> str:
    """Returns the error message for a model most of which would stay whole."""
    patterns = sorted({kind_of(name) for name in reasons})
    mapping = ", ".join(f'"{pattern}": "replicated"' for pattern in patterns)
    listed = [f"{name} ({reason})" for name, reason in reasons.items()]
    more = f"; and {len(listed) - _MOST_LISTED} more" if len(listed) > _MOST_LISTED else ""
    return (
        f"{kind} cannot be split over {size} ranks: {share:.0%} of its parameters would stay whole on every "
        f"rank. No correct split was found for {'; '.join(listed[:_MOST_LISTED])}{more}. "
        f"To keep them whole anyway, pass the mapping {{{mapping}}}."
    )
