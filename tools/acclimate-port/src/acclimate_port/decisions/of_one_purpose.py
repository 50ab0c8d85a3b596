"""Edits of one purpose in a function: a context and its body, a stream and who gets it, terms of a sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator

import libcst as cst

from acclimate_port.conditions.placements import sharing
from acclimate_port.dataflow.uses import uses_of
from acclimate_port.decisions.decision import Decisions
from acclimate_port.source.tree import Span, called_name
from acclimate_port.source_file import SourceFile, cuda_name

_GIVE_DEVICE = ("device-string", "device-format", "device-object", "integer-device", "available-choice")
_USE_DEVICE = ("cuda-method", "current-device", "runtime-call", *_GIVE_DEVICE)
_CONTEXTS = ("device", "device_of", "stream")
_OF_STREAMS = ("Stream", "Event", "stream", "current_stream", "default_stream", "set_stream")


def groups_of_one_purpose(file: SourceFile, decisions: Decisions) -> Iterator[list[int]]:
    """The indices of decisions that are unsafe if one of them is left or unsafe.

    Args:
        file: the file.
        decisions: all decisions.
    """
    purposes = _Purposes(file, decisions)
    yield from purposes.statements()
    yield from purposes.contexts()
    yield from purposes.handlers()
    yield from purposes.figures()
    yield from purposes.streams()


class _Purposes:
    def __init__(self, file: SourceFile, decisions: Decisions) -> None:
        self._file = file
        self._all = decisions

    def _of(self, places: Iterable[cst.CSTNode | Span], *rules: str) -> list[int]:
        """The decisions of some rules in some ranges, on code for one kind of device."""
        spans = [one if isinstance(one, Span) else self._file.span(one) for one in places]
        return [i for i in self._all.counted(spans) if self._all[i].finding.rule.name in rules]

    # -- statements and blocks ---------------------------------------------------------------------------

    def statements(self) -> Iterator[list[int]]:
        """What one statement pins, and what one text tells: ``return x.pin_memory(), y.pin_memory()``."""
        members: dict[int, list[int]] = defaultdict(list)
        for index in self._all.of_rules("pin-memory"):
            members[id(self._file.tree.statement(self._all[index].finding.node))].append(index)
        yield from members.values()
        # `f"{n if device == 'cuda' else 0} of {count}"`
        for text in self._file.tree.of_type(cst.FormattedString):
            yield self._of([text], "device-comparison", "is-cuda", "runtime-call")

    def contexts(self) -> Iterator[list[int]]:
        """A context of a device or a stream, and what its body moves: ``with torch.cuda.device(i):``."""
        for statement in self._file.tree.of_type(cst.With):
            called = [(i, self._all[i].finding.node) for i in self._of(statement.items, "runtime-call")]
            items = [i for i, one in called if isinstance(one, cst.Call) and called_name(one) in _CONTEXTS]
            if items:
                yield [*items, *self._of([statement.body], *_USE_DEVICE)]

    def handlers(self) -> Iterator[list[int]]:
        """The type of an error that is caught, and what the handler does: ``except OutOfMemoryError:``."""
        for handler in self._file.tree.of_type(cst.ExceptHandler):
            caught = self._of([handler.type], "runtime-reference") if handler.type is not None else []
            if caught:
                yield [*caught, *self._of([handler.body], "runtime-call")]

    def streams(self) -> Iterator[list[int]]:
        """A stream, and the contexts and calls that get it: ``with torch.cuda.stream(self.stream):``."""
        for index in self._all.of_rules("runtime-call"):
            node = self._all[index].finding.node
            if isinstance(node, cst.Call) and cuda_name(self._file, node.func) == "Stream":
                getting = [self._getting(use) for use in uses_of(self._file, node) if use is not node]
                yield [index, *dict.fromkeys(one for one in getting if one is not None)]
        of_streams = self._all.of_rules("runtime-call", "runtime-reference")
        yield [index for index in of_streams if self._is_of_streams(index)]

    def _is_of_streams(self, index: int) -> bool:
        """Whether a decision is on a stream or an event, or on their class."""
        node = self._all[index].finding.node
        return cuda_name(self._file, node.func if isinstance(node, cst.Call) else node) in _OF_STREAMS

    # -- numbers -----------------------------------------------------------------------------------------

    def figures(self) -> Iterator[list[int]]:
        """The figures of one sum, and a number of devices with the calls that get it: ``rank % count``."""
        numbers = self._all.of_rules("runtime-call", "current-device")
        reached = {
            index: uses_of(self._file, self._all[index].finding.node, in_functions=False, computed=True)
            for index in numbers
        }
        sums: list[set[Hashable]] = [
            {id(one) for one in reached[i] if isinstance(one, cst.BinaryOperation)} for i in numbers
        ]
        yield from ([numbers[one] for one in own] for own in sharing(sums))
        for index in numbers:
            node = self._all[index].finding.node
            if isinstance(node, cst.Call) and called_name(node) == "device_count":
                getting = [self._getting(one) for one in reached[index]]
                yield [index, *dict.fromkeys(one for one in getting if one is not None and one != index)]

    def _getting(self, number: cst.CSTNode) -> int | None:
        """The decision on a call or a name of a device that gets a number."""
        for around in self._file.tree.ancestors(number):
            index = self._all.at.get(around)
            if index is not None and self._all.counts(index):
                return index
            if isinstance(around, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
                return None
        return None
