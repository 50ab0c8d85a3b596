"""The objects that a program moves to a device or wraps for it, and the tests that decide whether it does.

A model that stays on the CPU and a batch that moves meet in an error, and so do a model that stays and its
``DistributedDataParallel(model, device_ids=[rank])``. The tests around such calls are ported together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property

import libcst as cst

from acclimate_port.source.tree import Span, called_name, dotted, keyword, walk
from acclimate_port.source_file import SourceFile

_MOVES = {"cuda", "to", "to_empty"}
_WRAPS = {
    *("DistributedDataParallel", "DDP", "DataParallel", "FullyShardedDataParallel", "FSDP", "fully_shard"),
    *("data_parallel", "convert_sync_batchnorm", "DeepSpeedEngine"),
}
_DTYPES = {"float16", "half", "bfloat16", "float32", "float", "float64", "double"}


@dataclass(frozen=True)
class _Placement:
    """A call that moves or wraps objects."""

    place: Span
    objects: frozenset[Hashable]
    words: frozenset[str]
    """The names in its arguments, which may hold a device."""


class Placements:
    """The calls in a file that move or wrap objects.

    Args:
        file: the file.
    """

    def __init__(self, file: SourceFile) -> None:
        self._file = file

    def within(self, places: list[Span]) -> set[Hashable]:
        """The objects that are moved or wrapped in some ranges."""
        return {held for one in self._within(places) for held in one.objects}

    def are_within(self, places: list[Span]) -> bool:
        """Whether code in some ranges moves or wraps an object, or makes one on a device."""
        return any(True for _ in self._within(places))

    def _within(self, places: list[Span]) -> Iterator[_Placement]:
        for place in places:
            first, last = bisect_left(self._starts, place.start), bisect_left(self._starts, place.end)
            yield from (one for one in self._calls[first:last] if one.place.end <= place.end)

    def on(self, holders: list[str]) -> set[Hashable]:
        """The objects that are moved to the devices that some names hold."""
        names = {holder.rpartition(".")[2] for holder in holders}
        return {held for one in self._calls if one.words & names for held in one.objects}

    @cached_property
    def _calls(self) -> list[_Placement]:
        found = [placement for call in self._file.tree.of_type(cst.Call) for placement in self._of(call)]
        return sorted(found, key=lambda placement: placement.place.start)

    @cached_property
    def _starts(self) -> list[int]:
        return [placement.place.start for placement in self._calls]

    def _of(self, call: cst.Call) -> Iterator[_Placement]:
        name = called_name(call)
        moved: cst.CSTNode | None
        if name in _WRAPS:
            moved = call.args[0].value if call.args else None
        elif name in _MOVES and isinstance(call.func, cst.Attribute) and not self._is_cast(call):
            moved = call.func.value
        elif keyword(call, "device") is not None:
            moved = None  # a new object
        else:
            return
        named = (moved, *self._targets(call))
        objects = {self._identity(node) for node in named if node is not None} - {None}
        words = {node.value for given in call.args for node in walk(given) if isinstance(node, cst.Name)}
        yield _Placement(self._file.span(call), frozenset(objects), frozenset(words))

    @staticmethod
    def _is_cast(call: cst.Call) -> bool:
        """Whether ``x.to(…)`` gets a dtype alone."""
        if called_name(call) != "to" or len(call.args) != 1:
            return False
        return dotted(call.args[0].value).rpartition(".")[2] in (*_DTYPES, "dtype")

    def _targets(self, call: cst.Call) -> Iterator[cst.CSTNode]:
        """What the result of a call is bound to: ``model`` in ``model = Net().cuda()``."""
        at: cst.CSTNode | None = self._file.tree.parent(call)
        while isinstance(at, (cst.Attribute, cst.Call, cst.IfExp)):
            at = self._file.tree.parent(at)
        if isinstance(at, cst.Assign):
            yield from (target.target for target in at.targets)

    def _identity(self, node: cst.CSTNode) -> Hashable:
        """What stands for an object: its name and the scope that binds it, or its attribute."""
        while isinstance(node, (cst.Call, cst.Subscript)):
            held = node.func if isinstance(node, cst.Call) else node
            if not isinstance(held, (cst.Attribute, cst.Subscript)):
                return None  # a new object, which has no name yet: `Net().cuda()`
            node = held.value
        text = dotted(node)
        if not isinstance(node, cst.Name):
            return text or None
        bound = self._file.tree.assignments(node)
        return (id(bound[0].scope), text) if bound else text


def outermost_function(file: SourceFile, node: cst.CSTNode) -> cst.CSTNode | None:
    """The function of a module or class around a node, whose inner functions share its objects."""
    found = file.tree.function(node)
    while found is not None and (outer := file.tree.function(found)) is not None:
        found = outer
    return found


def sharing(keys: list[set[Hashable]]) -> list[list[int]]:
    """For each element that several sets have, the indices of these sets."""
    holders: dict[Hashable, list[int]] = defaultdict(list)
    for index, own in enumerate(keys):
        for key in own:
            holders[key].append(index)
    return [list(own) for own in {tuple(held) for held in holders.values() if len(held) > 1}]
