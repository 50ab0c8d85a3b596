"""Dictionaries that begin empty, and get all their entries by keys that are no literals: ``held[device]``."""

from __future__ import annotations

from collections.abc import Iterable

import libcst as cst

from acclimate_port.dataflow.uses import LOOK_UP, class_around
from acclimate_port.source.tree import called_name, dotted, positional, string_value
from acclimate_port.source_file import SourceFile, kept

_MAKE = {"dict", "defaultdict", "OrderedDict", "WeakValueDictionary"}
_WITHOUT_KEYS = {"values", "clear"}


@kept
def is_cache(file: SourceFile, table: cst.CSTNode) -> bool:
    """Whether a table holds no name of a device but those by which the program itself fills and reads it.

    Whatever the device's name is, the program finds what it entered under the same name. A table that
    something else gets, that begins with entries, or that has an entry under a literal is no such table.
    """
    if isinstance(table, cst.Name):
        bound = file.bound_values(table)
        return bool(bound) and all(map(_is_empty, bound)) and _are_keyed(file, file.tree.accesses(table))
    if not isinstance(table, cst.Attribute) or dotted(table.value) not in ("self", "cls"):
        return False
    name = table.attr.value
    texts = (f"self.{name}", f"cls.{name}")
    given = [value for text in texts for value in file.values.given_to_attributes.get(text, ())]
    given += _of_class(class_around(file, table), name)
    return bool(given) and all(map(_is_empty, given)) and _are_keyed(file, file.attributes.get(name, ()))


def _of_class(owner: cst.ClassDef | None, name: str) -> list[cst.BaseExpression | None]:
    """What a class gives to a name of its own."""
    lines = owner.body.body if owner is not None else ()
    found: list[cst.BaseExpression | None] = []
    for line in lines:
        for one in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            targets = [target.target for target in one.targets] if isinstance(one, cst.Assign) else []
            targets += [one.target] if isinstance(one, cst.AnnAssign) else []
            if isinstance(one, (cst.Assign, cst.AnnAssign)) and name in map(dotted, targets):
                found.append(one.value)
    return found


def _is_empty(value: cst.BaseExpression | None) -> bool:
    """Whether a value is a new dictionary without entries."""
    if isinstance(value, cst.Call) and called_name(value) in _MAKE:
        return len(value.args) == (called_name(value) == "defaultdict") or not value.args
    return isinstance(value, cst.Dict) and not value.elements


def _are_keyed(file: SourceFile, reads: Iterable[cst.CSTNode]) -> bool:
    return all(_is_keyed(file, one) for one in reads)


def _is_keyed(file: SourceFile, read: cst.CSTNode) -> bool:
    """Whether code uses a table only by a key that is no literal, or without its keys."""
    at = file.tree.parent(read)
    around = file.tree.parent(at) if at is not None else None
    if isinstance(at, cst.Subscript) and at.value is read and len(at.slice) == 1:
        key = at.slice[0].slice
        return isinstance(key, cst.Index) and string_value(key.value) is None
    if isinstance(at, cst.Attribute) and isinstance(around, cst.Call) and around.func is at:
        given = positional(around)
        if at.attr.value == "keys":
            return _is_membership(file.tree.parent(around))
        is_look_up = at.attr.value in LOOK_UP and bool(given) and string_value(given[0].value) is None
        return is_look_up or at.attr.value in _WITHOUT_KEYS
    if isinstance(at, cst.Arg):
        return isinstance(around, cst.Call) and dotted(around.func) == "len"
    return _is_membership(at) or isinstance(at, (cst.AssignTarget, cst.AnnAssign, cst.NameItem))


def _is_membership(at: cst.CSTNode | None) -> bool:
    """Whether a test looks for a key in a table."""
    return isinstance(at, cst.ComparisonTarget) and isinstance(at.operator, (cst.In, cst.NotIn))
