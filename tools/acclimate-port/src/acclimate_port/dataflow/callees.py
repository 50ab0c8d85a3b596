"""The functions that a call may run where a name of the program holds them: ``scope = torch.autocast``."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from acclimate_port.dataflow.uses import calls_of, parameter_of
from acclimate_port.source.tree import Given
from acclimate_port.source_file import SourceFile, kept

_STEPS = 4
"""How many names and arguments are followed to what a name holds."""


def may_call(file: SourceFile, given: Given) -> tuple[str, ...]:
    """The full names of the functions that may get an argument; of a ``partial``, its function."""
    return (given.full,) if given.full else held_functions(file, given.call.func)


@kept
def held_functions(file: SourceFile, function: cst.CSTNode) -> tuple[str, ...]:
    """The full names of the imported functions that an expression may hold."""
    return tuple(dict.fromkeys(_held(file, function, _STEPS)))


def _held(file: SourceFile, value: cst.CSTNode | None, steps: int) -> Iterator[str]:
    if value is None or not steps:
        return
    if full := file.tree.qualified(value):
        yield full
    elif isinstance(value, cst.IfExp):
        for branch in (value.body, value.orelse):
            yield from _held(file, branch, steps)
    elif isinstance(value, cst.BooleanOperation):
        for side in (value.left, value.right):
            yield from _held(file, side, steps)
    elif isinstance(value, cst.Call) and file.tree.qualified(value.func) == "functools.partial":
        # Arguments before the first of a call would be another device.
        if value.args and not any(one.keyword is None for one in value.args[1:]):
            yield from _held(file, value.args[0].value, steps)
    elif isinstance(value, cst.Name):
        for one in file.bound_values(value):
            yield from _held(file, one, steps - 1)
        for parameter in (one.node for one in file.tree.assignments(value)):
            if isinstance(parameter, cst.Param):
                yield from _held(file, parameter.default, steps - 1)
                for argument in _arguments_of(file, parameter):
                    yield from _held(file, argument, steps - 1)
    elif isinstance(value, cst.Attribute):
        for one in file.attributes.get(value.attr.value, ()):
            if isinstance(file.tree.parent(one), cst.AssignTarget):
                yield from _held(file, file.tree.value_of(one), steps - 1)


def _arguments_of(file: SourceFile, parameter: cst.Param) -> Iterator[cst.CSTNode]:
    """What the calls in the file give a parameter."""
    function = file.tree.parent(file.tree.parent(parameter) or parameter)
    for call in calls_of(file, function):
        for argument in call.args if isinstance(call, cst.Call) else ():
            if parameter_of(file, file.tree.given_to(argument)) is parameter:
                yield argument.value
