"""Texts in the cache that can always be made again, so a damaged or missing one only costs time."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from acclimate.cache.folder import cache_root, check_folder, read_file
from acclimate.cache.publish import publish_once
from acclimate.errors import AcclimateError

_T = TypeVar("_T")

_SOURCES = (".py", ".cpp", ".h", ".def")


def source_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the name and content of each source file in a folder and below, always in the same order.

    For the key of a text that depends on this code.
    """
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SOURCES:
            yield path.relative_to(folder).as_posix(), path.read_bytes()


@dataclass(frozen=True)
class TextCache:
    """Keeps the texts of one kind, each under a key that covers everything it depends on."""

    folder: str
    """The name of their folder in the cache."""
    file: str
    """The name of the file in the folder of each."""
    noun: str
    """A noun for messages: "the plan"."""
    instead: str
    """What happens without the text, for messages: "planning again"."""
    logger: logging.Logger

    def load(self, key: str, read: Callable[[str], _T]) -> _T | None:
        """Returns ``read``'s result for the text under a key; ``None`` if it is missing or damaged.

        ``read`` raises a ValueError, KeyError, IndexError, AttributeError or TypeError for a text that it
        cannot use.
        """
        path = f"{self.folder}/{key}"
        try:
            folder = self._path(key)
            path = str(folder)
            if not folder.is_dir():
                return None
            check_folder(folder)
            written = json.loads(read_file(folder / self.file))
            if written["digest"] != _digest(written["text"]):
                raise ValueError("its content does not match its digest")
            return read(written["text"])
        except (
            AcclimateError, OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError,
        ) as error:  # fmt: skip
            self.logger.warning("%s in %s cannot be used (%s); %s", self.noun, path, error, self.instead)
            return None

    def save(self, key: str, text: str) -> None:
        """Saves a text; if the cache is not writable, only logs it."""
        content = json.dumps({"digest": _digest(text), "text": text})

        def write(folder: Path) -> None:
            (folder / self.file).write_text(content)

        def is_saved() -> bool:
            try:
                return (folder / self.file).read_text() == content
            except (OSError, ValueError):
                return False

        try:
            folder = self._path(key)
            publish_once(folder, write, is_whole=is_saved)
        except (AcclimateError, OSError) as error:
            self.logger.info("%s is not saved for the next start: %s", self.noun, error)

    def _path(self, key: str) -> Path:
        return cache_root() / self.folder / key


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
