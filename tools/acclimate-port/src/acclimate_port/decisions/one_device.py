"""The decisions on where a program computes: those of one file are all ported, or none of them is safe.

A device, a move, a test for CUDA, a backend and a number of devices have to agree, whichever way the value of
one reaches the others: through a parameter, an attribute, an option or a result. One that stays leaves a
program half on CUDA, so the others are only offered.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cached_property

import libcst as cst

from acclimate_port.conditions.branches import controlled_quietly, holders_of_result
from acclimate_port.conditions.device_tests import may_stay
from acclimate_port.conditions.statements import decided_by, leaves
from acclimate_port.decisions.decision import Decisions, Status, asks_for_device
from acclimate_port.decisions.symbols import Kind
from acclimate_port.rules.base import Outcome
from acclimate_port.source.process_groups import COLLECTIVES
from acclimate_port.source.torch_cuda import (
    FIGURES,
    NEVER_RAISE,
    OLD_RESETS,
    RESETS,
    STREAMS,
    TELL_OF_DEVICE,
)
from acclimate_port.source.tree import called_name, dotted, keyword
from acclimate_port.source_file import SourceFile, cuda_name, is_assigned

_CHOOSE = {
    *("device-string", "device-format", "device-object", "integer-device", "available-choice"),
    *("device-comparison", "is-cuda", "current-device", "cuda-method", "tensor-type", "default-tensor-type"),
    *("communication-backend", "device-ids", "data-parallel"),
}
"""Rules for what chooses a device, asks for it or moves to it."""
_DEVICES = {"device-string", "device-format", "device-object", "available-choice"}
"""Rules for devices that a program holds as values."""
_CHOOSING_CALLS = {"is_available", "device_count", "set_device", "device", "device_of"}
"""Functions of torch.cuda that do; the others seed, wait or free memory."""
_FIGURES = FIGURES | RESETS | OLD_RESETS | {"mem_get_info", "memory_stats"}
_STATES = {"get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"}
_STREAMS = {*STREAMS, "Event"}
_EXCHANGES = COLLECTIVES | {"batch_isend_irecv", "P2POp"}
"""Names of torch.distributed that exchange tensors, or describe an exchange."""

_NAMES = ("device-string", "device-format", "device-object")
_NO_TENSORS = {"torch.device", "torch.load", "torch.autocast", "torch.amp.autocast", "torch.Generator"}
"""Functions of torch that get a device by that word and raise nothing where it is missing, or not always."""
_RIGHT_ANYWHERE = ("checkpoint-device", "cuda-import")
"""Rules for edits that change nothing for other code."""
_MAY_NOT_RUN = (cst.BooleanOperation, cst.IfExp, cst.Lambda, cst.BaseComp, cst.Comparison)

_MESSAGE = re.compile(
    r"^(print|log|info|debug|warn|warning|error|critical|exit|echo|write)(_|$)|(_|^)(log|print)$"
)
"""Names of functions that write a message, or end the program with one."""


class OneDevice:
    """The decisions of a file on where a program computes.

    Args:
        file: the file.
        decisions: all its decisions.
    """

    def __init__(self, file: SourceFile, decisions: Decisions) -> None:
        self._file = file
        self._all = decisions
        calls = decisions.of_rules("runtime-call")
        mixed = decisions.of_rules("mixed-precision")
        casts = [index for index in mixed if self._may_be_on(index)]
        self.turned_off = [index for index in mixed if self._is_turned_off(index)]
        """Autocasts and scalers that are off, which turn off those around them on the same device."""
        placing = {*casts}
        casts += [index for index in calls if self._called(index) == "is_bf16_supported"]
        streams = [index for index in calls if self._called(index) in _STREAMS]
        figures = {index for index in calls if self._called(index) in _FIGURES}
        chosen = {index for index in range(len(decisions)) if self._chooses(index)}
        # From the last to the first, so that a test within another is known when the outer one is asked.
        for index in sorted(chosen, reverse=True):
            if self._is_about_others(index, {*chosen, *casts}):
                chosen.discard(index)
                figures |= {index} if figures.intersection(self._decided(index)) else set()
        self._texts = [*self._tests_of_texts(figures, chosen)]
        """Tests around figures, each with one of its function that decides what else is told."""
        for index in chosen:
            finding = decisions[index].finding
            if finding.rule.name == "device-comparison" and may_stay(file, finding.node):
                finding.stands_alone = True
        self.groups = {
            # Where an autocast or a scaler stays on CUDA, another device would compute in other dtypes.
            Kind.PLACE: sorted(chosen | placing),
            Kind.CAST: sorted(casts),
            Kind.STREAM: sorted([*streams, *decisions.of_rules("graphs")]),
            Kind.FIGURE: sorted(figures),
            Kind.STATE: [index for index in calls if self._called(index) in _STATES],
        }
        """The decisions of each kind."""
        self.on_device = [*casts, *self.groups[Kind.STREAM], *decisions.of_rules("sync-batch-norm")]
        self.on_device += [index for index in calls if self._called(index) in TELL_OF_DEVICE]
        self.on_device += self.groups[Kind.FIGURE]
        self._waits = [index for index in calls if self._called(index) == "synchronize"]
        self._frees = [index for index in calls if self._called(index) == "empty_cache"]
        self.on_device += [index for index in self._waits if self._gets_device(index)]
        """What is right only on the device that the rest of the program chooses."""

    @property
    def needing_import(self) -> list[int]:
        """All decisions that do something only if the file is imported on another machine."""
        return [i for i, one in enumerate(self._all) if one.finding.rule.name not in _RIGHT_ANYWHERE]

    @cached_property
    def reports(self) -> list[int]:
        """What is only told of the device: its name, and tests that choose a message or end the program."""
        calls = self._all.of_rules("runtime-call")
        told = [index for index in calls if self._called(index) in TELL_OF_DEVICE]
        return told + [index for index in self.groups[Kind.PLACE] if self._only_tells(index)]

    def _only_tells(self, index: int) -> bool:
        """Whether a decision on a device or a test is a part of a message or a check, or chooses one."""
        node = self._all[index].finding.node
        statement = self._file.tree.statement(node) if node is not None else None
        if statement is None or node is None:
            return False
        decided = decided_by(self._file, node)
        if not isinstance(decided, cst.If):
            return _tells(statement)
        last = decided.orelse
        blocks = [decided.body, *([last.body] if isinstance(last, cst.Else) else [])]
        is_whole = not isinstance(last, cst.If)
        return is_whole and all(_only_tell(block) for block in blocks)

    @cached_property
    def exchanging(self) -> list[int]:
        """The communication backends, and where tensors are exchanged all that chooses a device."""
        calls = (call for call in self._file.tree.of_type(cst.Call) if called_name(call) in _EXCHANGES)
        names = (self._file.tree.qualified(call.func) or "" for call in calls)
        if any(name.startswith(("torch.distributed.", "deepspeed.comm.")) for name in names):
            return self.groups[Kind.PLACE]
        return self._all.of_rules("communication-backend")

    def keep_whole(self) -> None:
        """Makes edits unsafe beside those that stay or are unsafe, until no more are found."""
        while changed := self._beside_what_stays():
            self._all.settle(changed)

    def staying(self, members: list[int]) -> list[int]:
        """Those of some decisions that make no safe edit, so that an edit of another is half of one."""
        return [index for index in members if not self.is_made(index) and not self._stands_alone(index)]

    def is_made(self, index: int) -> bool:
        """Whether a decision makes an edit that is safe."""
        return self._all[index].status is Status.CONVERTED and self._all[index].safe

    def _beside_what_stays(self) -> set[int]:
        """Makes edits unsafe beside those that stay or are unsafe; returns the changed ones."""
        visible = self._all.of_rules("visible-devices")
        counts = [index for index in self.groups[Kind.PLACE] if self._called(index) == "device_count"]
        beside = [(members, members) for members in self.groups.values()]
        beside += [([test], [other]) for test, other in self._texts]
        beside += [(self.on_device, self.groups[Kind.PLACE]), (counts, visible)]
        beside += [(self._annotations(), self.groups[Kind.CAST]), (self._waits, self.groups[Kind.STREAM])]
        beside += [(self.turned_off, self.groups[Kind.CAST]), (self.groups[Kind.CAST], self.turned_off)]
        beside += [([index], self._measured_with(index)) for index in self._waits]
        beside += [([index], self._measured_with(index, RESETS | OLD_RESETS)) for index in self._frees]
        beside += self._under_one_flag
        # What takes the time of the device, or orders its work, fails on others where it is not edited.
        offered = [i for i in self.groups[Kind.STREAM] if self._all[i].status is Status.CONVERTED]
        beside += [(self.groups[Kind.PLACE], offered)]
        changed = {
            index
            for members, others in beside
            for other in self.staying(others)[:1]
            for index in members
            if self._all.stay_beside(index, other)
        }
        return changed | {index for index in range(len(self._all)) if self._is_dead(index)}

    def _is_dead(self, index: int) -> bool:
        """Makes an edit unsafe that another machine never reaches; returns whether it changed."""
        before = self._raising_before(index) if self.is_made(index) else ()
        line = next((line for one, line in before if not self.is_made(one)), 0)
        if line:
            self._all[index].doubt(f"line {line} runs before it, needs CUDA, and stays as it is")
        return line > 0

    def _raising_before(self, index: int) -> list[tuple[int, int]]:
        """The calls, with their lines, that run before code in its function and raise without CUDA.

        A checkpoint that is loaded to the host is right wherever the program goes on.
        """
        finding = self._all[index].finding
        if not self._raising or finding.node is None or finding.rule.name in _RIGHT_ANYWHERE:
            return []
        around = {id(one) for one in self._file.tree.ancestors(finding.node)}
        return [
            (one, line)
            for one, line, function, blocks in self._raising
            if one < index
            and not around.isdisjoint(blocks)
            and function is self._file.tree.function(finding.node)
        ]

    @cached_property
    def _raising(self) -> list[tuple[int, int, cst.CSTNode | None, list[int]]]:
        """The calls that raise without CUDA wherever their block runs: line, function and blocks of each."""
        tree = self._file.tree
        found: list[tuple[int, int, cst.CSTNode | None, list[int]]] = []
        for index in self._all.of_rules("runtime-call", "cuda-method", *_NAMES):
            node = self._call_with(index)
            if isinstance(node, cst.Call) and self._raises(index, node):
                line = tree.line(tree.span(node).start)
                found.append((index, line, tree.function(node), self._blocks(node)))
        return found

    def _call_with(self, index: int) -> cst.CSTNode | None:
        """The code of a decision: for the name of a device, the call that moves or makes something there."""
        node = self._all[index].finding.node
        given = self._file.tree.given_to(node) if self._all[index].finding.rule.name in _NAMES else None
        if given is None:
            return node if isinstance(node, cst.Call) else None
        is_made = given.word == "device" and given.full.startswith("torch.")
        is_used = given.name == "to" or (is_made and given.full not in _NO_TENSORS)
        return given.call if is_used and isinstance(given.call.func, cst.Attribute) else None

    def _raises(self, index: int, call: cst.Call) -> bool:
        """Whether a call raises without CUDA, always when its statement runs, and nothing catches that."""
        is_quiet = self._called(index) in NEVER_RAISE
        if is_quiet or self._file.is_guarded(call) or self._all[index].hidden:
            return False
        for around in self._file.tree.ancestors(call):
            if isinstance(around, _MAY_NOT_RUN):
                return False
            if isinstance(around, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
                break
        return self._file.tree.around(call, cst.Try) is None

    def _blocks(self, node: cst.CSTNode) -> list[int]:
        """The blocks whose later statements run after a node: its own, and those around ``with``."""
        found: list[int] = []
        for below, around in self._file.tree.upwards(node):
            is_block = isinstance(around, (cst.IndentedBlock, cst.SimpleStatementSuite, cst.Module))
            if found and not is_block and not isinstance(around, cst.With):
                break
            if is_block:
                found.append(id(around))
            elif isinstance(around, cst.With) and below is around.body:
                continue
        return found

    def _gets_device(self, index: int) -> bool:
        """Whether a call gets a device, other than by a number: ``torch.cuda.synchronize(self.device)``."""
        node = self._all[index].finding.node
        given = node.args[0].value if isinstance(node, cst.Call) and node.args else None
        return given is not None and not isinstance(given, cst.Integer)

    def _measured_with(self, index: int, names: Collection[str] = _FIGURES) -> list[int]:
        """The figures of memory beside a call that its function, or one that it calls, reads or resets.

        Without CUDA a wait raised: if it alone is edited, the function goes on with figures of 0.

        Args:
            index: the decision on the call.
            names: the functions of torch.cuda that count.
        """
        function = self._file.tree.function(self._all[index].finding.node)
        figures = [one for one in self.groups[Kind.FIGURE] if self._called(one) in names]
        if function is None or not figures:
            return []
        called = {id(one) for call in self._calls_in.get(id(function), ()) for one in self._defined(call)}
        readers = {one: self._file.tree.function(self._all[one].finding.node) for one in figures}
        return [one for one, reader in readers.items() if reader is function or id(reader) in called]

    @cached_property
    def _calls_in(self) -> dict[int, list[cst.Call]]:
        """The calls in each function, by its id."""
        found: dict[int, list[cst.Call]] = defaultdict(list)
        for call in self._file.tree.of_type(cst.Call):
            found[id(self._file.tree.function(call))].append(call)
        return found

    def _defined(self, call: cst.Call) -> Iterator[cst.CSTNode]:
        """The functions of the file that a call may run, by their name."""
        name = called_name(call)
        yield from (one for one in self._file.tree.of_type(cst.FunctionDef) if one.name.value == name)

    @cached_property
    def _under_one_flag(self) -> list[tuple[list[int], list[int]]]:
        """The profiler ranges under each flag, with what stays under the same one and needs CUDA.

        ``if profile: torch.cuda.cudart().cudaProfilerStart()``, and elsewhere ``if profile: range_push(…)``.
        """
        ranges: dict[str, list[int]] = defaultdict(list)
        others: dict[str, list[int]] = defaultdict(list)
        for index in self._all.of_rules("nvtx", "runtime-call", "other-use"):
            finding = self._all[index].finding
            if finding.rule.name == "nvtx" or finding.outcome is Outcome.LEFT:
                held = ranges if finding.rule.name == "nvtx" else others
                for flag in self._flags_around(finding.node):
                    held[flag].append(index)
        return [(members, others[flag]) for flag, members in ranges.items() if flag in others]

    def _flags_around(self, node: cst.CSTNode | None) -> set[str]:
        """The names and attributes of which all must be true where code runs."""
        found: set[str] = set()
        for below, around in self._file.tree.upwards(node) if node is not None else ():
            waiting = [around.test] if isinstance(around, cst.If) and below is around.body else []
            while waiting:
                test = waiting.pop()
                if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
                    waiting += [test.left, test.right]
                elif isinstance(test, (cst.Name, cst.Attribute)):
                    found.add(dotted(test))
        return found - {""}

    def _annotations(self) -> list[int]:
        """The classes of autocasts and scalers in annotations: ``scaler: GradScaler | None``."""
        references = ((i, self._all[i].finding.node) for i in self._all.of_rules("runtime-reference"))
        return [i for i, node in references if (cuda_name(self._file, node) or "").startswith("amp.")]

    def _chooses(self, index: int) -> bool:
        rule = self._all[index].finding.rule.name
        is_one = rule in _CHOOSE or (rule == "runtime-call" and self._called(index) in _CHOOSING_CALLS)
        return (is_one or self._needs_cuda(index)) and self._all.counts(index)

    def _needs_cuda(self, index: int) -> bool:
        """Whether a call stays that raises without CUDA: the program ends there, whatever its device is."""
        finding, name = self._all[index].finding, self._called(index)
        if finding.rule.name != "runtime-call" or finding.outcome is not Outcome.LEFT:
            return False
        is_told = name in NEVER_RAISE | TELL_OF_DEVICE | _FIGURES | _STATES
        is_caught = self._file.tree.around(finding.node, cst.Try) is not None
        return not (is_told or is_caught or self._file.is_guarded(finding.node))

    def _called(self, index: int) -> str:
        """The function of torch.cuda that a decision is on; ``""`` if it is on no call."""
        node = self._all[index].finding.node
        return (cuda_name(self._file, node.func) or "") if isinstance(node, cst.Call) else ""

    def _is_about_others(self, index: int, chosen: set[int]) -> bool:
        """Whether a test decides about code for a device that chooses none: it seeds, or frees memory.

        ``if not x.is_cuda: x = x.cuda()`` decides nothing for a tensor that is on a device already.
        """
        finding = self._all[index].finding
        if not asks_for_device(self._file, finding):
            return False
        if decided := self._decided(index):
            if self._leaves_before_others(finding.node):
                return False
            is_kept = any(map(self._is_known_elsewhere, holders_of_result(self._file, finding.node)))
            return not is_kept and chosen.isdisjoint(decided)
        statement = decided_by(self._file, finding.node)
        moves = self._all.counted([self._file.span(statement.body)]) if isinstance(statement, cst.If) else []
        rules = {self._all[move].finding.rule.name for move in moves}
        return finding.rule.name == "is-cuda" and rules == {"cuda-method"}

    def _leaves_before_others(self, question: cst.CSTNode) -> bool:
        """Whether a test decides, by an early ``return``, about code that is for any device."""
        statement = decided_by(self._file, question)
        block = self._file.tree.parent(statement) if isinstance(statement, cst.If) else None
        if not isinstance(statement, cst.If) or block is None or not leaves(statement.body):
            return False
        lines = list(block.body) if isinstance(block, (cst.Module, cst.IndentedBlock)) else []  # no `elif`
        later = lines[lines.index(statement) + 1 :] if statement in lines else []
        return any(not self._all.counted([self._file.span(one)]) for one in later)

    def _tests_of_texts(self, figures: set[int], chosen: set[int]) -> Iterator[tuple[int, int]]:
        """The tests around figures, with those of the same function that decide about no code for a device.

        ``if torch.cuda.is_available(): text.append("memory: {memory}")`` makes the text for a figure below.
        """
        asking = [i for i in (*figures, *chosen) if asks_for_device(self._file, self._all[i].finding)]
        for test in figures.intersection(asking):
            function = self._file.tree.function(self._all[test].finding.node)
            for other in chosen.intersection(asking):
                node = self._all[other].finding.node
                if self._file.tree.function(node) is function and not self._decided(other):
                    yield test, other

    def _decided(self, test: int) -> list[int]:
        """The decisions in the code that a test decides about."""
        return self._all.counted(controlled_quietly(self._file, self._all[test].finding.node), test)

    def _is_known_elsewhere(self, holder: cst.CSTNode) -> bool:
        """Whether other files may read what holds an answer: an attribute, an argument, a global."""
        is_function = isinstance(self._file.tree.parent(holder), cst.FunctionDef)
        is_local = isinstance(holder, cst.Name) and self._file.tree.function(holder) is not None
        is_torchs = dotted(holder).startswith(f"{self._file.torch}.")  # `torch.backends.cudnn.enabled = True`
        return is_function or not (is_local or is_torchs)

    def _may_be_on(self, index: int) -> bool:
        """Whether a program may turn an autocast or a scaler on there: ``context = autocast``."""
        node = self._all[index].finding.node
        is_named = is_assigned(self._file, node) or self._file.tree.around(node, cst.Annotation) is not None
        return not (is_named or self._is_turned_off(index))

    def _is_turned_off(self, index: int) -> bool:
        """Whether an autocast or a scaler is off: ``autocast(enabled=False)``."""
        node = self._all[index].finding.node
        given = keyword(node, "enabled") if isinstance(node, cst.Call) else None
        return given is not None and dotted(given.value) == "False"

    def _stands_alone(self, index: int) -> bool:
        """Whether the others can be ported without a decision, or the user says that it stays.

        A check of what the user asked for may stay, but not beside a device that stays with it.
        """
        own, root = self._all[index], self._all[index].root
        is_kept_device = root is not own and own.finding.rule.name in _DEVICES
        is_check = is_kept_device and asks_for_device(self._file, root.finding)
        keeps = is_check and not may_stay(self._file, root.finding.node)
        return own.hidden or (root.finding.stands_alone and not keeps)


def _only_tell(block: cst.BaseSuite) -> bool:
    """Whether the statements of a block only write messages, or end the program."""
    for line in block.body if isinstance(block, cst.IndentedBlock) else [block]:
        if isinstance(line, (cst.SimpleStatementLine, cst.SimpleStatementSuite)):
            if not all(isinstance(one, (cst.Raise, cst.Pass)) or _tells(one) for one in line.body):
                return False
        elif not (isinstance(line, (cst.For, cst.With)) and _only_tell(line.body)):
            return False
    return True


def _tells(statement: cst.CSTNode) -> bool:
    """Whether a statement writes a message, or is a check."""
    call = statement.value if isinstance(statement, cst.Expr) else None
    is_message = isinstance(call, cst.Call) and _MESSAGE.search(called_name(call) or "") is not None
    return is_message or isinstance(statement, cst.Assert)
