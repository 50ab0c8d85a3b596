"""Ports the text of one file: finds edits, obeys ``# acclimate: ignore``, groups edits and applies them."""

from __future__ import annotations

import ast
import dataclasses
import re
import warnings
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from heapq import heappop, heappush

import libcst as cst

from acclimate_port.conditions.branches import (
    branches,
    branches_of_result,
    code_passed,
    controlled_quietly,
    values_before_fallback,
    where_true,
)
from acclimate_port.conditions.cuda_only import flag_for_others
from acclimate_port.conditions.device_tests import tests_reached
from acclimate_port.conditions.first_use import reason_against_counting
from acclimate_port.conditions.local_imports import WITHOUT_TORCH, imports_torch_anew, reason_without_value
from acclimate_port.conditions.missing_cuda import reason_against_host
from acclimate_port.conditions.placements import Placements, outermost_function, sharing
from acclimate_port.conditions.probes import CAUGHT, is_probe
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
from acclimate_port.conditions.statements import is_for_older_torch, leaves
from acclimate_port.conditions.worlds import TooComplexError
from acclimate_port.dataflow.sources import listed_devices
from acclimate_port.dataflow.uses import uses_of
from acclimate_port.new_code.edits import Edit, clash, insert, render, render_within
from acclimate_port.new_code.local_names import with_local_names
from acclimate_port.new_code.placement import new_lines
from acclimate_port.rules import BY_NAME, RULES
from acclimate_port.rules.acc202_available_choice import is_map_location
from acclimate_port.rules.base import Finding, Outcome, Rule, is_assigned
from acclimate_port.source.survey import Survey
from acclimate_port.source.tree import Span, called_name, dotted, walk
from acclimate_port.source_file import SourceFile

_INDEX = rb"(?:\d|[\w.\[\]\"']*(?:rank|gpu|id|idx|index|num)\b)"
_HINTS = re.compile(
    rb"cuda|nccl|cudnn|cpp_extension|SyncBatchNorm|sync_batchnorm|DataParallel|\bdata_parallel\(|pin_memory|device_ids?\b|op_builder|autocast_(?:gpu|enabled)|\.to\(\s*"
    + _INDEX
    + rb"|device\s*[=(]\s*"
    + _INDEX,
    re.I,
)
"""A file without any of these has nothing to port; a quick test that needs no syntax tree."""

_TORCH = re.compile(rb"torch|nccl|cuda|deepspeed", re.I)
_IGNORE = re.compile(r"#\s*acclimate:\s*ignore(?:\[([^\]]*)\])?")


class Status(Enum):
    """What the port did with a piece of hardware-specific code."""

    CONVERTED = "converted"
    UNSAFE = "unsafe"
    """``--unsafe`` would convert it."""
    LEFT = "left"
    EXEMPT = "exempt"


@dataclass(frozen=True)
class Site:
    """One entry of the report."""

    code: str
    rule: str
    line: int
    column: int
    text: str
    status: Status
    safe: bool
    reason: str
    after: str = ""
    """The lines that an edit which needs ``--unsafe`` would give."""


@dataclass(frozen=True)
class Ported:
    """The result of porting one text."""

    text: str
    sites: tuple[Site, ...] = ()


@dataclass(frozen=True)
class Settings:
    """The options of a port.

    Args:
        target: ``acclimate`` or ``torch``.
        unsafe: whether to apply edits that a person must review.
        select: codes or names of rules; empty for all.
        ignore: rules that are not applied and not reported.
        survey: facts from other files about the classes that a file uses.
        compiles_all: whether another file may give any module of this one to TorchScript.
    """

    target: str = "acclimate"
    unsafe: bool = False
    select: frozenset[str] = frozenset()
    ignore: frozenset[str] = frozenset()
    survey: Survey = field(default_factory=Survey)
    compiles_all: bool = False

    def has(self, rule: Rule) -> bool:
        """Whether a rule is selected."""
        names = {rule.code, rule.name, rule.code[:4]}
        return (not self.select or bool(names & self.select)) and not names & self.ignore


@dataclass
class _Decision:
    finding: Finding
    status: Status
    safe: bool
    reason: str
    hidden: bool = False
    needs: list[int] = field(default_factory=list)
    """The decisions that it is left or unsafe with."""
    beside: list[int] = field(default_factory=list)
    """The decisions that make it unsafe if they are left or unsafe."""
    cause: _Decision | None = None
    """The decision that it follows, whose own reason is the one to tell."""

    @property
    def root(self) -> _Decision:
        """The decision at the end of the chain of those that follow each other."""
        return self if self.cause is None else self.cause


class _Decisions(list[_Decision]):
    """All decisions of a file, in source order."""

    @cached_property
    def _starts(self) -> list[int]:
        return [decision.finding.place.start for decision in self]

    @cached_property
    def at(self) -> dict[cst.CSTNode | None, int]:
        """The index of the decision on a node."""
        return {decision.finding.node: index for index, decision in enumerate(self)}

    @cached_property
    def users(self) -> dict[int, set[int]]:
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


def may_concern(source: bytes) -> bool:
    """Whether a file can hold anything to port; a quick test of its bytes."""
    return bool(_HINTS.search(source)) and bool(_TORCH.search(source))


_MOST_RUNS = 4


def port_text(
    text: str, settings: Settings, is_build_script: bool = False, is_package_init: bool = False
) -> Ported:
    """Ports one file's text, until another run would change nothing.

    Raises:
        libcst.ParserSyntaxError: it is not Python 3.
    """
    ported = Ported(text)
    for run in range(_MOST_RUNS):
        following, may_go_on = _port_once(ported.text, settings, is_build_script, is_package_init)
        if run and following.text == ported.text:
            break
        sites = following.sites if not run else _joined(ported.sites, following.sites)
        ported = Ported(following.text, sites)
        if not may_go_on:
            break
    return ported


def _port_once(
    text: str, settings: Settings, is_build_script: bool, is_package_init: bool
) -> tuple[Ported, bool]:
    """One run over a text, and whether another one may convert what this one left."""
    if not may_concern(text.encode()):
        return Ported(text), False
    file = SourceFile(
        text, settings.target, is_build_script, is_package_init, settings.survey, settings.compiles_all
    )
    findings = _find(file, settings)
    decisions = _decide(file, findings, settings)
    applied = [decision for decision in decisions if decision.status is Status.CONVERTED]
    edits = [edit for conversion in applied for edit in conversion.finding.edits]
    shown = sorted(
        (decision for decision in decisions if not decision.hidden),
        key=lambda decision: decision.finding.place.start,
    )
    sites = tuple(_site(file, site) for site in shown)
    if not edits:
        return Ported(text, sites), False
    # At one offset, new imports and functions come before a name for the accelerator and the first statement.
    edits = [*_head(file, applied), *_named(file, edits)]
    result = render(file.tree.bytes, edits).decode()
    _parse_again(result)
    # A new guard may make safe what was unsafe before.
    waiting = (Status.LEFT, Status.UNSAFE)
    left = (one for one in shown if one.finding.outcome is Outcome.CONVERT and one.status in waiting)
    return Ported(result, sites), next(left, None) is not None


def _joined(before: tuple[Site, ...], after: tuple[Site, ...]) -> tuple[Site, ...]:
    """The sites of one run, those that it left as the next one found them."""
    later = {(site.code, site.text): site for site in after}
    found: list[Site] = []
    for site in before:
        if site.status is Status.LEFT:
            now = later.get((site.code, site.text))
            status = Status.CONVERTED if now is None else now.status
            if status is not Status.LEFT:
                safe = now is None or now.safe
                found.append(dataclasses.replace(site, status=status, safe=safe))
                continue
        elif site.status is Status.UNSAFE:
            now = later.get((site.code, site.text))
            if now is not None and now.status is Status.CONVERTED:
                found.append(dataclasses.replace(site, status=now.status, safe=now.safe))
                continue
        found.append(site)
    return tuple(found)


def _parse_again(text: str) -> None:
    """Checks that the result is Python.

    Raises:
        libcst.ParserSyntaxError: neither this Python nor libcst, which may know a newer Python, can parse it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError):
        cst.parse_module(text)


# -- finding -----------------------------------------------------------------------------------------


def _find(file: SourceFile, settings: Settings) -> list[Finding]:
    by_type: dict[type, list[Rule]] = defaultdict(list)
    for rule in RULES:
        if settings.target in rule.targets:
            for kind in rule.nodes:
                by_type[kind].append(rule)
    claimed: set[int] = set()
    findings: list[Finding] = []
    for node in file.tree.nodes:
        if type(node) not in by_type or id(node) in claimed:
            continue
        if isinstance(node, (cst.Name, cst.Attribute)) and not _may_be_cudas(file, node):
            continue
        for rule in by_type[type(node)]:
            finding = rule.check(file, node)
            if finding is None:
                continue
            for claim in finding.claims:
                claimed.add(id(claim))
                _claim_chain(claim, claimed)
            findings.append(_unsafe_by_place(file, _without_vendor_code(file, finding)))
            break
    return sorted(findings, key=lambda finding: finding.place.start)


def _may_be_cudas(file: SourceFile, node: cst.Name | cst.Attribute) -> bool:
    """Whether any rule has a finding for a name or an attribute; a quick test before each of them looks."""
    return (isinstance(node, cst.Attribute) and node.attr.value == "is_cuda") or file.tree.may_be_torchs(node)


def _claim_chain(node: cst.CSTNode, claimed: set[int]) -> None:
    """Claims the prefixes of a claimed chain of attributes: ``torch.cuda`` of ``torch.cuda.Stream``."""
    at = node
    while isinstance(at, cst.Attribute):
        if at.attr.value in ("is_cuda",):
            return
        at = at.value
        if isinstance(at, (cst.Name, cst.Attribute)):
            claimed.add(id(at))


def _without_vendor_code(file: SourceFile, finding: Finding) -> Finding:
    """The finding, left in a kernel, in a build script, and in code that TorchScript compiles."""
    node = finding.node or (finding.claims[0] if finding.claims else None)
    if finding.outcome is Outcome.EXEMPT or node is None:
        return finding
    reason = ""
    if file.is_build_script or file.imports_build_tools:
        reason = "a build script: it builds for one vendor's hardware"
    elif own := file.vendor_code.reason(node, _is_test(file, finding)):
        reason = own
    elif file.kernels.are_for_cuda_alone and _is_test(file, finding):
        reason = "it guards CUTLASS kernels, which only NVIDIA GPUs run"
    if reason:
        return dataclasses.replace(finding, outcome=Outcome.LEFT, reason=reason, safe=True, edits=())
    is_named = finding.rule.name in ("device-string", "device-comparison")
    if (
        finding.outcome is Outcome.CONVERT
        and is_named
        and file.own_words
        and not _is_given_to_torch(file, node)
    ):
        reason = f"the program has its own words for devices: `{file.own_words}` beside `cuda`"
        return finding.rule.left(file, node, reason, finding.claims)
    if finding.outcome is Outcome.CONVERT and is_for_older_torch(file, node):
        reason = "the branch is for an older torch, which lacks what an edit would use"
        return finding.rule.exempt(file, node, reason, finding.claims)
    if finding.outcome is Outcome.CONVERT and is_assigned(file, node) and file.tree.qualified(node):
        return finding.rule.left(file, node, "the program assigns to this name of torch.cuda", finding.claims)
    if finding.outcome is Outcome.CONVERT and file.torchscript.holds(node) and _asks(file, finding):
        reason = "TorchScript compiles this code, and cannot call get_accelerator() or torch.accelerator"
        return finding.rule.left(file, node, reason, finding.claims)
    if finding.outcome is Outcome.CONVERT and (
        reason := reason_without_value(file, node, _new_code(finding))
    ):
        return finding.rule.left(file, node, reason, finding.claims)
    return finding


def _is_given_to_torch(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a device is an argument of a call of torch, or of a tensor or module."""
    argument = file.tree.parent(node)
    call = file.tree.parent(argument) if isinstance(argument, cst.Arg) else None
    if not isinstance(call, cst.Call):
        return False
    is_torchs = (file.tree.qualified(call.func) or "").startswith("torch.")
    return is_torchs or called_name(call) in ("to", "to_empty", "cuda")


_USE_DEVICE = {"ACC101", "ACC102", "ACC201", "ACC205", "ACC206", "ACC301", "ACC304"}
"""Rules for code that may use a device, and raises if there is none."""
_DEVICES = {"device-string", "device-format", "device-object", "integer-device"}
"""Rules for devices that something else uses."""
_LOOK_UP = {
    "ACC201", "ACC202", "ACC203", "ACC205", "ACC206", "ACC301", "ACC304", "ACC401", "ACC402", "ACC501",
    "ACC506",
}  # fmt: skip
"""Rules whose edits look up the accelerator where the code before does not, or not by itself."""


def _unsafe_by_place(file: SourceFile, finding: Finding) -> Finding:
    """The finding, unsafe where the program catches the error, or where it is too early to count devices."""
    if finding.outcome is not Outcome.CONVERT or not finding.safe or finding.node is None:
        return finding
    is_device = finding.rule.name in _DEVICES
    is_lookup = finding.rule.code in _LOOK_UP
    reason = ""
    if _asks(file, finding):
        reason = reason_against_counting(file, finding.node, is_device=is_device, is_lookup=is_lookup)
    if not reason and _asks(file, finding) and imports_torch_anew(file, finding.node):
        reason = WITHOUT_TORCH
    if not reason and is_device:
        reason = reason_against_host(file, finding.node)
    if not reason and finding.rule.code in _USE_DEVICE and is_probe(file, finding.node):
        reason = CAUGHT
    return dataclasses.replace(finding, safe=False, reason=reason) if reason else finding


def _asks(file: SourceFile, finding: Finding) -> bool:
    """Whether an edit adds a call that looks up the accelerator."""
    names = (f"{file.accelerator}()", f"{file.helper}()", f"{file.torch}.accelerator.", "get_device_module(")
    return any(name in part for part in _new_code(finding) for name in names)


def _new_code(finding: Finding) -> list[str]:
    return [part for edit in finding.edits for part in edit.parts if isinstance(part, str)]


# -- deciding ----------------------------------------------------------------------------------------


def _decide(file: SourceFile, findings: list[Finding], settings: Settings) -> list[_Decision]:
    decisions = _Decisions(_first(file, finding, settings) for finding in findings)
    for index, decision in enumerate(decisions):
        decision.needs += _needs(file, decisions, index)
        decision.beside += _decided_by_result(file, decisions, index)
        decision.beside += _autocasts_inside(file, decisions, index)
        decision.beside += _reached_by_device(file, decisions, index)
        decision.beside += _in_chosen_functions(file, decisions, index)
        decision.beside += _given_to_calls(file, decisions, index)
        _join_inner(file, decisions, index)
    _join_placements(file, decisions)
    _join_conditions(file, decisions)
    _join_expressions(decisions)
    _join_graphs(decisions)
    _join_wrapped(file, decisions)
    _join_branches_of_types(file, decisions)
    _leave_overlapping(file, decisions)
    tests = _Tests(file, decisions)
    changed = _settle(file, decisions, range(len(decisions)))
    while changed := tests.prove(changed):
        changed |= _settle(file, decisions, changed)
    for decision in decisions:
        if decision.status is Status.CONVERTED and not decision.safe and not settings.unsafe:
            decision.status = Status.UNSAFE
    return decisions


def _settle(file: SourceFile, decisions: _Decisions, changed: Collection[int]) -> set[int]:
    """Lets decisions follow those that they depend on; returns the changed ones.

    It goes over the decisions in order, again and again, and looks at those alone that may follow a change.

    Args:
        file: the file.
        decisions: all decisions.
        changed: those that have changed since the last time; all of them, the first time.
    """
    found: set[int] = set()
    following = {user for index in changed for user in decisions.users[index]}
    while following:
        waiting, following = sorted(following), set()
        queued = set(waiting)
        while waiting:
            index = heappop(waiting)
            decision = decisions[index]
            is_new = False
            for need in decision.needs:
                is_new = _follow(file, decision, decisions[need]) or is_new
            for other in decision.beside:
                is_new = _stay_beside(file, decision, decisions[other]) or is_new
            if not is_new:
                continue
            found.add(index)
            for user in decisions.users[index]:
                if user <= index:
                    following.add(user)
                elif user not in queued:
                    queued.add(user)
                    heappush(waiting, user)
    return found


def _first(file: SourceFile, finding: Finding, settings: Settings) -> _Decision:
    hidden = not settings.has(finding.rule)
    if finding.outcome is Outcome.EXEMPT:
        return _Decision(finding, Status.EXEMPT, True, finding.reason, hidden)
    if finding.outcome is Outcome.LEFT:
        return _Decision(finding, Status.LEFT, True, finding.reason, hidden or _is_ignored(file, finding))
    kernel = file.kernels.called_in(where_true(file, finding.node)) if _is_test(file, finding) else ""
    if kernel:
        reason = (
            f"it decides about `{kernel}(…)`, which needs CUDA by its name or by the functions that it calls"
        )
        return _Decision(finding, Status.LEFT, True, reason, hidden or _is_ignored(file, finding))
    if hidden or _is_ignored(file, finding):
        return _Decision(finding, Status.LEFT, True, "a comment or the settings ignore it", hidden=True)
    return _Decision(finding, Status.CONVERTED, finding.safe, finding.reason)


def _is_ignored(file: SourceFile, finding: Finding) -> bool:
    for line in {file.tree.line(finding.place.start), file.tree.line(max(finding.place.end - 1, 0))}:
        found = _IGNORE.search(file.tree.line_text(line))
        if found is None:
            continue
        if found[1] is None:
            return True
        names = {name.strip() for name in found[1].split(",")}
        if names & {finding.rule.code, finding.rule.name}:
            return True
    return False


def _needs(file: SourceFile, decisions: _Decisions, index: int) -> list[int]:
    """The indices of the decisions that a decision depends on."""
    finding = decisions[index].finding
    needs: list[int] = []
    for body in branches(file, finding.node) if _is_test(file, finding) else []:
        for other in decisions.within(body):
            decision = decisions[other]
            if other != index and decision.finding.outcome is not Outcome.EXEMPT:
                needs.append(other)
                if decision.finding.rule.name == "pin-memory":
                    decision.needs.append(index)
        keeps = _holds_unknown_device(file, body, decisions) or _keeps_device(file, body, decisions)
        if decisions[index].status is Status.CONVERTED and keeps:
            decisions[index].status = Status.LEFT
            decisions[index].reason = "the branch names a CUDA device in a form that no rule converts"
    if decisions[index].status is Status.CONVERTED and _is_test(file, finding) and finding.node is not None:
        function = next(
            (
                ancestor
                for ancestor in file.tree.ancestors(finding.node)
                if isinstance(ancestor, cst.Decorator)
            ),
            None,
        )
        decorated = file.tree.parent(function) if function is not None else None
        if decorated is not None and _keeps_device(file, file.span(decorated), decisions):
            decisions[index].status = Status.LEFT
            decisions[
                index
            ].reason = "the decorated function names a CUDA device in a form that no rule converts"
    if _is_test(file, finding):
        returned, refused = code_passed(file, finding.node)
        needs += [
            other for place in returned for other in decisions.within(place) if _counts(decisions[other])
        ]
        needs += [
            other
            for place in refused
            for other in decisions.within(place)
            if _counts(decisions[other]) and _asks_for_device(file, decisions[other].finding)
        ]
    for body in branches_of_result(file, finding.node) if _is_test(file, finding) else []:
        needs += [
            other
            for other in decisions.within(body)
            if decisions[other].finding.outcome is Outcome.LEFT
            and decisions[other].finding.rule.name == "runtime-call"
        ]
    listed = (
        listed_devices(file, finding.node) if _is_test(file, finding) and finding.node is not None else []
    )
    for other in (decisions.at[literal] for literal in listed if literal in decisions.at):
        candidate = decisions[other]
        if candidate.finding.rule.name == "device-string":
            needs.append(other)
            candidate.needs.append(index)
            if candidate.status is Status.EXEMPT:
                decisions[index].status = Status.LEFT
                decisions[index].reason = "it compares entries of a list that stays"
    for place in finding.needs_applied_at:
        holder = next(
            (
                other
                for other, candidate in enumerate(decisions)
                if other != index
                and any(e.start <= place.start and place.end <= e.end for e in candidate.finding.edits)
            ),
            None,
        )
        if holder is None:
            decisions[index].status = Status.LEFT
            decisions[index].reason = "one of its uses stays as it is"
        else:
            needs.append(holder)
    return needs


def _counts(decision: _Decision) -> bool:
    """Whether a decision is about code for one kind of device."""
    return decision.finding.outcome is not Outcome.EXEMPT and decision.status is not Status.EXEMPT


def _decided_by_result(file: SourceFile, decisions: _Decisions, index: int) -> list[int]:
    """The indices of the decisions on code that a test decides through names: ``if use_cuda:``."""
    finding = decisions[index].finding
    if not _is_test(file, finding):
        return []
    decided = controlled_quietly(file, finding.node)
    replaced = values_before_fallback(file, finding.node)
    if decisions[index].safe and any(_keeps_device(file, place, decisions) for place in replaced):
        decisions[index].safe = False
        decisions[index].reason = "its branch replaces a CUDA device that no rule converts"
    found = [
        other
        for place in (*decided, *replaced)
        for other in decisions.within(place)
        if other != index and _counts(decisions[other])
    ]
    if not found and decisions[index].safe and (flag := flag_for_others(file, finding.node)):
        decisions[index].safe = False
        decisions[index].reason = f"nothing in this file shows what `{flag}`, which says CUDA, decides"
    return found


def _autocasts_inside(file: SourceFile, decisions: _Decisions, index: int) -> list[int]:
    """The indices of the decisions on autocasts inside the autocast that a decision is about."""
    below = decisions[index].finding.node
    for around in file.tree.ancestors(below) if below is not None else ():
        if isinstance(around, cst.With) and below is not around.body:
            is_autocast = any("autocast" in file.tree.source(item) for item in around.items)
            inside = decisions.within(file.span(around.body)) if is_autocast else []
            return [
                other for other in inside if "autocast" in file.tree.source(decisions[other].finding.place)
            ]
        if isinstance(around, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
            return []
        below = around
    return []


def _given_to_calls(file: SourceFile, decisions: _Decisions, index: int) -> list[int]:
    """The indices of the decisions on calls that get a device's number: ``get_device_properties(i)``."""
    finding = decisions[index].finding
    if finding.rule.name != "current-device" or finding.node is None or not _counts(decisions[index]):
        return []
    held = [use for use in uses_of(file, finding.node) if use is not finding.node]
    around = (decisions.at.get(outer) for use in held for outer in file.tree.ancestors(use))
    return [other for other in around if other is not None and other != index and _counts(decisions[other])]


def _join_inner(file: SourceFile, decisions: _Decisions, index: int) -> None:
    """Makes the code that runs only if a test is true unsafe where the test stays as it is or is unsafe."""
    finding = decisions[index].finding
    is_test = _asks_for_device(file, finding) or finding.rule.name == "other-use"
    if not is_test or not _counts(decisions[index]):
        return
    places = branches_of_result(file, finding.node)
    if file.tree.function(finding.node or file.tree.module) is not None:
        places += [place for passed in code_passed(file, finding.node) for place in passed]
    for body in places:
        for other in decisions.within(body):
            if other != index:
                decisions[other].beside.append(index)


def _in_chosen_functions(file: SourceFile, decisions: _Decisions, index: int) -> list[int]:
    """The indices of the decisions in functions of the file that run only if a test is true."""
    finding = decisions[index].finding
    if not _is_test(file, finding):
        return []
    found: list[int] = []
    for body in branches(file, finding.node):
        for call in file.calls_within(body):
            for function in file.functions_called(call):
                found += [other for other in decisions.within(file.span(function.body)) if other != index]
    return [other for other in found if _counts(decisions[other])]


def _reached_by_device(file: SourceFile, decisions: _Decisions, index: int) -> list[int]:
    """The indices of the decisions on tests of a device's name that a device reaches, by default or always.

    A device that a test of the device chooses reaches these tests only where there is one.
    """
    decision = decisions[index]
    node = decision.finding.node
    is_device = decision.finding.rule.name in _DEVICES and decision.status is Status.CONVERTED
    if not is_device or node is None or file.is_guarded(node):
        return []
    found: list[int] = []
    for test in tests_reached(file, node):
        own = [other for other in decisions.within(file.span(test)) if _counts(decisions[other])]
        found += own
        if not own and decision.safe:
            line = file.tree.line(file.span(test).start)
            decision.safe = False
            decision.reason = f"line {line} tests the name of the device, and on a host it finds another one"
    return [other for other in found if other != index]


_FEW = 12


def _join_placements(file: SourceFile, decisions: _Decisions) -> None:
    """Joins the tests that decide about moving or wrapping the same objects, or objects of one function."""
    placements = Placements(file)
    tests = [
        index
        for index, decision in enumerate(decisions)
        if _counts(decision)
        and (_asks_for_device(file, decision.finding) or decision.finding.rule.name == "available-choice")
    ]
    placed = []
    for index in tests:
        node = decisions[index].finding.node
        inside = placements.within(controlled_quietly(file, node))
        chosen = placements.on(_chosen_names(file, node))
        placed.append((inside[0] | chosen[0], inside[1] | chosen[1]))
    for joined in sharing([objects for objects, _ in placed]):
        for one, other in _pairs(joined):
            decisions[tests[one]].needs.append(tests[other])
    for joined in sharing([set(functions) for _, functions in placed]):
        for one, other in _pairs(joined):
            decisions[tests[one]].beside.append(tests[other])
    # The other tests of a function are about what these move: `if use_cuda: x = x.half()`.
    moving: dict[cst.CSTNode | None, int] = {}
    for index, (_, functions) in zip(tests, placed, strict=True):
        moving |= dict.fromkeys(functions, index)
    for index, (_, functions) in zip(tests, placed, strict=True):
        function = outermost_function(file, decisions[index].finding.node or file.tree.module)
        if not functions and function in moving:
            decisions[index].beside.append(moving[function])


def _join_conditions(file: SourceFile, decisions: _Decisions) -> None:
    """Joins the edits of each condition, which are made together or not at all."""
    members: dict[int, list[int]] = defaultdict(list)
    for index, decision in enumerate(decisions):
        node = decision.finding.node if decision.finding.edits else None
        whole = whole_value(file, node, of_choice=False) if node is not None else None
        if isinstance(whole, (cst.BooleanOperation, cst.UnaryOperation, cst.Comparison)):
            members[id(whole)].append(index)
    for joined in members.values():
        for one, other in _pairs(joined):
            decisions[one].needs.append(other)


def _join_wrapped(file: SourceFile, decisions: _Decisions) -> None:
    """Makes ``DDP(model, device_ids=[rank])`` unsafe where the move of the same object is, or stays."""
    placements = Placements(file)
    movers = [
        index
        for index, one in enumerate(decisions)
        if one.finding.rule.name == "cuda-method" and _counts(one)
    ]
    moved = [placements.within([decisions[index].finding.place])[0] for index in movers]
    for decision in decisions if movers else ():
        call = file.tree.statement(decision.finding.node or file.tree.module)
        if decision.finding.rule.name != "device-ids" or not decision.finding.edits:
            continue
        wrapped = placements.within([file.span(call)])[0]
        decision.beside += [index for index, own in zip(movers, moved, strict=True) if own & wrapped]


def _join_expressions(decisions: _Decisions) -> None:
    """Joins an edit with those of its arguments: ``torch.device("cuda", torch.cuda.current_device())``."""
    for outer, decision in enumerate(decisions):
        if not _counts(decision) or not isinstance(decision.finding.node, cst.Call):
            continue
        for inner in decisions.within(decision.finding.place):
            if inner != outer and _counts(decisions[inner]):
                decision.needs.append(inner)
                decisions[inner].needs.append(outer)


def _join_graphs(decisions: _Decisions) -> None:
    """Joins the edits of a file's graphs: a graph of acclimate's cannot be captured by torch.cuda's."""
    graphs = [
        index for index, one in enumerate(decisions) if one.finding.rule.name == "graphs" and _counts(one)
    ]
    for one, other in _pairs(graphs):
        decisions[one].needs.append(other)


_MOVE = {"cuda-method", "device-string", "device-format", "device-object", "integer-device"}


def _join_branches_of_types(file: SourceFile, decisions: _Decisions) -> None:
    """Joins the moves in the branches of a choice by type: ``if torch.is_tensor(x): … else: …``."""
    for statement in file.tree.of_type(cst.If):
        if isinstance(file.tree.parent(statement), cst.If) or not _tells_types(statement):
            continue
        moves = [
            [index for index in decisions.within(block) if decisions[index].finding.rule.name in _MOVE]
            for block in _branches_of(file, statement)
        ]
        for one, own in enumerate(moves):
            others = [index for other, found in enumerate(moves) if other != one for index in found]
            for index in own:
                _join_move(file, decisions, index, others)


def _branches_of(file: SourceFile, statement: cst.If) -> list[Span]:
    """The branches of a statement, and the rest of its block if all of them leave it."""
    blocks: list[cst.BaseSuite] = []
    at: cst.If | cst.Else | None = statement
    while isinstance(at, cst.If):
        blocks.append(at.body)
        at = at.orelse
    blocks += [at.body] if at is not None else []
    found = [file.span(block) for block in blocks]
    around = file.tree.parent(statement)
    if at is None and isinstance(around, cst.IndentedBlock) and all(map(leaves, blocks)):
        found.append(Span(file.span(statement).end, file.span(around).end))
    return found


def _join_move(file: SourceFile, decisions: _Decisions, index: int, others: list[int]) -> None:
    """Makes a move unsafe beside others that stay or are unsafe."""
    decision = decisions[index]
    for other in others:
        if _counts(decisions[other]):
            decision.beside.append(other)
        elif decision.safe and _gives_device(file, decisions[other].finding):
            line = file.tree.line(decisions[other].finding.place.start)
            decision.safe = False
            decision.reason = f"line {line}, which moves what is of another type, stays as it is"


def _tells_types(statement: cst.If) -> bool:
    """Whether a condition of a statement, or of an ``elif`` of it, asks for the type of a value."""
    at: cst.If | cst.Else | None = statement
    while isinstance(at, cst.If):
        calls = (node for node in walk(at.test) if isinstance(node, cst.Call))
        if any(called_name(call) in _ASK_TYPE for call in calls):
            return True
        at = at.orelse
    return False


_ASK_TYPE = ("isinstance", "hasattr", "is_tensor", "type", "issubclass")


def _pairs(members: list[int]) -> list[tuple[int, int]]:
    """Pairs that join all members with each other, directly if they are few."""
    if len(members) > _FEW:
        return list(zip(members, [*members[1:], members[0]], strict=True))
    return [(one, other) for one in members for other in members if one != other]


def _chosen_names(file: SourceFile, node: cst.CSTNode | None) -> list[str]:
    """The names that get a device which a test or choice decides: ``device = "cuda" if … else "cpu"``."""
    is_choice, below = isinstance(node, cst.IfExp), node
    for around in file.tree.ancestors(node) if node is not None else ():
        if isinstance(around, cst.IfExp):
            is_choice = is_choice or below is around.test
        elif isinstance(around, cst.Assign):
            return [dotted(target.target) for target in around.targets] if is_choice else []
        elif not isinstance(
            around, (cst.Arg, cst.Call, cst.BooleanOperation, cst.UnaryOperation, cst.Comparison)
        ):
            return []
        below = around
    return []


_GIVE_VALUES = (cst.Assign, cst.Arg, cst.Element, cst.Return, cst.IfExp, cst.DictElement, cst.Dict)


def _keeps_device(file: SourceFile, body: Span, decisions: _Decisions) -> bool:
    """Whether a branch uses ``"cuda"`` where nothing shows that it is a device, so that the literal stays."""
    return any(_gives_device(file, decisions[index].finding) for index in decisions.within(body))


def _gives_device(file: SourceFile, finding: Finding) -> bool:
    """Whether a finding is ``"cuda"`` as a value that nothing shows to be a device."""
    return (
        finding.rule.name == "device-string"
        and finding.outcome is Outcome.EXEMPT
        and isinstance(file.tree.parent(finding.node or file.tree.module), _GIVE_VALUES)
    )


def _holds_unknown_device(file: SourceFile, body: Span, decisions: _Decisions) -> bool:
    """Whether a branch has a string that no rule converts, such as ``f"cuda:{a}{b}"``."""
    starts = (Span(body.start, 0), Span(body.end, 0))
    first, last = (bisect_left(file.device_texts, start) for start in starts)
    texts = [place for place in file.device_texts[first:last] if place.end <= body.end]
    found = [decisions[index].finding.place for index in decisions.within(body)] if texts else []
    return any(
        not any(one.start <= place.start < one.end or place.start <= one.start < place.end for one in found)
        for place in texts
    )


def _is_test(file: SourceFile, finding: Finding) -> bool:
    """Whether a finding is a test of the device, which may control a branch."""
    if finding.node is None or finding.outcome is not Outcome.CONVERT:
        return False
    return _asks_for_device(file, finding)


def _asks_for_device(file: SourceFile, finding: Finding) -> bool:
    """Whether a finding is a test of the device, ported or left."""
    if finding.rule.name == "runtime-call" and isinstance(finding.node, cst.Call):
        name = called_name(finding.node)
        return name == "is_available" or (
            name == "device_count" and bool(controlled_quietly(file, finding.node))
        )
    return finding.rule.name in ("device-comparison", "is-cuda")


class _Tests:
    """The tests and choices that decisions change a part of, compared before and after the edits.

    All edits of one test or choice are made together or not at all.

    Args:
        file: the file.
        decisions: all decisions.
    """

    def __init__(self, file: SourceFile, decisions: _Decisions) -> None:
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
            offered = self._prove(self._wholes[whole], found)
            if not offered:
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
                member.status, member.reason = Status.LEFT, reason
                changed.add(index)
            elif member.safe and inside(member.finding.edits[0], file.span(whole)):
                member.safe, member.reason = False, reason
                changed.add(index)
        return offered


def _is_part_of_tests(file: SourceFile, finding: Finding) -> bool:
    """Whether a finding changes a test, a choice or a name, and not what is computed with them."""
    if finding.rule.name == "runtime-call" and isinstance(finding.node, cst.Call):
        return is_decision(file, finding.node)
    return finding.rule.name in _NAMES_AND_TESTS


_NAMES_AND_TESTS = {
    *("device-string", "device-object", "device-format", "available-choice", "device-comparison"),
    *("is-cuda", "communication-backend", "current-device", "mixed-precision"),
}


def _whole(file: SourceFile, decision: _Decision) -> cst.CSTNode | None:
    """The test or choice that a decision changes a part of."""
    if decision.finding.node is None or not decision.finding.edits:
        return None
    whole = whole_value(file, decision.finding.node)
    # `None` as a map_location means the device that a checkpoint was saved on, which is CUDA.
    is_location = decision.finding.rule.name == "available-choice" and is_map_location(file, whole)
    # The number of the device is the same one: `current_device() == rank`.
    if decision.finding.rule.name == "current-device" and isinstance(whole, cst.Comparison):
        return None
    return whole if is_decision(file, whole) and not is_location else None


def _follow(file: SourceFile, decision: _Decision, need: _Decision) -> bool:
    """Gives a decision the status of one that it depends on; returns whether it changed."""
    if decision.status is not Status.CONVERTED:
        return False
    root = need.root
    if need.status is Status.LEFT:
        decision.status, decision.cause = Status.LEFT, root
        decision.reason = f"{_place_of(file, root, decision)}, which must be edited with it, stays as it is"
        return True
    if decision.safe and not need.safe:
        decision.safe, decision.cause = False, root
        decision.reason = f"it must be edited with {_place_of(file, root, decision)}: {root.reason}"
        return True
    return False


def _place_of(file: SourceFile, one: _Decision, beside: _Decision) -> str:
    """How to name the code of a decision in the reason of another: its line, or its text on the same line."""
    line = file.tree.line(one.finding.place.start)
    if line != file.tree.line(beside.finding.place.start):
        return f"line {line}"
    return f"`{_shortened(file.tree.source(one.finding.place))}`"


def _stay_beside(file: SourceFile, decision: _Decision, other: _Decision) -> bool:
    """Makes a decision unsafe beside one that is left or unsafe; returns whether it changed."""
    if decision.status is not Status.CONVERTED or not decision.safe:
        return False
    if other.status is Status.LEFT or (other.status is Status.CONVERTED and not other.safe):
        root = other.root
        kept = "stays as it is" if root.status is Status.LEFT else f"is unsafe: {root.reason}"
        decision.safe, decision.cause = False, root
        decision.reason = f"{_place_of(file, root, decision)}, which relies on the same device, {kept}"
        return True
    return False


def _leave_overlapping(file: SourceFile, decisions: list[_Decision]) -> None:
    """Leaves each finding whose edits overlap those of an earlier one."""
    kept: dict[int, list[Edit]] = defaultdict(list)
    for decision in sorted(
        decisions, key=lambda decision: (decision.finding.place.start, -decision.finding.place.end)
    ):
        if decision.status is not Status.CONVERTED:
            continue
        near = [
            e
            for e in dict.fromkeys(one for line in _lines(file, decision.finding) for one in kept[line])
            if any(e.start <= new.end and new.start <= e.end for new in decision.finding.edits)
        ]
        if any(_removes(neighbour, decision.finding.place) for neighbour in near):
            decision.status, decision.hidden = Status.EXEMPT, True
        elif clash([*near, *decision.finding.edits]):
            decision.status, decision.reason = (
                Status.LEFT,
                "it overlaps another edit",
            )
        else:
            for edit in decision.finding.edits:
                for line in range(file.tree.line(edit.start), file.tree.line(edit.end) + 1):
                    kept[line].append(edit)


def _lines(file: SourceFile, finding: Finding) -> set[int]:
    """The lines that the edits of a finding touch."""
    return {
        line
        for edit in finding.edits
        for line in range(file.tree.line(edit.start), file.tree.line(edit.end) + 1)
    }


def _removes(edit: Edit, place: Span) -> bool:
    """Whether an edit removes a whole range."""
    kept = [part for part in edit.parts if isinstance(part, Span)]
    is_inside = edit.start <= place.start and place.end <= edit.end
    return is_inside and not any(part.start < place.end and place.start < part.end for part in kept)


# -- applying ----------------------------------------------------------------------------------------


def _named(file: SourceFile, edits: list[Edit]) -> list[Edit]:
    """The edits, with a local name for the accelerator in functions that ask for it often."""
    if file.target.name == "acclimate":
        return with_local_names(file.tree, edits, f"{file.accelerator}()", ("acc", "accelerator"))
    return with_local_names(file.tree, edits, f"{file.helper}()", ("device_type", "accelerator"))


def _head(file: SourceFile, applied: list[_Decision]) -> list[Edit]:
    """The imports and helper functions that the edits need."""
    accelerator, helper, torch = f"{file.accelerator}()", f"{file.helper}()", f"{file.torch}."
    texts = [
        (decision.finding, part)
        for decision in applied
        for edit in decision.finding.edits
        for part in edit.parts
        if isinstance(part, str)
    ]
    uses_wrapper = any(f"{file.on_any_device}(" in part for _, part in texts)
    uses_accelerator = uses_wrapper or any(accelerator in part for _, part in texts)
    uses_helper = file.target.name == "torch" and (uses_wrapper or any(helper in part for _, part in texts))
    imports: list[str] = []
    if file.target.name == "acclimate" and file.needs_import and uses_accelerator:
        alias = "" if file.accelerator == "get_accelerator" else f" as {file.accelerator}"
        imports.append(f"from acclimate import get_accelerator{alias}")
    uses_torch = uses_helper or uses_wrapper or any(torch in part for _, part in texts)
    if file.needs_torch_import and uses_torch and not file.imports_torch_in_functions:
        imports.append("import torch")
    helpers = [file.helper_text] if uses_helper and file.needs_helper else []
    helpers += [file.on_any_device_text] if uses_wrapper and file.needs_on_any_device else []
    if not imports and not helpers:
        return []
    beside: list[Edit] = []
    if file.optional_import is not None:
        beside = [_after(file, file.optional_import, imports)] if imports else []
        imports = []
    names = (accelerator, helper, torch, f"{file.on_any_device}(")
    relevant = [finding for finding, part in texts if any(name in part for name in names)]
    early = [f.place.start for f in relevant if f.node is not None and file.runs_at_import(f.node)]
    return [*beside, *new_lines(file.tree, min(early, default=len(file.tree.bytes)), imports, helpers)]


def _after(file: SourceFile, line: cst.SimpleStatementLine, statements: list[str]) -> Edit:
    """An insertion of statements after a line, with its indentation."""
    number = file.tree.line(file.span(line.body[0]).start)
    text = file.tree.line_text(number)
    margin = text[: len(text) - len(text.lstrip())]
    end = file.tree.line(max(file.span(line.body[0]).end - 1, 0))
    starts = file.tree.line_starts
    at = starts[end] if end < len(starts) else len(file.tree.bytes)
    return insert(at, "".join(f"{margin}{one}{file.tree.newline}" for one in statements))


def _site(file: SourceFile, decision: _Decision) -> Site:
    place = decision.finding.place
    rule = decision.finding.rule
    return Site(
        rule.code,
        rule.name,
        file.tree.line(place.start),
        file.tree.column(place.start),
        _shortened(file.tree.source(place)),
        decision.status,
        decision.safe,
        decision.reason,
        _lines_after(file, decision.finding) if decision.status is Status.UNSAFE else "",
    )


def _shortened(text: str) -> str:
    """A text on one line of at most 80 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:79]}…"


def _lines_after(file: SourceFile, finding: Finding) -> str:
    """The lines that a finding's edits change, with these edits alone."""
    first = file.tree.line(min(edit.start for edit in finding.edits))
    last = file.tree.line(max(edit.end for edit in finding.edits))
    starts = [*file.tree.line_starts, len(file.tree.bytes)]
    place = Span(starts[first - 1], max(starts[min(last, len(starts) - 1)], starts[first - 1]))
    inside_lines = [edit for edit in finding.edits if inside(edit, place)]
    return render_within(file.tree.bytes, place, inside_lines).decode().rstrip("\r\n")


def unknown_rules(names: Collection[str]) -> list[str]:
    """The names that match no rule."""
    families = {rule.code[:4] for rule in RULES}
    return sorted(name for name in names if name not in BY_NAME and name not in families)
