"""Edits of byte ranges. A replacement may keep parts of the old text, which other edits may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from acclimate_port.source.tree import Span

Part = str | Span
"""New text, or a range of the old text to keep, with the edits inside that range."""


@dataclass(frozen=True)
class Edit:
    """Replaces bytes ``start`` to ``end`` with the parts."""

    start: int
    end: int
    parts: tuple[Part, ...]


def replace(place: Span, *parts: Part) -> Edit:
    """An edit that replaces one range."""
    return Edit(place.start, place.end, parts)


def insert(offset: int, text: str) -> Edit:
    """An edit that inserts text and removes none."""
    return Edit(offset, offset, (text,))


def render(source: bytes, edits: Sequence[Edit]) -> bytes:
    """The text after all edits. Two edits must be nested or disjoint."""
    return render_within(source, Span(0, len(source)), edits)


def render_within(source: bytes, place: Span, edits: Sequence[Edit]) -> bytes:
    """The text of one range after the edits, which are all inside it."""
    return _render(source, place, _ordered(edits))


def _ordered(edits: Sequence[Edit]) -> list[Edit]:
    # The outer edit comes first; an insertion comes before an edit that starts at the same offset.
    return sorted(edits, key=lambda edit: (edit.start, edit.start != edit.end, -edit.end))


def _render(source: bytes, place: Span, edits: list[Edit]) -> bytes:
    """The text of one range, given the edits inside it in order."""
    result: list[bytes] = []
    at, index = place.start, 0
    while index < len(edits):
        edit = edits[index]
        following = index + 1
        while following < len(edits) and edits[following].start < edit.end:
            following += 1
        inside = edits[index + 1 : following]
        result.append(source[at : edit.start])
        for part in edit.parts:
            if isinstance(part, str):
                result.append(part.encode())
            else:
                held = [e for e in inside if part.start <= e.start and e.end <= part.end]
                result.append(_render(source, part, held))
        at = edit.end
        index += 1 + len(inside)
    result.append(source[at : place.end])
    return b"".join(result)


def clash(edits: Sequence[Edit]) -> bool:
    """Whether two edits overlap, and neither is inside a kept part of the other."""
    ordered = _ordered(edits)
    open_edits: list[Edit] = []
    for edit in ordered:
        while open_edits and open_edits[-1].end <= edit.start:
            open_edits.pop()
        if open_edits:
            kept = [part for part in open_edits[-1].parts if isinstance(part, Span)]
            if not any(part.start <= edit.start and edit.end <= part.end for part in kept):
                return True
        if edit.start != edit.end:
            open_edits.append(edit)
    return False
