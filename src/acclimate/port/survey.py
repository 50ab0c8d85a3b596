"""What files say about classes that other files use, found in their text before any of them is ported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_CLASS = re.compile(
    rb"^(?P<margin>[ \t]*)class[ \t]+(?P<name>\w+)[ \t]*(?:\((?P<bases>[^)]*)\))?[ \t]*:", re.M
)
_METHOD = re.compile(rb"^(?P<margin>[ \t]+)def[ \t]+(?P<name>cuda|to)[ \t]*\(", re.M)
_COMPILES = re.compile(rb"\bjit\.script\(\s*[\w.]+\s*[,)]")
_IMPORTS = re.compile(rb"^[ \t]*from[ \t]+[\w.]+[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.M)
_NAME = re.compile(rb"\b[A-Z]\w*")


@dataclass(frozen=True)
class Survey:
    """Names of classes."""

    with_own_cuda: frozenset[str] = frozenset()
    """Those that have a method ``cuda`` and none that is called ``to``, so they are no modules."""
    compiled: frozenset[str] = frozenset()
    """Those that a file imports, makes, and may give to TorchScript."""

    def __or__(self, other: Survey) -> Survey:
        """Both together."""
        return Survey(self.with_own_cuda | other.with_own_cuda, self.compiled | other.compiled)


def survey(source: bytes) -> Survey:
    """What one file says."""
    return Survey(frozenset(_own_cuda(source)), frozenset(_compiled(source)))


def _own_cuda(source: bytes) -> Iterator[str]:
    if b"def cuda" not in source:
        return
    classes = list(_CLASS.finditer(source))
    methods = list(_METHOD.finditer(source))
    for index, each in enumerate(classes):
        end = classes[index + 1].start() if index + 1 < len(classes) else len(source)
        own = {found["name"] for found in methods if each.end() <= found.start() < end}
        if own == {b"cuda"} and b"Module" not in (each["bases"] or b""):
            yield each["name"].decode()


def _compiled(source: bytes) -> Iterator[str]:
    if not _COMPILES.search(source):
        return
    for statement in _IMPORTS.finditer(source):
        for name in _NAME.findall(statement[1]):
            if re.search(rb"\b" + name + rb"\(", source):
                yield name.decode()
