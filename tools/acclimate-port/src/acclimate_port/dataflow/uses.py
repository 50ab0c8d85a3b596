"""The places that a value reaches in its file: through names, attributes, parameters and results."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge

import libcst as cst

from acclimate_port.dataflow.sinks import parameter_of
from acclimate_port.source.tree import called_name, dotted
from acclimate_port.source_file import SourceFile, kept

_MOST = 100
"""The most places that are looked at for one value."""
KEEP_NAME = {"lower", "strip", "casefold", "partition", "rpartition", "split", "rsplit", "removesuffix"}
"""Methods of a string whose result begins with the name of the device in it."""

_GIVE_DEFAULT = {"get", "getattr", "pop", "setdefault", "getenv"}
"""Calls that give their last argument in place of a missing value."""
_OPTIONS = re.compile(
    r"(^|_)(args?|opts?|options?|flags?|h?params?|config|cfg|conf|namespace|ns)$", re.IGNORECASE
)

_GIVE_DEVICE = re.compile(r"^(?!(to|set|move|put|is|has)_).*(^|_)device(_?(type|name|str))?$")
"""Functions of other files that give a device for a device: ``resolve_device_type(device)``."""


@kept
def uses_of(file: SourceFile, value: cst.CSTNode, *, in_functions: bool = True) -> list[cst.CSTNode]:
    """The expressions that have a value: the first, and those that names and functions pass it on to.

    Args:
        file: the file.
        value: the expression.
        in_functions: whether to follow the value into functions of the file, and out of them.
    """
    found: list[cst.CSTNode] = []
    waiting, seen = [value], {id(value)}
    while waiting:
        node = waiting.pop()
        found.append(node)
        for following in _following(file, node, in_functions) if len(seen) < _MOST else ():
            if id(following) not in seen:
                seen.add(id(following))
                waiting.append(following)
                if len(seen) == _MOST:
                    break
    return found


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
    return [call] if _GIVE_DEVICE.search(given.name) and not given.full.startswith("torch.") else []


def reads_of_option(file: SourceFile, call: cst.Call) -> list[cst.CSTNode]:
    """The reads of an option that ``add_argument`` defines: ``args.device``."""
    names = [name for name, calls in file.options.items() if call in calls]
    reads = (use for name in names for use in file.attributes.get(name, ()))
    return [use for use in reads if _OPTIONS.search(dotted(use.value).rpartition(".")[2])]


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
        for base in heir.bases:
            found[dotted(base.value).rpartition(".")[2]].append(heir)
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
        for base in (dotted(one.value).rpartition(".")[2] for one in node.bases):
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
