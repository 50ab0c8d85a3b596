"""A device's name that a program uses as a word: a key of its own data, or a part of a command line."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import libcst as cst

from acclimate_port.conditions.placements import outermost_function
from acclimate_port.dataflow.uses import uses_of
from acclimate_port.source.tree import called_name, string_value
from acclimate_port.source_file import SourceFile, kept

_OPTION = re.compile(r"(^|[\s\"'])-{1,2}[A-Za-z][\w-]*[=\s]+[\"']?$")
"""The end of a text before the value of an option: ``python run.py --device``."""
_OPTION_WITH_VALUE = re.compile(r"(^|[\s\"'])-{1,2}[A-Za-z][\w-]*[=\s]+[\"']?(\{|%s)")
_IN_COMMAND = "it is part of a command line, which another program or machine reads"


def used_as_word(file: SourceFile, device: cst.CSTNode) -> str:
    """Why the name of a device is unsafe: it is a key, or part of a command; ``""`` if neither is shown."""
    if (line := _line_of_key(file, device)) is not None:
        return f"line {line} has the same name as a key, which stays"
    return _IN_COMMAND if any(_is_in_command(file, use) for use in uses_of(file, device)) else ""


# -- keys --------------------------------------------------------------------------------------------


def _line_of_key(file: SourceFile, device: cst.CSTNode) -> int | None:
    """The line of a key with the name of a device: the value itself, or the same text near it."""
    keys = [use for use in uses_of(file, device) if isinstance(file.tree.parent(use), cst.Index)]
    if not keys and isinstance(device, cst.SimpleString):
        around = file.tree.around(device, cst.ClassDef) or outermost_function(file, device)
        keys = _keys(file).get((string_value(device), id(around)), [])
    return file.tree.line(file.span(keys[0]).start) if keys else None


@kept
def _keys(file: SourceFile) -> dict[tuple[str | None, int], list[cst.CSTNode]]:
    """The keys of entries that are names of devices, by their text and the class or function around them."""
    found: dict[tuple[str | None, int], list[cst.CSTNode]] = defaultdict(list)
    for text in file.tree.of_type(cst.SimpleString):
        if (string_value(text) or "").startswith("cuda") and _is_key(file, text):
            around = file.tree.around(text, cst.ClassDef) or outermost_function(file, text)
            found[string_value(text), id(around)].append(text)
    return found


def _is_key(file: SourceFile, text: cst.CSTNode) -> bool:
    """Whether a text is the key of an entry, and not of a ``map_location``."""
    at = file.tree.parent(text)
    if isinstance(at, cst.DictElement):
        holder = file.tree.parent(at)
        return at.key is text and not isinstance(file.tree.parent(holder or at), cst.Arg)
    return isinstance(at, cst.Index)


# -- command lines -----------------------------------------------------------------------------------


def _is_in_command(file: SourceFile, use: cst.CSTNode) -> bool:
    at = file.tree.parent(use)
    if isinstance(at, cst.FormattedStringExpression):
        return any(_OPTION.search(text) for text in _texts_before(file, at))
    if isinstance(at, cst.BinaryOperation) and at.right is use:
        return (
            _ends_with_option(file, at.left)
            or _OPTION_WITH_VALUE.search(file.tree.source(at.left)) is not None
        )
    if isinstance(at, cst.Arg):
        call = file.tree.parent(at)
        if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
            return False
        is_format = called_name(call) == "format"
        return is_format and _OPTION_WITH_VALUE.search(file.tree.source(call.func)) is not None
    if isinstance(at, cst.Element):
        holder = file.tree.parent(at)
        listed = [*holder.elements] if isinstance(holder, (cst.List, cst.Tuple)) else []
        before = listed[listed.index(at) - 1].value if at in listed[1:] else None
        return re.match(r"-{1,2}[A-Za-z]", string_value(before) or "") is not None
    return False


def _texts_before(file: SourceFile, part: cst.CSTNode) -> Iterator[str]:
    """The text before a part of an f-string."""
    around = file.tree.parent(part)
    parts = [*around.parts] if isinstance(around, cst.FormattedString) else []
    before = parts[parts.index(part) - 1] if part in parts[1:] else None  # type: ignore[arg-type]
    if isinstance(before, cst.FormattedStringText):
        yield before.value


def _ends_with_option(file: SourceFile, left: cst.BaseExpression) -> bool:
    """Whether the text that a device is appended to ends with an option."""
    last = left.right if isinstance(left, cst.BinaryOperation) else left
    return _OPTION.search(string_value(last) or "") is not None
