"""A parsed source file: its concrete syntax tree, the position of each node, and the meaning of each name.

Positions are byte offsets into the UTF-8 text, so an edit leaves all bytes outside its range unchanged.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, TypeVar, cast

import libcst as cst
from libcst.metadata import (
    ByteSpanPositionProvider,
    ExpressionContextProvider,
    ScopeProvider,
)
from libcst.metadata.scope_provider import Assignment, ImportAssignment, QualifiedNameSource, Scope

Node = TypeVar("Node", bound=cst.CSTNode)
Function = cst.FunctionDef | cst.Lambda
_IS_NODE: dict[type, bool] = {}
_LINE_END = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True)
class Span:
    """A range of bytes."""

    start: int
    end: int


class _Scopes(ScopeProvider):
    """The scope of each node.

    libcst's metadata wrapper would visit the whole tree twice more to compute it.
    """

    def __init__(self, module: cst.Module) -> None:
        super().__init__()
        self._contexts = _Contexts()
        self._contexts.visit_Module(module)
        self.found: dict[cst.CSTNode, Scope | None] = {}
        self.visit_Module(module)

    def get_metadata(self, key: Any, node: cst.CSTNode, default: Any = None) -> Any:
        """Whether a name is read or bound, the only metadata that the scope provider asks for."""
        return self._contexts.found.get(node, default)

    def set_metadata(self, node: cst.CSTNode, value: Any) -> None:
        """Keeps the scope of a node."""
        self.found[node] = value


class _Spans(ByteSpanPositionProvider):
    """The bytes of each node, without the wrapper's extra visit of the tree."""

    def __init__(self, module: cst.Module) -> None:
        super().__init__()
        self._gen_impl(module)
        self.found: Mapping[cst.CSTNode, Any] = self._computed


class _Contexts(ExpressionContextProvider):
    """Whether a name is read or bound."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[cst.CSTNode, Any] = {}

    def set_metadata(self, node: cst.CSTNode, value: Any) -> None:
        """Keeps the context of a name."""
        self.found[node] = value


class Tree:
    """One file's syntax tree with positions, parents and scopes.

    Args:
        text: the source, without a byte-order mark.

    Raises:
        libcst.ParserSyntaxError: it is not Python 3.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.bytes = text.encode()
        self.module = cst.parse_module(text)
        self._spans = _Spans(self.module).found
        self._scopes = _Scopes(self.module).found
        self._parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self.nodes: list[cst.CSTNode] = []
        self._of_type: dict[type, list[cst.CSTNode]] = defaultdict(list)
        for node in walk(self.module):
            self.nodes.append(node)
            self._of_type[type(node)].append(node)
            for below in _child_nodes(node):
                self._parents[below] = node
        self.line_starts = [0, *(found.end() for found in _LINE_END.finditer(self.bytes))]
        self.newline = self.module.default_newline
        self.indent = self.module.default_indent
        self._qualified: dict[cst.CSTNode, str | None] = {}
        self._imported = {"torch", "os"}
        for node in self.of_type(cst.ImportAlias):
            self._imported.add((node.evaluated_alias or node.evaluated_name).partition(".")[0])

    # -- positions -----------------------------------------------------------------------------------

    def span(self, node: cst.CSTNode) -> Span:
        """The bytes of a node, with the parentheses around it."""
        place = self._spans[node]
        return Span(place.start, place.start + place.length)

    def source(self, node: cst.CSTNode | Span) -> str:
        """The text of a node."""
        place = node if isinstance(node, Span) else self.span(node)
        return self.bytes[place.start : place.end].decode()

    def line(self, offset: int) -> int:
        """The line of an offset, counted from 1."""
        return bisect.bisect_right(self.line_starts, offset)

    def column(self, offset: int) -> int:
        """The column of an offset in characters, counted from 1."""
        start = self.line_starts[self.line(offset) - 1]
        return len(self.bytes[start:offset].decode()) + 1

    def line_text(self, line: int) -> str:
        """A line without its end."""
        start = self.line_starts[line - 1]
        end = self.line_starts[line] if line < len(self.line_starts) else len(self.bytes)
        return self.bytes[start:end].decode().rstrip("\r\n")

    def of_type(self, kind: type[Node]) -> list[Node]:
        """Every node of one class, as :attr:`nodes` orders them.

        A pass over all nodes costs more: ``isinstance`` is slow for libcst's classes.
        """
        return cast("list[Node]", self._of_type[kind])

    # -- the tree ------------------------------------------------------------------------------------

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The node that holds this one."""
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around a node, nearest first."""
        at = self._parents.get(node)
        while at is not None:
            yield at
            at = self._parents.get(at)

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """The small statement or block header that a node is part of."""
        for around in (node, *self.ancestors(node)):
            if isinstance(around, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
                return around
        return node

    def function(self, node: cst.CSTNode) -> Function | None:
        """The function in whose body a node is; decorators, defaults and annotations are outside."""
        below = node
        for around in self.ancestors(node):
            if isinstance(around, cst.FunctionDef) and below is around.body:
                return around
            if isinstance(around, cst.Lambda) and below is around.body:
                return around
            below = around
        return None

    def in_annotation(self, node: cst.CSTNode) -> bool:
        """Whether a node is part of a type annotation."""
        return any(isinstance(around, cst.Annotation) for around in self.ancestors(node))

    # -- names ---------------------------------------------------------------------------------------

    def scope(self, node: cst.CSTNode) -> Scope | None:
        """The scope that a node's names are looked up in."""
        for around in (node, *self.ancestors(node)):
            scope = self._scopes.get(around)
            if scope is not None:
                return scope
        return None

    def qualified(self, node: cst.CSTNode) -> str | None:
        """The full dotted name of a name or a chain of attributes that an import binds.

        ``None`` for any other, such as a name that one branch binds to something else.
        """
        if node not in self._qualified:
            self._qualified[node] = self._qualify(node)
        return self._qualified[node]

    def _qualify(self, node: cst.CSTNode) -> str | None:
        names = self._full_names(node)
        return names.pop() if len(names) == 1 else None

    def may_be_cuda(self, name: cst.Name) -> bool:
        """Whether a name belongs to torch.cuda in some branches and not in others."""
        meanings = self._meanings(name)
        return len(meanings) > 1 and any((meaning or "").startswith("torch.cuda") for meaning in meanings)

    def may_be(self, node: cst.CSTNode) -> set[str]:
        """The full names that a name or a chain of attributes may have, by the imports that bind it."""
        return {name for name in self._full_names(node) if name is not None}

    def _full_names(self, node: cst.CSTNode) -> set[str | None]:
        """The full names of a node, with ``None`` for a binding that is not an import."""
        attributes: list[str] = []
        at = node
        while isinstance(at, cst.Attribute):
            attributes.append(at.attr.value)
            at = at.value
        if not isinstance(at, cst.Name):
            return set()
        return {
            None if root is None else ".".join((root, *reversed(attributes))) for root in self._meanings(at)
        }

    def _meanings(self, name: cst.Name) -> set[str | None]:
        if name.value not in self._imported:
            return set()
        scope = self.scope(name)
        if scope is None:
            return set()
        assignments = [
            found for found in scope[name.value] if isinstance(found, Assignment | ImportAssignment)
        ]
        if not assignments:
            # A notebook, or `from x import *`: torch is still torch.
            return {name.value} if name.value in ("torch", "os") else set()
        meanings: set[str | None] = set()
        for assignment in assignments:
            found = assignment.get_qualified_names_for(name.value)
            meanings |= {
                meaning.name if meaning.source is QualifiedNameSource.IMPORT else None for meaning in found
            }
        given = any(
            isinstance(assignment, Assignment) and isinstance(assignment.node, cst.Param)
            for assignment in assignments
        )
        if name.value == "torch" and None in meanings and not given:
            return {"torch"}  # a lazy loader's object, or `None` after a failed import
        return meanings

    def assignments(self, name: cst.Name) -> Sequence[Assignment]:
        """Every binding of a name in the scope where it is looked up."""
        scope = self.scope(name)
        return [] if scope is None else [a for a in scope[name.value] if isinstance(a, Assignment)]

    def accesses(self, name: cst.Name) -> list[cst.CSTNode]:
        """Every read of a name."""
        return [access.node for assignment in self.assignments(name) for access in assignment.references]

    def reads(self, holder: cst.Name | cst.Attribute) -> list[cst.CSTNode]:
        """The other reads of a name, or of an attribute with the same text."""
        if isinstance(holder, cst.Name):
            return [use for use in self.accesses(holder) if use is not holder]
        text = dotted(holder)
        return [node for node in self.of_type(cst.Attribute) if node is not holder and dotted(node) == text]

    @cached_property
    def imports(self) -> list[cst.Import | cst.ImportFrom]:
        """Every import statement, also those in functions; ``import x`` before ``from x import y``."""
        return [*self.of_type(cst.Import), *self.of_type(cst.ImportFrom)]

    @cached_property
    def imported_packages(self) -> set[str]:
        """The first names of the modules that the file imports, or imports from."""
        found: set[str] = set()
        for statement in self.imports:
            if isinstance(statement, cst.Import):
                found |= {dotted(alias.name).partition(".")[0] for alias in statement.names}
            elif not statement.relative:
                found.add(dotted(statement.module).partition(".")[0])
        return found

    def all_names(self) -> set[str]:
        """Every identifier in the file."""
        return {node.value for node in self.of_type(cst.Name)}


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all its descendants, each before its children; not always in source order.

    libcst's own ``children`` visits each node again, which takes longer than the rest of this class.
    """
    waiting = [node]
    while waiting:
        at = waiting.pop()
        yield at
        waiting.extend(_child_nodes(at))


def _child_nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The children of a node, without white space, which no rule needs."""
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, (list, tuple)):
            for child in value:
                if _is_node(type(child)):
                    yield child
        elif _is_node(type(value)):
            yield value


def _is_node(kind: type) -> bool:
    """Whether a class is a libcst node class. Cached, as ``isinstance`` is slow for these classes."""
    known = _IS_NODE.get(kind)
    if known is None:
        known = _IS_NODE[kind] = issubclass(kind, cst.CSTNode)
    return known


@cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    names = [field.name for field in fields(kind)]
    return tuple(name for name in names if name not in _WHITE_SPACE and not name.startswith("whitespace"))


_WHITE_SPACE = frozenset(
    {
        "leading_lines",
        "lines_after_decorators",
        "header",
        "footer",
        "trailing_whitespace",
        "semicolon",
        "comma",
    }
)


def dotted(node: cst.CSTNode | None) -> str:
    """The text of a name with dots."""
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""


def parts_of_imported_names(statement: cst.Import | cst.ImportFrom) -> list[str]:
    """The parts between the dots of the names that a statement imports."""
    if isinstance(statement, cst.Import):
        names = [dotted(alias.name) for alias in statement.names]
    else:
        held = [] if isinstance(statement.names, cst.ImportStar) else statement.names
        names = [dotted(statement.module), *(dotted(alias.name) for alias in held)]
    return [part for name in names for part in name.split(".")]


def called_name(call: cst.Call) -> str | None:
    """The last name of the called function: ``to`` for ``a.b.to(…)``."""
    if isinstance(call.func, cst.Attribute):
        return call.func.attr.value
    return call.func.value if isinstance(call.func, cst.Name) else None


def positional(call: cst.Call) -> list[cst.Arg]:
    """The positional arguments of a call, up to the first ``*arguments``."""
    found: list[cst.Arg] = []
    for argument in call.args:
        if argument.star or argument.keyword is not None:
            break
        found.append(argument)
    return found


def position(call: cst.Call, argument: cst.Arg) -> int | None:
    """The index of an argument among a call's positional arguments; ``None``: it is not positional."""
    return next((i for i, given in enumerate(positional(call)) if given is argument), None)


def keyword(call: cst.Call, name: str) -> cst.Arg | None:
    """A keyword argument of a call."""
    return next((a for a in call.args if a.keyword is not None and a.keyword.value == name), None)


def has_unpacking(call: cst.Call) -> bool:
    """Whether a call has ``*arguments`` or ``**options``."""
    return any(argument.star for argument in call.args)


def string_value(node: cst.CSTNode | None) -> str | None:
    """The text of a plain string literal, or of an f-string without a field."""
    if isinstance(node, cst.FormattedString) and "r" not in node.start.lower():
        texts = [part.value for part in node.parts if isinstance(part, cst.FormattedStringText)]
        is_plain = len(texts) == len(node.parts) and not any(set(text) & set("\\{}") for text in texts)
        return "".join(texts) if is_plain else None
    if not isinstance(node, cst.SimpleString) or node.prefix not in ("", "u", "r"):
        return None
    return cast(str, node.evaluated_value)
