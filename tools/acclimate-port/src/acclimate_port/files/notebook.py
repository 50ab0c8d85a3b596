"""Notebooks. All code cells are ported as one source, so that a name means the same in each cell."""

from __future__ import annotations

import json
import re
from typing import Any

from acclimate_port.source.tree import CELL

_CELL_LINE = re.compile(r"^# acclimate: cell (\d+)\n", re.MULTILINE)
_MAGIC = re.compile(
    r"^([ \t]*)([%!?](?:.*\\\n)*.*|\w[\w, ]*=[ \t]*[%!](?:.*\\\n)*.*|[\w.*\[\]'\"-]+\?\??[ \t]*)$",
    re.MULTILINE,
)
"""A magic, a shell command, also of which a name gets the output, or a question for help: ``ones?``."""
_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"')
"""A text in JSON."""
_HIDDEN = re.compile(r"^([ \t]*)pass  # acclimate: magic (\d+)(?: sets VISIBLE_DEVICES)?$", re.MULTILINE)


class Notebook:
    """The code cells of a notebook, and a way to write them back without changing the rest.

    Args:
        text: the text of the file.

    Raises:
        ValueError: it is not a notebook, or its JSON has an unusual format.
    """

    def __init__(self, text: str) -> None:
        self._data: Any = json.loads(text)
        if not isinstance(self._data, dict) or not isinstance(self._data.get("cells"), list):
            raise ValueError("it has no cells")
        self._style = _style(text, self._data)
        self._magics: list[str] = []
        self._cells = [
            cell
            for cell in self._data["cells"]
            if isinstance(cell, dict) and cell.get("cell_type") == "code" and "source" in cell
        ]
        self._has_list = [isinstance(cell["source"], list) for cell in self._cells]
        self._ended = [_cell_source(cell).endswith("\n") for cell in self._cells]
        self.source = "".join(
            CELL.format(number)
            + self._without_magics(_cell_source(cell))
            + ("" if self._ended[number] else "\n")
            for number, cell in enumerate(self._cells)
        )

    def _without_magics(self, source: str) -> str:
        """A cell with its magics and shell commands replaced by ``pass``."""
        if source.lstrip().startswith("%%"):
            ended = "\n" if source.endswith("\n") else ""
            return self._hidden(source.rstrip("\n")) + ended

        def hide(found: re.Match[str]) -> str:
            hidden: list[str] = []
            # A backslash continues a shell command on the next line.
            for line in found[2].split("\n"):
                hidden.append(found[1] + self._hidden(line.removeprefix(found[1]) if hidden else line))
            return "\n".join(hidden)

        return _MAGIC.sub(hide, source)

    def _hidden(self, magic: str) -> str:
        """The statement in place of a magic, which says whether this one chooses devices: ``%env …``."""
        self._magics.append(magic)
        note = " sets VISIBLE_DEVICES" if "VISIBLE_DEVICES" in magic else ""
        return f"pass  # acclimate: magic {len(self._magics) - 1}{note}"

    def cell_of(self, line: int) -> tuple[int, int]:
        """The cell of a line of the source, and the line in that cell; both are counted from 1."""
        before = list(_CELL_LINE.finditer("".join(self.source.splitlines(keepends=True)[:line])))
        if not before:
            return 1, line
        start = self.source[: before[-1].end()].count("\n")
        return int(before[-1][1]) + 1, line - start

    def with_source(self, source: str) -> str:
        """The notebook with another source."""
        parts = _CELL_LINE.split(source)
        head, cells = parts[0], dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))
        for number, cell in enumerate(self._cells):
            text = _HIDDEN.sub(lambda found: found[1] + self._magics[int(found[2])], cells[number])
            if number == 0:
                text = head + text
            if not self._ended[number] and text.endswith("\n"):
                text = text[:-1]
            if text != _cell_source(cell):
                cell["source"] = text.splitlines(keepends=True) if self._has_list[number] else text
        return _dumped(self._data, self._style)


def code_of(text: str) -> str:
    """The code of a notebook, also of one that cannot be written back, without magics and shell commands.

    If its JSON cannot be read, all texts in it count as code.
    """
    try:
        data = json.loads(text)
        cells = [one for one in data["cells"] if one.get("cell_type") == "code"]
        sources = [_cell_source(one) for one in cells]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sources = [_unquoted(found[0]).rstrip("\n") for found in _TEXT.finditer(text)]
    return "\n".join(_MAGIC.sub(r"\1pass", one) for one in sources)


def _unquoted(quoted: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return quoted[1:-1]


_Style = tuple[int | str | None, bool, str]


def _cell_source(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return "".join(source) if isinstance(source, list) else str(source)


def _style(text: str, data: Any) -> _Style:
    """The JSON format of a notebook: indentation, escapes, and final newline."""
    for indent in (1, 2, 4, None, "\t", 0):
        for ascii_only in (False, True):
            for end in ("\n", ""):
                style = (indent, ascii_only, end)
                if _dumped(data, style) == text:
                    return style
    raise ValueError(
        "its JSON has an unusual format, so an edit would change the whole file; save it in Jupyter first"
    )


def _dumped(data: Any, style: _Style) -> str:
    indent, ascii_only, end = style
    return json.dumps(data, indent=indent, ensure_ascii=ascii_only) + end
