"""Ends a text before the first of the texts at which it must stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopTexts:
    """Passes pieces of a text on, up to the first stop text.

    A piece that may begin a stop text waits until it is clear that it does not.
    """

    def __init__(self, stops: Sequence[str], on_text: Callable[[str], None]) -> None:
        self._stops, self._on_text = tuple(stops), on_text
        self._waiting = ""
        self._pieces: list[str] = []
        self.found: str | None = None
        """The stop text that has ended the text."""

    @property
    def text(self) -> str:
        """The text passed on so far."""
        return "".join(self._pieces)

    def put(self, piece: str) -> None:
        """Adds a piece of text; nothing after a stop text."""
        if self.found is not None:
            return
        self._waiting += piece
        places = [(self._waiting.find(stop), stop) for stop in self._stops if stop in self._waiting]
        if places:
            place, self.found = min(places)
            self._pass_on(place)
            self._waiting = ""
            return
        self._pass_on(len(self._waiting) - max(map(self._begun, self._stops), default=0))

    def end(self) -> None:
        """Passes on what waits."""
        self._pass_on(len(self._waiting))

    def _begun(self, stop: str) -> int:
        """Returns how many characters at the end of the waiting text begin a stop text."""
        most = min(len(stop) - 1, len(self._waiting))
        return next((size for size in range(most, 0, -1) if self._waiting.endswith(stop[:size])), 0)

    def _pass_on(self, count: int) -> None:
        piece, self._waiting = self._waiting[:count], self._waiting[count:]
        if piece:
            self._pieces.append(piece)
            self._on_text(piece)
