"""Tests for CUDA that must keep meaning CUDA: they guard its packages, or set one flag of several."""

from __future__ import annotations

import re

import libcst as cst

from acclimate.port.source.cuda_packages import PACKAGE_IN_TEXT
from acclimate.port.source_file import OTHER_KINDS, SourceFile

_OTHER_FLAGS = (*OTHER_KINDS, "torch_npu", "torch_xpu")
_PACKAGE = re.compile(r"[-_](gpu|cuda|cpu)\b|CUDA\w*Provider")


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
        name = next((each.target for each in targets if isinstance(each.target, cst.Name)), None)
    flag = name.value if name is not None else ""
    if "nvidia" in flag.lower():
        return True
    before, cuda, after = flag.lower().partition("cuda")
    others = {f"{before}{kind}{after}" for kind in _OTHER_FLAGS}
    return bool(cuda) and not others.isdisjoint(each.lower() for each in file.tree.all_names())


def chooses_package(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether a test controls only the use of a package for NVIDIA GPUs."""
    uses = uses_of_answer(file, question)
    return bool(uses) and all(_chooses_package(file, use) for use in uses)


def one_use_chooses_package(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether a test controls the use of a package for NVIDIA GPUs, among other code."""
    return any(_chooses_package(file, use) for use in uses_of_answer(file, question))


def uses_of_answer(file: SourceFile, question: cst.CSTNode) -> list[cst.CSTNode]:
    """The test, or the uses of a name that holds its result."""
    assigned = next(
        (each for each in file.tree.ancestors(question) if isinstance(each, cst.BaseSmallStatement)), None
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
            texts = " ".join(file.tree.source(each) for each in sides if below is around.test)
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
