"""Whether a test must stay false on a CPU-only machine: its branch needs a device, or a CPU has its own."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.conditions.branches import branches, uses_of_result
from acclimate_port.conditions.statements import later_tests, refuses
from acclimate_port.source.cuda_packages import KERNEL_PACKAGES
from acclimate_port.source.tree import parts_of_imported_names, string_value, walk
from acclimate_port.source_file import SourceFile

_KERNELS = re.compile(r"^kernels?$|_kernels?$|^triton_|_triton$")
_NAME_OF_CUDA = re.compile(r"cuda|gpu", re.IGNORECASE)
_INDEX = re.compile(r"\bget_device\(\)|\.device\.index\b|\.record_stream\(")
_HALF = re.compile(r"\bb?float16\b|\.half\b")
_GPU_IN_TEXT = re.compile(r"['\"][^'\"]*\b(GPU|CUDA)\b", re.IGNORECASE)
_NAME_OF_HOST = re.compile(r"^cpu_|_cpu$|_cpu_")


def must_be_false_on_host(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a test of the device must stay false on a machine without an accelerator."""
    negated = file.tree.parent(node)
    if isinstance(negated, cst.UnaryOperation) and _guards_fallback(file, negated):
        return True
    if _needs_device(file, node) or _imports_kernels(file) or _pins(file, node):
        return True
    return any(_has_host_branch(file, use) for use in (node, *uses_of_result(file, node)))


# -- the branch needs a device -----------------------------------------------------------------------


def _needs_device(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a branch uses a device's index or stream, or a choice prints "GPU" or takes a 16-bit type."""
    is_choice = any(isinstance(ancestor, cst.IfExp) for ancestor in file.tree.ancestors(node))
    for place in branches(file, node):
        text = file.tree.source(place)
        if _INDEX.search(text):
            return True
        if is_choice and (_GPU_IN_TEXT.search(text) or _HALF.search(text)):
            return True
    return False


def _imports_kernels(file: SourceFile) -> bool:
    """Whether a file imports kernels, which accelerators may have and a CPU has not."""
    for statement in file.module_imports:
        parts = set(parts_of_imported_names(statement))
        if parts & KERNEL_PACKAGES or any(_KERNELS.search(part) for part in parts):
            return True
    return False


def _pins(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a result controls pinned memory, which a CPU-only machine has not: ``pin_memory=on_gpu``."""
    at = file.tree.parent(node)
    while isinstance(at, (cst.BooleanOperation, cst.AssignTarget)):
        at = file.tree.parent(at)
    if isinstance(at, cst.Arg):
        return _is_pinning(at)
    if (
        not isinstance(at, cst.Assign)
        or len(at.targets) != 1
        or not isinstance(at.targets[0].target, cst.Name)
    ):
        return False
    name = at.targets[0].target
    if _NAME_OF_CUDA.search(name.value):
        return True  # code that reads `use_cuda` means hardware other than the CPU
    return any(_is_pinning(file.tree.parent(use)) for use in file.tree.accesses(name))


def _is_pinning(argument: cst.CSTNode | None) -> bool:
    word = argument.keyword if isinstance(argument, cst.Arg) else None
    return word is not None and word.value == "pin_memory"


# -- the program has a branch for a CPU --------------------------------------------------------------


def _guards_fallback(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether the branch of a negated test, ``not x.is_cuda``, is code for a CPU and not an error."""
    below = test
    for around in file.tree.ancestors(test):
        if isinstance(around, cst.If):
            return below is around.test and not refuses(around.body)
        if not isinstance(around, cst.BooleanOperation):
            return False
        below = around
    return False


def _has_host_branch(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a test is one of several, and a later one is true on a CPU.

    A CPU-only machine needs that later branch, so this test must stay false there.
    """
    below = node
    for around in file.tree.ancestors(node):
        if isinstance(around, cst.If) and below is around.test:
            tests = list(later_tests(file, around))
            return (
                any(_is_true_on_host(test.test) for test in tests)
                or _names_host(_last_branch(around))
                or _follows_host_branch(file, around)
            )
        if isinstance(around, cst.IfExp) and below is around.test:
            other = around.orelse
            return _names_host(other) or (isinstance(other, cst.IfExp) and _is_true_on_host(other.test))
        if isinstance(around, cst.Match):
            return any(
                isinstance(case.pattern, cst.MatchValue) and string_value(case.pattern.value) == "cpu"
                for case in around.cases
            )
        if not isinstance(around, (cst.BooleanOperation, cst.MatchCase, cst.MatchValue)):
            return False
        below = around
    return False


def _follows_host_branch(file: SourceFile, statement: cst.If) -> bool:
    """Whether the statement before is the branch for the CPU: ``if "cpu" in device.type: …``."""
    block = file.tree.parent(statement)
    if not isinstance(block, (cst.IndentedBlock, cst.Module)):
        return False
    index = next((i for i, line in enumerate(block.body) if line is statement), 0)
    before = block.body[index - 1] if index else None
    return isinstance(before, cst.If) and before.orelse is None and _is_true_on_host(before.test)


def _last_branch(statement: cst.If) -> cst.CSTNode | None:
    """The ``else`` of a statement and its ``elif`` branches."""
    at: cst.If | cst.Else | None = statement.orelse
    while isinstance(at, cst.If):
        at = at.orelse
    return at


def _names_host(branch: cst.CSTNode | None) -> bool:
    """Whether a branch uses a name with ``cpu`` in it: ``self.cpu_config``, ``filter_cpu(x)``."""
    names = (
        [descendant.value for descendant in walk(branch) if isinstance(descendant, cst.Name)]
        if branch is not None
        else []
    )
    return any(_NAME_OF_HOST.search(name) for name in names)


def _is_true_on_host(test: cst.CSTNode) -> bool:
    """Whether a condition tests for the CPU: ``device.type == "cpu"``, ``x.is_cpu``."""
    for node in walk(test):
        if isinstance(node, cst.Attribute) and node.attr.value == "is_cpu":
            return True
        if not isinstance(node, cst.Comparison):
            continue
        operators = [comparison.operator for comparison in node.comparisons]
        asks = all(isinstance(operator, (cst.Equal, cst.In)) for operator in operators)
        if asks and any(string_value(descendant) == "cpu" for descendant in walk(node)):
            return True
    return False
