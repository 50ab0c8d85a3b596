"""Whether a device count sets the number of processes, or is a divisor, as a figure of memory may be.

``torch.accelerator.device_count()`` is 0 on a CPU-only machine. A program that starts one process per device
would start none there, and ``rank % device_count()`` would raise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from acclimate_port.conditions.statements import leaves, refuses
from acclimate_port.dataflow.sinks import parameter_of
from acclimate_port.source.tree import (
    called_name,
    dotted,
    last_name,
    position,
    positional,
    string_value,
    walk,
)
from acclimate_port.source_file import SourceFile

_PROCESSES = re.compile(
    r"(^|_)(local_)?(world_?size|n_?procs?(_per_node)?|num_?proc(s|esses)?|max_workers|processes)$",
    re.IGNORECASE,
)
_OPTION = re.compile(r"--?(nproc[-_]per[-_]node|num[-_]proc(esse)?s|nprocs?|world[-_]size|np?)[= ]?$")
_STARTS = {"Process", "Popen", "run", "remote", "submit", "spawn"}
_POOLS = {"Pool", "ProcessPoolExecutor", "ThreadPool"}
_PASSES = {"int", "float", "str", "min", "abs"}
_DEPTH = 6


def must_not_be_zero(file: SourceFile, count: cst.CSTNode) -> bool:
    """Whether a number reaches a use where it must not be 0; names that hold it are followed.

    The number may be a device count, or a figure of memory, which is 0 for some devices.
    """
    return _Flow(file).reaches(count, _DEPTH)


class _Flow:
    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._seen: set[cst.CSTNode] = set()

    def reaches(self, value: cst.CSTNode, depth: int) -> bool:
        """Whether an expression's value reaches a use where it must not be 0."""
        if depth == 0 or value in self._seen or self._is_asked_before(value):
            return False
        self._seen.add(value)
        below, at = value, self._file.tree.parent(value)
        while at is not None:
            if isinstance(at, cst.IfExp):
                if below is at.test:
                    return False
            elif isinstance(at, cst.BooleanOperation):
                if below is at.left and isinstance(at.operator, cst.And):
                    return False
            elif isinstance(at, cst.BinaryOperation):
                if below is at.right and self._divides(at):
                    return True
                if isinstance(at.operator, cst.Modulo):
                    return False
            elif isinstance(at, cst.Arg):
                call = self._file.tree.parent(at)
                if not isinstance(call, cst.Call):
                    return False
                if called_name(call) not in _PASSES or at.keyword is not None:
                    return self._in_call(call, at, depth)
                at = call
            elif isinstance(at, cst.NamedExpr):
                if self._target(at.target, depth):
                    return True
            elif not isinstance(at, (cst.FormattedStringExpression, cst.Tuple, cst.List, cst.Element)):
                return self._ends(at, below, depth)
            elif self._is_after_option(at, below):
                return True
            below, at = at, self._file.tree.parent(at)
        return False

    def _divides(self, operation: cst.BinaryOperation) -> bool:
        if isinstance(operation.operator, cst.Modulo):
            return string_value(operation.left) is None and not isinstance(
                operation.left, (cst.SimpleString, cst.ConcatenatedString, cst.FormattedString)
            )
        return isinstance(operation.operator, (cst.FloorDivide, cst.Divide))

    def _ends(self, at: cst.CSTNode, below: cst.CSTNode, depth: int) -> bool:
        """Whether the statement around a value uses it so, or passes it on to such a use."""
        if isinstance(at, cst.Assign):
            return any(self._assigned(target.target, below, depth) for target in at.targets)
        if isinstance(at, cst.AnnAssign):
            return self._target(at.target, depth)
        if isinstance(at, cst.AugAssign):
            divides = isinstance(at.operator, (cst.ModuloAssign, cst.DivideAssign, cst.FloorDivideAssign))
            return divides or self._target(at.target, depth)
        if isinstance(at, cst.Return):
            function = self._file.tree.function(at)
            return isinstance(function, cst.FunctionDef) and any(
                self.reaches(call, depth - 1) for call in self._calls(function.name)
            )
        if isinstance(at, cst.DictElement):
            return at.value is below and _PROCESSES.search(string_value(at.key) or "") is not None
        if isinstance(at, (cst.Comparison, cst.ComparisonTarget)):
            return self._refuses(at if isinstance(at, cst.Comparison) else self._file.tree.parent(at))
        return isinstance(at, cst.Param) and self._parameter(at, depth)

    def _assigned(self, target: cst.CSTNode, value: cst.CSTNode, depth: int) -> bool:
        if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple):
            pairs = zip(target.elements, value.elements, strict=False)
            return any(pair.value in self._seen and self._target(name.value, depth) for name, pair in pairs)
        targets = [one.value for one in target.elements] if isinstance(target, cst.Tuple) else [target]
        return any(self._target(one, depth) for one in targets)

    def _target(self, target: cst.CSTNode, depth: int) -> bool:
        """Whether the value of a name or an attribute reaches a use where it must not be 0."""
        name = last_name(target)
        if _PROCESSES.search(name) is not None:
            return True
        uses: Iterator[cst.CSTNode] = iter(())
        if isinstance(target, (cst.Name, cst.Attribute)):
            is_name = isinstance(target, cst.Name)
            uses = iter(self._file.tree.reads(target)) if is_name else self._attributes(name, target)
        return any(self.reaches(use, depth - 1) for use in uses)

    def _attributes(self, name: str, target: cst.CSTNode | None = None) -> Iterator[cst.CSTNode]:
        for node in self._file.attributes.get(name, []):
            bound = isinstance(self._file.tree.parent(node), cst.AssignTarget)
            if node is not target and not bound:
                yield node

    def _calls(self, name: cst.Name) -> Iterator[cst.CSTNode]:
        for use in (*self._file.tree.accesses(name), *self._attributes(name.value)):
            call = self._file.tree.parent(use)
            if isinstance(call, cst.Call) and call.func is use:
                yield call

    def _in_call(self, call: cst.Call, argument: cst.Arg, depth: int) -> bool:
        name = called_name(call) or ""
        index = position(call, argument)
        if argument.keyword is not None:
            word = argument.keyword.value
            if word == "default" and name in ("add_argument", "option", "Option"):
                return self._option(call, depth)
            if _PROCESSES.search(word):
                return True
        if (name in ("spawn", "start_processes") and index == 2) or (name == "divmod" and index == 1):
            return True
        if name in _POOLS and index == 0:
            return True
        if name == "range":
            return self._loop_starts(call)
        parameter = parameter_of(self._file, self._file.tree.given_to(argument))
        return parameter is not None and self._parameter(parameter, depth)

    def _option(self, call: cst.Call, depth: int) -> bool:
        """Whether a command-line option with this default reaches a use where it must not be 0."""
        for argument in positional(call):
            said = (string_value(argument.value) or "").lstrip("-").replace("-", "_")
            if _PROCESSES.search(said) or any(self.reaches(use, depth - 1) for use in self._attributes(said)):
                return True
        return False

    def _loop_starts(self, call: cst.Call) -> bool:
        """Whether a loop over ``range(…)`` starts a process in each iteration."""
        loop = self._file.tree.parent(call)
        holder = self._file.tree.parent(loop) if isinstance(loop, cst.CompFor) else loop
        if not isinstance(loop, (cst.For, cst.CompFor)) or holder is None or loop.iter is not call:
            return False
        names = {called_name(descendant) for descendant in walk(holder) if isinstance(descendant, cst.Call)}
        return bool(names & _STARTS)

    def _parameter(self, parameter: cst.Param, depth: int) -> bool:
        if _PROCESSES.search(parameter.name.value):
            return True
        return any(self.reaches(use, depth - 1) for use in self._file.tree.accesses(parameter.name))

    def _is_after_option(self, at: cst.CSTNode, below: cst.CSTNode) -> bool:
        """Whether a value follows a launcher's option: ``["torchrun", "--nproc_per_node", n]``."""
        if isinstance(at, cst.FormattedStringExpression):
            text = self._file.tree.parent(at)
            parts: Sequence[cst.CSTNode] = text.parts if isinstance(text, cst.FormattedString) else ()
            before = parts[parts.index(at) - 1] if at in parts[1:] else None
            return isinstance(before, cst.FormattedStringText) and bool(_OPTION.search(before.value))
        if isinstance(at, (cst.List, cst.Tuple)):
            values = [entry.value for entry in at.elements]
            element = next((i for i, entry in enumerate(at.elements) if entry is below), 0)
            return element > 0 and bool(_OPTION.search(string_value(values[element - 1]) or ""))
        return False

    # -- what the program does with no device --------------------------------------------------------

    def _refuses(self, comparison: cst.CSTNode | None) -> bool:
        """Whether a comparison of a name that holds the number ends the program if it is 0."""
        if not isinstance(comparison, cst.Comparison):
            return False
        sides = (comparison.left, comparison.comparisons[0].comparator)
        return any(side in self._seen and ends_without(self._file, side) for side in sides)

    def _is_asked_before(self, use: cst.CSTNode) -> bool:
        """Whether the program has tested the number before, and so handles 0 itself."""
        tree, text = self._file.tree, self._file.tree.source(use)

        def asks(test: cst.CSTNode) -> bool:
            return any(
                isinstance(descendant, (cst.Name, cst.Attribute, cst.Call))
                and tree.source(descendant) == text
                for descendant in walk(test)
            )

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
