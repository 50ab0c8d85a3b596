"""The code that a test suite skips where a test of the device is false."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from acclimate_port.conditions.branches import uses_of_result
from acclimate_port.conditions.statements import decided_by
from acclimate_port.source.tree import Span, called_name, dotted
from acclimate_port.source_file import SourceFile, kept

_SKIPS = re.compile(r"skip", re.IGNORECASE)
_SETS_UP = re.compile(r"^(async_?)?set_?up(_?(class|method|module|function))?$", re.IGNORECASE)
_MARKS_ALL = "pytestmark"


@kept
def skipped(file: SourceFile, test: cst.CSTNode) -> list[Span]:
    """The code that is skipped: after ``pytest.skip()``, below ``@skipif(…)``, in a class whose set-up skips.

    A name or a function may hold the test's result, or the mark.
    """
    return [place for use in (test, *uses_of_result(file, test)) for place in _skipped(file, use)]


def _skipped(file: SourceFile, test: cst.CSTNode) -> Iterator[Span]:
    decided = decided_by(file, test)
    block = file.tree.parent(decided) if decided is not None else None
    if isinstance(decided, cst.If) and block is not None and _SKIPS.search(file.tree.source(decided.body)):
        yield Span(file.span(decided).end, file.span(block).end)
        check = file.tree.around(decided, cst.FunctionDef)
        yield from _run_before(file, check) if check is not None else ()
    decorator = file.tree.around(test, cst.Decorator)
    if decorator is not None and _SKIPS.search(file.tree.source(decorator)):
        yield from _decorated(file, decorator)
    yield from _beside_mark(file, test)
    assign = file.tree.statement(test)
    function = file.tree.function(test)
    if isinstance(assign, cst.Return) and isinstance(function, cst.FunctionDef):
        yield from _marked(file, function.name) if _SKIPS.search(file.tree.source(assign)) else ()
    if isinstance(assign, cst.Assign) and _SKIPS.search(file.tree.source(assign.value)):
        for target in (one.target for one in assign.targets):
            if dotted(target) == _MARKS_ALL:
                yield _home(file, assign)
            elif isinstance(target, cst.Name):
                yield from _marked(file, target)


def _run_before(file: SourceFile, function: cst.FunctionDef) -> Iterator[Span]:
    """The tests that a function runs before: as a set-up, as a fixture, or as a decorator."""
    fixture = next((one for one in function.decorators if "fixture" in file.tree.source(one)), None)
    if _SETS_UP.match(function.name.value) or (fixture and "autouse" in file.tree.source(fixture)):
        yield _home(file, function)
    elif fixture is not None:
        for other in file.tree.of_type(cst.FunctionDef):
            if any(one.name.value == function.name.value for one in other.params.params):
                yield file.span(other.body)
    yield from _marked(file, function.name)


def _marked(file: SourceFile, name: cst.Name) -> Iterator[Span]:
    """What is below decorators that use a name."""
    for use in file.tree.accesses(name):
        if (mark := file.tree.around(use, cst.Decorator)) is not None:
            yield from _decorated(file, mark)
        yield from _beside_mark(file, use)


def _beside_mark(file: SourceFile, mark: cst.CSTNode) -> Iterator[Span]:
    """The values of a parameter of a test that a mark skips: ``pytest.param("cuda", marks=needs_cuda)``."""
    for around in file.tree.ancestors(mark):
        if isinstance(around, cst.Arg) and around.keyword is not None and around.keyword.value == "marks":
            call = file.tree.parent(around)
            if isinstance(call, cst.Call) and called_name(call) == "param":
                yield from (file.span(one.value) for one in call.args if one is not around)
            return
        if isinstance(around, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
            return


def _decorated(file: SourceFile, decorator: cst.Decorator) -> list[Span]:
    """The body of the function or class below a decorator."""
    own = file.tree.parent(decorator)
    return [file.span(own.body)] if isinstance(own, (cst.FunctionDef, cst.ClassDef)) else []


def _home(file: SourceFile, node: cst.CSTNode) -> Span:
    """The class around a node, or the module."""
    owner = file.tree.around(node, cst.ClassDef)
    return file.span(owner.body) if owner is not None else Span(0, len(file.tree.bytes))
