"""Tests for CUDA that keep a device named by a setting from machines without it.

``cfg.device if torch.cuda.is_available() else "cpu"`` takes the host wherever the file of settings says
``cuda:0``. That file is not ported, so on another accelerator a ported test would let the name through.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from acclimate_port.conditions.statements import decided_by
from acclimate_port.source.tree import called_name, dotted, entry_key, string_value
from acclimate_port.source.values import DEVICE_NAME
from acclimate_port.source_file import SourceFile

_OWN = ("self", "cls")
_READ = ("get", "getattr", "pop")


def setting_guarded(file: SourceFile, question: cst.CSTNode) -> str:
    """The setting that gives the device where a question is true, while a host is named where it is not.

    A setting whose default is in a file of Python is ported with it, and a user who names another device
    means it.
    """
    for value, other in _sides(file, question):
        held = _inside(value)
        name = _setting(file, held)
        if name and _is_host(_inside(other)) and not _has_default(file, name):
            return file.tree.source(held)
    return ""


def _sides(file: SourceFile, question: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """What a choice gives for a true answer and for a false one, as an expression or as two assignments."""
    decided = decided_by(file, question)
    is_negated = isinstance(file.tree.parent(question), cst.UnaryOperation)
    if isinstance(decided, cst.IfExp):
        sides = (decided.body, decided.orelse)
        yield (sides[1], sides[0]) if is_negated else sides
    elif isinstance(decided, cst.If):
        assigns, rest = _assigned(decided.body), decided.orelse
        second = _assigned(rest.body) if isinstance(rest, cst.Else) else {}
        others = {name: one.value for name, one in second.items()}
        if rest is None:  # `device = cfg.device`, and then the host, or a setting that the block replaces
            others = {
                name: _before(file, decided, name) or one.targets[0].target for name, one in assigns.items()
            }
        for name in assigns.keys() & others.keys():
            pair: tuple[cst.CSTNode, cst.CSTNode] = (assigns[name].value, others[name])
            yield (pair[1], pair[0]) if is_negated else pair


def _assigned(block: cst.BaseSuite) -> dict[str, cst.Assign]:
    """The assignments of a block, by the name that each gives a value to."""
    lines = [one for one in block.body if isinstance(one, cst.SimpleStatementLine)]
    assigns = [one for line in lines for one in line.body if isinstance(one, cst.Assign)]
    return {dotted(one.targets[0].target): one for one in assigns}


def _before(file: SourceFile, statement: cst.If, name: str) -> cst.BaseExpression | None:
    """The value that the statements before one in its block give to a name, or to itself."""
    block = file.tree.parent(statement)
    lines = list(getattr(block, "body", ()))
    before = lines[: lines.index(statement)] if statement in lines else []
    for line in reversed(before):
        for one in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            if isinstance(one, cst.Assign) and dotted(one.targets[0].target) == name:
                return one.value
    return None


def _inside(value: cst.CSTNode) -> cst.CSTNode:
    """The device in a call of ``torch.device`` or ``str``."""
    while isinstance(value, cst.Call) and called_name(value) in ("device", "str") and len(value.args) == 1:
        value = value.args[0].value
    return value


def _setting(file: SourceFile, value: cst.CSTNode) -> str:
    """The name of a setting for a device: ``cfg.device``, ``cfg["device"]``, ``cfg.get("device")``."""
    if isinstance(value, cst.Attribute) and dotted(value).partition(".")[0] not in (*_OWN, "torch", ""):
        name = value.attr.value if file.tree.qualified(value) is None else ""
    elif isinstance(value, cst.Subscript):
        name = entry_key(value) or ""
    elif isinstance(value, cst.Call) and called_name(value) in _READ and value.args:
        name = next((text for one in value.args if (text := string_value(one.value))), "")
    else:
        name = ""
    return name if DEVICE_NAME.search(name) else ""


def _is_host(value: cst.CSTNode) -> bool:
    return string_value(value) == "cpu"


def _has_default(file: SourceFile, name: str) -> bool:
    """Whether a file of Python says what the setting is if a user says nothing."""
    return name in file.survey.device_options
