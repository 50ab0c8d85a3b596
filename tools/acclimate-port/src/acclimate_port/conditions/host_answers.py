"""Whether a ported test for CUDA may be true on a CPU-only machine.

acclimate counts the CPU as an accelerator, torch does not. A program that tests for CUDA has a CPU path and
must still take it: with 32-bit numbers, without CUDA's kernels or a device's limits. The test may be true
there only if the code that it controls does the same on a CPU, or if the program would otherwise end.
"""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.conditions.cuda_only import asks_for_missing_cuda, direct_uses, one_use_chooses_package
from acclimate_port.conditions.device_counts import ends_without, expects_devices
from acclimate_port.conditions.statements import decided_by, later_tests, refuses
from acclimate_port.source.tree import called_name, string_value, walk
from acclimate_port.source.vendors import kinds_in
from acclimate_port.source_file import SourceFile

_DEVICE = re.compile(r"(cuda|cpu|mps)(:\d+)?$")
_FLOAT16 = re.compile(r"(?<!b)float16|\bhalf\b|fp16")
_HALF = re.compile(r"half|float16", re.IGNORECASE)
_ALIKE = {
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "synchronize", "empty_cache", "set_device"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "ipc_collect", "init", "current_device"),
}
_NEUTRAL = {
    *("int", "str", "len", "range", "isinstance", "items", "values", "parameters", "is_tensor"),
    "manual_seed",
}
_MOVES = re.compile(r"(^|_)(to|move|move_to|put_on)_(cuda|gpu|device)$")
_FROM_ONE = (cst.LessThan, cst.GreaterThanEqual)
"""Operators that tell 0 devices from 1 or more when compared with 1: ``device_count() < 1``."""


def may_be_true_on_host(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether a ported test for CUDA may be true on a CPU-only machine.

    Args:
        file: the file.
        question: the test, true if there is CUDA: a call or a comparison.
    """
    if one_use_chooses_package(file, question):
        return False
    if isinstance(question, cst.Comparison) and asks_for_missing_cuda(file, question):
        return True  # the choice of a device: a CPU-only machine has its CPU
    uses = direct_uses(file, question)
    return bool(uses) and all(
        ends_without(file, use)
        or (_same_effect_on_host(file, use) and not _kinds_in_later_branches(file, use))
        for use in uses
    )


def ends_program_if_false(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether the program ends if there is no CUDA. The test may be negated: ``device != "cuda"``."""
    if isinstance(question, cst.Comparison) and isinstance(
        question.comparisons[0].operator, (cst.NotEqual, cst.NotIn)
    ):
        below: cst.CSTNode = question
        for around in file.tree.ancestors(question):
            if isinstance(around, cst.If):
                ends = below is around.test and refuses(around.body)
                return ends and "skip" not in file.tree.source(around.body).lower()
            if not isinstance(around, cst.BooleanOperation):
                return False
            below = around
        return False
    return ends_without(file, question)


def other_kinds(file: SourceFile, question: cst.CSTNode) -> tuple[str, ...]:
    """The other device types that later branches, or other code in the file, handle."""
    return tuple(dict.fromkeys([*_kinds_in_later_branches(file, question), *file.other_kinds]))


def _kinds_in_later_branches(file: SourceFile, question: cst.CSTNode) -> list[str]:
    """The device types tested for in the branches after a false test: ``elif mps.is_available():``."""
    decided = decided_by(file, question)
    tests: list[cst.BaseExpression] = []
    if isinstance(decided, cst.If):
        tests = [place.test for place in later_tests(file, decided)]
    at = decided.orelse if isinstance(decided, cst.IfExp) else None
    while isinstance(at, cst.IfExp):
        tests.append(at.test)
        at = at.orelse
    return [kind for test in tests for kind in kinds_in(file.tree.source(test))]


def count_may_be_one(file: SourceFile, count: cst.CSTNode, test: cst.CSTNode) -> bool:
    """Whether a test of the device count may count the CPU; see :func:`may_be_true_on_host`."""
    alike = _same_effect_on_host(file, test) and not _kinds_in_later_branches(file, test)
    return ends_without(file, count) or alike


def asks_for_several(file: SourceFile, count: cst.CSTNode) -> tuple[cst.CSTNode, bool] | None:
    """The test for several devices, and whether it is true for several; ``None``: no such test.

    ``device_count() > 1``, ``device_count() < 4``.
    """
    around = file.tree.parent(count)
    if not isinstance(around, cst.Comparison) or len(around.comparisons) != 1 or around.left is not count:
        return None
    operator = around.comparisons[0].operator
    if isinstance(operator, (cst.GreaterThan, cst.GreaterThanEqual)):
        return around, True
    return (around, False) if isinstance(operator, (cst.LessThan, cst.LessThanEqual)) else None


def asks_for_none(file: SourceFile, count: cst.CSTNode) -> tuple[cst.CSTNode, bool] | None:
    """The test for 0 devices, and whether it is true for 0; ``None``: no such test.

    ``device_count() > 0``, ``not device_count()``, ``if device_count():``.
    """
    around = file.tree.parent(count)
    if isinstance(around, cst.UnaryOperation) and isinstance(around.operator, cst.Not):
        return around, True
    if isinstance(around, cst.Comparison) and len(around.comparisons) == 1 and around.left is count:
        target = around.comparisons[0]
        expected = expects_devices(around, count)
        limit = file.tree.source(target.comparator)
        tells_none = limit == "0" or (limit == "1" and isinstance(target.operator, _FROM_ONE))
        return (around, not expected) if expected is not None and tells_none else None
    if isinstance(around, (cst.If, cst.IfExp)) and around.test is count:
        return count, False
    return None


def needs_zero(file: SourceFile, count: cst.CSTNode) -> bool:
    """Whether the program tests the device count for 0 elsewhere, or uses at least 1: ``max(1, n)``."""
    holder = file.tree.parent(count)
    call = file.tree.parent(holder) if isinstance(holder, cst.Arg) else None
    if isinstance(call, cst.Call) and called_name(call) == "max":
        return any(
            isinstance(argument.value, cst.Integer) and argument.value.value == "1" for argument in call.args
        )
    uses: list[cst.CSTNode] = []
    if isinstance(holder, cst.Assign):
        names = [
            target.target for target in holder.targets if isinstance(target.target, (cst.Name, cst.Attribute))
        ]
        uses = [use for name in names for use in file.tree.reads(name)]
    elif isinstance(holder, cst.Return):
        function = file.tree.function(holder)
        name = function.name.value if isinstance(function, cst.FunctionDef) else ""
        named = [node for node in file.tree.of_type(cst.Attribute) if node.attr.value == name]
        uses += [attribute for attribute in named if not isinstance(file.tree.parent(attribute), cst.Call)]
        uses += [node for node in file.tree.of_type(cst.Call) if called_name(node) == name]
    return any(_handles_zero_itself(file, reference) for reference in uses)


def _handles_zero_itself(file: SourceFile, count: cst.CSTNode) -> bool:
    """Whether the program tests the device count for 0, and goes on if it is 0."""
    asked = asks_for_none(file, count)
    return asked is not None and not ends_without(file, count)


# -- the code that a test controls --------------------------------------------------------------------------


def _same_effect_on_host(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether the code that a test controls does the same on a CPU, and chooses nothing but the device."""
    decided = decided_by(file, question)
    if isinstance(decided, cst.IfExp):
        sides = (decided.body, decided.orelse)
        return _asks_for_bfloat16(file, decided) or all(_is_same_value(file, side) for side in sides)
    return decided is not None and _is_same_statement(file, decided)


def _asks_for_bfloat16(file: SourceFile, choice: cst.IfExp) -> bool:
    """Whether a choice also tests for bfloat16 and falls back to float16, which suits a CPU less."""
    asks = any(
        file.tree.qualified(descendant.func) == "torch.cuda.is_bf16_supported"
        for descendant in walk(choice.test)
        if isinstance(descendant, cst.Call)
    )
    return asks and _FLOAT16.search(file.tree.source(choice.orelse)) is not None


def _is_same_statement(file: SourceFile, statement: cst.If) -> bool:
    at: cst.If | cst.Else | None = statement
    while at is not None:
        if not _is_same_block(file, at.body):
            return False
        at = at.orelse if isinstance(at, cst.If) else None
    return True


def _is_same_block(file: SourceFile, block: cst.BaseSuite) -> bool:
    nodes = list(walk(block))
    return all(
        _is_same_small_statement(file, node) for node in nodes if isinstance(node, cst.BaseSmallStatement)
    ) and all(_is_same_call(file, node) for node in nodes if isinstance(node, cst.Call))


def _is_same_small_statement(file: SourceFile, statement: cst.BaseSmallStatement) -> bool:
    if isinstance(statement, (cst.Expr, cst.Pass)):
        return True  # the caller checks its calls one by one
    if isinstance(statement, cst.Assign):
        names = [file.tree.qualified(target.target) or "" for target in statement.targets]
        is_cudnn = all(name.startswith("torch.backends.cudnn.") for name in names)
        return is_cudnn or _is_same_value(file, statement.value)
    if isinstance(statement, (cst.AnnAssign, cst.Return)):
        return statement.value is not None and _is_same_value(file, statement.value)
    return False


def _is_same_value(file: SourceFile, value: cst.BaseExpression) -> bool:
    """Whether a value is a device, or a tensor or module that may be moved to one."""
    if isinstance(value, cst.IfExp):
        return _is_same_value(file, value.body) and _is_same_value(file, value.orelse)
    if isinstance(value, cst.Tuple):
        return bool(value.elements) and all(_is_same_value(file, element.value) for element in value.elements)
    if isinstance(value, cst.FormattedString):
        first = value.parts[0] if value.parts else None
        return isinstance(first, cst.FormattedStringText) and first.value.startswith("cuda")
    if isinstance(value, cst.Call):
        if called_name(value) == "device":
            return bool(value.args) and _is_same_value(file, value.args[0].value)
        return called_name(value) not in _NEUTRAL and _is_same_call(file, value)
    if isinstance(value, cst.Name):
        return _is_other_side_moved(file, value)
    return _DEVICE.match(string_value(value) or "") is not None


def _is_other_side_moved(file: SourceFile, name: cst.Name) -> bool:
    """Whether a name is one side of a choice whose other side moves it: ``x.cuda() if … else x``."""
    choice = file.tree.parent(name)
    if not isinstance(choice, cst.IfExp):
        return False
    return any(
        isinstance(side, cst.Call)
        and called_name(side) in ("cuda", "to")
        and isinstance(side.func, cst.Attribute)
        and file.tree.source(side.func.value) == name.value
        for side in (choice.body, choice.orelse)
    )


def _is_same_call(file: SourceFile, call: cst.Call) -> bool:
    """Whether a call does the same on a CPU as on an accelerator."""
    full, name = file.tree.qualified(call.func) or "", called_name(call) or ""
    if full.startswith("torch.cuda."):
        return full.rpartition(".")[2] in _ALIKE
    if full == "torch.device" or name in _NEUTRAL:
        return True
    if _MOVES.search(name) and isinstance(call.func, cst.Name):
        return any(
            isinstance(assignment.node, cst.FunctionDef) for assignment in file.tree.assignments(call.func)
        )
    moves = isinstance(call.func, cst.Attribute) and name in ("cuda", "to", "cpu", "pin_memory")
    return moves and _HALF.search(" ".join(file.tree.source(argument) for argument in call.args)) is None
