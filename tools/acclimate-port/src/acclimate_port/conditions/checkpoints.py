"""Tests that decide to which device a checkpoint is loaded."""

from __future__ import annotations

import libcst as cst

from acclimate_port.conditions.branches import uses_of_result, where_true
from acclimate_port.dataflow.map_location import is_map_location
from acclimate_port.source.tree import keyword, walk
from acclimate_port.source_file import SourceFile


def decides_location(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a checkpoint is loaded without a device if a test is true, so that it goes back to CUDA.

    ``map_location=None if use_cuda else "cpu"``, or ``torch.load(path)`` in a branch.
    """
    if not file.loads:
        return False
    places = where_true(file, test)
    for call in file.loads:
        span = file.span(call)
        given = keyword(call, "map_location")
        if given is None and len(call.args) < 2:
            if any(place.start <= span.start and span.end <= place.end for place in places):
                return True
        elif _chooses_none(file, call, {test, *uses_of_result(file, test)}):
            return True
    return False


def _chooses_none(file: SourceFile, call: cst.Call, tests: set[cst.CSTNode]) -> bool:
    """Whether one of the tests chooses between ``None`` and a device for ``map_location``."""
    for choice in (argument.value for argument in call.args):
        if isinstance(choice, cst.IfExp) and is_map_location(file, choice):
            sides = (choice.body, choice.orelse)
            has_none = any(isinstance(side, cst.Name) and side.value == "None" for side in sides)
            if has_none and tests & set(walk(choice.test)):
                return True
    return False
