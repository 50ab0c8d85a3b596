"""Tests that decide whether a data loader starts processes, which import the program again on a Mac.

Linux makes them as copies of the program. On a Mac a script that does its work when it is imported fails, and
so does one whose data sets hold a ``lambda``, as processes cannot be given one.
"""

from __future__ import annotations

import libcst as cst

from acclimate_port.conditions.branches import branches_of_result
from acclimate_port.source.tree import called_name, string_value
from acclimate_port.source_file import SourceFile, kept

_WORKERS = "num_workers"


def reason_against_workers(file: SourceFile, test: cst.CSTNode) -> str:
    """Why processes that a loader starts only where a test is true fail on a Mac; ``""`` if they do not."""
    if _WORKERS not in file.tree.text or not (reason := _reason(file)):
        return ""
    places = branches_of_result(file, test)
    for number in _numbers(file):
        start = file.span(number).start
        if any(place.start <= start < place.end for place in places):
            line = file.tree.line(start)
            return f"on a Mac the processes that line {line} asks for fail: {reason}"
    return ""


@kept
def _numbers(file: SourceFile) -> list[cst.CSTNode]:
    """The numbers of processes that the file gives to loaders, also in a dictionary of options."""
    given = [one.value for one in file.tree.of_type(cst.Arg) if one.keyword and one.keyword.value == _WORKERS]
    given += [one.value for one in file.tree.of_type(cst.DictElement) if string_value(one.key) == _WORKERS]
    return [one for one in given if not (isinstance(one, cst.Integer) and one.value == "0")]


@kept
def _reason(file: SourceFile) -> str:
    for function in file.tree.of_type(cst.Lambda):
        argument = file.tree.parent(function)
        call = file.tree.parent(argument) if isinstance(argument, cst.Arg) else None
        if isinstance(call, cst.Call) and called_name(call) == "Lambda":
            return f"they cannot be given the lambda in line {file.tree.line(file.span(function).start)}"
    runs = next((one for one in file.tree.module.body if isinstance(one, (cst.For, cst.While))), None)
    if runs is not None and "__name__" not in file.names:
        line = file.tree.line(file.span(runs).start)
        return f"they run line {line} too, and no test of `__name__` keeps them from it"
    return ""
