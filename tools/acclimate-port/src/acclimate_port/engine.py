"""Ports the text of one file: finds edits, obeys ``# acclimate: ignore``, groups edits and applies them."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import libcst as cst

from acclimate_port.conditions.branches import where_true
from acclimate_port.conditions.host_sides import other_side_is_of_host
from acclimate_port.conditions.local_imports import imports_before, torchs_import_before
from acclimate_port.conditions.proofs import inside
from acclimate_port.conditions.skips import skipped
from acclimate_port.decisions.across import Across
from acclimate_port.decisions.by_place import by_place
from acclimate_port.decisions.decide import decide
from acclimate_port.decisions.decision import Decision, Decisions, is_test, shortened
from acclimate_port.decisions.decision import Status as Status
from acclimate_port.decisions.symbols import Facts, Symbol
from acclimate_port.new_code.edits import Edit, insert, render, render_within
from acclimate_port.new_code.local_names import name_for_notebook, with_local_names
from acclimate_port.new_code.placement import new_lines
from acclimate_port.new_code.printed_text import with_printed_text
from acclimate_port.rules import BY_NAME, RULES
from acclimate_port.rules.base import Finding, Outcome, Rule
from acclimate_port.source.cuda_packages import CUDA_PACKAGES, OPERATORS
from acclimate_port.source.device_choosers import IN_TEXTS
from acclimate_port.source.survey import Survey
from acclimate_port.source.tree import Span, parse_as_python
from acclimate_port.source_file import SourceFile

_INDEX = rb"(?:\d+|[\w.\[\]\"']*(?:rank|gpu|id|idx|index|num)\b)"
_TRAINERS = tuple(name.encode() for name in IN_TEXTS)
_TORCH = (
    *(b"torch", b"nccl", b"cuda", b"deepspeed", b"nvidia-smi", b"nvml", b"gputil", b"gpustat", b"nvitop"),
    *_TRAINERS,
)
_WORDS = (
    *(b"cuda", b"nccl", b"nvml", b"gputil", b"gpustat", b"nvitop", b"cudnn", b"nvidia-smi", b"cpp_extension"),
    *(b"syncbatchnorm", b"sync_batchnorm", b"dataparallel", b"pin_memory", b"op_builder"),
    *(b"autocast_gpu", b"autocast_enabled", b"lightning", b"torch.load("),
    *_TRAINERS,
)
_FORMS = re.compile(
    rb"\bdata_parallel\(|device_ids?\b|(?:\.to\(\s*|device\s*[=(]\s*)" + _INDEX + rb"(?!\s*\.|\w)"
)
_PACKAGE_WORDS = tuple(name.lower().encode() for name in sorted((*CUDA_PACKAGES, *OPERATORS)))
_PACKAGES = re.compile(rb"\b(?:" + b"|".join(map(re.escape, _PACKAGE_WORDS)) + rb")\b")
"""A file without any of these has nothing to port; a quick test that needs no syntax tree.

Looking for plain words takes a tenth of the time of a pattern, so the patterns come last.
"""

_LOAD = b"torch.load("
_COPIES = (b"load_state_dict", b"copy_")
"""What a checkpoint must come to, so that it may be loaded to another device."""
_LONGEST_CALL = 600

_IGNORE = re.compile(r"#\s*acclimate:\s*ignore(?:\[([^\]]*)\])?")


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


class Look(NamedTuple):
    """A text and what is found in it, whatever stays in other files."""

    file: SourceFile
    findings: list[Finding]


@dataclass(frozen=True)
class Ported:
    """The result of porting one text."""

    text: str
    sites: tuple[Site, ...] = ()
    facts: Facts = field(default_factory=Facts)
    """What other files of the project must know of it."""


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
        concerns_all: whether to look at files that hold nothing to port too: others must know of them.
        elsewhere: what stays as it is in other files, and why edits that rely on it are unsafe.
    """

    target: str = "acclimate"
    unsafe: bool = False
    select: frozenset[str] = frozenset()
    ignore: frozenset[str] = frozenset()
    survey: Survey = field(default_factory=Survey)
    compiles_all: bool = False
    concerns_all: bool = False
    elsewhere: Mapping[Symbol, str] = field(default_factory=dict)

    def has(self, rule: Rule[Any]) -> bool:
        """Whether a rule is selected."""
        names = {rule.code, rule.name, rule.code[:4]}
        return (not self.select or bool(names & self.select)) and not names & self.ignore


@lru_cache(maxsize=2)
def may_concern(source: bytes) -> bool:
    """Whether a file can hold anything to port; a quick test of its bytes, made once for a file in turn."""
    text = source.lower()
    if not any(word in text for word in _TORCH):
        return False
    words = {word for word in _WORDS if word in text}
    if words - {_LOAD} or _FORMS.search(text) is not None:
        return True
    if _LOAD in words and any(word in text for word in _COPIES) and _loads_to_where_saved(text):
        return True
    return any(name in text for name in _PACKAGE_WORDS) and _PACKAGES.search(text) is not None


def _loads_to_where_saved(text: bytes) -> bool:
    """Whether a call of ``torch.load`` may give no device; of one with many arguments it is not asked."""
    start = text.find(_LOAD)
    while start >= 0:
        depth, at = 1, start + len(_LOAD)
        while depth and at < min(len(text), start + _LONGEST_CALL):
            depth += {40: 1, 41: -1}.get(text[at], 0)
            at += 1
        if depth or b"map_location" not in text[start:at]:
            return True
        start = text.find(_LOAD, at)
    return False


_MOST_RUNS = 4


def port_text(
    text: str,
    settings: Settings,
    is_build_script: bool = False,
    is_package_init: bool = False,
    looks: dict[str, Look] | None = None,
) -> Ported:
    """Ports one file's text, until another run would change nothing.

    Args:
        text: the source.
        settings: the options.
        is_build_script: whether it is a build script, or one imports it.
        is_package_init: whether it is an ``__init__.py``, whose names others import.
        looks: what earlier calls for this file found in texts, by settings that differ in nothing but
            ``elsewhere``; what is found now is added.

    Raises:
        libcst.ParserSyntaxError: it is not Python 3.
    """
    looks = {} if looks is None else looks
    ported = Ported(text)
    for run in range(_MOST_RUNS):
        following, may_go_on = _port_once(ported.text, settings, is_build_script, is_package_init, looks)
        if run and following.text == ported.text:
            break
        sites = following.sites if not run else _joined(ported.sites, following.sites)
        facts = following.facts.after(ported.facts) if run else following.facts
        ported = Ported(following.text, sites, facts)
        if not may_go_on:
            break
    return ported


def _port_once(
    text: str, settings: Settings, is_build_script: bool, is_package_init: bool, looks: dict[str, Look]
) -> tuple[Ported, bool]:
    """One run over a text, and whether another one may convert what this one left."""
    concerned = may_concern(text.encode())
    if not (concerned or settings.concerns_all):
        return Ported(text), False
    if text not in looks:
        file = SourceFile(
            text, settings.target, is_build_script, is_package_init, settings.survey, settings.compiles_all
        )
        looks[text] = Look(file, _find(file, settings) if concerned else [])
    file = looks[text].file
    findings = [copy(finding) for finding in looks[text].findings]  # decisions change them
    decisions, facts = _decide(file, findings, settings)
    applied = [decision for decision in decisions if decision.status is Status.CONVERTED]
    edits = [edit for conversion in applied for edit in conversion.finding.edits]
    shown = sorted(
        (decision for decision in decisions if not decision.hidden),
        key=lambda decision: decision.finding.place.start,
    )
    sites = tuple(_site(file, site) for site in shown)
    if not edits:
        return Ported(text, sites, facts), False
    # At one offset, new imports and functions come before a name for the accelerator and the first statement.
    edits, names = _named(file, edits)
    edits = [*_head(file, applied, names), *with_printed_text(file.tree, edits)]
    result = render(file.tree.bytes, edits).decode()
    _parse_again(result)
    # A new guard may make safe what was unsafe before.
    waiting = (Status.LEFT, Status.UNSAFE)
    left = (one for one in shown if one.finding.outcome is Outcome.CONVERT and one.status in waiting)
    return Ported(result, sites, facts), next(left, None) is not None


def _joined(before: tuple[Site, ...], after: tuple[Site, ...]) -> tuple[Site, ...]:
    """The sites of one run, those that it left as the next one found them."""
    later = {(site.code, site.text): site for site in after}
    return tuple(_found_later(site, later.get((site.code, site.text))) for site in before)


def _found_later(site: Site, now: Site | None) -> Site:
    if now is None:
        is_gone = site.status is Status.LEFT
        return dataclasses.replace(site, status=Status.CONVERTED, safe=True) if is_gone else site
    news = (site.status is Status.LEFT) or (site.status, now.status) == (Status.UNSAFE, Status.CONVERTED)
    return dataclasses.replace(site, status=now.status, safe=now.safe) if news else site


def _parse_again(text: str) -> None:
    """Checks that the result is Python.

    Raises:
        libcst.ParserSyntaxError: neither this Python nor libcst, which may know a newer Python, can parse it.
    """
    try:
        parse_as_python(text)
    except (SyntaxError, ValueError):
        cst.parse_module(text)


# -- finding -----------------------------------------------------------------------------------------


def _find(file: SourceFile, settings: Settings) -> list[Finding]:
    by_type: dict[type, list[Rule[Any]]] = defaultdict(list)
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
            findings.append(by_place(file, finding))
            break
    return sorted(findings, key=lambda finding: finding.place.start)


def _may_be_cudas(file: SourceFile, node: cst.Name | cst.Attribute) -> bool:
    """Whether any rule has a finding for a name or an attribute; a quick test before each of them looks."""
    return (isinstance(node, cst.Attribute) and node.attr.value == "is_cuda") or file.tree.may_be_torchs(node)


def _claim_chain(node: cst.CSTNode, claimed: set[int]) -> None:
    """Claims the prefixes of a claimed chain of attributes: ``torch.cuda`` of ``torch.cuda.Stream``."""
    at = node
    while isinstance(at, cst.Attribute):
        if at.attr.value == "is_cuda":
            return
        at = at.value
        if isinstance(at, (cst.Name, cst.Attribute)):
            claimed.add(id(at))


# -- deciding ----------------------------------------------------------------------------------------


def _decide(file: SourceFile, findings: list[Finding], settings: Settings) -> tuple[Decisions, Facts]:
    decisions = Decisions(file, (_alone(file, finding, settings) for finding in findings))
    across = Across(file, decisions)
    if findings:
        across.doubt(settings.elsewhere)
        decide(file, decisions)
    facts = across.facts()
    for decision in decisions:
        if decision.status is Status.CONVERTED and not decision.safe and not settings.unsafe:
            decision.status = Status.UNSAFE
    return decisions, facts


def _alone(file: SourceFile, finding: Finding, settings: Settings) -> Decision:
    """What becomes of a finding if it depends on no other."""
    hidden, reason = not settings.has(finding.rule), finding.reason
    if finding.outcome is Outcome.EXEMPT:
        return Decision(finding, Status.EXEMPT, True, reason, hidden)
    hidden = hidden or _is_ignored(file, finding)
    kernel = ""
    if is_test(file, finding):
        kernel = file.kernels.called_in([*where_true(file, finding.node), *skipped(file, finding.node)])
    if kernel:
        reason = (
            f"it decides about `{kernel}(…)`, which needs CUDA by its name or by the functions that it calls"
        )
        finding.stands_alone = not other_side_is_of_host(file, finding.node)
    if kernel or finding.outcome is Outcome.LEFT:
        return Decision(finding, Status.LEFT, True, reason, hidden)
    if hidden:
        return Decision(finding, Status.LEFT, True, "a comment or the settings ignore it", hidden)
    is_buffer = finding.rule.name in ("tensor-type", "cuda-method") and isinstance(finding.node, cst.Call)
    caller = file.tree.function(finding.node) if is_buffer else None
    if finding.safe and (called := file.kernels.callers.get(id(caller), "")):
        reason = f"its function calls `{called}(…)`, which needs CUDA"
        finding.stands_alone = True
        return Decision(finding, Status.CONVERTED, False, reason)
    return Decision(finding, Status.CONVERTED, finding.safe, reason)


def _is_ignored(file: SourceFile, finding: Finding) -> bool:
    for line in {file.tree.line(finding.place.start), file.tree.line(max(finding.place.end - 1, 0))}:
        found = _IGNORE.search(file.tree.line_text(line))
        names = {name.strip() for name in (found[1] or "").split(",")} if found is not None else set()
        if found is not None and (found[1] is None or names & {finding.rule.code, finding.rule.name}):
            return True
    return False


# -- applying ----------------------------------------------------------------------------------------


def _named(file: SourceFile, edits: list[Edit]) -> tuple[list[Edit], list[str]]:
    """The edits, with a local name for the accelerator in functions that ask for it often.

    And the statements that bind such a name beside the imports, in a notebook.
    """
    if file.imports_in_functions:
        return edits, []  # a name before the import would have no value
    is_acclimate = file.target.name == "acclimate"
    call = f"{file.accelerator if is_acclimate else file.helper}()"
    names = ("acc", "accelerator") if is_acclimate else ("device_type", "accelerator")
    statements: list[str] = []
    is_new = file.needs_import if is_acclimate else file.needs_helper
    if file.tree.is_notebook and is_new and file.optional_import is None:
        statement, edits = name_for_notebook(file.tree, edits, call, names)
        statements += [statement] if statement else []
    return with_local_names(file.tree, edits, call, names), statements


def _head(file: SourceFile, applied: list[Decision], names: list[str]) -> list[Edit]:
    """The imports and helper functions that the edits need, and statements that bind names by them."""
    accelerator, helper, torch = f"{file.accelerator}()", f"{file.helper}()", f"{file.torch}."
    texts = [
        (decision.finding, part)
        for decision in applied
        for edit in decision.finding.edits
        for part in edit.parts
        if isinstance(part, str)
    ]
    uses_wrapper = any(f"{file.on_any_device}(" in part for _, part in texts)
    asking = [finding for finding, part in texts if accelerator in part]
    beside = _in_functions(file, asking)
    uses_accelerator = bool(asking) or (uses_wrapper and not file.imports_in_functions)
    uses_helper = file.target.name == "torch" and (uses_wrapper or any(helper in part for _, part in texts))
    imports: list[str] = []
    if file.target.name == "acclimate" and file.needs_import and uses_accelerator and beside is None:
        imports.append(file.import_of_accelerator)
    uses_torch = uses_helper or uses_wrapper or any(torch in part for _, part in texts)
    if file.needs_torch_import and uses_torch and not file.imports_torch_in_functions:
        imports.append("import torch")
    helpers = [file.helper_text] if uses_helper and file.needs_helper else []
    helpers += [file.on_any_device_text] if uses_wrapper and file.needs_on_any_device else []
    beside = beside or []
    if not imports and not helpers:
        return beside
    if file.optional_import is not None:
        beside = [_after(file, file.optional_import, imports)] if imports else []
        imports = []
    new = (accelerator, helper, torch, f"{file.on_any_device}(")
    relevant = [finding for finding, part in texts if any(name in part for name in new)]
    early = [f.place.start for f in relevant if f.node is not None and file.runs_at_import(f.node)]
    first, uses = min(early, default=len(file.tree.bytes)), [finding.place.start for finding in relevant]
    return [*beside, *new_lines(file.tree, first, uses, imports, helpers, names)]


def _in_functions(file: SourceFile, asking: list[Finding]) -> list[Edit] | None:
    """The imports of acclimate beside those of torch in functions; ``None``: the module imports it.

    Args:
        file: the file.
        asking: the findings whose edits ask for the accelerator.
    """
    if not file.imports_in_functions:
        return None
    lines: dict[cst.SimpleStatementLine, None] = {}
    for finding in asking:
        line = torchs_import_before(file, finding.node)
        if line is None:
            return None  # an unsafe edit in another place
        if not imports_before(file, finding.node, file.accelerator):
            lines[line] = None
    return [_after(file, line, [file.import_of_accelerator]) for line in lines]


def _after(file: SourceFile, line: cst.SimpleStatementLine, statements: list[str]) -> Edit:
    """An insertion of statements after a line, with its indentation."""
    number = file.tree.line(file.span(line.body[0]).start)
    text = file.tree.line_text(number)
    margin = text[: len(text) - len(text.lstrip())]
    end = file.tree.line(max(file.span(line.body[0]).end - 1, 0))
    starts = file.tree.line_starts
    at = starts[end] if end < len(starts) else len(file.tree.bytes)
    return insert(at, "".join(f"{margin}{one}{file.tree.newline}" for one in statements))


def _site(file: SourceFile, decision: Decision) -> Site:
    place = decision.finding.place
    rule = decision.finding.rule
    return Site(
        rule.code,
        rule.name,
        file.tree.line(place.start),
        file.tree.column(place.start),
        shortened(file.tree.source(place)),
        decision.status,
        decision.safe,
        decision.reason,
        _lines_after(file, decision.finding) if decision.status is Status.UNSAFE else "",
    )


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
