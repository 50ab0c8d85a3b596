"""Whether a device count sets the number of processes, or is a divisor, as a figure of memory may be.

``torch.accelerator.device_count()`` is 0 on a CPU-only machine. A program that starts one process per device
would start none there, and ``rank % device_count()`` would raise.
"""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.conditions.statements import leaves, refuses
from acclimate_port.dataflow.uses import parameter_of, uses_of
from acclimate_port.source.tree import called_name, dotted, last_name, positional, string_value, walk
from acclimate_port.source_file import SourceFile

_PROCESSES = re.compile(
    r"(^|_)(local_)?(world_?size|n_?procs?(_per_node)?|num_?proc(s|esses)?|max_workers|processes)$",
    re.IGNORECASE,
)
_OPTION = re.compile(r"--?(nproc[-_]per[-_]node|num[-_]proc(esse)?s|nprocs?|world[-_]size|np?)[= ]?$")
_STARTS = {"Process", "Popen", "run", "remote", "submit", "spawn"}
_POOLS = {"Pool", "ProcessPoolExecutor", "ThreadPool"}


def must_not_be_zero(file: SourceFile, count: cst.CSTNode) -> bool:
    """Whether a number reaches a use where it must not be 0; names that hold it are followed.

    The number may be a device count, or a figure of memory, which is 0 for some devices.
    """
    return any(
        _divides_or_starts(file, use) for use in uses_of(file, count, computed=True, unless=_is_asked_before)
    )


def _divides_or_starts(file: SourceFile, use: cst.CSTNode) -> bool:
    """Whether a number is a divisor, or how many processes there are, by the code around it."""
    at = file.tree.parent(use)
    if isinstance(at, cst.BinaryOperation):
        is_text = isinstance(at.left, (cst.SimpleString, cst.ConcatenatedString, cst.FormattedString))
        divides = isinstance(at.operator, (cst.FloorDivide, cst.Divide, cst.Modulo))
        return at.right is use and divides and not is_text
    if isinstance(at, cst.AugAssign):
        divides = isinstance(at.operator, (cst.ModuloAssign, cst.DivideAssign, cst.FloorDivideAssign))
        return divides or _is_of_processes(at.target)
    if isinstance(at, cst.Arg):
        return _starts_processes(file, at)
    if isinstance(at, cst.DictElement):
        return at.value is use and _PROCESSES.search(string_value(at.key) or "") is not None
    if isinstance(at, cst.Param):
        return _PROCESSES.search(at.name.value) is not None
    if isinstance(at, (cst.FormattedStringExpression, cst.Element)):
        return _is_after_option(file, at)
    targets = (
        [one.target for one in at.targets] if isinstance(at, cst.Assign) else [getattr(at, "target", None)]
    )
    return any(_is_of_processes(one) for one in targets if one is not None)


def _is_of_processes(target: cst.CSTNode) -> bool:
    return _PROCESSES.search(last_name(target)) is not None


def _starts_processes(file: SourceFile, argument: cst.Arg) -> bool:
    """Whether a call gets a number as that of processes or as a divisor, or loops to start so many."""
    given = file.tree.given_to(argument)
    if given is None:
        return False
    name, index, call = given.name, given.index, given.call
    if given.word == "default" and name in ("add_argument", "option", "Option"):
        options = (string_value(text.value) or "" for text in positional(call))
        return any(_PROCESSES.search(option.lstrip("-").replace("-", "_")) for option in options)
    if (name in ("spawn", "start_processes") and index == 2) or (name == "divmod" and index == 1):
        return True
    parameter = parameter_of(file, given)
    words = (given.word, parameter.name.value if parameter is not None else "")
    if any(_PROCESSES.search(word) for word in words) or (name in _POOLS and index == 0):
        return True
    loop = file.tree.parent(call)
    holder = file.tree.parent(loop) if isinstance(loop, cst.CompFor) else loop
    if (
        name != "range"
        or not isinstance(loop, (cst.For, cst.CompFor))
        or holder is None
        or loop.iter is not call
    ):
        return False
    return not _STARTS.isdisjoint(called_name(one) or "" for one in walk(holder) if isinstance(one, cst.Call))


def _is_after_option(file: SourceFile, at: cst.CSTNode) -> bool:
    """Whether a value follows a launcher's option: ``["torchrun", "--nproc_per_node", n]``."""
    holder = file.tree.parent(at)
    parts: list[cst.CSTNode] = []
    if isinstance(holder, (cst.List, cst.Tuple)):
        parts = [*holder.elements]
    elif isinstance(holder, cst.FormattedString):
        parts = [*holder.parts]
    before = parts[parts.index(at) - 1] if at in parts[1:] else None
    text = before.value if isinstance(before, cst.FormattedStringText) else None
    text = string_value(before.value) if isinstance(before, cst.Element) else text
    return text is not None and _OPTION.search(text) is not None


def _is_asked_before(file: SourceFile, use: cst.CSTNode) -> bool:
    """Whether the program has tested a number before, and so handles 0 itself."""
    tree, text = file.tree, file.tree.source(use)

    def asks(test: cst.CSTNode) -> bool:
        kinds = (cst.Name, cst.Attribute, cst.Call)
        return any(isinstance(one, kinds) and tree.source(one) == text for one in walk(test))

    for below, around in tree.upwards(use):
        if isinstance(around, (cst.If, cst.IfExp)) and below is not around.test and asks(around.test):
            return True
        if isinstance(around, (cst.FunctionDef, cst.ClassDef)):
            break
    return any(
        isinstance(statement, cst.If)
        and leaves(statement.body)
        and not refuses(statement.body)
        and asks(statement.test)
        for statement in tree.earlier_statements(use)
    )


def ends_without(file: SourceFile, asked: cst.CSTNode) -> bool:
    """Whether a test ends the program if there is no device.

    ``assert is_available()``, ``if device_count() == 0: raise …``.

    Args:
        file: the file.
        asked: the call that tells whether there is a device, or how many there are.
    """
    positive = True
    for below, around in file.tree.upwards(asked):
        if isinstance(around, cst.UnaryOperation) and isinstance(around.operator, cst.Not):
            positive = not positive
        elif isinstance(around, cst.ComparisonTarget):
            pass
        elif isinstance(around, cst.Comparison):
            expected = expects_devices(around, asked)
            if expected is None:
                return False
            positive = expected
        elif isinstance(around, cst.Assert):
            return below is around.test and positive
        elif isinstance(around, cst.If):
            other = around.orelse.body if isinstance(around.orelse, cst.Else) else None
            without = other if positive else around.body
            return below is around.test and without is not None and _ends_program(without)
        elif not isinstance(around, cst.BooleanOperation):
            return False
        elif isinstance(around.operator, cst.Or) == positive:
            return False  # the other operand of `or` may let the program go on
    return False


def expects_devices(comparison: cst.Comparison, count: cst.CSTNode) -> bool | None:
    """Whether a comparison is true if there is a device; ``None`` if one device makes no difference."""
    if len(comparison.comparisons) != 1:
        return None
    right = comparison.comparisons[0]
    first = comparison.left is count
    other = right.comparator if first else comparison.left
    if isinstance(other, cst.Integer) and other.value not in ("0", "1"):
        return None
    more, fewer = (cst.GreaterThan, cst.GreaterThanEqual), (cst.LessThan, cst.LessThanEqual)
    if isinstance(right.operator, (*more, *fewer, cst.Equal, cst.NotEqual)):
        return isinstance(right.operator, (cst.NotEqual, *(more if first else fewer)))
    return None


def _ends_program(block: cst.BaseSuite) -> bool:
    """Whether a block's last statement raises or ends the program; a skipped test does not end it."""
    last = block.body[-1] if block.body else None
    if last is None or not refuses(last):
        return False
    for check in (descendant for descendant in walk(last) if isinstance(descendant, cst.Assert)):
        if dotted(check.test) != "False" and not isinstance(check.test, cst.Integer):
            return False  # it checks something else
    words = {descendant.value.lower() for descendant in walk(last) if isinstance(descendant, cst.Name)}
    return not isinstance(last, cst.BaseCompoundStatement) and not any("skip" in word for word in words)
