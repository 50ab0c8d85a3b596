"""The literals that a compared name may hold: defaults, lists in a loop, and parameters of a test."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from acclimate_port.source.tree import called_name, string_value, walk
from acclimate_port.source_file import SourceFile


def listed_devices(file: SourceFile, test: cst.CSTNode) -> list[cst.CSTNode]:
    """The names of CUDA devices in lists whose entries a test compares.

    ``for device in ["cpu", "cuda"]:``, ``@parametrize("device", ["cpu", "cuda"])``. After the edits the test
    must find the same entry as before.
    """
    names = (node for node in walk(test) if isinstance(node, cst.Name))
    return [
        literal
        for name in names
        for holder in _lists(file, name)
        for literal in walk(holder)
        if (string_value(literal) or "").startswith("cuda")
    ]


def _lists(file: SourceFile, name: cst.Name) -> Iterator[cst.CSTNode]:
    """The lists that a name gets its values from."""
    for assignment in file.tree.assignments(name):
        bound = assignment.node
        around = file.tree.parent(bound)
        if isinstance(bound, cst.Param):
            yield from _parameters_of_test(file, bound)
        elif isinstance(around, (cst.For, cst.CompFor)) and around.target is bound:
            yield around.iter


def _parameters_of_test(file: SourceFile, parameter: cst.Param) -> Iterator[cst.CSTNode]:
    function = file.tree.parent(file.tree.parent(parameter) or parameter)
    for decorator in function.decorators if isinstance(function, cst.FunctionDef) else ():
        call = decorator.decorator
        if isinstance(call, cst.Call) and called_name(call) == "parametrize" and len(call.args) > 1:
            said = string_value(call.args[0].value) or ""
            if parameter.name.value in said.replace(",", " ").split():
                yield call.args[1].value
