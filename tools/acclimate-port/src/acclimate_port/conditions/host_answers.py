"""Whether a ported test for CUDA may be true on a CPU-only machine.

acclimate counts the CPU as an accelerator, torch does not. A program that tests for CUDA has a CPU path and
must still take it: with 32-bit numbers, without CUDA's kernels or a device's limits. The test may be true
there only if the code that it controls does the same on a CPU, or if the program would otherwise end.
"""

from __future__ import annotations

import libcst as cst

from acclimate_port.conditions.branches import where_true
from acclimate_port.conditions.device_counts import ends_without, expects_devices
from acclimate_port.conditions.statements import decided_by, later_tests, refuses
from acclimate_port.new_code.targets import TorchTarget
from acclimate_port.source.torch_cuda import STREAMS
from acclimate_port.source.vendors import VENDORS, WITHOUT_STREAMS, kinds_in
from acclimate_port.source_file import SourceFile, cuda_name, kept

_SERVE = {
    *("synchronize", "empty_cache", "ipc_collect"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all"),
}
"""Functions of torch.cuda that are right on every device, also beside code of its own for it."""
_FROM_ONE = (cst.LessThan, cst.GreaterThanEqual)
"""Operators that tell 0 devices from 1 or more when compared with 1: ``device_count() < 1``."""


def ends_program_if_false(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether the program ends if there is no CUDA. The test may be negated: ``device != "cuda"``."""
    if isinstance(question, cst.Comparison) and isinstance(
        question.comparisons[0].operator, (cst.NotEqual, cst.NotIn)
    ):
        for below, around in file.tree.upwards(question):
            if isinstance(around, cst.If):
                ends = below is around.test and refuses(around.body)
                return ends and "skip" not in file.tree.source(around.body).lower()
            if not isinstance(around, cst.BooleanOperation):
                return False
        return False
    return ends_without(file, question)


def other_kinds(file: SourceFile, question: cst.CSTNode) -> tuple[str, ...]:
    """The other device types that later branches, or other code in the file, handle."""
    return tuple(dict.fromkeys([*_kinds_in_later_branches(file, question), *kinds_near(file, question)]))


def is_for_cuda_alone(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether the file has its own code for each other device, so that a ported test means CUDA still."""
    kinds = {*_kinds_in_later_branches(file, question), *file.other_kinds}
    return {vendor.device_type for vendor in VENDORS} <= kinds


@kept
def kinds_near(file: SourceFile, question: cst.CSTNode) -> tuple[str, ...]:
    """The other device types for which code in the file stands beside that of a test.

    What waits, seeds or frees memory is right on every device: it stands beside no code of another function.
    """
    functions = [one for one in file.tree.ancestors(question) if isinstance(one, cst.FunctionDef)]
    if not file.other_kinds or not functions or not only_serves(file, question):
        return file.other_kinds
    named = kinds_in(file.tree.source(functions[-1]))
    return tuple(kind for kind in file.other_kinds if kind in named)


def only_serves(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether a test is the whole condition of an ``if`` that only waits, seeds or frees memory."""
    decided = decided_by(file, question)
    if not isinstance(decided, cst.If) or decided.test is not question:
        return False
    lines = [line.body for line in decided.body.body if isinstance(line, cst.SimpleStatementLine)]
    small = [one for line in lines for one in line]
    calls = [one.value for one in small if isinstance(one, cst.Expr) and isinstance(one.value, cst.Call)]
    is_all = len(lines) == len(decided.body.body) and len(calls) == len(small)
    return is_all and all(cuda_name(file, call.func) in _SERVE for call in calls)


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


def asks_for_several(file: SourceFile, count: cst.CSTNode) -> tuple[cst.CSTNode, bool] | None:
    """The test for several devices, and whether it is true for several; ``None``: no such test.

    ``device_count() > 1``, ``device_count() < 4``.
    """
    around = file.tree.parent(count)
    if not isinstance(around, cst.Comparison) or len(around.comparisons) != 1 or around.left is not count:
        return None
    operator, limit = around.comparisons[0].operator, around.comparisons[0].comparator
    if not isinstance(limit, cst.Integer) or limit.value == "0":
        return None
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


def needs_streams(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether code that runs where a test is true makes streams, which torch lacks on MPS.

    This matters for ``--to torch`` only: acclimate has streams for MPS.
    """
    if not isinstance(file.target, TorchTarget):
        return False
    asked = (attribute for name in STREAMS for attribute in file.attributes.get(name, []))
    found = [file.span(one) for one in asked if (file.tree.qualified(one) or "").startswith("torch.cuda.")]
    places = where_true(file, test) if found else []
    return any(place.start <= span.start and span.end <= place.end for place in places for span in found)


def kinds_apart(file: SourceFile, test: cst.CSTNode) -> tuple[str, ...]:
    """The other device types for which a ported test of the device must be false."""
    return WITHOUT_STREAMS if needs_streams(file, test) else other_kinds(file, test)
