"""Tests for CUDA that must keep meaning CUDA: for its packages, its version, or to find it missing."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.conditions.branches import branches
from acclimate_port.conditions.statements import decided_by, whole_condition
from acclimate_port.source.cuda_packages import KERNEL_PACKAGES, PACKAGE_IN_TEXT
from acclimate_port.source.tree import Span, called_name, parts_of_imported_names, string_value, walk
from acclimate_port.source.vendors import FLAG_WORDS
from acclimate_port.source_file import SourceFile

_PACKAGE = re.compile(r"[-_](gpu|cuda|cpu)\b|CUDA\w*Provider")
_PROVIDER = re.compile(r"(CUDA|Tensorrt)\w*Provider")
"""ONNX Runtime's names for NVIDIA GPUs: ``CUDAExecutionProvider``."""


def reason_to_keep(file: SourceFile, test: cst.CSTNode) -> str:
    """Why a comparison with CUDA, or a test for it, must keep meaning CUDA; ``""`` if it need not."""
    if (asks_for_missing_cuda(file, test) and not _skips(file, test)) or _is_in_check_for_cuda(file, test):
        return "it detects that the program was told to use CUDA on a machine without CUDA"
    if "version.cuda" in file.tree.source(whole_condition(file, test)):
        return "it tests the version of CUDA"
    places = branches(file, test)
    if any(_imports_package_within(file, place) for place in places):
        return "its branch imports a package for NVIDIA GPUs"
    if any(_PROVIDER.search(file.tree.source(place)) for place in places):
        return "it controls the use of a package for NVIDIA GPUs"
    return ""


def _imports_package_within(file: SourceFile, place: Span) -> bool:
    """Whether the code in a range imports a package for NVIDIA GPUs."""
    return any(
        KERNEL_PACKAGES & set(parts_of_imported_names(statement))
        for statement in file.tree.imports
        if place.start <= file.span(statement).start and file.span(statement).end <= place.end
    )


def is_flag_beside_others(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether the test sets one of several flags: ``is_cuda_available`` beside ``is_npu_available``.

    Code that reads the flags takes the first true one, so the flag for CUDA must mean CUDA.
    """
    assigned = file.tree.parent(question)
    if isinstance(assigned, cst.Return):
        function = file.tree.function(assigned)
        name = function.name if isinstance(function, cst.FunctionDef) else None
    else:
        targets = assigned.targets if isinstance(assigned, cst.Assign) else []
        name = next((target.target for target in targets if isinstance(target.target, cst.Name)), None)
    flag = name.value if name is not None else ""
    if "nvidia" in flag.lower():
        return True
    before, cuda, after = flag.lower().partition("cuda")
    others = {f"{before}{kind}{after}" for kind in FLAG_WORDS}
    return bool(cuda) and not others.isdisjoint(all_name.lower() for all_name in file.tree.all_names())


# -- a test that chooses a package -------------------------------------------------------------------


def chooses_package(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether a test controls only the use of a package for NVIDIA GPUs."""
    uses = direct_uses(file, question)
    return bool(uses) and all(_chooses_package(file, use) for use in uses)


def one_use_chooses_package(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether a test controls the use of a package for NVIDIA GPUs, among other code."""
    return any(_chooses_package(file, use) for use in direct_uses(file, question))


def direct_uses(file: SourceFile, question: cst.CSTNode) -> list[cst.CSTNode]:
    """The test itself; the reads of a name instead, if an assignment gives it the test's result."""
    assigned = next(
        (
            ancestor
            for ancestor in file.tree.ancestors(question)
            if isinstance(ancestor, cst.BaseSmallStatement)
        ),
        None,
    )
    if not isinstance(assigned, cst.Assign) or len(assigned.targets) != 1:
        return [question]
    below: cst.CSTNode | None = file.tree.parent(question)
    while isinstance(below, cst.BooleanOperation):
        below = file.tree.parent(below)
    target = assigned.targets[0].target
    if below is not assigned or not isinstance(target, cst.Name):
        return [question]
    return file.tree.reads(target)


def _chooses_package(file: SourceFile, question: cst.CSTNode) -> bool:
    below = question
    for around in file.tree.ancestors(question):
        if isinstance(around, cst.IfExp):
            sides = (around.body, around.orelse)
            texts = " ".join(file.tree.source(side) for side in sides if below is around.test)
            return _PACKAGE.search(texts) is not None and "device" not in texts
        if isinstance(around, cst.Assert):
            return around.msg is not None and PACKAGE_IN_TEXT.search(file.tree.source(around.msg)) is not None
        if isinstance(around, cst.If):
            ends = below is around.test and len(around.body.body) == 1
            text = file.tree.source(around.body.body[0]) if ends else ""
            return text.startswith("raise ") and PACKAGE_IN_TEXT.search(text) is not None
        if not isinstance(around, (cst.UnaryOperation, cst.BooleanOperation)):
            return False
        below = around
    return False


# -- a test that finds CUDA missing ------------------------------------------------------------------


def _skips(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a true condition skips a test case."""
    statement = decided_by(file, test)
    return isinstance(statement, cst.If) and "skip" in file.tree.source(statement.body).lower()


def asks_for_missing_cuda(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a test is part of ``"cuda" in device and not torch.cuda.is_available()``."""
    whole = whole_condition(file, test)
    parts = [
        descendant
        for descendant in walk(whole)
        if isinstance(descendant, (cst.Comparison, cst.Call, cst.UnaryOperation))
    ]
    missing = any(isinstance(part, cst.UnaryOperation) and _says_missing(file, part) for part in parts)
    is_only_and = all(
        isinstance(descendant.operator, cst.And)
        for descendant in walk(whole)
        if isinstance(descendant, cst.BooleanOperation)
    )
    return missing and is_only_and and any(_asks_for_cuda(part) for part in parts)


def _is_in_check_for_cuda(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a test is part of ``if device == "cuda": assert torch.cuda.is_available()``."""
    statements = (ancestor for ancestor in file.tree.ancestors(test) if isinstance(ancestor, cst.If))
    return any(_only_checks_for_cuda(file, statement) for statement in statements)


def _only_checks_for_cuda(file: SourceFile, statement: cst.If) -> bool:
    """Whether a statement does nothing for a CUDA device but check that there is one."""
    asks = [descendant for descendant in walk(statement.test) if _asks_for_cuda(descendant)]
    if not asks or statement.orelse is not None or len(statement.body.body) != 1:
        return False
    (inner,) = statement.body.body
    if isinstance(inner, cst.If):
        negation = inner.test
        says = isinstance(negation, cst.UnaryOperation) and _says_missing(file, negation)
        return says and inner.orelse is None
    check = inner.body[0] if isinstance(inner, cst.SimpleStatementLine) and len(inner.body) == 1 else None
    return isinstance(check, cst.Assert) and _asks_for_any_cuda(file, check.test)


def _says_missing(file: SourceFile, negation: cst.UnaryOperation) -> bool:
    return isinstance(negation.operator, cst.Not) and _asks_for_any_cuda(file, negation.expression)


def _asks_for_any_cuda(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether an expression is ``torch.cuda.is_available()``."""
    return isinstance(node, cst.Call) and file.tree.qualified(node.func) == "torch.cuda.is_available"


def _asks_for_cuda(node: cst.CSTNode) -> bool:
    """Whether an expression is true for a CUDA device: ``device == "cuda"``, ``"cuda" in device``."""
    if isinstance(node, cst.Call):
        first = string_value(node.args[0].value) if node.args else None
        return called_name(node) == "startswith" and (first or "").startswith("cuda")
    if not isinstance(node, cst.Comparison):
        return False
    asks = all(isinstance(comparison.operator, (cst.Equal, cst.In)) for comparison in node.comparisons)
    return asks and any((string_value(descendant) or "").startswith("cuda") for descendant in walk(node))
