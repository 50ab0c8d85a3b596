"""Checks that accept only some names of devices: by a list, a pattern, an enumeration or a ``Literal``.

``if device not in ALLOWED: raise`` with ``ALLOWED = ("cpu", "cuda")`` refuses another accelerator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from acclimate_port.dataflow.uses import fields_of, uses_of
from acclimate_port.source.tree import base_names, called_name, dotted, last_name, string_value, walk
from acclimate_port.source.values import DEVICE_NAME
from acclimate_port.source_file import SourceFile, kept

_ENUMERATIONS = {"Enum", "StrEnum"}
_MATCH = ("match", "fullmatch", "search")
_SUBSTITUTE = ("sub", "subn", "split", "findall")
_TAKE_APART = {
    *("replace", "strip", "lstrip", "rstrip", "removeprefix", "split", "rsplit", "partition", "rpartition"),
    *("find", "rfind", "index", "count"),
}
"""Methods of a text that look for another one in it."""
_CHECKING = re.compile(r"validator|\bpattern=|\bregex=")
_CHECKS_FIELD = re.compile(r"validator$|^validates")
_CHECK_WORDS = ("pattern", "regex", "validator", "validate")
"""Arguments of a field by which libraries check its value."""
_LENGTHS = ("4", "5")
"""The numbers of letters in `cuda` and in `cuda:`."""
ACCEPTED = "line {line} accepts only the names of some devices, and stays as it is"


def reason_against_words(file: SourceFile, device: cst.CSTNode) -> str:
    """Why a device must not get another accelerator's name; ``""`` if nothing that it reaches refuses it."""
    checked, taken = _checked(file), _taken_by_classes(file)
    for use in uses_of(file, device) if checked or taken else ():
        if (check := checked.get(id(use))) is not None:
            return ACCEPTED.format(line=file.tree.line(file.span(check).start))
        given = file.tree.given_to(use)
        name = dotted(given.call.func) if given is not None else ""
        for word in (given.word, f"#{given.index}") if given is not None else ():
            if (name, word) in taken:
                return ACCEPTED.format(line=file.tree.line(file.span(taken[name, word]).start))
    return ""


@kept
def accepted_words(file: SourceFile) -> list[tuple[cst.CSTNode, cst.CSTNode]]:
    """The checks of a file that accept a list or a pattern, each with what it looks at."""
    return [*_in_lists(file), *_by_patterns(file), *_taken_apart(file)]


@kept
def classes_with_words(file: SourceFile) -> list[tuple[cst.ClassDef, tuple[str, ...]]]:
    """The classes that accept only some names of devices, each with the words for the argument."""
    return [*_enumerations(file), *_with_literals(file), *_with_validators(file)]


@kept
def _checked(file: SourceFile) -> dict[int, cst.CSTNode]:
    return {id(value): check for check, value in accepted_words(file)}


@kept
def _taken_by_classes(file: SourceFile) -> dict[tuple[str, str], cst.ClassDef]:
    return {(own.name.value, word): own for own, words in classes_with_words(file) for word in words}


def _in_lists(file: SourceFile) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    for test in file.tree.of_type(cst.Comparison):
        target = test.comparisons[0]
        is_membership = isinstance(target.operator, (cst.In, cst.NotIn))
        if is_membership and any(map(_lists_cuda, _held(file, target.comparator))):
            yield test, test.left
    if "cuda" not in file.tree.text:
        return
    for table in file.tree.of_type(cst.Dict):  # `{"cuda": a, "cpu": b}[device]`
        entry = file.tree.parent(table)
        index = entry.slice[0].slice if isinstance(entry, cst.Subscript) and entry.value is table else None
        if isinstance(entry, cst.Subscript) and isinstance(index, cst.Index) and _lists_cuda(table):
            yield entry, index.value


def _by_patterns(file: SourceFile) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    for call in file.tree.of_type(cst.Call):
        if called_name(call) not in _MATCH or not call.args or not isinstance(call.func, cst.Attribute):
            continue
        is_plain = dotted(call.func.value) == "re"
        patterns = [call.args[0].value] if is_plain else _held(file, call.func.value)
        if len(call.args) > is_plain and any("cuda" in file.tree.source(one) for one in patterns):
            yield call, call.args[is_plain].value


def _taken_apart(file: SourceFile) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """What looks for CUDA's name in a device's, or cuts it off: ``int(device.replace("cuda:", ""))``."""
    if "cuda" in file.tree.text:
        for call in file.tree.of_type(cst.Call):
            name, is_method = called_name(call), isinstance(call.func, cst.Attribute)
            if is_method and name in _TAKE_APART and any(_names_cuda(one.value) for one in call.args[:1]):
                yield call, _whole_text(call.func)
            elif name in _SUBSTITUTE and len(call.args) > 1 and _names_cuda(call.args[0].value):
                yield call, _whole_text(call.args[-1])
    for entry in file.tree.of_type(cst.Subscript):
        part = entry.slice[0].slice
        ends = (part.lower, part.upper) if isinstance(part, cst.Slice) else ()
        is_cut = any(isinstance(one, cst.Integer) and one.value in _LENGTHS for one in ends)
        if is_cut and DEVICE_NAME.search(last_name(text := _whole_text(entry))):
            yield entry, text


def _names_cuda(node: cst.CSTNode) -> bool:
    return "cuda" in (string_value(node) or "")


def _whole_text(holder: cst.CSTNode) -> cst.CSTNode:
    """What a method or an entry of a text is of: ``device`` of ``str(device).replace``."""
    text: cst.CSTNode = getattr(holder, "value", holder)
    if isinstance(text, cst.Call) and called_name(text) == "str" and text.args:
        return text.args[0].value
    return text


def _enumerations(file: SourceFile) -> Iterator[tuple[cst.ClassDef, tuple[str, ...]]]:
    for own in file.tree.of_type(cst.ClassDef):
        if not _ENUMERATIONS.isdisjoint(base_names(own)):
            lines = (line for line in own.body.body if isinstance(line, cst.SimpleStatementLine))
            members = [one.value for line in lines for one in line.body if isinstance(one, cst.Assign)]
            if any(map(_is_cuda, members)):
                yield own, ("value", "#0")


def _with_literals(file: SourceFile) -> Iterator[tuple[cst.ClassDef, tuple[str, ...]]]:
    """The classes with a field of ``Literal["cpu", "cuda"]``; a plain dataclass checks none."""
    for own in file.tree.of_type(cst.ClassDef) if "Literal" in file.names else ():
        if any(last_name(one.decorator) == "dataclass" for one in own.decorators) or not own.bases:
            continue
        lines = (line for line in own.body.body if isinstance(line, cst.SimpleStatementLine))
        for field in (one for line in lines for one in line.body if isinstance(one, cst.AnnAssign)):
            words = walk(field.annotation)
            if "Literal" in file.tree.source(field.annotation.annotation) and any(map(_is_cuda, words)):
                name = last_name(field.target)
                yield own, (name, *(f"#{n}" for n, one in enumerate(fields_of(own)) if one == name))


def _with_validators(file: SourceFile) -> Iterator[tuple[cst.ClassDef, tuple[str, ...]]]:
    """The classes whose field has a pattern, a list or a function that looks for CUDA's name."""
    if "cuda" not in file.tree.text or _CHECKING.search(file.tree.text) is None:
        return
    for own in file.tree.of_type(cst.ClassDef):
        lines = [
            part for line in own.body.body if isinstance(line, cst.SimpleStatementLine) for part in line.body
        ]
        fields = [(last_name(one.target), one.value) for one in lines if isinstance(one, cst.AnnAssign)]
        fields += [
            (last_name(one.targets[0].target), one.value) for one in lines if isinstance(one, cst.Assign)
        ]
        names = {name for name, value in fields if value is not None and _has_check(value)}
        for method in (one for one in own.body.body if isinstance(one, cst.FunctionDef)):
            checks = [one.decorator for one in method.decorators if isinstance(one.decorator, cst.Call)]
            checks = [one for one in checks if _CHECKS_FIELD.search(last_name(one.func))]
            if checks and any(map(_names_cuda, walk(method.body))):
                names |= {string_value(one.value) or "" for check in checks for one in check.args}
        if names:
            yield own, tuple(sorted(names - {""}))


def _has_check(value: cst.CSTNode) -> bool:
    """Whether a field's value has an argument that accepts some names: ``Field(pattern="cpu|cuda")``."""
    given = [part for part in walk(value) if isinstance(part, cst.Arg)]
    checks = (one.value for one in given if one.keyword is not None and one.keyword.value in _CHECK_WORDS)
    return any(_names_cuda(part) for check in checks for part in walk(check))


def _held(file: SourceFile, holder: cst.CSTNode) -> list[cst.BaseExpression]:
    """What a name or an attribute gets in the file; nothing for other expressions."""
    if isinstance(holder, cst.Name):
        return [one for one in file.bound_values(holder) if one is not None]
    alike = file.tree.alike(holder) if isinstance(holder, cst.Attribute) else ()
    return [one for one in map(file.tree.value_of, alike) if one is not None]


def _lists_cuda(listed: cst.CSTNode) -> bool:
    """Whether a list, a set or the keys of a dictionary have the name of CUDA, and no way to add others."""
    if isinstance(listed, cst.Dict):
        return any(_is_cuda(one.key) for one in listed.elements if isinstance(one, cst.DictElement))
    if isinstance(listed, cst.Call) and called_name(listed) in ("set", "frozenset", "tuple", "list"):
        return any(_lists_cuda(argument.value) for argument in listed.args)
    elements = listed.elements if isinstance(listed, (cst.Tuple, cst.List, cst.Set)) else ()
    return any(_is_cuda(one.value) for one in elements)


def _is_cuda(node: cst.CSTNode) -> bool:
    return (string_value(node) or "").partition(":")[0] == "cuda"
