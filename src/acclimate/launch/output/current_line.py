"""The unfinished line of a stream, as a terminal shows it: a carriage return restarts it."""

from __future__ import annotations


class CurrentLine:
    """Receives a line piece by piece, each byte once, and keeps only its visible part.

    Args:
        kept_bytes: how many bytes at its beginning to keep; ``None``: all.
    """

    def __init__(self, kept_bytes: int | None = None) -> None:
        self._kept_bytes = kept_bytes
        self._shown = bytearray()
        self._returned = False
        """Whether the last byte was a carriage return, so that the next piece replaces the line."""

    def __len__(self) -> int:
        return len(self._shown)

    def feed(self, piece: bytes) -> None:
        """Adds a piece without a newline."""
        body = piece.rstrip(b"\r")
        if body:
            _, returned, after = body.rpartition(b"\r")
            if returned or self._returned:
                self._shown.clear()
            room = len(after) if self._kept_bytes is None else max(0, self._kept_bytes - len(self._shown))
            self._shown += after[:room]
            self._returned = False
        self._returned |= len(body) < len(piece)

    def start(self, size: int) -> bytes:
        """Returns the first visible bytes."""
        return bytes(self._shown[:size])

    def take(self) -> bytes:
        """Returns the visible part and starts a new line."""
        shown = bytes(self._shown)
        self._shown.clear()
        self._returned = False
        return shown
