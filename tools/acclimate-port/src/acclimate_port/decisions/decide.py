"""Decides which edits are made: those of one test or choice together, if they are right on every machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from heapq import heappop

import libcst as cst

from acclimate_port.conditions.proofs import (
    TOO_COMPLEX,
    Proof,
    asks_for_cuda,
    inside,
    is_decision,
    names_cuda,
    only_checks,
    outer_tests,
    verdict,
    whole_value,
)
from acclimate_port.conditions.worlds import TooComplexError
from acclimate_port.dataflow.map_location import is_map_location
from acclimate_port.decisions.decision import Decision, Decisions, Status
from acclimate_port.decisions.links import link
from acclimate_port.decisions.one_device import OneDevice
from acclimate_port.new_code.edits import Edit, clash
from acclimate_port.rules.base import Finding
from acclimate_port.source.tree import Span, called_name
from acclimate_port.source_file import SourceFile

_NAMES_AND_TESTS = {
    *("device-string", "device-object", "device-format", "available-choice", "device-comparison"),
    *("is-cuda", "communication-backend", "current-device", "mixed-precision"),
}
"""Rules whose findings are a part of a test, a choice or a name, and not what is computed with them."""


def decide(file: SourceFile, decisions: Decisions) -> None:
    """Gives each decision its status; an edit that is unsafe alone or by others still counts as converted.

    Args:
        file: the file.
        decisions: what each rule alone would do.
    """
    link(file, decisions)
    _leave_overlapping(file, decisions)
    tests = _Tests(file, decisions)
    changed = decisions.settle(range(len(decisions)))
    while changed := tests.prove(changed):
        changed |= decisions.settle(changed)
    OneDevice(file, decisions).keep_whole()


def _leave_overlapping(file: SourceFile, decisions: Decisions) -> None:
    """Leaves each finding whose edits overlap those of an earlier one."""
    kept: dict[int, list[Edit]] = defaultdict(list)
    for decision in sorted(decisions, key=lambda one: (one.finding.place.start, -one.finding.place.end)):
        if decision.status is not Status.CONVERTED:
            continue
        edits, tree = decision.finding.edits, file.tree
        lines = [line for e in edits for line in range(tree.line(e.start), tree.line(e.end) + 1)]
        near = [
            e
            for e in dict.fromkeys(one for line in set(lines) for one in kept[line])
            if any(e.start <= new.end and new.start <= e.end for new in edits)
        ]
        if any(_removes(neighbour, decision.finding.place) for neighbour in near):
            decision.status, decision.hidden = Status.EXEMPT, True
        elif clash([*near, *edits]):
            decision.leave("it overlaps another edit")
        else:
            for edit in edits:
                for line in range(tree.line(edit.start), tree.line(edit.end) + 1):
                    kept[line].append(edit)


def _removes(edit: Edit, place: Span) -> bool:
    """Whether an edit removes a whole range."""
    kept = [part for part in edit.parts if isinstance(part, Span)]
    is_inside = edit.start <= place.start and place.end <= edit.end
    return is_inside and not any(part.start < place.end and place.start < part.end for part in kept)


class _Tests:
    """The tests and choices that decisions change a part of, compared before and after the edits.

    All edits of one test or choice are made together or not at all.

    Args:
        file: the file.
        decisions: all decisions.
    """

    def __init__(self, file: SourceFile, decisions: Decisions) -> None:
        self._file = file
        self._decisions = decisions
        compared = [one.finding for one in decisions if _is_part_of_tests(file, one.finding)]
        self._proof = Proof(file, [edit for finding in compared for edit in finding.edits])
        self._wholes: list[cst.CSTNode] = []
        self._changed_by: list[list[int]] = []
        """The decisions that change a part of each test or choice."""
        self._users: dict[int, set[int]] = defaultdict(set)
        """The tests and choices that hold each decision, or have it in a test around them."""
        numbers: dict[int, int] = {}
        for index, decision in enumerate(decisions):
            whole = _whole(file, decision)
            if whole is None:
                continue
            if id(whole) not in numbers:
                numbers[id(whole)] = len(self._wholes)
                self._wholes.append(whole)
                self._changed_by.append([])
                for member in self._members(whole):
                    self._users[member].add(numbers[id(whole)])
            self._changed_by[numbers[id(whole)]].append(index)
        self._waiting = [*range(len(self._wholes))]
        for decision in decisions:
            if decision.status is not Status.CONVERTED:
                self._proof.drop(decision.finding.edits)

    def _outer(self, whole: cst.CSTNode) -> list[tuple[cst.BaseExpression, bool]]:
        return outer_tests(self._file, whole) if asks_for_cuda(self._file, whole) else []

    def _members(self, whole: cst.CSTNode) -> list[int]:
        """The decisions on a test or choice, and on the tests around it."""
        nodes = (whole, *(test for test, _ in self._outer(whole)))
        found = [index for node in nodes for index in self._decisions.within(self._file.span(node))]
        return [index for index in found if self._decisions[index].finding.edits]

    def prove(self, changed: Collection[int]) -> set[int]:
        """Compares those that may have changed; returns the decisions that this changes.

        It stops at the first that stays as it is: the others are compared without its edits.

        Args:
            changed: the decisions that have changed since the last time.
        """
        for index in changed:
            if self._decisions[index].status is not Status.CONVERTED:
                self._proof.drop(self._decisions[index].finding.edits)
                self._waiting += self._users[index]
        self._waiting = sorted(set(self._waiting))
        found: set[int] = set()
        while self._waiting:
            whole = heappop(self._waiting)
            applied = (self._decisions[index].status for index in self._changed_by[whole])
            if Status.CONVERTED not in applied:
                continue
            if not self._prove(self._wholes[whole], found):
                break
        return found

    def _prove(self, whole: cst.CSTNode, changed: set[int]) -> bool:
        """Compares one test or choice; returns whether its edits can be offered."""
        file, outer = self._file, self._outer(whole)
        try:
            differences = self._proof.below(outer, whole) if outer else self._proof.differences(whole)
            is_request = (
                only_checks(file, whole) if outer else names_cuda(whole) and asks_for_cuda(file, whole)
            )
            offered, reason = verdict(file, whole, differences, is_request=is_request)
        except TooComplexError:
            offered, reason = True, TOO_COMPLEX
        for index in self._members(whole) if reason else ():
            member = self._decisions[index]
            if member.status is not Status.CONVERTED:
                continue
            if not offered:
                member.leave(reason)
                member.finding.stands_alone = is_request
                changed.add(index)
            elif inside(member.finding.edits[0], file.span(whole)):
                if member.safe:
                    changed.add(index)
                member.doubt_also(reason)
        return offered


def _is_part_of_tests(file: SourceFile, finding: Finding) -> bool:
    """Whether a finding changes a test, a choice or a name, and not what is computed with them."""
    if finding.rule.name == "runtime-call" and isinstance(finding.node, cst.Call):
        return is_decision(file, finding.node)
    return finding.rule.name in _NAMES_AND_TESTS


def _whole(file: SourceFile, decision: Decision) -> cst.CSTNode | None:
    """The test or choice that a decision changes a part of."""
    if not decision.finding.edits:
        return None
    whole = whole_value(file, decision.finding.node)
    # `None` as a map_location means the device that a checkpoint was saved on, which is CUDA.
    is_location = decision.finding.rule.name == "available-choice" and is_map_location(file, whole)
    # The number of the device is the same one: `current_device() == rank`.
    if decision.finding.rule.name == "current-device" and isinstance(whole, cst.Comparison):
        return None
    # The edit says itself what it gives elsewhere: `get_device_capability() == (9, 0)`.
    node = decision.finding.node
    is_call = isinstance(node, cst.Call) and called_name(node) == "get_device_capability"
    if is_call and isinstance(whole, cst.Comparison):
        return None
    return whole if is_decision(file, whole) and not is_location else None
