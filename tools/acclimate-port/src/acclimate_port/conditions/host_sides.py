"""Tests whose other side only the host runs: ``sort_cuda(x) if x.is_cuda else np.sort(x.numpy())``.

Where such a test stays, a tensor of another accelerator takes the side of the host, and fails there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from acclimate_port.conditions.branches import where_true
from acclimate_port.conditions.statements import decided_by, leaves
from acclimate_port.source.tree import Span, called_name, dotted, string_value, walk
from acclimate_port.source_file import SourceFile

_OF_HOST = re.compile(r"_cpu(_|$)|^cpu_")
_NO_KERNEL = re.compile(
    r"(^|_)(to|move|use|uses|is|has|on|from|get|num)_cpus?$|^cpu_(count|info|percent|offload)"
)
"""Names with the CPU in them of functions that move something, or tell of it."""


def other_side_is_of_host(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether the code that runs where a test for CUDA is false takes tensors of the host alone."""
    places = [*_where_false(file, test)]
    if not places:
        return False
    calls = ((call, file.span(call).start) for call in file.tree.of_type(cst.Call))
    inside = (call for call, at in calls if any(place.start <= at < place.end for place in places))
    return any(map(_is_of_host, inside))


def _where_false(file: SourceFile, test: cst.CSTNode) -> Iterator[Span]:
    """The sides of the choice that a test makes which do not run if it is true."""
    choice = decided_by(file, test)
    if choice is None:
        return
    sides: list[Span] = [file.span(one) for one in (choice.body, choice.orelse) if one is not None]
    block = file.tree.parent(choice)
    if isinstance(choice, cst.If) and isinstance(block, (cst.IndentedBlock, cst.Module)):
        end = file.span(choice).end
        is_rest = choice.orelse is None and leaves(choice.body)
        sides += [Span(end, max(end, file.span(block.body[-1]).end))] if is_rest else []
    true = where_true(file, test)
    for side in sides:
        if not any(place.start <= side.start and side.end <= place.end for place in true):
            yield side


def _is_of_host(call: cst.Call) -> bool:
    """Whether a call needs a tensor of the host: ``x.numpy()``, a kernel for the CPU by its name."""
    if isinstance(call.func, cst.Attribute) and call.func.attr.value == "numpy":
        return not any(isinstance(one, cst.Call) and _moves_to_host(one) for one in walk(call.func.value))
    parts = dotted(call.func).split(".")
    return any(_OF_HOST.search(part) and not _NO_KERNEL.search(part) for part in parts)


def _moves_to_host(call: cst.Call) -> bool:
    name = called_name(call)
    return name == "cpu" or (name == "to" and any(string_value(one.value) == "cpu" for one in call.args))
