"""What the port does with each finding, and how a decision follows those that it depends on."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from heapq import heappop, heappush

import libcst as cst

from acclimate_port.conditions.branches import where_true
from acclimate_port.conditions.host_answers import ends_program_if_false
from acclimate_port.rules.base import Finding, Outcome
from acclimate_port.source.tree import Span, called_name
from acclimate_port.source_file import SourceFile


class Status(Enum):
    """What the port did with a piece of hardware-specific code."""

    CONVERTED = "converted"
    UNSAFE = "unsafe"
    """``--unsafe`` would convert it."""
    LEFT = "left"
    EXEMPT = "exempt"


@dataclass
class Decision:
    """What becomes of a finding."""

    finding: Finding
    status: Status
    safe: bool
    reason: str
    hidden: bool = False
    needs: list[int] = field(default_factory=list)
    """The decisions that it is left or unsafe with."""
    beside: list[int] = field(default_factory=list)
    """The decisions that make it unsafe if they are left or unsafe."""
    cause: Decision | None = None
    """The decision that it follows, whose own reason is the one to tell."""

    @property
    def root(self) -> Decision:
        """The decision at the end of the chain of those that follow each other."""
        return self if self.cause is None else self.cause

    def leave(self, reason: str) -> None:
        """Makes no edit."""
        if self.status is Status.CONVERTED:
            self.status, self.reason = Status.LEFT, reason

    def doubt(self, reason: str) -> None:
        """Makes the edit unsafe."""
        if self.safe:
            self.safe, self.reason = False, reason

    def doubt_also(self, reason: str) -> None:
        """Makes the edit unsafe, and keeps the reason beside one that it has."""
        if self.safe:
            self.doubt(reason)
        elif reason not in self.reason:
            self.reason = f"{self.reason}; {reason}"


class Decisions(list[Decision]):
    """All decisions of a file, in source order.

    Args:
        file: the file.
        decisions: the decisions.
    """

    def __init__(self, file: SourceFile, decisions: Iterable[Decision]) -> None:
        super().__init__(decisions)
        self._file = file
        self._starts = [decision.finding.place.start for decision in self]

    @cached_property
    def at(self) -> dict[cst.CSTNode | None, int]:
        """The index of the decision on a node."""
        return {decision.finding.node: index for index, decision in enumerate(self)}

    @cached_property
    def _users(self) -> dict[int, set[int]]:
        """The decisions that follow each one; for the time when all dependencies are known."""
        found: dict[int, set[int]] = defaultdict(set)
        for index, decision in enumerate(self):
            for other in (*decision.needs, *decision.beside):
                found[other].add(index)
        return found

    def within(self, place: Span) -> list[int]:
        """The indices of the decisions on code in a range."""
        first, last = bisect_left(self._starts, place.start), bisect_left(self._starts, place.end)
        return [index for index in range(first, last) if self[index].finding.place.end <= place.end]

    def counted(self, places: Iterable[Span], besides: int = -1) -> list[int]:
        """The indices of the decisions in some ranges on code for one kind of device.

        Args:
            places: the ranges.
            besides: the index of a decision that is not meant.
        """
        found = (index for place in places for index in self.within(place))
        return [index for index in found if index != besides and self.counts(index)]

    def counts(self, index: int) -> bool:
        """Whether a decision is about code for one kind of device."""
        return self[index].finding.outcome is not Outcome.EXEMPT

    def of_rules(self, *names: str) -> list[int]:
        """The indices of the decisions on what some rules find for one kind of device."""
        return [i for i, one in enumerate(self) if one.finding.rule.name in names and self.counts(i)]

    def settle(self, changed: Collection[int]) -> set[int]:
        """Lets decisions follow those that they depend on; returns the changed ones.

        It goes over the decisions in order, again and again, and looks only at those that may change.

        Args:
            changed: those that have changed since the last time; all of them, the first time.
        """
        found: set[int] = set()
        following = {user for index in changed for user in self._users[index]}
        while following:
            waiting, following = sorted(following), set()
            queued = set(waiting)
            while waiting:
                index = heappop(waiting)
                if not self._follow_all(self[index]):
                    continue
                found.add(index)
                for user in self._users[index]:
                    if user <= index:
                        following.add(user)
                    elif user not in queued:
                        queued.add(user)
                        heappush(waiting, user)
        return found

    def _follow_all(self, decision: Decision) -> bool:
        """Lets a decision follow those that it depends on; returns whether it changed."""
        links: tuple[tuple[list[int], Callable[[Decision, Decision], bool]], ...] = (
            (decision.needs, self._follow),
            (decision.beside, self._stay_beside),
        )
        changes = [follow(decision, self[other]) for others, follow in links for other in others]
        return any(changes)

    def _follow(self, decision: Decision, need: Decision) -> bool:
        """Gives a decision the status of one that it needs; returns whether it changed."""
        if decision.status is not Status.CONVERTED:
            return False
        root = need.root
        if need.status is Status.LEFT:
            decision.cause = root
            decision.leave(f"{self._place_of(root, decision)}, which must be edited with it, stays as it is")
            return True
        if decision.safe and not need.safe:
            decision.cause = root
            decision.doubt(f"it must be edited with {self._place_of(root, decision)}: {root.reason}")
            return True
        return False

    def stay_beside(self, index: int, other: int) -> bool:
        """Makes a decision unsafe beside one that is left or unsafe; returns whether it changed."""
        return self._stay_beside(self[index], self[other])

    def _stay_beside(self, decision: Decision, other: Decision) -> bool:
        """Makes a decision unsafe beside one that is left or unsafe; returns whether it changed."""
        if decision.status is not Status.CONVERTED or not decision.safe:
            return False
        if other.status is Status.LEFT or (other.status is Status.CONVERTED and not other.safe):
            root = other.root
            kept = "stays as it is" if root.status is Status.LEFT else f"is unsafe: {root.reason}"
            decision.cause = root
            decision.doubt(f"{self._place_of(root, decision)}, which relies on the same device, {kept}")
            return True
        return False

    def _place_of(self, one: Decision, beside: Decision) -> str:
        """How to name the code of a decision in another's reason: its line, or its text on the same line."""
        tree = self._file.tree
        line = tree.line(one.finding.place.start)
        if line != tree.line(beside.finding.place.start):
            return f"line {line}"
        return f"`{shortened(tree.source(one.finding.place))}`"


def shortened(text: str) -> str:
    """A text on one line of at most 80 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:79]}…"


def is_test(file: SourceFile, finding: Finding) -> bool:
    """Whether a finding is a test of the device to port, which may control a branch."""
    return finding.outcome is Outcome.CONVERT and asks_for_device(file, finding)


def asks_for_device(file: SourceFile, finding: Finding) -> bool:
    """Whether a finding is a test of the device, ported or left."""
    if finding.rule.name == "runtime-call" and isinstance(finding.node, cst.Call):
        name = called_name(finding.node)
        return name == "is_available" or (name == "device_count" and bool(where_true(file, finding.node)))
    return finding.rule.name in ("device-comparison", "is-cuda")


def may_take_host(file: SourceFile, finding: Finding) -> bool:
    """Whether a finding is on a device, or asks for one, in place of which the program may take the host."""
    node = finding.node
    if finding.rule.name == "available-choice" or file.is_guarded(node):
        return True
    return asks_for_device(file, finding) and not ends_program_if_false(file, node)
