"""F-strings that print the text of an expression, which edits keep: ``f"{torch.cuda.device_count()=}"``."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from acclimate_port.new_code.edits import Edit, insert, replace
from acclimate_port.source.tree import Span, Tree


def with_printed_text(tree: Tree, edits: Sequence[Edit]) -> list[Edit]:
    """The edits, and those that write the old text of an expression before it, where it is printed.

    ``f"{old()=:,}"`` becomes ``f"old()={new():,}"``.

    Args:
        tree: the file.
        edits: the edits.
    """
    found = [*edits]
    for field in _printing(tree):
        place = tree.span(field)
        if any(place.start <= edit.start and edit.end <= place.end for edit in edits):
            found += _edits(tree, field) or []
    return found


def loses_text(tree: Tree, node: cst.CSTNode) -> bool:
    """Whether an f-string prints the text of code around a node, and cannot hold it as plain text."""
    fields = (one for one in tree.ancestors(node) if isinstance(one, cst.FormattedStringExpression))
    return any(field.equal is not None and _edits(tree, field) is None for field in fields)


def _printing(tree: Tree) -> list[cst.FormattedStringExpression]:
    return [one for one in tree.of_type(cst.FormattedStringExpression) if one.equal is not None]


def _edits(tree: Tree, field: cst.FormattedStringExpression) -> list[Edit] | None:
    """The edits that put the printed text before a field; ``None`` if the string cannot hold that text."""
    string = tree.around(field, cst.FormattedString)
    place, value = tree.span(field), tree.span(field.expression)
    around = [one for one in tree.ancestors(field) if isinstance(one, cst.FormattedStringExpression)]
    # Where the printed text ends: at the conversion, the format, or the end of the field.
    rest = tree.bytes[value.end : place.end]
    length = rest.index(b"=") + 1
    length += len(rest[length:]) - len(rest[length:].lstrip())
    text = tree.bytes[place.start + 1 : value.end + length].decode()
    if string is None or around or "\\" in text or string.end in text or "#" in text:
        return None
    if len(string.end) == 1 and "\n" in text:
        return None
    text = text.replace("{", "{{").replace("}", "}}")
    shown = "" if field.conversion is not None or field.format_spec is not None else "!r"
    end = Span(value.end, value.end + length)
    return [insert(place.start, text), replace(end, shown)]
