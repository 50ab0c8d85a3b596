"""Finds which edits are one decision: a test and what it controls, a device and the tests that read it.

An edit that *needs* another is left or unsafe with it. An edit *beside* another is unsafe if that one is
left or unsafe.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

import libcst as cst

from acclimate_port.conditions.branches import (
    branches,
    branches_of_result,
    code_passed,
    controlled_quietly,
    decided_by_result,
    replaced_by_host,
)
from acclimate_port.conditions.cuda_only import REPORTS, flag_for_others, uses_cuda_package
from acclimate_port.conditions.device_indices import index_may_be_none
from acclimate_port.conditions.device_tests import listed_devices, tests_reached
from acclimate_port.conditions.device_words import used_as_word
from acclimate_port.conditions.placements import Placements, outermost_function, sharing
from acclimate_port.conditions.proofs import whole_value
from acclimate_port.conditions.skips import skipped
from acclimate_port.conditions.statements import decided_by, leaves, refuses, whole_condition
from acclimate_port.dataflow.uses import uses_of
from acclimate_port.decisions.decision import Decisions, Status, asks_for_device, is_test
from acclimate_port.decisions.of_one_purpose import groups_of_one_purpose
from acclimate_port.decisions.symbols import sources
from acclimate_port.rules.base import DEVICE_FORM, Finding, Outcome
from acclimate_port.source.torch_cuda import TELL_OF_DEVICE
from acclimate_port.source.tree import Span, called_name, dotted, string_value, walk
from acclimate_port.source.values import DEVICE_NAME
from acclimate_port.source_file import SourceFile, cuda_name

GIVE_DEVICE = ("device-string", "device-format", "device-object", "integer-device")
"""Rules for devices that something else uses."""
_MOVE = ("cuda-method", *GIVE_DEVICE)
_ARE_HELD = {
    *("runtime-call", "current-device", "available-choice", "device-comparison", "is-cuda"),
    *GIVE_DEVICE,
}
"""Rules for tests, numbers and names of devices, which names hold for a later test."""
_GIVE_VALUES = (
    *(cst.Assign, cst.Arg, cst.Element, cst.Return, cst.IfExp, cst.DictElement, cst.Dict),
    cst.BinaryOperation,  # `"cuda" + ":" + number`
)
_NEGATIVE = (cst.NotEqual, cst.NotIn, cst.LessThan, cst.LessThanEqual)
_ASK_TYPE = ("isinstance", "hasattr", "is_tensor", "type", "issubclass")
_FEW = 12
_DEVICE_TEXT = re.compile(r"""\(?[rf]*['"]+cuda(:|['"])""", re.IGNORECASE)
"""The source of a text of several parts that begins with a device's name."""


_ODD_DEVICE = re.compile(r"\s*cuda\s*:?\s*\d*\s*$(?<!cuda)(?<!cuda:\d)(?<!cuda:\d\d)", re.IGNORECASE)


def link(file: SourceFile, decisions: Decisions) -> None:
    """Tells each decision which others it depends on."""
    _Links(file, decisions).make()


class _Links:
    def __init__(self, file: SourceFile, decisions: Decisions) -> None:
        self._file = file
        self._all = decisions
        self._placements = Placements(file)
        self._names_held: dict[cst.CSTNode, list[int]] = {}

    def make(self) -> None:
        """Makes all links."""
        for index, decision in enumerate(self._all):
            node = decision.finding.node
            if is_test(self._file, decision.finding):
                self._of_test(index, node)
            self._of_places(index)
            if self._compares_text(index):
                self._of_text(node)
            if decision.finding.reason == REPORTS:
                self._of_report(node)
            if self._all.counts(index):
                if decision.finding.rule.name == "default-generators":  # `fork_rng(devices=devices)`
                    held = [*self._held_in(node), *self._all.counted([self._file.span(node)])]
                    decision.beside += [other for other in held if other != index]
                self._of_device(index, node)
                self._of_branch(index, node)
                self._of_condition(index, node)
                decision.beside += self._in_names_around(index, node)
        for members in (*self._by_object(), *self._by_condition()):
            for one, other in _pairs(members):
                self._all[one].needs.append(other)
        for one, others in self._branches_of_types():
            self._all[one].beside += others
        for members in groups_of_one_purpose(self._file, self._all):
            for one, other in _pairs(members):
                self._all[one].beside.append(other)

    # -- a test and the code that it controls ------------------------------------------------------------

    def _of_test(self, index: int, test: cst.CSTNode) -> None:
        """Links a test with the code that it controls."""
        file, decision = self._file, self._all[index]
        inside = branches(file, test)
        for other in self._all.counted(inside, index):
            decision.needs.append(other)
            if self._all[other].finding.rule.name == "pin-memory":
                self._all[other].needs.append(index)
        if any(self._holds_unknown_device(body) or self._keeps_device(body) for body in inside):
            decision.leave("the branch names a CUDA device in a form that no rule converts")
        decorator = file.tree.around(test, cst.Decorator)
        decorated = file.tree.parent(decorator) if decorator is not None else None
        if decorated is not None and self._keeps_device(file.span(decorated)):
            decision.leave("the decorated function names a CUDA device in a form that no rule converts")
        returned, refused = code_passed(file, test)
        decision.needs += self._all.counted(returned)
        decision.needs += [o for o in self._all.counted(refused) if asks_for_device(file, self._finding(o))]
        decision.beside += self._all.counted([*refused, *skipped(file, test)], index)
        decision.beside += self._runtime_calls([*skipped(file, test), *returned])
        decision.beside += self._reached_from([*inside, *returned, *refused])
        decision.needs += [
            other
            for other in self._all.counted(branches_of_result(file, test))
            if self._finding(other).outcome is Outcome.LEFT
            and self._finding(other).rule.name == "runtime-call"
        ]
        for literal in listed_devices(file, test):
            other = self._all.at.get(literal, index)
            if self._finding(other).rule.name == "device-string":
                decision.needs.append(other)
                self._all[other].needs.append(index)
                if not self._all.counts(other):
                    decision.leave("it compares entries of a list that stays")
        values = replaced_by_host(file, test)
        replaced = [file.span(value) for value in values]
        if any(map(self._keeps_device, replaced)):
            decision.doubt("its branch replaces a CUDA device that no rule converts")
        if any(self._is_given(value) for value in values):
            decision.doubt("it replaces a device that a caller gives, which may be CUDA's, with the CPU")
        controlled = controlled_quietly(file, test)
        decided = self._all.counted((*controlled, *replaced), index)
        if not decided and (flag := flag_for_others(file, test)):
            decision.doubt(f"nothing in this file shows what `{flag}`, which says CUDA, decides")
        calls = (call for body in inside for call in file.calls_within(body))
        called = [own for call in calls for own in file.functions_called(call)]
        for own in called:
            if runtime := file.vendor_code.of_runtimes.get(own):
                uses = f"calls `{own.name.value}(…)`, which uses {runtime}"
                decision.doubt(f"its branch {uses}, which only NVIDIA GPUs have")
        chosen = [file.span(own.body) for own in called]
        chosen += [file.span(own.body) for body in inside for own in file.functions_named(body)]
        decision.beside += [*decided, *self._all.counted(chosen, index)]
        if any(map(self._holds_unknown_device, [*controlled, *chosen])):
            decision.leave("code that it decides about names a CUDA device in a form that no rule converts")
        self._of_values(index, controlled, chosen)
        for other in self._all.counted(decided_by_result(file, test), index):
            self._all[other].beside.append(index)

    def _of_values(self, index: int, controlled: list[Span], called: list[Span]) -> None:
        """Links a test with the devices that names bring to the code it controls and to what that calls."""
        decision = self._all[index]
        used = [other for other in self._used_within([*controlled, *called]) if other != index]
        decision.beside += [other for other in used if self._all.counts(other)]
        kept = [*filter(self._gives_device, used)]
        kept += [other for body in called for other in self._all.within(body) if self._gives_device(other)]
        if kept:
            line = self._file.tree.line(self._finding(kept[0]).place.start)
            decision.doubt(
                f"the code that it decides about uses the name of a device in line {line}, which stays"
            )

    def _is_given(self, value: cst.CSTNode) -> bool:
        """Whether a value is a device that a function gets from its callers, by its name."""
        is_device = isinstance(value, cst.Name) and DEVICE_NAME.search(value.value) is not None
        return is_device and any(text.endswith(")") for text in sources(self._file, value))

    def _runtime_calls(self, places: list[Span]) -> list[int]:
        """The indices of the calls of torch.cuda in some ranges, and in the functions that these call."""
        calls = (call for place in places for call in self._file.calls_within(place))
        bodies = [self._file.span(own.body) for call in calls for own in self._file.functions_called(call)]
        found = self._all.counted([*places, *bodies])
        return [index for index in found if self._finding(index).rule.name == "runtime-call"]

    def _reached_from(self, places: list[Span]) -> list[int]:
        """What needs a device in the functions that code in some ranges calls, also through each other."""
        bodies: dict[cst.FunctionDef, Span] = {}
        waiting = [*places]
        while waiting:
            calls = self._file.calls_within(waiting.pop())
            new = (own for call in calls for own in self._file.functions_called(call) if own not in bodies)
            for own in new:
                bodies[own] = self._file.span(own.body)
                waiting.append(bodies[own])
        found = self._all.counted(bodies.values())
        return [index for index in found if not asks_for_device(self._file, self._finding(index))]

    def _of_branch(self, index: int, test: cst.CSTNode) -> None:
        """Links the code that runs only if a test is true with the test, ported or left."""
        finding = self._finding(index)
        if not asks_for_device(self._file, finding) and finding.rule.name != "other-use":
            return
        places = [*branches_of_result(self._file, test), *skipped(self._file, test)]
        if self._file.tree.function(test) is not None:
            places += [place for passed in code_passed(self._file, test) for place in passed]
        for other in self._all.counted(places, index):
            self._all[other].beside.append(index)

    def _of_condition(self, index: int, part: cst.CSTNode) -> None:
        """Links the code below a condition with each part of it: ``if hasattr(torch.cuda, …):``."""
        for below, around in self._file.tree.upwards(part):
            if isinstance(around, (cst.If, cst.IfExp, cst.While)):
                body = [self._file.span(around.body)] if below is around.test else []
                for other in self._all.counted(body, index):
                    self._all[other].beside.append(index)
                return
            operators = (
                [one.operator for one in around.comparisons] if isinstance(around, cst.Comparison) else []
            )
            is_negated = isinstance(around, cst.UnaryOperation) or any(
                isinstance(one, _NEGATIVE) for one in operators
            )
            if is_negated or isinstance(around, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
                return

    def _of_report(self, question: cst.CSTNode) -> None:
        """Leaves the rest of a report that says whether there is CUDA: the device's name, behind a test."""
        file = self._file
        line = file.tree.line(file.span(question).start)
        of_answer = self._all.counted(branches_of_result(file, question))
        for index in self._all.of_rules("runtime-call"):
            node = self._finding(index).node
            is_beside = index in of_answer or (
                file.is_guarded(node) and file.tree.function(node) is file.tree.function(question)
            )
            if is_beside and isinstance(node, cst.Call) and self._only_tells(node):
                self._all[index].leave(f"line {line}, which reports whether there is CUDA, stays as it is")

    def _only_tells(self, call: cst.Call) -> bool:
        """Whether a call tells about a device, in a branch that chooses none."""
        branch = self._file.tree.around(call, cst.If)
        beside = self._all.counted([self._file.span(branch.body)]) if branch is not None else []
        is_choice = any(self._finding(other).rule.name in _MOVE for other in beside)
        return cuda_name(self._file, call.func) in TELL_OF_DEVICE and not is_choice

    def _in_names_around(self, index: int, node: cst.CSTNode) -> Iterator[int]:
        """The decisions on what the names hold that code runs by: ``if devices:``, ``fork_rng(devices)``."""
        for below, around in self._file.tree.upwards(node):
            if isinstance(around, (cst.FunctionDef, cst.ClassDef, cst.Lambda)):
                return
            if isinstance(around, (cst.If, cst.IfExp, cst.While)) and below is around.body:
                yield from (other for other in self._held_in(around.test) if other != index)
            if isinstance(around, cst.With) and below is around.body:
                for item in around.items:
                    if isinstance(item.item, cst.Call) and called_name(item.item) == "fork_rng":
                        held = [*self._held_in(item), *self._all.counted([self._file.span(item)])]
                        yield from (other for other in held if other != index)

    def _held_in(self, code: cst.CSTNode) -> list[int]:
        """The decisions on the values of the names in a condition or an item, also through other names."""
        if code not in self._names_held:
            values: dict[cst.CSTNode, None] = {}
            waiting = [code]
            while waiting and len(values) < _FEW:
                names = [one for one in walk(waiting.pop()) if isinstance(one, cst.Name)]
                held = [one for name in names for one in self._file.bound_values(name) if one is not None]
                waiting += [one for one in held if one not in values]
                values |= dict.fromkeys(held)
            found = self._all.counted(map(self._file.span, values))
            self._names_held[code] = [one for one in found if self._finding(one).rule.name in _ARE_HELD]
        return self._names_held[code]

    def _of_text(self, literal: cst.CSTNode) -> None:
        """Makes the code unsafe that runs for a text ``"cuda"`` alone, which stays."""
        test = self._file.tree.around(literal, cst.Comparison)
        line = self._file.tree.line(self._file.span(literal).start)
        for index in self._all.counted(branches(self._file, test)):
            self._all[index].doubt(f"line {line} compares a text with the name of CUDA, and stays")

    def _of_places(self, index: int) -> None:
        """Links a finding with the edits of places that must be edited too: the uses of an imported name."""
        for place in self._finding(index).needs_applied_at:
            others = (
                other
                for other, candidate in enumerate(self._all)
                if other != index
                and any(e.start <= place.start and place.end <= e.end for e in candidate.finding.edits)
            )
            other = next(others, None)
            if other is None:
                self._all[index].leave("one of its uses stays as it is")
            else:
                self._all[index].needs.append(other)

    # -- a device and who gets it ------------------------------------------------------------------------

    def _of_device(self, index: int, node: cst.CSTNode) -> None:
        """Links a device with the tests of its name that it reaches, and the calls and autocasts that get it.

        A device that a test of the device chooses reaches these tests only where there is one.
        """
        file, decision, rule = self._file, self._all[index], self._finding(index).rule.name
        decision.beside += self._autocasts_inside(node)
        if rule in (*GIVE_DEVICE, "available-choice") and (reason := used_as_word(file, node)):
            decision.doubt(reason)
        if rule in (*GIVE_DEVICE, "available-choice") and (reason := index_may_be_none(file, node)):
            decision.doubt(reason)
        is_device = rule in (*GIVE_DEVICE, "available-choice") and decision.status is Status.CONVERTED
        is_guarded = is_device and file.is_guarded(node)
        for test in tests_reached(file, node) if is_device else ():
            own = self._all.counted([file.span(test)])
            line = file.tree.line(file.span(test).start)
            if uses_cuda_package(file, decided_by(file, test)):
                decision.doubt(f"line {line} decides by its name about a package for NVIDIA GPUs")
            is_elsewhere = outermost_function(file, test) is not outermost_function(file, node)
            if rule == "available-choice":
                decision.beside += own if is_elsewhere else []
                continue
            if not is_guarded or is_elsewhere or self._refuses_others(test):
                decision.beside += [other for other in own if other != index]
            if not own and not is_guarded:
                decision.doubt(
                    f"line {line} tests the name of the device, and on a host it finds another one"
                )
        decision.beside += [other for other in self._calls_that_get(node) if other != index]
        if rule == "current-device":  # its number may be given to a call: `get_device_properties(i)`
            held = (use for use in uses_of(file, node) if use is not node)
            around = (self._all.at.get(outer, index) for use in held for outer in file.tree.ancestors(use))
            decision.beside += [other for other in around if other != index and self._all.counts(other)]

    def _calls_that_get(self, device: cst.CSTNode) -> Iterator[int]:
        """The decisions on calls of torch.cuda that get a device: ``torch.cuda.memory_allocated(device)``."""
        for use in uses_of(self._file, device):
            given = self._file.tree.given_to(use) if use is not device else None
            other = self._all.at.get(given.call) if given is not None else None
            if other is not None and other in self._calls_of_torch:
                yield other

    @cached_property
    def _calls_of_torch(self) -> set[int]:
        return {*self._all.of_rules("runtime-call")}

    @cached_property
    def _devices_used(self) -> list[tuple[int, int]]:
        """Where each device is used through a name, in order, with its index: ``torch.device(target)``."""
        found = []
        for index, decision in enumerate(self._all):
            is_device = decision.finding.rule.name in GIVE_DEVICE and self._all.counts(index)
            if is_device or self._gives_device(index):
                node = decision.finding.node
                uses = [use for use in uses_of(self._file, node) if use is not node]
                found += [
                    (self._file.span(use).start, index) for use in (*uses, *self._reads_of_holder(node))
                ]
        return sorted(found)

    def _reads_of_holder(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """The reads of the names that get a list, a tuple or a dictionary with a value in it."""
        at = self._file.tree.parent(node)
        held = self._file.tree.parent(at) if isinstance(at, (cst.Element, cst.DictElement)) else None
        assign = self._file.tree.parent(held) if held is not None else None
        targets = [one.target for one in assign.targets] if isinstance(assign, cst.Assign) else []
        names = [e.value for one in targets if isinstance(one, cst.Tuple) for e in one.elements]
        held_by = (one for one in (*targets, *names) if isinstance(one, (cst.Name, cst.Attribute)))
        return [read for name in held_by for read in self._file.tree.reads(name)]

    def _used_within(self, places: list[Span]) -> list[int]:
        """The indices of the devices that code in some ranges uses through names."""
        found: dict[int, None] = {}
        for place in places:
            first = bisect_left(self._devices_used, (place.start, 0))
            last = bisect_left(self._devices_used, (place.end, 0))
            found |= dict.fromkeys(index for _, index in self._devices_used[first:last])
        return list(found)

    def _refuses_others(self, test: cst.CSTNode) -> bool:
        """Whether a program ends for other devices than a test lists: ``assert d in ["cpu", "cuda"]``."""
        holder = self._file.tree.parent(whole_condition(self._file, test))
        return isinstance(holder, cst.Assert) or (isinstance(holder, cst.If) and refuses(holder.body))

    def _autocasts_inside(self, node: cst.CSTNode) -> list[int]:
        """The indices of the decisions on autocasts inside the autocast that a node is part of."""
        file = self._file
        for below, around in file.tree.upwards(node):
            if isinstance(around, cst.With) and below is not around.body:
                is_autocast = any("autocast" in file.tree.source(item) for item in around.items)
                inside = self._all.counted([file.span(around.body)]) if is_autocast else []
                return [o for o in inside if "autocast" in file.tree.source(self._finding(o).place)]
            if isinstance(around, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
                break
        return []

    # -- edits of one thing ------------------------------------------------------------------------------

    def _by_condition(self) -> Iterator[list[int]]:
        """The edits of one condition, of a call and its arguments, and of all graphs, which are one."""
        members: dict[int, list[int]] = defaultdict(list)
        compared: set[int] = set()
        for index, decision in enumerate(self._all):
            whole = whole_value(self._file, decision.finding.node, of_choice=False)
            is_condition = isinstance(whole, (cst.BooleanOperation, cst.UnaryOperation, cst.Comparison))
            if is_condition and decision.finding.edits:
                members[id(whole)].append(index)
            elif isinstance(whole, cst.BooleanOperation) and self._compares_text(index):
                compared.add(id(whole))
        for whole_id in compared:  # `"cuda" in value and not torch.cuda.is_available()`
            for index in members.pop(whole_id, ()):
                self._all[index].leave("its condition compares a text with the name of CUDA, which stays")
        yield from members.values()
        for index, decision in enumerate(self._all):
            is_format = decision.finding.rule.name == "device-format"
            if self._all.counts(index) and (is_format or isinstance(decision.finding.node, cst.Call)):
                # `torch.device("cuda", torch.cuda.current_device())`, `f"cuda:{torch.cuda.current_device()}"`
                yield from ([index, inner] for inner in self._all.counted([decision.finding.place], index))
        # A graph of acclimate's cannot be captured by torch.cuda's.
        yield self._all.of_rules("graphs")

    def _compares_text(self, index: int) -> bool:
        """Whether a finding is a comparison with ``"cuda"`` of what may not be a device."""
        finding = self._finding(index)
        is_text = finding.rule.name == "device-comparison" and finding.outcome is Outcome.EXEMPT
        return is_text and "accelerator's own name" not in finding.reason

    def _by_object(self) -> Iterator[list[int]]:
        """The tests and choices of a device that decide about moving or wrapping the same objects."""
        tests, placed = [], []
        for index, decision in enumerate(self._all):
            node, is_choice = decision.finding.node, decision.finding.rule.name == "available-choice"
            if self._all.counts(index) and (is_choice or asks_for_device(self._file, decision.finding)):
                tests.append(index)
                inside = self._placements.within(controlled_quietly(self._file, node))
                placed.append(inside | self._placements.on(_chosen_names(self._file, node)))
        for joined in sharing(placed):
            yield [tests[one] for one in joined]

    def _branches_of_types(self) -> Iterator[tuple[int, list[int]]]:
        """Each move in a branch of a choice by type, with those in the others: ``if is_tensor(x): …``."""
        for statement in self._file.tree.of_type(cst.If):
            if isinstance(self._file.tree.parent(statement), cst.If) or not _tells_types(statement):
                continue
            moves = [
                [index for index in self._all.within(block) if self._finding(index).rule.name in _MOVE]
                for block in self._branches_of(statement)
            ]
            for one, own in enumerate(moves):
                others = [index for other, found in enumerate(moves) if other != one for index in found]
                for index in own:
                    for other in others:
                        if self._gives_device(other):
                            line = self._file.tree.line(self._finding(other).place.start)
                            self._all[index].doubt(
                                f"line {line}, which moves what is of another type, stays as it is"
                            )
                    yield index, others

    def _branches_of(self, statement: cst.If) -> list[Span]:
        """The branches of a statement, and the rest of its block if all of them leave it."""
        blocks: list[cst.BaseSuite] = []
        at: cst.If | cst.Else | None = statement
        while isinstance(at, cst.If):
            blocks.append(at.body)
            at = at.orelse
        blocks += [at.body] if at is not None else []
        found = [self._file.span(block) for block in blocks]
        around = self._file.tree.parent(statement)
        if at is None and isinstance(around, cst.IndentedBlock) and all(map(leaves, blocks)):
            found.append(Span(self._file.span(statement).end, self._file.span(around).end))
        return found

    # -- devices that stay -------------------------------------------------------------------------------

    def _finding(self, index: int) -> Finding:
        return self._all[index].finding

    def _keeps_device(self, body: Span) -> bool:
        """Whether code uses ``"cuda"`` where nothing shows that it is a device, so that the literal stays."""
        return any(map(self._gives_device, self._all.within(body)))

    def _gives_device(self, index: int) -> bool:
        """Whether a finding is ``"cuda"`` as a value that nothing shows to be a device."""
        finding = self._finding(index)
        is_text = finding.rule.name == "device-string" and finding.outcome is Outcome.EXEMPT
        return is_text and isinstance(self._file.tree.parent(finding.node), _GIVE_VALUES)

    @cached_property
    def _device_texts(self) -> list[Span]:
        """Where texts begin with a CUDA device's name and go on, in order: ``f"cuda:{a}{b}"``.

        A plain text that is formatted later is at each place that gets it: ``FORM = "cuda:{!r}"``.
        """
        file, tree = self._file, self._file.tree
        if "cuda" not in tree.text.lower():
            return []
        strings: list[cst.CSTNode] = [
            *tree.of_type(cst.FormattedString),
            *tree.of_type(cst.ConcatenatedString),
        ]
        found = [file.span(node) for node in strings if _DEVICE_TEXT.match(tree.source(node))]
        for text in tree.of_type(cst.SimpleString):
            if _ODD_DEVICE.match(
                string_value(text) or ""
            ):  # `"cuda: 0"`, which only old versions of torch take
                found.append(file.span(text))
            if DEVICE_FORM.match(string_value(text) or ""):
                found += [file.span(use) for use in uses_of(file, text)]
        return sorted(found)

    def _holds_unknown_device(self, body: Span) -> bool:
        """Whether a branch has a string that no rule converts, such as ``f"cuda:{a}{b}"``."""
        starts = (Span(body.start, 0), Span(body.end, 0))
        first, last = (bisect_left(self._device_texts, start) for start in starts)
        texts = [place for place in self._device_texts[first:last] if place.end <= body.end]
        found = [self._finding(index).place for index in self._all.within(body)] if texts else []
        return any(
            not any(
                one.start <= place.start < one.end or place.start <= one.start < place.end for one in found
            )
            for place in texts
        )


def _tells_types(statement: cst.If) -> bool:
    """Whether a condition of a statement, or of an ``elif`` of it, asks for the type of a value."""
    at: cst.If | cst.Else | None = statement
    while isinstance(at, cst.If):
        calls = (node for node in walk(at.test) if isinstance(node, cst.Call))
        if any(called_name(call) in _ASK_TYPE for call in calls):
            return True
        at = at.orelse
    return False


def _pairs(members: list[int]) -> list[tuple[int, int]]:
    """Pairs that join all members with each other, directly if they are few."""
    if len(members) > _FEW:
        return list(zip(members, [*members[1:], members[0]], strict=True))
    return [(one, other) for one in members for other in members if one != other]


def _chosen_names(file: SourceFile, node: cst.CSTNode) -> list[str]:
    """The names that get a device which a test or choice decides: ``device = "cuda" if … else "cpu"``."""
    is_choice = isinstance(node, cst.IfExp)
    for below, around in file.tree.upwards(node):
        if isinstance(around, cst.IfExp):
            is_choice = is_choice or below is around.test
        elif isinstance(around, cst.Assign):
            return [dotted(target.target) for target in around.targets] if is_choice else []
        elif not isinstance(
            around, (cst.Arg, cst.Call, cst.BooleanOperation, cst.UnaryOperation, cst.Comparison)
        ):
            return []
    return []
