"""The old and the new text of the tests and choices that edits change, and what is wrong with the new one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import libcst as cst

from acclimate_port.conditions.host_answers import kinds_near
from acclimate_port.conditions.worlds import CUDA, HOST, OTHER, Difference, TooComplexError, differences
from acclimate_port.new_code.edits import Edit, render_within
from acclimate_port.source.tree import Span, called_name, string_value, walk
from acclimate_port.source.vendors import kinds_in
from acclimate_port.source_file import SourceFile, cuda_name

_PARTS = (cst.BooleanOperation, cst.Comparison, cst.ComparisonTarget, cst.IfExp, cst.Arg)
_TESTS = (cst.If, cst.While, cst.Assert, cst.CompIf)
_QUESTIONS = {"is_available", "device_count", "is_bf16_supported", "is_initialized", "startswith"}
_KEEP_VALUE = ("str", "bool")
"""Functions that give the device or the truth that they get."""
_SWITCHES = {"autocast", "GradScaler"}
"""Calls that turn something on or off."""
_MOST_AROUND = 12
"""The most tests around another that are compared with it: a chain of ``elif`` may have hundreds."""
TOO_COMPLEX = "its condition has too many parts to tell what it does on other machines"


def whole_value(file: SourceFile, node: cst.CSTNode, *, of_choice: bool = True) -> cst.CSTNode:
    """The largest test, choice or device that an expression is a part of.

    Args:
        file: the file.
        node: the expression.
        of_choice: whether the test of a choice belongs to the choice: ``a if test else b``.
    """
    whole = node
    for below, around in file.tree.upwards(node):
        if isinstance(around, cst.IfExp) and not of_choice:
            return whole
        if isinstance(around, cst.Arg):
            call = file.tree.parent(around)
            if not isinstance(call, cst.Call) or not _keeps_value(file, call):
                return whole
        elif isinstance(around, cst.Call):
            whole = around
        elif isinstance(around, cst.Attribute):
            if around.attr.value != "type" or around.value is not below:
                return whole
            whole = around
        elif isinstance(around, cst.UnaryOperation):
            if not isinstance(around.operator, cst.Not):
                return whole
            whole = around
        elif isinstance(around, cst.ComparisonTarget):
            pass
        elif isinstance(around, _PARTS):
            whole = around
        else:
            return whole
    return whole


def _keeps_value(file: SourceFile, call: cst.Call) -> bool:
    """Whether a call gives the device or the truth that it gets, or turns something on by them."""
    name = called_name(call)
    return file.tree.qualified(call.func) == "torch.device" or name in (*_KEEP_VALUE, *_SWITCHES)


def is_decision(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a value is a test or a choice, and not the plain name of a device."""
    if isinstance(node, cst.Call):
        if called_name(node) in _KEEP_VALUE and len(node.args) == 1:
            return is_decision(file, node.args[0].value)
        return called_name(node) in _QUESTIONS | _SWITCHES
    if isinstance(node, cst.Attribute):
        return node.attr.value == "is_cuda"
    return isinstance(node, (cst.BooleanOperation, cst.Comparison, cst.UnaryOperation, cst.IfExp))


class Proof:
    """What edits change in the three worlds.

    Args:
        file: the file.
        edits: all edits to make, in any order.
    """

    def __init__(self, file: SourceFile, edits: Sequence[Edit]) -> None:
        self._file = file
        self._edits = sorted(edits, key=lambda edit: edit.start)
        self._starts = [edit.start for edit in self._edits]
        self._dropped: set[int] = set()

    def drop(self, edits: Sequence[Edit]) -> None:
        """Compares without some of the edits from now on."""
        self._dropped.update(map(id, edits))

    def differences(self, whole: cst.CSTNode) -> list[Difference]:
        """What the edits inside a test or choice change.

        Raises:
            TooComplexError: there are too many cases.
        """
        if isinstance(whole, cst.IfExp) and not all(map(self._is_plain, (whole.body, whole.orelse))):
            found = self.differences(whole.test)
            for branch in (whole.body, whole.orelse):
                found += self.differences(branch) if is_decision(self._file, branch) else []
            return found
        old, new = self._texts(whole)
        if old == new:
            return []
        holder = self._file.tree.parent(whole)
        is_test = isinstance(holder, _TESTS) or (isinstance(holder, cst.IfExp) and holder.test is whole)
        found = self._compared(whole, old, new, as_test=is_test and not isinstance(whole, cst.IfExp))
        # No host takes the branch of a test of the device, or gets past a call that raises there.
        never = self._file.is_guarded(whole) or _is_given_to_cuda(self._file, whole)
        if isinstance(whole, cst.IfExp) and self._texts(whole.orelse)[0] == self._texts(whole.orelse)[1]:
            never = never or self._file.tests_device(whole.test)
        return [difference for difference in found if difference.world is not HOST or not never]

    def _is_plain(self, branch: cst.BaseExpression) -> bool:
        """Whether the value of a branch is known: a device's name, a number, None."""
        if isinstance(branch, cst.IfExp):
            return self._is_plain(branch.body) and self._is_plain(branch.orelse)
        if isinstance(branch, cst.Call):
            return _keeps_value(self._file, branch) and all(
                self._is_plain(argument.value) for argument in branch.args
            )
        is_constant = isinstance(branch, cst.Name) and branch.value in ("None", "True", "False")
        return is_constant or isinstance(branch, (cst.SimpleString, cst.FormattedString, cst.Integer))

    def below(self, outer: Sequence[tuple[cst.BaseExpression, bool]], whole: cst.CSTNode) -> list[Difference]:
        """What the edits change of a test and of the tests around it, each with whether it must be true."""
        before, after = [], []
        for test, positive in outer:
            old, new = self._texts(test)
            before.append(f"({old})" if positive else f"(not ({old}))")
            after.append(f"({new})" if positive else f"(not ({new}))")
        old, new = self._texts(whole)
        found: list[Difference] = []
        for form in ("({})", "(not ({}))"):
            both = [" and ".join([*tests, form.format(own)]) for tests, own in ((before, old), (after, new))]
            found += self._compared(whole, both[0], both[1], as_test=True)
        return found

    def _texts(self, node: cst.CSTNode) -> tuple[str, str]:
        place = self._file.span(node)
        first, last = bisect_left(self._starts, place.start), bisect_right(self._starts, place.end)
        near = [edit for edit in self._edits[first:last] if id(edit) not in self._dropped]
        inside = [edit for edit in near if edit.end <= place.end]
        return self._file.tree.source(place), render_within(self._file.tree.bytes, place, inside).decode()

    def _compared(self, whole: cst.CSTNode, old: str, new: str, *, as_test: bool) -> list[Difference]:
        names = {
            name.value: full
            for name in walk(whole)
            if isinstance(name, cst.Name) and (full := self._file.tree.qualified(name)) is not None
        }
        names |= self._file.names_of_new_code
        kinds = kinds_near(self._file, whole) if as_test else tuple(kinds_in(old))
        flags = frozenset(
            self._file.tree.source(flag)
            for flag in walk(whole)
            if isinstance(flag, (cst.Name, cst.Attribute)) and self._file.tests_device(flag)
        )
        key = (old, new, as_test, kinds, frozenset(names.items()), flags)
        known = self._file.compared
        if key not in known:
            try:
                known[key] = differences(
                    *(old, new, names),
                    as_test=as_test,
                    kinds=kinds,
                    host_autocasts=self._file.autocasts_on_host,
                    false_on_host=flags,
                )
            except (SyntaxError, TooComplexError):  # an older Python than the file's cannot parse it
                known[key] = None
        found = known[key]
        if found is None:
            raise TooComplexError
        return list(found)


def _is_given_to_cuda(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a value is an argument of a call that raises without CUDA: ``torch.cuda.set_device(…)``."""
    for around in file.tree.ancestors(node):
        if isinstance(around, cst.Call) and cuda_name(file, around.func) == "set_device":
            return True
        if not isinstance(around, (cst.Arg, cst.BinaryOperation, cst.Call)):
            return False
    return False


def verdict(
    file: SourceFile, whole: cst.CSTNode, found: Sequence[Difference], *, is_request: bool
) -> tuple[bool, str]:
    """Whether an edit can be offered, and what a person must know of it; ``""``: it is safe.

    Args:
        file: the file.
        whole: the test or choice.
        found: what the edit changes.
        is_request: whether the test finds that the program was told to use CUDA where there is none.
    """
    for difference in found:
        if difference.world is CUDA or difference.world is OTHER:
            return False, f"an edit would change what its condition finds: {difference}"
        if difference.world is not HOST:
            return False, f"the program has its own code: {difference}"
    if not found:
        return True, ""
    if is_request:
        return False, "it detects that the program was told to use CUDA on a machine without CUDA"
    return True, str(found[0])


def only_checks(file: SourceFile, whole: cst.CSTNode) -> bool:
    """Whether the statement around a test does nothing for a CUDA device but look whether there is one."""
    statements = [around for around in file.tree.ancestors(whole) if isinstance(around, cst.If)]
    inner = next((one for one in statements if whole in (one.test, *walk(one.test))), None)
    outer = next((one for one in statements if one is not inner), None)
    return outer is None or (len(outer.body.body) == 1 and outer.orelse is None)


def outer_tests(file: SourceFile, node: cst.CSTNode) -> list[tuple[cst.BaseExpression, bool]]:
    """The nearest tests of CUDA devices around a node in its function, and whether each must be true."""
    found: list[tuple[cst.BaseExpression, bool]] = []
    for below, around in file.tree.upwards(node):
        if isinstance(around, (cst.FunctionDef, cst.ClassDef, cst.Lambda)) or len(found) == _MOST_AROUND:
            break
        if isinstance(around, cst.If) and below is not around.test and names_cuda(around.test):
            found.append((around.test, below is around.body))
    return found


def names_cuda(test: cst.CSTNode) -> bool:
    """Whether a test compares something with a CUDA device's name."""
    return any((string_value(node) or "").startswith("cuda") for node in walk(test))


def compares_device(test: cst.CSTNode) -> bool:
    """Whether a test compares something with the name of the CPU or of a CUDA device."""
    return any((string_value(node) or "").startswith(("cpu", "cuda")) for node in walk(test))


def asks_for_cuda(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a test contains ``torch.cuda.is_available()``."""
    return any(
        isinstance(node, cst.Call) and file.tree.qualified(node.func) == "torch.cuda.is_available"
        for node in walk(test)
    )


def inside(edit: Edit, place: Span) -> bool:
    """Whether an edit is inside a range."""
    return place.start <= edit.start and edit.end <= place.end
