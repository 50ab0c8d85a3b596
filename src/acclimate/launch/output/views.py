"""Formats the output of several ranks on one stream: unchanged, tagged line by line, or for a terminal.

All output is bytes: a rank may write invalid UTF-8, or one character in two writes.
"""

from __future__ import annotations

import os
import re
import time
import unicodedata
from abc import ABC, abstractmethod
from typing import NamedTuple

from acclimate.launch.output.writer import CurrentLine, Writer

_PARTIAL_DELAY_S = 0.2
"""How long a line may stay unfinished before its beginning is shown."""
_REDRAW_DELAY_S = 0.05
LONGEST_PARTIAL = 1 << 16
"""The most bytes of an unfinished line that are held back."""
_ROW_BYTES = 1 << 12
"""The most bytes of an unfinished line that are used for a terminal's row."""
_TAG = re.compile(rb"\[rank \d+\] ")
"""Matches the result of :func:`rank_tag`."""
_NOT_A_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[@-ln-~]")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[@-~]")


def rank_tag(rank: int) -> str:
    """Returns the tag of a rank's lines."""
    return f"[rank {rank}] "


class Source(NamedTuple):
    """One of the two streams of a rank, or the launcher itself."""

    tag: str
    """``"[rank 1] "``; empty for none."""
    stream: int


class View(ABC):
    """Shows the output of several sources on one stream."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer

    @abstractmethod
    def feed(self, source: Source, data: bytes) -> None:
        """Receives output of a source."""

    def end(self, source: Source) -> None:  # noqa: B027 - a view that keeps nothing has nothing to end
        """Shows the rest of a source that has ended."""

    def flush(self) -> float | None:
        """Shows output that has waited long enough; returns the seconds until the next call."""
        return None

    def resume(self) -> None:  # noqa: B027 - a view that shows no unfinished lines has no times
        """Called when reading resumes: the time of the pause does not count as waiting."""


class Plain(View):
    """Passes on the output of a single rank unchanged."""

    def feed(self, source: Source, data: bytes) -> None:
        self.writer.write(data)


class TaggedLines(View):
    """Whole lines, each after its rank's tag; for files, pipes and other programs.

    Nothing is left out. Each update of a progress bar has a tag and keeps its carriage return. A line that
    stays unfinished is shown after a moment and continued later, unless another rank writes in between.
    """

    def __init__(self, writer: Writer) -> None:
        super().__init__(writer)
        self._pending: dict[Source, bytearray] = {}
        self._due: dict[Source, float] = {}
        self._continued: Source | None = None
        """The source whose unfinished line was written last."""

    def feed(self, source: Source, data: bytes) -> None:
        pending = self._pending.setdefault(source, bytearray())
        end = data.rfind(b"\n") + 1
        if end:
            shown: list[bytes] = []
            *lines, _ = bytes(pending + data[:end]).split(b"\n")
            pending.clear()
            for line in lines:
                ending = b"\r\n" if line.endswith(b"\r") else b"\n"
                shown += (self._tagged(source, line.removesuffix(b"\r")), ending)
                self._continued = None
            self.writer.write(b"".join(shown))
        pending += data[end:]
        if not pending:
            self._due.pop(source, None)
        elif len(pending) > LONGEST_PARTIAL:
            self._show_partial(source)
        elif end or source not in self._due:
            self._due[source] = time.monotonic() + _PARTIAL_DELAY_S

    def end(self, source: Source) -> None:
        self._show_partial(source)
        if self._continued == source:
            self.writer.write(b"\n")
            self._continued = None
        self._pending.pop(source, None)

    def flush(self) -> float | None:
        now = time.monotonic()
        for source, due in list(self._due.items()):
            if due <= now:
                self._show_partial(source)
        return max(0.0, min(self._due.values()) - now) if self._due else None

    def resume(self) -> None:
        """Restarts the wait of unfinished lines: the rest of a line may be unread in a pipe."""
        self._due = dict.fromkeys(self._due, time.monotonic() + _PARTIAL_DELAY_S)

    def _show_partial(self, source: Source) -> None:
        pending = self._pending.get(source, bytearray())
        text = bytes(pending).removesuffix(b"\r")  # what follows may make it "\r\n"
        if text:
            self.writer.write(self._tagged(source, text))
            self._continued = source
            del pending[: len(text)]
        self._due.pop(source, None)

    def _tagged(self, source: Source, text: bytes) -> bytes:
        tag = source.tag.encode()
        text = text.replace(b"\r", b"\r" + tag)
        if self._continued == source:
            return text
        broken = b"\n" if self._continued is not None else b""
        return broken + text if text.startswith(b"\r") else broken + tag + text


class WholeLines(View):
    """Lines of several hosts, tagged by the hosts' agents; for any kind of stream.

    A line is held back until it is complete, as other hosts write to the same stream; a very long line is
    shown in parts. A carriage return ends a line too, so that progress bars update.
    """

    def __init__(self, writer: Writer) -> None:
        super().__init__(writer)
        self._pending: dict[Source, bytearray] = {}
        self._continued: Source | None = None
        """The source whose unfinished line was written last."""
        self._tags: dict[Source, bytes] = {}
        """The tag of each source's unfinished line that has been shown in part."""

    def feed(self, source: Source, data: bytes) -> None:
        pending = self._pending.setdefault(source, bytearray())
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end:
            self._show(source, pending + data[:end])
            pending.clear()
            self._tags.pop(source, None)
            self._continued = None
        pending += data[end:]
        if len(pending) > LONGEST_PARTIAL:
            self._show_partial(source)

    def end(self, source: Source) -> None:
        self._show_partial(source)
        self._pending.pop(source, None)

    def _show_partial(self, source: Source) -> None:
        pending = self._pending.get(source, bytearray())
        if pending:
            tag = _TAG.match(pending)
            self._show(source, pending)
            self._tags.setdefault(source, tag[0] if tag else b"")
            self._continued = source
            pending.clear()

    def _show(self, source: Source, text: bytes | bytearray) -> None:
        if self._continued == source:
            self.writer.write(text)
            return
        broken = b"\n" if self._continued is not None else b""
        self.writer.write(broken + self._tags.get(source, b"") + text)


class TaggedTerminal(View):
    """Finished lines scroll; unfinished ones, such as progress bars, stay below, one row for each source.

    A line that is too long to keep scrolls in parts.
    """

    def __init__(self, writer: Writer) -> None:
        super().__init__(writer)
        self._unfinished: dict[Source, CurrentLine] = {}
        self._finished: list[bytes] = []
        self._rows = 0
        """The number of unfinished lines on the screen."""
        self._changed_at: float | None = None
        """When the first change since the last drawing happened."""

    def feed(self, source: Source, data: bytes) -> None:
        # The row that changed last is drawn lowest, and is the last to be left out if there is no room.
        current = self._unfinished.pop(source, CurrentLine())
        *lines, rest = data.split(b"\n")
        for line in lines:
            current.feed(line)
            self._finished.append(_tagged(source, current.take()) + b"\n")
        current.feed(rest)
        if len(current) > LONGEST_PARTIAL:
            whole, begun = _split_letter(current.take())
            self._finished.append(_tagged(source, whole) + b"\n")
            current.feed(begun)
        if len(current):
            self._unfinished[source] = current
        self._changed_at = self._changed_at or time.monotonic()

    def end(self, source: Source) -> None:
        """Prints the last state of an unfinished line above the rows."""
        current = self._unfinished.pop(source, None)
        if current is not None:
            self._changed_at = time.monotonic() - _REDRAW_DELAY_S
            rest = current.take()
            if rest.strip():
                self._finished.append(_tagged(source, rest) + b"\n")

    def flush(self) -> float | None:
        """Draws the changes; unfinished lines at most 20 times a second."""
        if self._changed_at is None:
            return None
        wait = self._changed_at + _REDRAW_DELAY_S - time.monotonic()
        if not self._finished and wait > 0:
            return wait
        try:
            size = os.get_terminal_size(self.writer.descriptor)
        except OSError:  # the terminal was closed
            size = os.terminal_size((80, 24))
        rows = [
            _fitting(_tagged(source, text), size.columns - 1)
            for source, line in self._unfinished.items()
            if (text := line.start(_ROW_BYTES)).strip()
        ][-max(1, size.lines - 1) :]
        erase = b"\r" + b"\x1b[A" * (self._rows - 1) + b"\x1b[J" if self._rows else b""
        self.writer.write(erase + b"".join(self._finished) + b"\n".join(rows))
        self._finished.clear()
        self._rows, self._changed_at = len(rows), None
        return None


def _split_letter(text: bytes) -> tuple[bytes, bytes]:
    """Splits off an incomplete UTF-8 character at the end."""
    for length in range(1, 4):
        first = text[-length]
        if first >= 0xC0:  # the first byte says how many there are
            size = 2 + (first >= 0xE0) + (first >= 0xF0)
            return (text[:-length], text[-length:]) if size > length else (text, b"")
        if first < 0x80:
            break
    return text, b""


def _tagged(source: Source, line: bytes) -> bytes:
    # Escape sequences that move the cursor would overwrite other ranks' lines; those for colours stay.
    return source.tag.encode() + _NOT_A_COLOUR.sub(b"", line)


def _fitting(line: bytes, columns: int) -> bytes:
    """Cuts a line to one row of the terminal, since a longer one could not be erased."""
    if len(line) <= columns:  # there are at least as many bytes as letters
        return line
    shown, used, position = [], 0, 0
    text = line.decode(errors="surrogateescape")
    while position < len(text):
        escape = _ESCAPE.match(text, position)
        if escape:
            shown.append(escape[0])
            position = escape.end()
            continue
        letter = text[position]
        position += 1
        width = 2 if unicodedata.east_asian_width(letter) in "WF" else int(not unicodedata.combining(letter))
        if used + width > max(columns, 1):
            break
        used += width
        shown.append(letter)
    reset = "\x1b[m" if "\x1b" in text else ""
    return ("".join(shown) + reset).encode(errors="surrogateescape")
