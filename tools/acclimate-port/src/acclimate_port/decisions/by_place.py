"""Findings that stay or are unsafe by the place of their code: a kernel, TorchScript, a ``try``."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import libcst as cst

from acclimate_port.conditions.accepted_words import reason_against_words
from acclimate_port.conditions.branches import holders_of_result
from acclimate_port.conditions.checkpoints import reason_against_split
from acclimate_port.conditions.expected_errors import meant_to_fail
from acclimate_port.conditions.expected_numbers import reason_against_numbers
from acclimate_port.conditions.first_use import reason_against_counting
from acclimate_port.conditions.hidden_devices import reason_against_hidden, reason_against_replaced
from acclimate_port.conditions.host_answers import only_serves
from acclimate_port.conditions.host_sides import other_side_is_of_host
from acclimate_port.conditions.loader_workers import reason_against_workers
from acclimate_port.conditions.local_imports import (
    GIVEN_TORCH,
    NOT_IMPORTED,
    WITHOUT_TORCH,
    gets_torch,
    imports_torch_anew,
    lacks_import,
    reason_without_value,
)
from acclimate_port.conditions.missing_cuda import reason_against_host
from acclimate_port.conditions.pinned_memory import only_pins, reason_against_pinning
from acclimate_port.conditions.statements import decided_by, refuses, whole_condition
from acclimate_port.dataflow.own_devices import (
    bound_elsewhere,
    computes_elsewhere,
    computes_in_64_bits,
    given_by_base,
    moved_by_lightning,
)
from acclimate_port.dataflow.uses import class_around
from acclimate_port.decisions.decision import asks_for_device, is_test, may_take_host
from acclimate_port.decisions.links import GIVE_DEVICE
from acclimate_port.new_code.printed_text import loses_text
from acclimate_port.rules.base import Finding, Outcome, is_assigned
from acclimate_port.source.torch_cuda import NEVER_RAISE, STREAMS
from acclimate_port.source.tree import called_name, dotted, string_value, walk
from acclimate_port.source_file import SourceFile, cuda_name

_USE_DEVICE = {"ACC101", "ACC102", "ACC201", "ACC205", "ACC206", "ACC301", "ACC304", "ACC307"}
"""Rules for code that may use a device, and raises if there is none."""
_LOOK_UP = {
    "ACC103",
    *("ACC201", "ACC202", "ACC203", "ACC205", "ACC206", "ACC301", "ACC304", "ACC401", "ACC402", "ACC501"),
    "ACC506",
}
"""Rules whose edits look up the accelerator where the code before does not, or not by itself."""

_CAUGHT = "the program catches the error of a machine without CUDA, and other machines raise none"
_CPU_TWICE = "on a host the list that holds it would hold the CPU twice"
_PRINTED = "an f-string prints the text of this code (`=`), and cannot hold it as plain text"
_METHOD_CUDA = "a class gives it in its method `cuda`, whose users may rely on CUDA"
_ONE_DEVICE = "a machine may have one accelerator only, and takes the host today"
_NUMBERED = re.compile(r"cuda:0*[1-9]\d*$")
_SAID = "the text of its function says that it is about kernels or operators of CUDA"
_CODE_FOR_CUDA = re.compile(
    r"\bCUDA[ -](kernels?|op|ops|operators?|extensions?)\b"
    r"|\b(kernels?|op|ops|operators?|extensions?) (in|for|of|with) CUDA\b",
    re.IGNORECASE,
)
_BROAD = {"Exception", "BaseException", "RuntimeError", "AssertionError"}
"""Exceptions that torch raises without CUDA, and their bases."""
_SHORT = 3
"""The most statements of a ``try`` that is there to find out something, and does no other work."""
_CHOOSE_DEVICE = {
    *(*GIVE_DEVICE, "available-choice", "cuda-method", "tensor-type", "default-tensor-type"),
    *("current-device", "device-ids"),
}
"""Rules for what puts something on a device."""


def by_place(file: SourceFile, finding: Finding) -> Finding:
    """The finding, left or unsafe if the place of its code demands it."""
    if finding.outcome is Outcome.EXEMPT:
        return finding
    if reason := _meant_for_one_vendor(file, finding):
        # A flag says to other code, too, that there is no CUDA.
        is_alone = not is_test(file, finding) or not (
            holders_of_result(file, finding.node) or other_side_is_of_host(file, finding.node)
        )
        return dataclasses.replace(
            finding, outcome=Outcome.LEFT, reason=reason, safe=True, edits=(), stands_alone=is_alone
        )
    if finding.outcome is Outcome.LEFT:
        return finding
    if file.tree.is_for_older_torch(finding.node):
        reason = "the branch is for an older torch, which lacks what an edit would use"
        return finding.rule.exempt(file, finding.node, reason, finding.claims)
    if reason := _reason_to_leave(file, finding):
        return finding.rule.left(file, finding.node, reason, finding.claims)
    if finding.safe and (reason := _reason_to_doubt(file, finding)):
        return dataclasses.replace(finding, safe=False, reason=reason)
    if finding.safe and is_test(file, finding) and (reason := reason_against_pinning(file, finding.node)):
        is_alone = only_pins(file, finding.node)
        return dataclasses.replace(finding, safe=False, reason=reason, stands_alone=is_alone)
    return finding


def _meant_for_one_vendor(file: SourceFile, finding: Finding) -> str:
    if file.is_build_script or file.imports_build_tools:
        return "a build script, or a file that one imports: it builds for one vendor's hardware"
    if reason := file.vendor_code.reason(finding.node, is_test(file, finding)):
        return reason
    around = (one for one in file.tree.ancestors(finding.node) if isinstance(one, cst.ClassDef))
    if beside := next((file.classes_for_cuda[one] for one in around if one in file.classes_for_cuda), ""):
        return f"the class is the program's own code for CUDA, beside `{beside}`"
    if file.kernels.are_for_cuda_alone and is_test(file, finding):
        return "it guards CUTLASS kernels, which only NVIDIA GPUs run"
    return ""


def _reason_to_leave(file: SourceFile, finding: Finding) -> str:
    node = finding.node
    is_named = finding.rule.name in ("device-string", "device-comparison")
    if is_named and file.own_words and not _is_given_to_torch(file, finding):
        return f"the program has its own words for devices: `{file.own_words}` beside `cuda`"
    if is_assigned(file, node) and file.tree.qualified(node):
        return "the program assigns to this name of torch.cuda"
    if file.torchscript.holds(node) and _asks(file, finding):
        return "TorchScript compiles this code, and cannot call get_accelerator() or torch.accelerator"
    if finding.rule.name in _CHOOSE_DEVICE and (reason := meant_to_fail(file, node)):
        return reason
    return reason_without_value(file, node, _new_code(finding))


def _reason_to_doubt(file: SourceFile, finding: Finding) -> str:
    """Why the program may catch the error of a missing device, or why it is too early to count devices."""
    node, is_device, reason = finding.node, finding.rule.name in GIVE_DEVICE, ""
    if gets_torch(file, node):
        return GIVEN_TORCH
    if loses_text(file.tree, node):
        return _PRINTED
    if is_device and _is_in_method_cuda(file, node):
        return _METHOD_CUDA
    if name := _replaced_by_tests(file, node):
        return f"a test replaces `torch.cuda.{name}` for this module, and the new code does not call that"
    if any(f"{file.accelerator}()" in part for part in _new_code(finding)) and lacks_import(file, node):
        return NOT_IMPORTED
    if _finds_device(file, finding) and (reason := reason_against_hidden(file)):
        return reason
    if finding.rule.name == "cuda-method" and (reason := reason_against_replaced(file)):
        return reason
    if _asks(file, finding):
        is_lookup = finding.rule.code in _LOOK_UP
        reason = reason_against_counting(file, node, is_device=is_device, is_lookup=is_lookup)
        reason = reason or (WITHOUT_TORCH if imports_torch_anew(file, node) else "")
    if not reason and (finding.rule.name == "available-choice" or asks_for_device(file, finding)):
        reason = reason_against_workers(file, node)
    if not reason and is_device:
        reason = reason_against_host(file, node) or (_CPU_TWICE if _is_beside_cpu(file, node) else "")
    if not reason and (is_device or finding.rule.name == "available-choice"):
        reason = reason_against_words(file, node)
    if not reason and is_device and _NUMBERED.match(string_value(node) or "") and file.is_guarded(node):
        reason = _ONE_DEVICE
    is_choice = finding.rule.name in _CHOOSE_DEVICE or _finds_device(file, finding)
    if not reason and is_device:
        reason = _built_for_cuda(file, node)
    if not reason and is_choice and _is_said_to_be_for_cuda(file, node):
        return _SAID
    if not reason and (finding.rule.name in _CHOOSE_DEVICE or _follows_device(file, node)):
        reason = bound_elsewhere(file, node) or reason_against_split(file)
    is_count = isinstance(node, cst.Call) and cuda_name(file, node.func) == "device_count"
    is_whole = is_choice or finding.rule.name == "communication-backend" or _follows_device(file, node)
    is_whole = is_whole or is_count
    if not reason and is_whole and not _only_loads(file, node):
        reason = moved_by_lightning(file, node) or computes_elsewhere(file)
        reason = reason or computes_in_64_bits(file, node, may_be_host=may_take_host(file, finding))
    if not reason and (is_whole or finding.rule.name in ("mixed-precision", "data-parallel")):
        reason = given_by_base(file, node)
    reason = reason or (reason_against_numbers(file, node) if is_choice else "")
    is_load = finding.rule.code == "ACC307"
    return reason or (
        _CAUGHT if finding.rule.code in _USE_DEVICE and _is_probe(file, node, is_load=is_load) else ""
    )


def _replaced_by_tests(file: SourceFile, node: cst.CSTNode) -> str:
    """The function of torch.cuda, among those that a piece of code calls, that tests of the file replace."""
    replaced = {name for _, name in file.survey.mocked}
    calls = (one for one in walk(node) if isinstance(one, cst.Call)) if replaced else ()
    called = (cuda_name(file, one.func) or "" for one in calls)
    return next((name for name in called if name in replaced), "")


def _follows_device(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a call sets the device, takes a stream of it, or asks what only the program's device can do."""
    name = cuda_name(file, node.func) if isinstance(node, cst.Call) else None
    return name in ("set_device", "device", "device_of", "is_bf16_supported", *STREAMS)


def _finds_device(file: SourceFile, finding: Finding) -> bool:
    """Whether a finding is a question for a device, by the answer to which the program does something else.

    To wait for an accelerator, to seed it or to free its memory is right whether the program uses it or not.
    """
    if finding.rule.name == "available-choice":
        return True
    decided = decided_by(file, finding.node)
    is_for_others = decided is not None and decided.orelse is None and only_serves(file, finding.node)
    return asks_for_device(file, finding) and not is_for_others


def _built_for_cuda(file: SourceFile, node: cst.CSTNode) -> str:
    """Why a device stands under a question that stays: whether torch is built for CUDA."""
    for around in file.tree.ancestors(node):
        if isinstance(around, (cst.FunctionDef, cst.ClassDef)):
            return ""
        if isinstance(around, (cst.If, cst.IfExp)) and "has_cuda" in file.names:
            parts = [one for one in walk(around.test) if isinstance(one, cst.Attribute)]
            if any(file.tree.qualified(one) == "torch.has_cuda" for one in parts):
                line = file.tree.line(file.span(around.test).start)
                return f"line {line} asks whether torch is built for CUDA, and stays as it is"
    return ""


def _is_in_test(file: SourceFile, node: cst.CSTNode, around: cst.CSTNode) -> bool:
    """Whether a node is a part of the condition of an ``if`` statement around it."""
    test = file.span(around.test) if isinstance(around, cst.If) else None
    return test is not None and test.start <= file.span(node).start < test.end


def _only_loads(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a question only decides about the memory or the workers of a data loader."""
    given = file.tree.given_to(whole_condition(file, node))
    return given is not None and given.word in ("pin_memory", "num_workers", "persistent_workers")


def _is_said_to_be_for_cuda(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether the docstring of the function or class around a node, or what it decides about, says so."""
    for around in file.tree.ancestors(node):
        said = ""
        if isinstance(around, (cst.FunctionDef, cst.ClassDef)):
            said = around.get_docstring() or ""
        elif _is_in_test(file, node, around) or isinstance(around, cst.Decorator):
            said = file.tree.source(around)
        if _CODE_FOR_CUDA.search(said):
            return True
    return False


def _is_beside_cpu(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a list, a tuple or a set holds a device and the CPU, or is added to one that holds the CPU."""
    at = file.tree.parent(_whole_device(file, node))
    if file.is_guarded(node):
        return False
    if isinstance(at, cst.Arg):  # `devices.append(torch.device("cuda"))`
        call = file.tree.parent(at)
        if not isinstance(call, cst.Call) or called_name(call) not in ("append", "add", "insert"):
            return False
        holder = call.func.value if isinstance(call.func, cst.Attribute) else None
        return isinstance(holder, cst.Name) and any(map(partial(_holds_cpu, file), file.bound_values(holder)))
    whole = file.tree.parent(at) if isinstance(at, cst.Element) else None
    around = file.tree.parent(whole) if whole is not None else None
    while isinstance(around, (cst.BinaryOperation, cst.AugAssign)):
        if isinstance(around, cst.AugAssign):
            added_to = file.bound_values(around.target) if isinstance(around.target, cst.Name) else []
            return any(_holds_cpu(file, one) for one in (whole, *added_to))
        whole, around = around, file.tree.parent(around)
    return _holds_cpu(file, whole)


def _whole_device(file: SourceFile, node: cst.CSTNode) -> cst.CSTNode:
    """The call of ``torch.device`` that gets a name of a device, or the name itself."""
    given = file.tree.given_to(node)
    return given.call if given is not None and given.full == "torch.device" else node


def _holds_cpu(file: SourceFile, node: cst.CSTNode | None) -> bool:
    """Whether a list, or one of several that are added, has the CPU as an entry."""
    if isinstance(node, cst.BinaryOperation):
        return _holds_cpu(file, node.left) or _holds_cpu(file, node.right)
    held = [one.value for one in node.elements] if isinstance(node, (cst.List, cst.Tuple, cst.Set)) else []
    made = [one for one in held if isinstance(one, cst.Call) and one.args]
    held += [one.args[0].value for one in made if file.tree.qualified(one.func) == "torch.device"]
    return any(string_value(one) == "cpu" for one in held)


def _is_in_method_cuda(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a node is in a method ``cuda`` that a class defines: its users may ask for ``is_cuda``."""
    function = file.tree.function(node)
    is_one = isinstance(function, cst.FunctionDef) and function.name.value == "cuda"
    return is_one and class_around(file, node) is not None


def _is_given_to_torch(file: SourceFile, finding: Finding) -> bool:
    """Whether a device is an argument of a call of torch, or of a tensor or module."""
    given = file.tree.given_to(finding.node)
    return given is not None and (given.full.startswith("torch.") or given.name in ("to", "to_empty", "cuda"))


def _asks(file: SourceFile, finding: Finding) -> bool:
    """Whether an edit adds a call that looks up the accelerator."""
    names = (f"{file.accelerator}()", f"{file.helper}()", f"{file.torch}.accelerator.", "get_device_module(")
    return any(name in part for part in _new_code(finding) for name in names)


def _new_code(finding: Finding) -> list[str]:
    return [part for edit in finding.edits for part in edit.parts if isinstance(part, str)]


def _is_probe(file: SourceFile, node: cst.CSTNode, *, is_load: bool) -> bool:
    """Whether a use of a device, or a load, raises without CUDA and its function catches that."""
    name = cuda_name(file, node.func if isinstance(node, cst.Call) else node)
    # What records an event, or orders a stream, raises at its first use.
    is_quiet = name in NEVER_RAISE and name not in ("Event", "Stream")
    if is_quiet or (name or "").startswith("amp.") or file.is_guarded(node):
        return False
    for below, around in file.tree.upwards(node):
        if isinstance(around, (cst.FunctionDef, cst.ClassDef, cst.Lambda)):
            return False
        if isinstance(around, cst.Try) and below is around.body:
            asks = name or is_load or len(around.body.body) <= _SHORT
            if asks and any(map(_goes_on, around.handlers)):
                return True
    return False


def _goes_on(handler: cst.ExceptHandler) -> bool:
    """Whether a handler catches what torch raises without CUDA, and the program goes on."""
    kinds = handler.type.elements if isinstance(handler.type, cst.Tuple) else ()
    names = {dotted(kind.value) for kind in kinds} if kinds else {dotted(handler.type)}
    return (handler.type is None or bool(names & _BROAD)) and not refuses(handler.body)
