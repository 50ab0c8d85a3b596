"""The base class of the rules, and of their findings."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

import libcst as cst

from acclimate_port.new_code.added_functions import ACCELERATOR_TYPE
from acclimate_port.new_code.edits import Edit, Part, replace
from acclimate_port.source.tree import Span
from acclimate_port.source_file import SourceFile
from acclimate_port.source_file import cuda_name as cuda_name
from acclimate_port.source_file import is_assigned as is_assigned

Checked = TypeVar("Checked", bound=cst.CSTNode, contravariant=True)
"""The nodes that a rule looks at."""


class Outcome(Enum):
    """A rule's verdict on a piece of code."""

    CONVERT = "convert"
    LEFT = "left"
    EXEMPT = "exempt"
    """It looks like hardware-specific code, but is data or belongs to one vendor's kernels."""


@dataclass(frozen=True)
class Example:
    """A snippet before and after the port to each target; ``None``: left as it is."""

    before: str
    acclimate: str | None
    torch: str | None


IMPORTS = "import torch\nfrom acclimate import get_accelerator\n\n"
"""The first lines of an example that was ported to acclimate."""
WITH_HELPER = f"import torch\n\n\n{ACCELERATOR_TYPE}\n\n"
"""The first lines of an example that was ported to torch, and calls the added function."""


@dataclass
class Finding:
    """One piece of hardware-specific code."""

    rule: Rule[Any]
    node: cst.CSTNode
    place: Span
    outcome: Outcome
    reason: str = ""
    """Why the edit is unsafe, or why the code is left."""
    safe: bool = True
    edits: tuple[Edit, ...] = ()
    claims: tuple[cst.CSTNode, ...] = ()
    """Nodes that this finding covers, so that no other rule checks them."""
    needs_applied_at: tuple[Span, ...] = ()
    """Each of these ranges must be part of a finding that is applied."""
    stands_alone: bool = False
    """Whether the rest of a program can be ported without it: it is for NVIDIA's hardware, for a library with its own
    names of devices, a search for missing CUDA, or a fallback to the CPU."""


class Rule(ABC, Generic[Checked]):
    """Finds one kind of hardware-specific code, and makes its edits."""

    code: ClassVar[str]
    name: ClassVar[str]
    summary: ClassVar[str]
    explanation: ClassVar[str]
    examples: ClassVar[tuple[Example, ...]]
    nodes: ClassVar[tuple[type[cst.CSTNode], ...]]
    targets: ClassVar[tuple[str, ...]] = ("acclimate", "torch")

    @abstractmethod
    def check(self, file: SourceFile, node: Checked) -> Finding | None:
        """This rule's finding for a node; ``None`` if there is none."""

    def convert(
        self,
        file: SourceFile,
        node: cst.CSTNode,
        *edits: Edit,
        unsafe: str = "",
        claims: tuple[cst.CSTNode, ...] = (),
    ) -> Finding:
        """A finding with edits; it is unsafe if a reason is given."""
        place, claims = file.span(node), (node, *claims)
        return Finding(self, node, place, Outcome.CONVERT, unsafe, not unsafe, edits, claims)

    def becomes(
        self,
        file: SourceFile,
        node: cst.CSTNode,
        *parts: Part,
        unsafe: str = "",
        claims: tuple[cst.CSTNode, ...] = (),
    ) -> Finding:
        """A finding that replaces the whole node."""
        return self.convert(file, node, replace(file.span(node), *parts), unsafe=unsafe, claims=claims)

    def left(
        self,
        file: SourceFile,
        node: cst.CSTNode,
        reason: str,
        claims: tuple[cst.CSTNode, ...] = (),
        *,
        stands_alone: bool = False,
    ) -> Finding:
        """A finding without edits: hardware-specific code that stays as it is."""
        claims, place = (node, *claims), file.span(node)
        return Finding(self, node, place, Outcome.LEFT, reason, claims=claims, stands_alone=stands_alone)

    def exempt(
        self, file: SourceFile, node: cst.CSTNode, reason: str, claims: tuple[cst.CSTNode, ...] = ()
    ) -> Finding:
        """A finding without edits: code that is not hardware-specific."""
        return Finding(self, node, file.span(node), Outcome.EXEMPT, reason, claims=(node, *claims))


def without_argument(file: SourceFile, call: cst.Call, argument: cst.Arg) -> Edit:
    """An edit that removes an argument and its comma from a call."""
    index = next(i for i, arg in enumerate(call.args) if arg is argument)
    place = file.span(argument)
    if index + 1 < len(call.args):
        return replace(Span(place.start, file.span(call.args[index + 1]).start))
    start = file.span(call.args[index - 1].value).end if index else place.start
    return replace(Span(start, place.end))


def is_read(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a name is read here, and not bound, imported or an attribute's name."""
    parent = file.tree.parent(node)
    if isinstance(parent, cst.Attribute) and parent.attr is node:
        return False
    if isinstance(parent, (cst.ImportAlias, cst.AsName, cst.ImportFrom)):
        return False
    if (
        isinstance(parent, (cst.Param, cst.FunctionDef, cst.ClassDef))
        and getattr(parent, "name", None) is node
    ):
        return False
    if isinstance(parent, cst.Arg) and parent.keyword is node:
        return False
    return not any(isinstance(around, (cst.Import, cst.ImportFrom)) for around in file.tree.ancestors(node))


def margin_of(file: SourceFile, statement: cst.Expr) -> str | None:
    """The indentation of a statement; ``None`` if it shares its line."""
    line = file.tree.parent(statement)
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return None
    text = file.tree.line_text(file.tree.line(file.span(statement).start))
    return text[: len(text) - len(text.lstrip())]


DEVICE = re.compile(r"cuda(?::(\d+))?$")
DEVICE_FORM = re.compile(r"cuda:(?!\d+$)\S*$", re.IGNORECASE)
"""A text that becomes a device's name: ``"cuda:{!r}"``, ``"cuda:%d"``, ``"cuda:"``; no message."""


def is_device(text: str) -> bool:
    """Whether a string is the name of a CUDA device."""
    return DEVICE.match(text) is not None


def index_of(text: str) -> str | None:
    """The index in the name of a device."""
    found = DEVICE.match(text)
    return found[1] if found else None
