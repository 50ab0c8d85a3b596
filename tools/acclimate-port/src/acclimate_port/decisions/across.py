"""Decisions that cross the border of a file: what one file's edits rely on, and what stays in it.

A flag that one file sets and another reads, a device that a function of another file compares, a guard of a
call whose body needs CUDA: each is one decision, as inside one file. An edit *relies* on a symbol if it is
right only where no other code that has to do with this symbol stays as it is.

What chooses a device also relies on what else the files that hold or import it do there: see one_device.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property

import libcst as cst

from acclimate_port.conditions.accepted_words import accepted_words, classes_with_words
from acclimate_port.conditions.branches import code_passed, controlled_quietly, holders_of_result, where_true
from acclimate_port.conditions.device_tests import tests_of_devices
from acclimate_port.conditions.device_words import file_names
from acclimate_port.conditions.given_away import given_to_those_who_mean_cuda
from acclimate_port.conditions.hidden_devices import hiding, replacing
from acclimate_port.conditions.host_answers import ends_program_if_false
from acclimate_port.conditions.statements import later_tests, leaves
from acclimate_port.dataflow.caches import is_cache
from acclimate_port.dataflow.own_devices import (
    choosing,
    chosen_by_import,
    kernels_registered,
    operator_calls,
    words_expected,
)
from acclimate_port.dataflow.receivers import LIGHTNING, given_to_others, holders_given, library_named
from acclimate_port.dataflow.uses import LOOK_UP, fields_of, key_looked_up, uses_of
from acclimate_port.decisions.decision import Decision, Decisions, Status, asks_for_device, may_take_host
from acclimate_port.decisions.guarded_tests import guarded, guards, within
from acclimate_port.decisions.links import GIVE_DEVICE
from acclimate_port.decisions.one_device import OneDevice
from acclimate_port.decisions.symbols import (
    CONSTRUCTORS,
    MODULE,
    Facts,
    Kind,
    Symbol,
    holder_text,
    is_settings,
    known,
    of_argument,
    of_function,
    of_parameter,
    options,
    reference,
    sources,
)
from acclimate_port.source.device_choosers import BY_CALL
from acclimate_port.source.survey import takes_gloo
from acclimate_port.source.torch_cuda import NEVER_RAISE
from acclimate_port.source.tree import Span, called_name, child_nodes, dotted, last_name, string_value, walk
from acclimate_port.source.values import DEVICE_NAME
from acclimate_port.source.vendors import kinds_in
from acclimate_port.source_file import SourceFile, cuda_name

_DEVICES = (*GIVE_DEVICE, "available-choice", "communication-backend")
_NEED_CUDA = (
    "runtime-call",
    "cuda-method",
    "native-extension",
    "other-use",
    "device-string",
    "device-format",
)
_GIVEN = (Kind.DEVICE, Kind.TENSOR, Kind.FLAG)
"""What calls give to functions."""
_DEVICE_WORDS = ("device", "device_type")
_PROFILER = Symbol(Kind.FLAG, "any:ProfilerActivity")
_BACKEND = Symbol(Kind.BACKEND, "any:backend")
_SPLIT = Symbol(Kind.SPLIT, "any:device_ids")
_LOAD = Symbol(Kind.LOAD, f"here:{MODULE}")
_IMPORT = Symbol(Kind.IMPORT, f"here:{MODULE}")
_REPORT = Symbol(Kind.REPORT, "here:")
_REPORT_STAYS = Symbol(Kind.REPORT, "here:(stays)")
_PROFILED = ("device_time", "device_time_total", "self_device_time_total", "cuda_time", "cuda_time_total")
"""What a profiler knows only if it records the activities of the device."""
_EMPTY_WITHOUT_CUDA = {"memory_stats"}
"""Functions that raise nothing without CUDA, but give a dictionary that lacks what is read of it."""
_TRAINERS = (*LIGHTNING, *BY_CALL)
"""Libraries that run a program's own code on the device that they choose."""
_TOOL = "nvidia-smi"
_RAISE_WITHOUT_COMMAND = ("subprocess.check_output", "subprocess.check_call")
_ACCESSES = (cst.Name, cst.Attribute, cst.Call, cst.Subscript)
_MAY_NOT_RUN = (
    *(cst.If, cst.IfExp, cst.Try, cst.BooleanOperation, cst.For, cst.While),
    *(cst.FunctionDef, cst.ClassDef, cst.Lambda),
)


class Across:
    """What the decisions of a file have in common with other files.

    Args:
        file: the file.
        decisions: its decisions.
    """

    def __init__(self, file: SourceFile, decisions: Decisions) -> None:
        self._file = file
        self._all = decisions
        self._relying: dict[Symbol, list[int]] = defaultdict(list)
        self._readers: list[tuple[Symbol, list[Span]]] = [*self._read_flags()]
        self._implied: dict[tuple[Symbol, Symbol], None] = {}
        self._device = OneDevice(file, decisions)
        for kind, members in self._device.groups.items():
            for index in members:
                for text in self._homes(index):
                    self._relying[Symbol(kind, text)].append(index)
        for index in self._device.on_device:
            for text in self._homes(index):
                self._relying[Symbol(Kind.PLACE, f"{text}(needs)")].append(index)
        # acclimate's own backend for such devices stages through the host. gloo and torch's choice do not.
        is_of_torch = file.target.name == "torch"
        is_staged_by_none = file.survey.groups_on_host if is_of_torch else file.survey.names_gloo
        # In a file that has no other group, a program ends there also if it takes no host today.
        is_of_gloo = takes_gloo(file.tree.bytes)
        self._relying[_IMPORT] += self._device.needing_import
        for index in self._device.groups[Kind.PLACE]:
            self._relying[_LOAD].append(index)
            for text in self._homes(index):
                self._relying[Symbol(Kind.BOUND, text)].append(index)
                self._relying[Symbol(Kind.UNKNOWN, text)].append(index)
            if home := self._outermost(decisions[index].finding.node):
                self._relying[Symbol(Kind.USE, f"here:{home}")].append(index)
            takes_host = may_take_host(file, decisions[index].finding)
            for text in self._homes(index):
                if takes_host:
                    self._relying[Symbol(Kind.WIDE, text)].append(index)
                    self._relying[Symbol(Kind.KERNEL, text)].append(index)
                if is_of_gloo or (takes_host and is_staged_by_none):
                    self._relying[Symbol(Kind.GROUP, text)].append(index)
        for index in self._device.turned_off:
            for text in self._homes(index):
                self._relying[Symbol(Kind.CAST, f"{text}(needs)")].append(index)
        for index, code in self._after_calls():
            self._relying[Symbol(Kind.BUILD, code)].append(index)
        self._relying[_SPLIT] += [*decisions.of_rules("data-parallel")]
        self._relying[_BACKEND] += self._device.exchanging
        self._relying[_REPORT] += self._device.reports
        self._guards = [*guards(file, decisions)]
        self._guarded = [*guarded(file, decisions)]
        for index, symbol in (*self._guards, *self._guarded):
            self._relying[symbol].append(index)
        for index, decision in enumerate(decisions):
            if decisions.counts(index):
                for symbol in dict.fromkeys(self._symbols(index, decision)):
                    if symbol.text:
                        self._relying[symbol].append(index)

    def doubt(self, elsewhere: Mapping[Symbol, str]) -> None:
        """Makes edits unsafe that rely on what stays in other files.

        Args:
            elsewhere: the reason for each such symbol.
        """
        for symbol, reason in elsewhere.items():
            for index in self._relying.get(symbol, ()):
                if self._all[index].status is Status.CONVERTED:
                    self._all[index].doubt(reason)
                    self._all[index].finding.stands_alone |= symbol.kind in (Kind.CODE, Kind.USE)

    def facts(self) -> Facts:
        """What other files must know, after all decisions are made; without the file's outline."""
        stays: dict[Symbol, int] = {}

        def add(symbol: Symbol, place: Span) -> None:
            if symbol.text:
                stays.setdefault(symbol, self._file.tree.line(place.start))

        relies = []
        for symbol, members in self._relying.items():
            if any(_is_made(self._all[index]) for index in members):
                relies.append(symbol)
            left = (self._all[index] for index in members if self._stays(index))
            for decision in left if symbol.kind in (Kind.FLAG, Kind.NUMBER) else ():
                add(symbol, decision.finding.place)
        for symbol, places in self._readers:
            for index in self._all.counted(places):
                if self._stays(index):
                    add(symbol, self._all[index].finding.place)
            self._implied |= {(code, symbol): None for code in self._code_within(places)}
        staying = (
            *(
                self._tests_that_stay(),
                self._devices_of_calls(),
                self._keys(),
                self._given_to_others(),
                self._accepted(),
            ),
            *(self._names_of_files(), self._flags_before_others()),
            *(self._code_that_stays(), self._after_checks(), self._answers_given(), self._builds()),
        )
        for symbol, place in (pair for pairs in staying for pair in pairs):
            add(symbol, place)
        for index in filter(self._stays, self._all.of_rules("cuda-method")):
            node = self._all[index].finding.node
            if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
                for text in sources(self._file, node.func.value):
                    add(Symbol(Kind.TENSOR, text), self._all[index].finding.place)
        for index in filter(self._stays, self._all.of_rules("profiler-activities")):
            add(_PROFILER, self._all[index].finding.place)
        # Only CUDA's tensors pass such a check, also where the program may keep it: it guards a kernel.
        for index in filter(self._stays, self._all.of_rules("is-cuda")):
            if ends_program_if_false(self._file, self._all[index].finding.node):
                for text in self._homes(index):
                    add(Symbol(Kind.BOUND, text), self._all[index].finding.place)
        for kind, members in self._device.groups.items():
            for index in self._device.staying(members):
                for text in self._homes(index):
                    add(Symbol(kind, text), self._all[index].root.finding.place)
        # A region that stays does not turn off a ported autocast around it, of any program that runs it.
        for index in self._device.staying(self._device.turned_off):
            for text in self._homes(index):
                add(Symbol(Kind.CAST, text), self._all[index].root.finding.place)
        elsewhere: list[cst.CSTNode] = [*chosen_by_import(self._file)]
        elsewhere += [call for call, name in choosing(self._file) if name.partition(".")[0] in _TRAINERS]
        bound = (*operator_calls(self._file), *words_expected(self._file))
        for setting in (*hiding(self._file), *replacing(self._file), *elsewhere, *bound):
            for text in self._homes_of(setting):
                add(Symbol(Kind.PLACE, text), self._file.span(setting))
        for question, text in self._questions_that_stay():
            add(Symbol(Kind.ANSWER, text), question)
        registered = kernels_registered(self._file)
        called = self._file.attributes.get("ops", ()) if registered else ()
        for node in (*registered, *called):
            for text in (*self._homes_of(node), *self._decorated(node)):
                add(Symbol(Kind.PLACE, text), self._file.span(registered[0]))
        for index in self._device.staying(self._device.exchanging)[:1]:
            add(_BACKEND, self._all[index].root.finding.place)
        for index in self._device.staying(self._device.reports)[:1]:
            add(_REPORT_STAYS, self._all[index].root.finding.place)
        for index, symbol in self._guarded:
            if self._stays(index):
                add(within(symbol), self._all[index].finding.place)
        for index, symbol in self._guards:
            self._implied[within(symbol), symbol] = None
            if self._stays(index):
                add(symbol, self._all[index].finding.place)
        self._implied |= dict.fromkeys(self._passed_on())
        implied = tuple(pair for pair in self._implied if pair[0].text and pair[1].text)
        return Facts(relies=frozenset(relies), stays=stays, implies=implied)

    def _homes(self, index: int) -> list[str]:
        """The names by which other code runs or reads the code that a decision is on."""
        return self._homes_of(self._all[index].finding.node)

    def _homes_of(self, node: cst.CSTNode) -> list[str]:
        home = self._outermost(node)
        return [f"here:{name}" for name in ([home] if home else [*self._bound_by(node), MODULE])]

    def _questions_that_stay(self) -> Iterator[tuple[Span, str]]:
        """The questions for CUDA that stay, with the functions whose results they may decide about."""
        for index in filter(self._stays, range(len(self._all))):
            finding = self._all[index].finding
            function = self._file.tree.function(finding.node) if finding.node is not None else None
            if isinstance(function, cst.FunctionDef) and asks_for_device(self._file, finding):
                yield finding.place, of_function(self._file, function)

    def _decorated(self, node: cst.CSTNode) -> Iterator[str]:
        """The function that a call is a decorator of."""
        at = self._file.tree.parent(node)
        owner = self._file.tree.parent(at) if isinstance(at, cst.Decorator) else None
        yield from [of_function(self._file, owner)] if isinstance(owner, cst.FunctionDef) else []

    def _bound_by(self, node: cst.CSTNode) -> Iterator[str]:
        """The names that an assignment around a node binds, or whose attributes: ``_C.DEVICE = "cuda"``."""
        statement = self._file.tree.statement(node)
        targets = [one.target for one in statement.targets] if isinstance(statement, cst.Assign) else []
        targets += [statement.target] if isinstance(statement, cst.AnnAssign) else []
        for target in targets:
            root: cst.CSTNode = target
            while isinstance(root, cst.Attribute):
                root = root.value
            if isinstance(root, cst.Name) and root.value not in ("self", "cls"):
                yield root.value

    def _outermost(self, node: cst.CSTNode) -> str:
        """The name of the outermost function or class around a node; ``""`` for code of the module."""
        name = ""
        for around in self._file.tree.ancestors(node):
            if type(around) is cst.FunctionDef or type(around) is cst.ClassDef:
                name = around.name.value
        return name

    def _stays(self, index: int) -> bool:
        """Whether a decision on code for one kind of device makes no edit that is safe."""
        decision = self._all[index]
        return self._all.counts(index) and (decision.status is not Status.CONVERTED or not decision.safe)

    # -- what an edit relies on --------------------------------------------------------------------------

    def _symbols(self, index: int, decision: Decision) -> Iterator[Symbol]:
        file, node, rule = self._file, decision.finding.node, decision.finding.rule.name
        is_question = asks_for_device(file, decision.finding)
        if is_question:
            for holder in holders_of_result(file, node):
                yield from (Symbol(Kind.FLAG, text) for text in holder_text(file, holder))
            controlled = controlled_quietly(file, node)
            yield from self._code_within([*controlled, *where_true(file, node)])
            function = file.tree.function(node)
            if isinstance(function, cst.FunctionDef) and function.name.value.startswith("test"):
                tested = self._code_within([file.span(function.body)])
                yield from (Symbol(Kind.ANSWER, one.text) for one in tested)
            if isinstance(function, cst.FunctionDef) and code_passed(file, node)[1]:
                yield _after(of_function(file, function))
            figures = [file.span(one).start for name in _PROFILED for one in file.attributes.get(name, ())]
            if any(place.start <= at < place.end for at in figures for place in controlled):
                yield _PROFILER
        elif rule == "runtime-call" and isinstance(node, cst.Call) and called_name(node) == "device_count":
            for holder in holders_of_result(file, node):
                yield from (Symbol(Kind.FLAG, text) for text in holder_text(file, holder))
        if rule == "runtime-call" and isinstance(node, cst.Call) and called_name(node) == "device_count":
            yield from self._started(node)
        if rule in _DEVICES:
            yield from self._reached(node)
        if rule in ("device-object", "device-format") and node is not None:
            yield from (Symbol(Kind.NUMBER, text) for text in self._numbering(node))

    def _reached(self, device: cst.CSTNode) -> Iterator[Symbol]:
        """What gets a device: parameters and attributes, results of functions, and tensors on the device."""
        file = self._file
        for use in uses_of(file, device):
            at = file.tree.parent(use)
            for held in holders_given(file, use):
                if isinstance(argument := file.tree.parent(held), cst.Arg):
                    yield Symbol(Kind.DEVICE, of_argument(file, argument))
            if isinstance(at, (cst.Arg, cst.DictElement)):
                yield from (Symbol(Kind.DEVICE, text) for text in options(file, at))
            if isinstance(at, cst.Arg):
                yield Symbol(Kind.DEVICE, of_argument(file, at))
                # Without a choice of the device, nothing ran before where there is no CUDA.
                if isinstance(device, cst.IfExp) or file.is_guarded(device):
                    yield from (Symbol(Kind.TENSOR, text) for text in self._given_tensor(at))
            elif isinstance(at, cst.Return):
                function = file.tree.function(at)
                if isinstance(function, cst.FunctionDef):
                    yield Symbol(Kind.DEVICE, of_function(file, function))
            elif isinstance(at, (cst.Assign, cst.AnnAssign)):
                targets = [one.target for one in at.targets] if isinstance(at, cst.Assign) else [at.target]
                yield from (Symbol(Kind.DEVICE, text) for one in targets for text in known(file, one))

    def _numbering(self, device: cst.CSTNode) -> Iterator[str]:
        """The project's functions and names that number a device: ``torch.device("cuda", gpu_of(rank))``."""
        parts = [one for one in walk(device) if isinstance(one, (cst.Name, cst.Call))]
        for text in dict.fromkeys(text for one in parts for text in sources(self._file, one)):
            if text.partition(":")[0] in ("here", "from") and "(" not in text:
                yield text

    def _started(self, count: cst.Call) -> Iterator[Symbol]:
        """The functions that calls get beside a number of devices: ``mp.spawn(work, nprocs=count)``."""
        for use in uses_of(self._file, count):
            given = self._file.tree.parent(use)
            call = self._file.tree.parent(given) if isinstance(given, cst.Arg) else None
            for argument in call.args if isinstance(call, cst.Call) else ():
                if isinstance(argument.value, (cst.Name, cst.Attribute)):
                    yield self._code(argument.value)

    def _given_tensor(self, argument: cst.Arg) -> Iterator[str]:
        """The parameters that get a tensor which a call makes on a device."""
        file = self._file
        call = file.tree.parent(argument)
        word = argument.keyword.value if argument.keyword is not None else ""
        if not isinstance(call, cst.Call) or not (word == "device" or last_name(call.func) == "to"):
            return
        for use in uses_of(file, call, in_functions=False, computed=True):
            given = file.tree.parent(use)
            if isinstance(given, cst.Arg):
                yield of_argument(file, given)

    def _code_within(self, places: list[Span]) -> Iterator[Symbol]:
        """The functions that code calls, imports, or names as methods of its own object."""
        for place in places:
            starts, nodes = self._code_named
            for node in nodes[bisect_left(starts, place.start) : bisect_left(starts, place.end)]:
                if (code := self._code(node)).text:
                    yield code

    @cached_property
    def _code_named(self) -> tuple[list[int], list[cst.Name | cst.Attribute]]:
        """Where the file calls, imports or names functions, in order, and the names there."""
        file = self._file
        nodes: list[cst.CSTNode] = [call.func for call in file.tree.of_type(cst.Call)]
        nodes += [
            read
            for name in file.methods
            for read in file.attributes.get(name, ())
            if dotted(read.value) == "self"
            and not isinstance(file.tree.parent(read), (cst.Call, cst.AssignTarget))
        ]
        for statement in file.tree.of_type(cst.ImportFrom):
            nodes += self._names_of(statement)
        named = [node for node in nodes if isinstance(node, (cst.Name, cst.Attribute))]
        named.sort(key=lambda node: file.span(node).start)
        return [file.span(node).start for node in named], named

    def _names_of(self, statement: cst.ImportFrom) -> Iterator[cst.CSTNode]:
        """A use of each name that an import binds, which has the name's full name."""
        if isinstance(statement.names, cst.ImportStar):
            return
        for alias in statement.names:
            bound = alias.asname.name if alias.asname is not None else alias.name
            if isinstance(bound, cst.Name):
                yield bound

    def _code(self, function: cst.CSTNode) -> Symbol:
        text = reference(self._file, function)
        return Symbol(Kind.CODE, "" if text.startswith("any:") else text)

    # -- what stays --------------------------------------------------------------------------------------

    def _read_flags(self) -> Iterator[tuple[Symbol, list[Span]]]:
        """The reads of flags that other files may set, and the code that each of them controls."""
        file, flags = self._file, self._file.survey.flags
        if not flags:
            return
        entries: list[cst.CSTNode] = [*file.tree.of_type(cst.Subscript), *file.tree.of_type(cst.Call)]
        for read in entries:
            if not isinstance(file.tree.parent(read), cst.AssignTarget):
                for text in options(file, read):
                    if text.partition(":")[2] in flags:
                        yield Symbol(Kind.FLAG, text), controlled_quietly(file, read)
        for name in flags & file.attributes.keys():
            is_set = self._sets(name)
            for read in file.attributes[name]:
                if isinstance(file.tree.parent(read), (cst.AssignTarget, cst.AnnAssign)):
                    continue
                text = reference(file, read)
                if text and not (text.startswith("any:") and is_set):
                    yield Symbol(Kind.FLAG, text), controlled_quietly(file, self._called(read))
        for assign in file.tree.of_type(cst.Assign):  # `device, use_cuda = setup()`
            target = assign.targets[0].target
            function = assign.value.func if isinstance(assign.value, cst.Call) else None
            text = reference(file, function) if isinstance(function, (cst.Name, cst.Attribute)) else ""
            for part in target.elements if isinstance(target, cst.Tuple) and text else ():
                for use in file.tree.reads(part.value) if isinstance(part.value, cst.Name) else ():
                    if places := controlled_quietly(file, use):
                        yield Symbol(Kind.FLAG, text), places
        bound = [one for one in file.tree.of_type(cst.Name) if one.value in flags]
        functions = file.tree.of_type(cst.FunctionDef)
        takers = (one for one in functions if _called_name(file, one) in flags)
        bound += [one.name for function in takers for one in function.params.params]
        for one in dict.fromkeys(bound):
            texts = self._flag_bound(one)
            for use in file.tree.reads(one) if any(texts) else ():
                places = controlled_quietly(file, self._called(use))
                yield from ((Symbol(Kind.FLAG, text), places) for text in texts)

    def _flag_bound(self, name: cst.Name) -> list[str]:
        """The symbols of a flag, if a name is where an import, a parameter or the module binds it."""
        file, at = self._file, self._file.tree.parent(name)
        if isinstance(at, cst.Param) and at.name is name:
            return of_parameter(file, at)
        if isinstance(at, (cst.ImportAlias, cst.AsName)):
            return [reference(file, name)]
        if (text := reference(file, name)).startswith("star:"):
            return [text]
        is_first = isinstance(at, cst.AssignTarget) and file.tree.assignments(name)[0].node is name
        return [reference(file, name)] if is_first and isinstance(at, cst.AssignTarget) else []

    def _sets(self, name: str) -> bool:
        """Whether the file itself gives a value to an attribute of a name."""
        targets = (cst.AssignTarget, cst.AnnAssign)
        return any(isinstance(self._file.tree.parent(one), targets) for one in self._file.attributes[name])

    def _called(self, read: cst.CSTNode) -> cst.CSTNode:
        call = self._file.tree.parent(read)
        return call if isinstance(call, cst.Call) and call.func is read else read

    def _tests_that_stay(self) -> Iterator[tuple[Symbol, Span]]:
        """What the tests of a device's name that stay compare, and where they are."""
        file = self._file
        for test, operand in tests_of_devices(file):
            place = file.span(test)
            own = self._all.counted([place])
            if own and not any(map(self._stays, own)):
                continue
            for text in sources(file, operand):
                yield Symbol(Kind.DEVICE, text), place
            device = (
                operand.value
                if isinstance(operand, cst.Attribute) and operand.attr.value == "type"
                else operand
            )
            if isinstance(device, cst.Attribute) and device.attr.value == "device":
                yield from ((Symbol(Kind.TENSOR, text), place) for text in sources(file, device.value))

    def _devices_of_calls(self) -> Iterator[tuple[Symbol, Span]]:
        """The devices from other files that calls of torch.cuda get which stay, and where these are."""
        for index in filter(self._stays, self._all.of_rules("runtime-call")):
            node = self._all[index].finding.node
            for argument in node.args[:1] if isinstance(node, cst.Call) else ():
                for text in sources(self._file, argument.value):
                    yield Symbol(Kind.DEVICE, text), self._file.span(node)

    def _keys(self) -> Iterator[tuple[Symbol, Span]]:
        """What is looked up in tables of modules and objects, whose keys stay, and where."""
        file = self._file
        tables: list[cst.CSTNode] = [one.value for one in file.tree.of_type(cst.Subscript)]
        tables += [one.value for name in LOOK_UP for one in file.attributes.get(name, ())]
        for table in tables:
            key = key_looked_up(file, table)
            if not isinstance(key, (cst.Name, cst.Attribute)) or not _is_known(reference(file, table)):
                continue
            if is_cache(file, table):
                continue
            for text in sources(file, key):
                yield Symbol(Kind.DEVICE, text), file.span(key)

    def _names_of_files(self) -> Iterator[tuple[Symbol, Span]]:
        """The devices from other files that are a part of a file's name, which may exist for CUDA alone."""
        for part in file_names(self._file):
            owner = part.value if isinstance(part, cst.Attribute) and part.attr.value == "type" else part
            if isinstance(owner, (cst.Name, cst.Attribute)):
                texts = sources(self._file, owner)
                yield from ((Symbol(Kind.DEVICE, text), self._file.span(part)) for text in texts)

    def _flags_before_others(self) -> Iterator[tuple[Symbol, Span]]:
        """The flags of other files beside which code has branches for other devices: ``elif on_mps: …``."""
        later = {
            self._file.span(one.body).start: one
            for one in (self._file.tree.of_type(cst.If) if self._readers else ())
            if any(kinds_in(self._file.tree.source(other.test)) for other in later_tests(self._file, one))
        }
        for symbol, places in self._readers if later else ():
            decided = next((later[place.start] for place in places if place.start in later), None)
            if decided is not None:
                yield symbol, self._file.span(decided.test)

    def _accepted(self) -> Iterator[tuple[Symbol, Span]]:
        """What checks look at that accept only some names of devices, and the arguments of such classes."""
        file = self._file
        for check, value in accepted_words(file):
            yield from ((Symbol(Kind.DEVICE, text), file.span(check)) for text in sources(file, value))
        for owner, words in classes_with_words(file):
            for word in words:
                yield Symbol(Kind.DEVICE, f"here:{owner.name.value}({word})"), file.span(owner)

    def _given_to_others(self) -> Iterator[tuple[Symbol, Span]]:
        """The parameters that a library gets which may choose a device by them or by what they hold."""
        for given in given_to_others(self._file):
            root: cst.CSTNode = given
            while isinstance(root, cst.Attribute) and dotted(root.value) not in ("self", "cls"):
                root = root.value
            for text in sources(self._file, root) if isinstance(root, (cst.Name, cst.Attribute)) else ():
                if "(" in text:
                    yield Symbol(Kind.DEVICE, text), self._file.span(given)

    def _answers_given(self) -> Iterator[tuple[Symbol, Span]]:
        """The flags and numbers of other files that libraries and processes get which mean CUDA by them."""
        file = self._file
        for given in given_to_those_who_mean_cuda(file):
            own = (
                library_named(file, call.func) if isinstance(call := self._around(given), cst.Call) else None
            )
            kinds = (Kind.FLAG, Kind.DEVICE) if own is None or not own.may_be_torchs else (Kind.FLAG,)
            for text in sources(file, given):
                yield from ((Symbol(kind, text), file.span(given)) for kind in kinds)

    def _around(self, argument: cst.CSTNode) -> cst.CSTNode | None:
        """The call that gets an argument."""
        at = self._file.tree.parent(argument)
        return self._file.tree.parent(at) if isinstance(at, cst.Arg) else None

    def _code_that_stays(self) -> Iterator[tuple[Symbol, Span]]:
        """The functions that need CUDA in any case, and classes with native code for it, with the place."""
        file = self._file
        for owner in file.tree.of_type(cst.ClassDef):
            yield from self._native_code(owner, f"here:{owner.name.value}")
        for function in file.tree.of_type(cst.FunctionDef):
            yield from self._native_code(function, of_function(file, function))
        for index, decision in enumerate(self._all):
            text = self._runs_always.get(id(decision.finding.node), "")
            if text and self._stays(index) and self._needs_cuda(index):
                yield Symbol(Kind.CODE, text), decision.finding.place
            if decision.finding.rule.name in _DEVICES and self._stays(index):
                reached = (one.text for one in self._reached(decision.finding.node))
                own = (one for one in reached if "(" not in one and one in self._functions)
                yield from ((Symbol(Kind.CODE, one), decision.finding.place) for one in own)

    @cached_property
    def _functions(self) -> set[str]:
        """The symbols of the functions of the file."""
        return {of_function(self._file, one) for one in self._file.tree.of_type(cst.FunctionDef)}

    def _after_checks(self) -> Iterator[tuple[Symbol, Span]]:
        """What stays after calls of other files' functions, which may raise without CUDA: ``check(args)``."""
        file = self._file
        for statement in file.tree.of_type(cst.Expr):
            call, line = statement.value, file.tree.parent(statement)
            block = file.tree.parent(line) if line is not None else None
            text = self._code(call.func).text if isinstance(call, cst.Call) else ""
            if line is None or block is None or not text.startswith("from:"):
                continue
            later = self._all.counted([Span(file.span(line).end, file.span(block).end)])
            left = (self._all[index].finding for index in later if self._stays(index))
            place = next((one.place for one in left if not asks_for_device(file, one)), None)
            if place is not None:
                yield _after(text), place

    def _after_calls(self) -> Iterator[tuple[int, str]]:
        """The decisions on the device after calls of functions in the same block, with these."""
        placed = set(self._device.groups[Kind.PLACE])
        statements: list[cst.Expr | cst.Assign] = [*self._file.tree.of_type(cst.Expr)] if placed else []
        statements += self._file.tree.of_type(cst.Assign) if placed else []
        for statement in statements:
            call, line = statement.value, self._file.tree.parent(statement)
            block = self._file.tree.parent(line) if line is not None else None
            text = self._code(call.func).text if isinstance(call, cst.Call) else ""
            if line is not None and block is not None and text.startswith(("from:", "here:")):
                later = Span(self._file.span(line).end, self._file.span(block).end)
                yield from ((index, text) for index in self._all.counted([later]) if index in placed)

    def _builds(self) -> Iterator[tuple[Symbol, Span]]:
        """The functions that end a program without CUDA, as they run NVIDIA's tools."""
        file = self._file
        for call in file.tree.of_type(cst.Call) if _TOOL in file.tree.text else ():
            is_run = file.tree.qualified(call.func) in _RAISE_WITHOUT_COMMAND
            if is_run and _TOOL in file.tree.source(call) and not file.is_guarded(call):
                around = [*file.tree.ancestors(call)]
                if not any(isinstance(one, (cst.Try, cst.IfExp, cst.If)) for one in around):
                    functions = (of_function(file, one) for one in around if isinstance(one, cst.FunctionDef))
                    yield from ((Symbol(Kind.BUILD, text), file.span(call)) for text in functions)

    def _native_code(self, code: cst.ClassDef | cst.FunctionDef, text: str) -> Iterator[tuple[Symbol, Span]]:
        body = self._file.span(code.body)
        if code in self._file.vendor_code.of_runtimes:
            yield Symbol(Kind.CODE, text), body
        if text and self._file.kernels.called_in([body]):
            yield Symbol(Kind.CODE, text), body
        for index in self._all.within(body) if text else ():
            if self._all[index].finding.rule.name == "native-extension":
                yield Symbol(Kind.CODE, text), self._all[index].finding.place

    def _needs_cuda(self, index: int) -> bool:
        """Whether what a decision is about raises without CUDA."""
        finding = self._all[index].finding
        if finding.rule.name not in _NEED_CUDA or asks_for_device(self._file, finding):
            return False
        node = finding.node
        name = cuda_name(self._file, node.func if isinstance(node, cst.Call) else node)
        return name not in NEVER_RAISE or name in _EMPTY_WITHOUT_CUDA

    @cached_property
    def _runs_always(self) -> dict[int, str]:
        """The nodes that functions of the module and its classes run in any case, and which."""
        found: dict[int, str] = {}
        for function in self._file.tree.of_type(cst.FunctionDef):
            text = of_function(self._file, function)
            waiting: list[cst.CSTNode] = [function.body] if text else []
            while waiting:
                node = waiting.pop()
                if type(node) in _MAY_NOT_RUN:
                    continue
                found[id(node)] = text
                if type(node) is not cst.IndentedBlock:
                    waiting += child_nodes(node)
                    continue
                returns = (n for n, one in enumerate(node.body) if type(one) is cst.If and leaves(one.body))
                waiting += node.body[: next(returns, None)]
        return found

    # -- what passes it on -------------------------------------------------------------------------------

    def _passed_on(self) -> Iterator[tuple[Symbol, Symbol]]:
        file = self._file
        for call in file.tree.of_type(cst.Call):
            if not isinstance(call.func, (cst.Name, cst.Attribute)):
                continue
            code = self._code(call.func)
            if code.text and (caller := self._runs_always.get(id(call))):
                yield code, Symbol(Kind.CODE, caller)
                yield Symbol(Kind.BUILD, code.text), Symbol(Kind.BUILD, caller)
            for argument in call.args if code.text else ():
                yield from self._through(argument.value, of_argument(file, argument), kinds=_GIVEN)
                if argument.star == "**" and is_settings(argument.value):
                    for word in _DEVICE_WORDS:
                        yield Symbol(Kind.DEVICE, f"{code.text}({word})"), Symbol(Kind.DEVICE, f"any:{word}")
                elif argument.star == "**":
                    for word, value in self._entries(argument.value):
                        yield from self._through(value, f"{code.text}({word})", kinds=_GIVEN)
        for owner in file.tree.of_type(cst.ClassDef):
            kind = owner.name.value
            for index, name in enumerate(fields_of(owner)):
                read = Symbol(Kind.DEVICE, f"self:{kind}.{name}")
                yield from ((read, Symbol(Kind.DEVICE, f"here:{kind}({one})")) for one in (name, f"#{index}"))
        for one in file.tree.of_type(cst.Return):
            function = file.tree.function(one)
            if one.value is not None and isinstance(function, cst.FunctionDef):
                yield from self._through(one.value, of_function(file, function), kinds=(Kind.DEVICE,))
        for assign in file.tree.of_type(cst.Assign):
            for target in assign.targets:
                if DEVICE_NAME.search(last_name(target.target)):
                    for text in known(file, target.target):
                        yield from self._through(assign.value, text, kinds=(Kind.DEVICE,))

    def _entries(self, options: cst.BaseExpression) -> Iterator[tuple[str, cst.BaseExpression]]:
        """The entries of a dictionary of arguments, also through a name: ``given = dict(device=device)``."""
        bound = self._file.bound_values(options) if isinstance(options, cst.Name) else [options]
        for value in bound:
            if isinstance(value, cst.Call) and called_name(value) == "dict":
                yield from ((one.keyword.value, one.value) for one in value.args if one.keyword is not None)
            elif isinstance(value, cst.Dict):
                entries = (one for one in value.elements if isinstance(one, cst.DictElement))
                yield from ((string_value(one.key) or "", one.value) for one in entries)

    def _through(
        self, value: cst.CSTNode, reached: str, kinds: tuple[Kind, ...] = (Kind.DEVICE, Kind.TENSOR)
    ) -> Iterator[tuple[Symbol, Symbol]]:
        """The symbols that a value comes from, each with the one that it reaches."""
        if not reached or not isinstance(
            value, (cst.Name, cst.Attribute, cst.Call, cst.BooleanOperation, cst.IfExp)
        ):
            return
        for text in sources(self._file, value):
            yield from ((Symbol(kind, reached), Symbol(kind, text)) for kind in kinds)
        if reached and isinstance(value, cst.Attribute) and value.attr.value == "device":
            for text in sources(self._file, value.value):
                yield Symbol(Kind.DEVICE, reached), Symbol(Kind.TENSOR, text)


def _after(function: str) -> Symbol:
    """The symbol of the code after calls of a function."""
    return Symbol(Kind.CODE, f"{function}(after)" if function else "")


def _is_known(text: str) -> bool:
    """Whether a symbol is a name of a module, or an attribute of an object of the file's."""
    return text.startswith(("here:", "from:", "self:", "star:"))


def _called_name(file: SourceFile, function: cst.FunctionDef) -> str:
    """The name by which other files call a function: of a constructor, its class."""
    owner = file.tree.around(function, cst.ClassDef)
    is_own = owner is not None and function.name.value in CONSTRUCTORS
    return owner.name.value if owner is not None and is_own else function.name.value


def _is_made(decision: Decision) -> bool:
    return decision.status is Status.CONVERTED and decision.safe
