"""Settings that hide the devices of CUDA from a program, so that it runs on the host.

``os.environ["CUDA_VISIBLE_DEVICES"] = "-1"`` makes ``torch.cuda.is_available()`` false. It hides no device of
another accelerator, which a ported test would find and use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from acclimate_port.dataflow.uses import parameter_of
from acclimate_port.source.tree import (
    called_name,
    dotted,
    keyword,
    last_name,
    positional,
    string_value,
)
from acclimate_port.source_file import SourceFile, is_assigned, kept

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_SETTERS = ("setdefault", "putenv", "setenv", "setitem", "__setitem__")
_NAMES_DEVICES = re.compile(r"\s*(\d|GPU-|MIG-|all\b)")
"""The beginning of a value that shows a device: any other hides them all."""
_SAYS_HOST = re.compile(r"-1|\bcpu\b", re.IGNORECASE)
"""What the help of an option says if one of its values means the host."""
_KEEP_TEXT = ("str", "int", "strip", "get", "pop", "getattr")
_QUESTIONS = ("torch.cuda.is_available", "torch.cuda.device_count")
_MOVES = tuple(f"torch.{owner}.{name}" for owner in ("Tensor", "nn.Module") for name in ("cuda", "to"))
_MOST_STEPS = 20
REPLACED = "line {line} replaces this method of all tensors or modules, and the new code does not call that"
HIDDEN = "line {line} hides the devices of CUDA to run a program on the host, and hides no others"


@kept
def hiding(file: SourceFile) -> list[cst.CSTNode]:
    """The places where a file hides the devices of CUDA, in source order."""
    found = [*_by_variable(file)] if "VISIBLE_DEVICES" in file.tree.text else []
    found += [*_by_answer(file)]
    return sorted(found, key=lambda node: file.span(node).start)


def reason_against_hidden(file: SourceFile) -> str:
    """Why a test for CUDA must not find another accelerator; ``""`` if nothing hides the devices of CUDA."""
    found = hiding(file)
    return HIDDEN.format(line=file.tree.line(file.span(found[0]).start)) if found else ""


def reason_against_replaced(file: SourceFile) -> str:
    """Why a move of a tensor or module must stay; ``""`` if the file does not replace the method."""
    found = replacing(file)
    return REPLACED.format(line=file.tree.line(file.span(found[0]).start)) if found else ""


@kept
def replacing(file: SourceFile) -> list[cst.CSTNode]:
    """Where a file replaces the method by which tensors are moved: ``torch.Tensor.cuda = lambda self: self``.

    Where it does so without CUDA alone, the new question for a device says the same.
    """
    found: list[cst.CSTNode] = []
    for name in ("cuda", "to"):
        for read in file.attributes.get(name, ()):
            if is_assigned(file, read) and file.tree.qualified(read) in _MOVES:
                around = (one for one in file.tree.ancestors(read) if isinstance(one, cst.If))
                if not any("is_available" in file.tree.source(one.test) for one in around):
                    found.append(read)
    return found


def _by_variable(file: SourceFile) -> Iterator[cst.CSTNode]:
    for variable, value in _settings(file):
        if _may_hide(file, value, _MOST_STEPS):
            yield variable


def _by_answer(file: SourceFile) -> Iterator[cst.CSTNode]:
    """Where a program replaces the question for CUDA: ``torch.cuda.is_available = lambda: False``."""
    for name in (one.rpartition(".")[2] for one in _QUESTIONS):
        for read in file.attributes.get(name, ()):
            if is_assigned(file, read) and file.tree.qualified(read) in _QUESTIONS:
                yield read
    for call in file.tree.of_type(cst.Call) if "setattr" in file.names else ():
        given = [one.value for one in positional(call)]
        if dotted(call.func) == "setattr" and len(given) > 1:
            name = f"{file.tree.qualified(given[0])}.{string_value(given[1])}"
            yield from [call] if name in _QUESTIONS else []


def _settings(file: SourceFile) -> Iterator[tuple[cst.CSTNode, cst.BaseExpression]]:
    """Each name of such a variable that gets a value, and the value."""
    for name in file.tree.of_type(cst.SimpleString):
        if string_value(name) not in _VARIABLES:
            continue
        at = file.tree.parent(name)
        if isinstance(at, cst.DictElement) and at.key is name:
            yield name, at.value
        elif isinstance(at, cst.Index):
            holder = file.tree.parent(file.tree.parent(at) or at)
            value = file.tree.value_of(holder) if isinstance(holder, cst.Subscript) else None
            yield from [(name, value)] if value is not None else []
        elif isinstance(at, cst.Arg) and isinstance(call := file.tree.parent(at), cst.Call):
            after = call.args[call.args.index(at) + 1 :]
            yield from [(name, after[0].value)] if after and called_name(call) in _SETTERS else []
    for given in file.tree.of_type(cst.Arg):  # `os.environ.update(CUDA_VISIBLE_DEVICES="")`
        if given.keyword is not None and given.keyword.value in _VARIABLES:
            yield given, given.value


def _may_hide(file: SourceFile, value: cst.CSTNode | None, steps: int) -> bool:
    """Whether the file shows that a value may be one that names no device."""
    if value is None or not steps:
        return False
    text = string_value(value)
    if text is not None:
        return _NAMES_DEVICES.match(text) is None
    if isinstance(value, cst.UnaryOperation):
        return isinstance(value.operator, cst.Minus)
    return any(_may_hide(file, part, steps - 1) for part in _parts(file, value))


def _parts(file: SourceFile, value: cst.CSTNode) -> Iterator[cst.CSTNode | None]:
    """What a value may be: the sides of a choice, what a name holds, the default of an option."""
    if isinstance(value, cst.IfExp):
        yield from (value.body, value.orelse)
    elif isinstance(value, cst.BooleanOperation):
        yield value.right
    elif isinstance(value, cst.Call) and called_name(value) in _KEEP_TEXT:
        yield from [one.value for one in positional(value)][-1:]
        if isinstance(value.func, cst.Attribute) and called_name(value) == "strip":
            yield value.func.value
    elif isinstance(value, cst.FormattedString) and len(value.parts) == 1:
        held = value.parts[0]
        yield held.expression if isinstance(held, cst.FormattedStringExpression) else None
    elif isinstance(value, cst.Name) and not _is_tested(file, value):
        yield from file.bound_values(value)
        yield from _given(file, value)
    elif isinstance(value, (cst.Attribute, cst.Subscript)) and not _is_tested(file, value):
        yield from (file.tree.value_of(one) for one in file.tree.alike(value))
        for option in file.options.get(last_name(value), ()):
            default, said = keyword(option, "default"), keyword(option, "help")
            yield default.value if default is not None else None
            if said is not None and _SAYS_HOST.search(file.tree.source(said.value)):
                yield _HOST


_HOST = cst.SimpleString('"-1"')


def _given(file: SourceFile, name: cst.Name) -> Iterator[cst.CSTNode | None]:
    """What a parameter may get: its default, and what the calls in the file give to it."""
    for one in (assignment.node for assignment in file.tree.assignments(name)):
        if isinstance(one, cst.Param):
            yield one.default
            function = file.tree.around(one, cst.FunctionDef)
            calls = file.tree.accesses(function.name) if isinstance(function, cst.FunctionDef) else ()
            for call in (file.tree.parent(read) for read in calls):
                for argument in call.args if isinstance(call, cst.Call) else ():
                    if parameter_of(file, file.tree.given_to(argument.value)) is one:
                        yield argument.value


def _is_tested(file: SourceFile, value: cst.CSTNode) -> bool:
    """Whether an ``if`` around the setting looks at its value: ``if args.gpu >= 0:``."""
    text = file.tree.source(value)
    for below, around in file.tree.upwards(value):
        if isinstance(around, cst.FunctionDef):
            return False
        test = around.test if isinstance(around, cst.If) and below is not around.test else None
        if test is not None and text in file.tree.source(test):
            return True
    return False
