"""What a program says, or refuses, where it is told to use CUDA and there is none."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from acclimate_port.conditions.statements import refuses, whole_condition
from acclimate_port.dataflow.uses import uses_of
from acclimate_port.source.tree import called_name, string_value, walk
from acclimate_port.source_file import SourceFile, cuda_name, kept

_ASKS = ("is_available", "device_count")


def reason_against_host(file: SourceFile, device: cst.CSTNode) -> str:
    """Why a device must not become the host's where there is no CUDA; ``""`` if it may.

    The program compares it with CUDA's name, finds that there is no CUDA, and says so or refuses.
    """
    if file.is_guarded(device):
        return ""
    found = _compared_lines(file)
    line = (
        next((found[id(use)] for use in uses_of(file, device) if id(use) in found), None) if found else None
    )
    if line is None:
        return ""
    return f"line {line} finds that CUDA was asked for and is missing, and on a host it finds that no longer"


@kept
def _compared_lines(file: SourceFile) -> dict[int, int]:
    """The lines of the searches for missing CUDA, by the identity of what they compare."""
    return {id(node): line for line, node in _compared(file)}


def _compared(file: SourceFile) -> Iterator[tuple[int, cst.CSTNode]]:
    """What is compared with CUDA's name where a program looks for missing CUDA, and the line of that."""
    for call in file.tree.of_type(cst.Call):
        if cuda_name(file, call.func) not in _ASKS:
            continue
        whole = whole_condition(file, call)
        statement = file.tree.parent(whole)
        tests = [whole]
        for around in file.tree.ancestors(statement) if statement is not None else ():
            if isinstance(around, (cst.FunctionDef, cst.ClassDef)):
                break
            tests += [around.test] if isinstance(around, cst.If) else []
        if isinstance(statement, cst.Assert) or (isinstance(statement, cst.If) and _is_said(statement)):
            for test in tests:
                yield from ((file.tree.line(file.span(call).start), node) for node in _operands(test))


def _is_said(statement: cst.If) -> bool:
    """Whether a branch of a statement prints something or raises."""
    last = statement.orelse.body if isinstance(statement.orelse, cst.Else) else None
    for block in (statement.body, *([last] if last is not None else [])):
        lines = (line.body for line in block.body if isinstance(line, cst.SimpleStatementLine))
        says = any(
            isinstance(one, cst.Expr) and isinstance(one.value, cst.Call) for line in lines for one in line
        )
        if says or refuses(block):
            return True
    return False


def _operands(test: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The values that a test compares with CUDA's name."""
    for node in walk(test):
        if isinstance(node, cst.Comparison):
            sides = [node.left, *(target.comparator for target in node.comparisons)]
            if any((string_value(part) or "").startswith("cuda") for side in sides for part in walk(side)):
                yield from sides
        elif isinstance(node, cst.Call) and called_name(node) == "startswith" and node.args:
            is_cuda = (string_value(node.args[0].value) or "").startswith("cuda")
            yield from [node.func.value] if is_cuda and isinstance(node.func, cst.Attribute) else []
