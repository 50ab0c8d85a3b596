"""The places that a value reaches in its file: through names, attributes, parameters and results."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from typing import NamedTuple

import libcst as cst

from acclimate_port.source.tree import (
    Given,
    base_names,
    called_name,
    dotted,
    entry_key,
    last_name,
    positional,
    string_value,
)
from acclimate_port.source_file import SourceFile, kept

DEVICE_KEYWORDS = {"device", "map_location", "torch_device"}
_MOST = 100
"""The most places that are looked at for one value."""
KEEP_NAME = {"lower", "strip", "casefold", "partition", "rpartition", "split", "rsplit", "removesuffix"}
"""Methods of a string whose result begins with the name of the device in it."""

LOOK_UP = {"get", "pop", "setdefault"}
"""Methods of a dictionary whose first argument is a key."""
_GIVE_DEFAULT = {"get", "getattr", "pop", "setdefault", "getenv"}
"""Calls that give their last argument in place of a missing value."""
SETTINGS = re.compile(
    r"(^|_)([Aa]rgs?|opts?|options?|flags?|h?params?|config|cfg|conf|namespace|ns|settings|defaults)$"
    r"|^(Namespace|[Dd]ict|update|parse_args)$|[a-z](Config|Cfg|Args|Arguments|Options|Opts|H?[Pp]arams|Settings)$|^[A-Z_]*(CONFIG|CFG|OPTIONS|OPTS|ARGS|FLAGS|DEFAULTS|SETTINGS|PARAMS)$"
)
"""Names of options and settings, and of classes and functions that make them."""

_KEEP_NUMBER = {"int", "float", "min", "max", "abs", "round", "sum"}
_GIVE_DEVICE = re.compile(r"^(?!(to|set|move|put|is|has)_).*(^|_)device(_?(type|name|str))?$")
"""Functions of other files that give a device for a device: ``resolve_device_type(device)``."""


@kept
def uses_of(
    file: SourceFile,
    value: cst.CSTNode,
    *,
    in_functions: bool = True,
    computed: bool = False,
    unless: Callable[[SourceFile, cst.CSTNode], bool] | None = None,
) -> list[cst.CSTNode]:
    """The expressions that have a value: the first, and those that names and functions pass it on to.

    Args:
        file: the file.
        value: the expression.
        in_functions: whether to follow the value into functions of the file, and out of them.
        computed: whether to follow the numbers that are computed from it, too.
        unless: says which expressions do not count, nor what follows from them.
    """
    found: list[cst.CSTNode] = []
    waiting, seen = [_Held(value)], {(id(value), "")}
    while waiting:
        held = waiting.pop()
        if unless is not None and unless(file, held.node):
            continue
        if not held.key:
            found.append(held.node)
        for following in _after(file, held, in_functions, computed) if len(seen) < _MOST else ():
            if (id(following.node), following.key) not in seen:
                seen.add((id(following.node), following.key))
                waiting.append(following)
                if len(seen) == _MOST:
                    break
    return found


def whole_choice(file: SourceFile, value: cst.CSTNode) -> cst.CSTNode:
    """The largest choice that may give a value: ``value if test else other``, ``value or other``."""
    whole = value
    for below, around in file.tree.upwards(value):
        is_test = isinstance(around, cst.IfExp) and below is around.test
        if is_test or not isinstance(around, (cst.IfExp, cst.BooleanOperation, cst.NamedExpr)):
            break
        whole = around
    return whole


class _Held(NamedTuple):
    """An expression that has a value, or a dictionary that has it under a key."""

    node: cst.CSTNode
    key: str = ""


def _after(file: SourceFile, held: _Held, in_functions: bool, computed: bool) -> Iterator[_Held]:
    if held.key:
        yield from _of_entry(file, held)
        return
    yield from map(_Held, _following(file, held.node, in_functions))
    yield from map(_Held, _computed(file, held.node) if computed else ())
    yield from (one for one in _entries_with(file, held.node) if one.key)


def _entries_with(file: SourceFile, node: cst.CSTNode) -> Iterator[_Held]:
    """The dictionaries that get a value as an entry: ``{"key": x}``, ``dict(key=x)``, ``d["key"] = x``."""
    at = file.tree.parent(node)
    if isinstance(at, cst.Assign):
        for entry in (one.target for one in at.targets if isinstance(one.target, cst.Subscript)):
            yield from (_Held(use, entry_key(entry) or "") for use in reads_of(file, entry.value))
    holder = file.tree.parent(at) if isinstance(at, (cst.DictElement, cst.Arg)) else None
    if isinstance(at, cst.DictElement) and at.value is node and holder is not None:
        yield _Held(holder, string_value(at.key) or "")
    elif isinstance(at, cst.Arg) and isinstance(holder, cst.Call) and dotted(holder.func) == "dict":
        yield _Held(holder, at.keyword.value if at.keyword is not None else "")


def _of_entry(file: SourceFile, held: _Held) -> Iterator[_Held]:
    """The reads of an entry, what else holds its dictionary, and arguments ``**options`` with a device."""
    node, key, at = held.node, held.key, file.tree.parent(held.node)
    if isinstance(at, cst.Arg) and at.star == "**" and key in DEVICE_KEYWORDS:
        yield _Held(at)
    elif isinstance(at, cst.StarredDictElement):
        around = file.tree.parent(at)
        yield from [_Held(around, key)] if around is not None else []
    elif isinstance(at, cst.Subscript) and at.value is node and entry_key(at) == key:
        yield from [_Held(at)] if not isinstance(file.tree.parent(at), cst.AssignTarget) else []
    elif isinstance(at, cst.Attribute) and at.attr.value in _GIVE_DEFAULT:
        call = file.tree.parent(at)
        is_read = isinstance(call, cst.Call) and call.args and string_value(call.args[0].value) == key
        yield from [_Held(call)] if is_read and call is not None else []
    elif isinstance(at, (cst.Assign, cst.AnnAssign)) and at.value is node:
        targets = [one.target for one in at.targets] if isinstance(at, cst.Assign) else [at.target]
        yield from (_Held(use, key) for target in targets for use in reads_of(file, target))


def _following(file: SourceFile, node: cst.CSTNode, in_functions: bool) -> Iterable[cst.CSTNode]:
    at = file.tree.parent(node)
    if isinstance(at, cst.IfExp):
        return [] if node is at.test else [at]
    if isinstance(at, cst.BooleanOperation):
        return [at]
    if isinstance(at, cst.NamedExpr):
        return [at, *reads_of(file, at.target)]
    if isinstance(at, cst.FormattedStringExpression):  # `f"{device}:0".split(":")`
        text = file.tree.parent(at)
        return [text] if text is not None and _text_method(file, text) is not None else []
    if isinstance(at, cst.Attribute) and at.value is node:
        called = _text_method(file, node)
        return [called] if called is not None else [at] if at.attr.value == "type" else []
    if isinstance(at, cst.Subscript) and at.value is node:
        return [at]
    if isinstance(at, cst.Arg):
        return _of_argument(file, at, in_functions)
    if isinstance(at, cst.Assign):
        return (use for target in at.targets for use in reads_of(file, _first(target.target)))
    if isinstance(at, cst.AnnAssign):
        return reads_of(file, at.target)
    if isinstance(at, cst.Param) and in_functions:
        return file.tree.accesses(at.name)
    return calls_of(file, file.tree.function(at)) if isinstance(at, cst.Return) and in_functions else []


def _computed(file: SourceFile, node: cst.CSTNode) -> Iterable[cst.CSTNode]:
    """What a number is a part of, and the reads of names that get a part of it: ``free, _ = f()``."""
    at = file.tree.parent(node)
    if isinstance(at, (cst.BinaryOperation, cst.UnaryOperation)):
        return [at]
    if isinstance(at, cst.Attribute) and at.value is node:
        return [at]
    if isinstance(at, cst.Arg):
        call = file.tree.parent(at)
        return [call] if isinstance(call, cst.Call) and called_name(call) in _KEEP_NUMBER else []
    if isinstance(at, cst.AugAssign):
        return reads_of(file, at.target)
    values = file.tree.parent(at) if isinstance(at, cst.Element) else None
    holder = file.tree.parent(values) if isinstance(values, cst.Tuple) else at
    targets = [one.target for one in holder.targets] if isinstance(holder, cst.Assign) else []
    parts = [part.value for one in targets if isinstance(one, cst.Tuple) for part in one.elements]
    if isinstance(values, cst.Tuple):  # `a, n = 1, device_count()`
        parts = [part for part, own in zip(parts, values.elements, strict=False) if own is at]
    return [use for part in parts for use in reads_of(file, part)]


def _text_method(file: SourceFile, node: cst.CSTNode) -> cst.Call | None:
    """The call of a method of a string that gives the string's first part, or all of it."""
    attribute = file.tree.parent(node)
    call = file.tree.parent(attribute) if isinstance(attribute, cst.Attribute) else None
    is_method = isinstance(call, cst.Call) and call.func is attribute and called_name(call) in KEEP_NAME
    return call if is_method and isinstance(call, cst.Call) else None


def _of_argument(file: SourceFile, argument: cst.Arg, in_functions: bool) -> Iterable[cst.CSTNode]:
    given = file.tree.given_to(argument)
    if given is None:
        return []
    call = given.call
    if given.full == "torch.device" or dotted(call.func) == "str":
        return [call]
    if given.name in _GIVE_DEFAULT and call.args[-1] is argument and len(call.args) > 1:
        return [call]
    if given.name == "add_argument" and given.word == "default":
        return reads_of_option(file, call)
    parameter = parameter_of(file, given) if in_functions else None
    if parameter is not None:
        return file.tree.accesses(parameter.name)
    if in_functions and (reads := _reads_of_field(file, given)):
        return reads
    return [call] if _GIVE_DEVICE.search(given.name) and not given.full.startswith("torch.") else []


def parameter_of(file: SourceFile, given: Given | None) -> cst.Param | None:
    """The parameter that gets an argument, if this file defines the called function."""
    function, is_bound = _defined(file, given.call) if given is not None else (None, False)
    if given is None or function is None or given.argument.star:
        return None
    listed = [*function.params.posonly_params, *function.params.params]
    if given.word:
        named = [*listed, *function.params.kwonly_params]
        return next((name for name in named if name.name.value == given.word), None)
    return None if given.index is None else next(iter(listed[given.index + is_bound :]), None)


def _defined(file: SourceFile, call: cst.Call) -> tuple[cst.FunctionDef | None, bool]:
    """The function of this file that a call runs, and whether Python passes its first argument (``self``)."""
    if isinstance(call.func, cst.Name):
        for assignment in file.tree.assignments(call.func):
            if isinstance(assignment.node, cst.FunctionDef):
                return assignment.node, False
            if isinstance(assignment.node, cst.ClassDef):
                return _method(assignment.node, "__init__"), True
        return None, False
    if not isinstance(call.func, cst.Attribute) or file.tree.qualified(call.func) is not None:
        return None, False
    name, receiver = call.func.attr.value, dotted(call.func.value)
    around = file.tree.around(call, cst.ClassDef)
    owners = [around] if receiver in ("self", "cls") and around is not None else []
    found = [method for owner in owners if (method := _method(owner, name))] or file.methods.get(name, [])
    if len(found) != 1:
        return None, False
    kinds = {dotted(decorator.decorator) for decorator in found[0].decorators}
    return found[0], "staticmethod" not in kinds


def _reads_of_field(file: SourceFile, given: Given) -> list[cst.CSTNode]:
    """The reads of the field that gets an argument, in a class without a constructor, such as a dataclass."""
    bound = file.tree.assignments(given.call.func) if isinstance(given.call.func, cst.Name) else ()
    for owner in (one.node for one in bound if isinstance(one.node, cst.ClassDef)):
        listed = fields_of(owner)
        name = given.word or (next(iter(listed[given.index :]), "") if given.index is not None else "")
        if name in listed:
            return [*_of_class(file, (f"self.{name}",), owner)]
    return []


def fields_of(owner: cst.ClassDef) -> list[str]:
    """The fields of a class without a constructor, which its constructor gets: those of a dataclass."""
    lines = (line for line in owner.body.body if isinstance(line, cst.SimpleStatementLine))
    targets = [one.target for line in lines for one in line.body if isinstance(one, cst.AnnAssign)]
    return [last_name(one) for one in targets] if _method(owner, "__init__") is None else []


def _method(owner: cst.ClassDef, name: str) -> cst.FunctionDef | None:
    for statement in owner.body.body:
        if isinstance(statement, cst.FunctionDef) and statement.name.value == name:
            return statement
    return None


def keys_of(file: SourceFile, table: cst.Name | cst.Attribute) -> list[cst.BaseExpression]:
    """What a file looks up in a table: ``kind`` of ``TABLE[kind]`` and of ``TABLE.get(kind)``."""
    return [key for read in file.tree.alike(table) if (key := key_looked_up(file, read)) is not None]


def key_looked_up(file: SourceFile, table: cst.CSTNode) -> cst.BaseExpression | None:
    """What an expression that reads a table looks up in it; ``None`` if it looks nothing up."""
    at = file.tree.parent(table)
    around = file.tree.parent(at) if at is not None else None
    if isinstance(at, cst.Subscript) and at.value is table and len(at.slice) == 1:
        element = at.slice[0].slice
        is_read = not isinstance(around, (cst.AssignTarget, cst.Del))
        return element.value if is_read and isinstance(element, cst.Index) else None
    if not isinstance(at, cst.Attribute) or not isinstance(around, cst.Call) or around.func is not at:
        return None
    given = positional(around)
    return given[0].value if at.attr.value in LOOK_UP and given else None


def is_device_of(file: SourceFile, key: cst.CSTNode) -> bool:
    """Whether a key is the device of a tensor: ``x.device.type``, ``str(x.device)``, also through a name."""
    return any(
        _is_device_of(value)
        for value in (key, *(file.bound_values(key) if isinstance(key, cst.Name) else ()))
        if value is not None
    )


def _is_device_of(value: cst.CSTNode) -> bool:
    if isinstance(value, cst.Call) and dotted(value.func) == "str" and value.args:
        return _is_device_of(value.args[0].value)
    if not isinstance(value, cst.Attribute):
        return False
    return value.attr.value == "device" or (value.attr.value == "type" and _is_device_of(value.value))


def reads_of_option(file: SourceFile, call: cst.Call) -> list[cst.CSTNode]:
    """The reads of an option that ``add_argument`` defines: ``args.device``."""
    names = [name for name, calls in file.options.items() if call in calls]
    reads = (use for name in names for use in file.attributes.get(name, ()))
    return [use for use in reads if SETTINGS.search(last_name(use.value))]


def _first(target: cst.CSTNode) -> cst.CSTNode:
    """The name that gets the first part: ``kind`` in ``kind, _, index = device.partition(":")``."""
    return target.elements[0].value if isinstance(target, (cst.Tuple, cst.List)) else target


def reads_of(file: SourceFile, target: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The reads of a name, an attribute or an entry; of an attribute of ``self``, those in its own class."""
    if not isinstance(target, (cst.Name, cst.Attribute, cst.Subscript)):
        return
    found: Iterable[cst.CSTNode] = file.tree.alike(target)
    text = dotted(target) if isinstance(target, cst.Attribute) else ""
    if text.startswith("self."):
        found = _of_class(file, (text,), class_around(file, target))
    yield from (use for use in found if use is not target)


def _of_class(file: SourceFile, texts: Sequence[str], owner: cst.ClassDef | None) -> Iterator[cst.CSTNode]:
    """The attributes of ``self`` with one of some texts in a class and in those that derive from it."""
    users = [owner] if owner is None else [owner, *_heirs(file).get(owner.name.value, ())]
    by_class = _attributes_by_class(file)
    groups = [by_class.get((text, id(user)), []) for text in texts for user in dict.fromkeys(users)]
    return (node for _, node in merge(*groups, key=lambda one: one[0]))


@kept
def _attributes_by_class(file: SourceFile) -> dict[tuple[str, int], list[tuple[int, cst.CSTNode]]]:
    """The attributes of ``self`` by their text and the class around them, numbered in the tree's order."""
    found: dict[tuple[str, int], list[tuple[int, cst.CSTNode]]] = defaultdict(list)
    for number, node in enumerate(file.tree.of_type(cst.Attribute)):
        if (text := dotted(node)).startswith(("self.", "cls.")):
            found[text, id(class_around(file, node))].append((number, node))
    return found


@kept
def _heirs(file: SourceFile) -> dict[str, list[cst.ClassDef]]:
    """The classes that derive from the classes of each name."""
    found: dict[str, list[cst.ClassDef]] = defaultdict(list)
    for heir in file.tree.of_type(cst.ClassDef):
        for base in base_names(heir):
            found[base].append(heir)
    return found


def class_around(file: SourceFile, node: cst.CSTNode) -> cst.ClassDef | None:
    """The innermost class around a node."""
    return file.tree.around(node, cst.ClassDef)


@kept
def calls_of(file: SourceFile, function: cst.CSTNode | None) -> list[cst.CSTNode]:
    """The calls of a function of the file, and the reads of a property, which give its result."""
    if not isinstance(function, cst.FunctionDef):
        return []
    name, owner = function.name.value, class_around(file, function)
    reads: Iterable[cst.CSTNode] = file.tree.accesses(function.name)
    if owner is not None:
        reads = _of_class(file, (f"self.{name}", f"cls.{name}"), owner)
    is_property = any(dotted(one.decorator).endswith("property") for one in function.decorators)
    if is_property:
        return [*reads]
    calls = ((use, file.tree.parent(use)) for use in reads)
    return [call for use, call in calls if isinstance(call, cst.Call) and call.func is use]


def attributes_of_self(file: SourceFile, node: cst.CSTNode, name: str) -> list[cst.CSTNode]:
    """``self.name`` and ``cls.name`` in the class around a node and in those that are related to it.

    A function outside any class may become a method of each of them.
    """
    owner = class_around(file, node)
    if owner is None:
        return [
            one for one in file.attributes.get(name, []) if dotted(one) in (f"self.{name}", f"cls.{name}")
        ]
    return _attributes_of_family(file).get((name, _families(file)[owner.name.value]), [])


@kept
def _attributes_of_family(file: SourceFile) -> dict[tuple[str, int | None], list[cst.CSTNode]]:
    """The attributes of ``self`` by their name and the family of their class."""
    families = _families(file)
    numbers = sorted(set(families.values()))
    found: dict[tuple[str, int | None], list[cst.CSTNode]] = defaultdict(list)
    for node in file.tree.of_type(cst.Attribute):
        if isinstance(node.value, cst.Name) and node.value.value in ("self", "cls"):
            owner = class_around(file, node)
            for number in numbers if owner is None else [families[owner.name.value]]:
                found[node.attr.value, number].append(node)
    return found


@kept
def _families(file: SourceFile) -> dict[str, int]:
    """A number for each class of the file, the same for those that derive from each other."""
    related: dict[str, set[str]] = {node.name.value: set() for node in file.tree.of_type(cst.ClassDef)}
    for node in file.tree.of_type(cst.ClassDef):
        for base in base_names(node):
            if base in related:
                related[base].add(node.name.value)
                related[node.name.value].add(base)
    found: dict[str, int] = {}
    for number, name in enumerate(related):
        waiting = [name] if name not in found else []
        while waiting:
            at = waiting.pop()
            found[at] = number
            waiting += [one for one in related[at] if one not in found]
    return found
