"""Edits of one purpose in a function: a backend and its device, a context and its body, terms of a sum."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator

import libcst as cst

from acclimate_port.conditions.placements import outermost_function, sharing
from acclimate_port.dataflow.uses import class_around, uses_of
from acclimate_port.decisions.decision import Decisions, asks_for_device
from acclimate_port.source.tree import Span, called_name, dotted, keyword, last_name, string_value, walk
from acclimate_port.source_file import SourceFile, cuda_name

_GIVE_DEVICE = ("device-string", "device-format", "device-object", "integer-device", "available-choice")
_USE_DEVICE = ("cuda-method", "current-device", "runtime-call", *_GIVE_DEVICE)
_CONTEXTS = ("device", "device_of", "stream")
_OF_STREAMS = ("Stream", "Event", "stream", "current_stream", "default_stream", "set_stream")
_WRAPPER = re.compile(r"DataParallel|(^|_)F?S?DD?P$|FullyShardedDataParallel|fully_shard$")


def groups_of_one_purpose(file: SourceFile, decisions: Decisions) -> Iterator[list[int]]:
    """The indices of decisions that are unsafe if one of them is left or unsafe.

    Args:
        file: the file.
        decisions: all decisions.
    """
    purposes = _Purposes(file, decisions)
    yield from purposes.backends_and_devices()
    yield from purposes.statements()
    yield from purposes.contexts()
    yield from purposes.handlers()
    yield from purposes.wrapped()
    yield from purposes.branches()
    yield from purposes.figures()
    yield from purposes.streams()
    yield from purposes.compared()
    yield from purposes.compared_and_moved()
    yield from purposes.moved_and_asked()
    yield from purposes.strategies()
    yield from purposes.scalers()


def ranks_and_backends(file: SourceFile, decisions: Decisions) -> Iterator[tuple[int, list[int]]]:
    """What belongs to the ranks of a process group, with the decisions that make it unsafe."""
    return _Purposes(file, decisions).ranks()


def amp_flags(file: SourceFile, node: cst.CSTNode) -> list[str]:
    """The attribute that turns an autocast or a scaler on: ``GradScaler(enabled=self.mixed_precision)``."""
    call = node if isinstance(node, cst.Call) else None
    given = keyword(call, "enabled") if call is not None else None
    return [last_name(given.value)] if given is not None and isinstance(given.value, cst.Attribute) else []


class _Purposes:
    def __init__(self, file: SourceFile, decisions: Decisions) -> None:
        self._file = file
        self._all = decisions

    def _of(self, places: Iterable[cst.CSTNode | Span], *rules: str) -> list[int]:
        """The decisions of some rules in some ranges, on code for one kind of device."""
        spans = [one if isinstance(one, Span) else self._file.span(one) for one in places]
        return [i for i in self._all.counted(spans) if self._all[i].finding.rule.name in rules]

    # -- a process group and its devices -----------------------------------------------------------------

    def backends_and_devices(self) -> Iterator[list[int]]:
        """The backend of the process group that a function makes or tests, and the devices it chooses."""
        backends = self._all.of_rules("communication-backend")
        around = {id(own): own for i in backends if (own := self._function_of(i)) is not None}
        members: dict[int, list[int]] = defaultdict(list)
        for index in backends:
            members[id(self._function_of(index))].append(index)
        for key, function in around.items():
            for index in self._all.counted([self._file.span(function)]):
                if self._chooses_device(index) and self._function_of(index) is function:
                    members[key].append(index)
            yield members[key]

    def ranks(self) -> Iterator[tuple[int, list[int]]]:
        """A file's backends of process groups, its wrappers, and what gives ranks a device or counts them."""
        backends, wrappers = self._all.of_rules("communication-backend"), self._all.of_rules("device-ids")
        yield from ((index, wrappers) for index in backends)
        yield from ((index, backends) for index in wrappers)
        for index in self._all.of_rules("runtime-call") if backends else ():
            node = self._all[index].finding.node
            name = cuda_name(self._file, node.func) if isinstance(node, cst.Call) else ""
            if name in ("set_device", "device_count"):
                yield index, backends

    def _function_of(self, index: int) -> cst.CSTNode | None:
        """The function that a decision is in, also as a default of a parameter."""
        node = self._all[index].finding.node
        return outermost_function(self._file, node) or self._file.tree.around(node, cst.FunctionDef)

    def _chooses_device(self, index: int) -> bool:
        finding = self._all[index].finding
        if finding.rule.name == "runtime-call" and isinstance(finding.node, cst.Call):
            return cuda_name(self._file, finding.node.func) in ("is_available", "set_device", "device_count")
        return finding.rule.name in _GIVE_DEVICE or asks_for_device(self._file, finding)

    # -- statements and blocks ---------------------------------------------------------------------------

    def statements(self) -> Iterator[list[int]]:
        """What one statement moves or pins: ``return x.pin_memory(), y.pin_memory()``."""
        for rule in ("cuda-method", "pin-memory"):
            members: dict[int, list[int]] = defaultdict(list)
            for index in self._all.of_rules(rule):
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

    def wrapped(self) -> Iterator[list[int]]:
        """The parts of a call that wraps a model: ``DataParallel(model.cuda(), device_ids=…)``."""
        for call in self._file.tree.of_type(cst.Call):
            if call.args and _WRAPPER.search(called_name(call) or ""):
                yield self._of([call], *_USE_DEVICE, "device-ids", "data-parallel")
        for index in self._all.of_rules("device-ids"):  # the device that goes on with the model of a rank
            function = self._function_of(index)
            if function is not None:
                named = self._of([function], "device-string", "device-format", "runtime-call")
                yield [index, *(one for one in named if self._names_or_counts(one))]

    def _names_or_counts(self, index: int) -> bool:
        """Whether a decision is on the name of a device, or on the number of devices."""
        node = self._all[index].finding.node
        return not isinstance(node, cst.Call) or called_name(node) in ("device_count", "set_device", "format")

    def branches(self) -> Iterator[list[int]]:
        """What the branches of a statement make or move in place of each other: ``GradScaler(…)``."""
        for statement in self._file.tree.of_type(cst.If):
            if statement.orelse is None or isinstance(self._file.tree.parent(statement), cst.If):
                continue
            alike: dict[str, list[int]] = defaultdict(list)
            for index in self._of([statement], "mixed-precision", "cuda-method"):
                node = self._all[index].finding.node
                if isinstance(node, cst.Call):
                    alike[self._made_or_moved(node)].append(index)
            yield from (own for name, own in alike.items() if name)

    def _made_or_moved(self, call: cst.Call) -> str:
        """The class of the object that a call makes, or the name of the one that it moves."""
        if called_name(call) == "GradScaler":
            return "GradScaler"
        if called_name(call) != "cuda" or not isinstance(call.func, cst.Attribute):
            return ""
        return dotted(call.func.value) if isinstance(call.func.value, (cst.Name, cst.Attribute)) else ""

    def compared_and_moved(self) -> Iterator[list[int]]:
        """A test of a tensor's device, and the move that follows: ``if x.device != d: x = x.to(d)``."""
        for statement in self._file.tree.of_type(cst.If):
            test = statement.test
            if not isinstance(test, cst.Comparison):
                continue
            sides = (test.left, *(one.comparator for one in test.comparisons))
            if any(isinstance(side, cst.Attribute) and side.attr.value == "device" for side in sides):
                tested = self._of([test], *_GIVE_DEVICE, "device-comparison")
                if tested:
                    yield [*tested, *self._of([statement.body], "cuda-method", *_GIVE_DEVICE)]

    def scalers(self) -> Iterator[list[int]]:
        """A scaler, and the autocasts of its class or function, or of the flag that turns both on."""
        by_home: dict[Hashable, list[int]] = defaultdict(list)
        for index in self._all.of_rules("mixed-precision"):
            node = self._all[index].finding.node
            home = class_around(self._file, node) or outermost_function(self._file, node)
            for key in (id(home), *amp_flags(self._file, node)):
                by_home[key].append(index)
        for members in by_home.values():
            made = [i for i in members if "GradScaler" in self._file.tree.source(self._all[i].finding.place)]
            if made and len(made) < len(members):
                yield members

    def strategies(self) -> Iterator[list[int]]:
        """A model whose library has its own words for devices, and the devices that the same class names."""
        for index in self._all.of_rules("device-string"):
            node = self._all[index].finding.node
            if isinstance(node, cst.SimpleString) and " " in (string_value(node) or ""):
                home = class_around(self._file, node) or self._file.tree.module
                yield [index, *self._of([home], *_GIVE_DEVICE, "cuda-method")]

    def moved_and_asked(self) -> Iterator[list[int]]:
        """A move, and a test of the same object's device: ``x = x.cuda()``, ``assert x.is_cuda``."""
        asked: dict[Hashable, list[int]] = defaultdict(list)
        for index in self._all.of_rules("device-comparison", "is-cuda"):
            node = self._all[index].finding.node
            devices = [one for one in walk(node) if isinstance(one, cst.Attribute)]
            held = {dotted(one.value) for one in devices if one.attr.value in ("device", "is_cuda")}
            for text in held - {""}:
                asked[id(outermost_function(self._file, node)), text].append(index)
        for index in self._all.of_rules("cuda-method", *_GIVE_DEVICE) if asked else ():
            node = self._all[index].finding.node
            function = outermost_function(self._file, node)
            for text in self._moved(node):
                later = asked.get((id(function), text), ())
                yield [index, *(o for o in later if self._is_kept(o) or self._start(o) > self._start(index))]

    def _start(self, index: int) -> int:
        return self._all[index].finding.place.start

    def _is_kept(self, index: int) -> bool:
        """Whether a name gets the answer of a test: ``copy_back = not x.is_cuda``."""
        return isinstance(self._file.tree.statement(self._all[index].finding.node), cst.Assign)

    def _moved(self, node: cst.CSTNode) -> set[str]:
        """The texts of the object that a call moves, and of what gets the result, without ``.data``."""
        given = self._file.tree.given_to(node)
        call = node if isinstance(node, cst.Call) and called_name(node) == "cuda" else given and given.call
        if not isinstance(call, cst.Call) or called_name(call) not in ("cuda", "to"):
            return set()
        at = self._file.tree.parent(call)
        targets = [one.target for one in at.targets] if isinstance(at, cst.Assign) else []
        named = [*targets, *([call.func.value] if isinstance(call.func, cst.Attribute) else [])]
        return {dotted(one).removesuffix(".data") for one in named} - {""}

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

    def compared(self) -> Iterator[list[int]]:
        """Devices that one test compares with each other: ``"cuda:" + str(k) != self.last_device``."""
        members: dict[int, list[int]] = defaultdict(list)
        for index in self._all.of_rules(*_GIVE_DEVICE):
            for use in uses_of(self._file, self._all[index].finding.node):
                at = self._file.tree.parent(use)
                if isinstance(at, (cst.Comparison, cst.ComparisonTarget)):
                    test = at if isinstance(at, cst.Comparison) else self._file.tree.parent(at)
                    holder = self._file.tree.statement(at)
                    body = [holder.body] if isinstance(holder, cst.If) and holder.test is test else []
                    members[id(test)] += [index, *self._of(body, *_GIVE_DEVICE)]
        yield from (list(dict.fromkeys(own)) for own in members.values())

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
