"""Finds the files to port, reads them in their encoding, and replaces them atomically."""

from __future__ import annotations

import codecs
import fnmatch
import io
import os
import re
import stat
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from acclimate_port.replace_file import replace_file

_SKIPPED_FOLDERS = frozenset(
    {
        *(".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", ".eggs", "node_modules", "__pycache__"),
        *(".mypy_cache", ".ruff_cache", ".pytest_cache", "site-packages", ".ipynb_checkpoints"),
        *("__pypackages__",),
    }
)
NOT_REGULAR = "it is not a regular file"
_SUFFIXES = (".py", ".pyi", ".ipynb", ".yaml", ".yml")
_PROGRAMS = (".py", ".ipynb", ".pyx", ".pyw")
_SCRIPT = re.compile(rb"#![^\n]*python")
"""The first line of a script without a suffix."""


class UnreadableError(Exception):
    """A file cannot be ported; the message says why."""


@dataclass(frozen=True)
class Content:
    """The text of a file, and how to turn it back into bytes."""

    text: str
    encoding: str
    has_mark: bool

    def encode(self, text: str) -> bytes:
        """The bytes of a new text, in the file's encoding."""
        return (codecs.BOM_UTF8 if self.has_mark else b"") + text.encode(self.encoding)


def find(paths: Sequence[Path], exclude: Sequence[str]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The files to port, each once, and the paths that cannot be read, with the reason."""
    found: dict[Path, Path] = {}
    failures: list[tuple[Path, str]] = []
    for path in paths:
        try:
            if path.is_dir():
                candidates: Iterator[Path] = _below(path, exclude, failures)
            else:
                os.stat(path)
                candidates = iter([path])
            for candidate in candidates:
                _add(candidate, found, failures)
        except OSError as error:
            failures.append((path, error.strerror or str(error)))
        except RuntimeError:  # some Python versions raise it in Path.is_dir() for a loop of links
            failures.append((path, "it is a loop of symbolic links"))
    return list(found.values()), failures


def _add(path: Path, found: dict[Path, Path], failures: list[tuple[Path, str]]) -> None:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            failures.append((path, NOT_REGULAR))
            return
        real = Path(os.path.realpath(path))
    except OSError as error:
        failures.append((path, error.strerror or str(error)))
    else:
        found.setdefault(real, path)


def _is_wanted(path: Path) -> bool:
    return path.name.endswith(_SUFFIXES)


def _below(
    folder: Path,
    exclude: Sequence[str],
    failures: list[tuple[Path, str]],
    is_wanted: Callable[[Path], bool] = _is_wanted,
) -> Iterator[Path]:
    def on_error(error: OSError) -> None:
        failures.append((Path(error.filename), error.strerror or str(error)))

    root = Path(os.path.realpath(folder))
    # os.walk does not follow links to folders, so loops of links are harmless.
    for where, folders, names in os.walk(folder, onerror=on_error):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED_FOLDERS and not _is_excluded(Path(where, name), folder, exclude)
        )
        for name in sorted(names):
            path = Path(where, name)
            wanted = is_wanted(path) and not _is_excluded(path, folder, exclude)
            if wanted and _is_regular_within(path, root):
                yield path


def find_beside(paths: Sequence[Path], ported: Sequence[Path]) -> list[Path]:
    """The programs below folders that are not ported: excluded ones, Cython, and scripts without a suffix."""
    own = {os.path.realpath(path) for path in ported}
    found = []
    for folder in paths:
        for path in _below(folder, (), [], _is_program) if os.path.isdir(folder) else ():
            if os.path.realpath(path) not in own:
                found.append(path)
    return found


def _is_program(path: Path) -> bool:
    if path.suffix:
        return path.suffix in _PROGRAMS
    try:
        return _SCRIPT.match(read(path)) is not None
    except (OSError, UnreadableError):
        return False


def _is_regular_within(path: Path, root: Path) -> bool:
    """Whether a path is a regular file below a folder; a link to another place, a pipe or a device is not.

    A link that cannot be followed is reported with the other files that cannot be read.
    """
    real = Path(os.path.realpath(path))
    try:
        return root in real.parents and (stat.S_ISREG(os.stat(path).st_mode))
    except OSError:
        return True


def read(path: Path) -> bytes:
    """The bytes of a regular file.

    Raises:
        UnreadableError: it is something else, such as a pipe, which could block for ever.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableError(NOT_REGULAR)
        return file.read()


def _is_excluded(path: Path, folder: Path, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a file or folder: its name, or its path relative to ``folder``."""
    relative = path.relative_to(folder).as_posix()
    return any(
        fnmatch.fnmatch(path.name, pattern)
        or fnmatch.fnmatch(relative, pattern)
        or fnmatch.fnmatch(relative, f"{pattern.rstrip('/')}/*")
        for pattern in patterns
    )


def decode(data: bytes) -> Content:
    """The text of a Python file.

    Raises:
        UnreadableError: its encoding is unknown, or the bytes do not match it.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        raise UnreadableError(f"its encoding is not known: {error}") from error
    has_mark = data.startswith(codecs.BOM_UTF8)
    plain = "utf-8" if encoding == "utf-8-sig" else encoding
    body = data[len(codecs.BOM_UTF8) :] if has_mark else data
    try:
        text = body.decode(plain)
    except (UnicodeDecodeError, LookupError) as error:
        raise UnreadableError(f"it is not {plain}: {error}") from error
    if "\0" in text:
        raise UnreadableError("it contains a null byte, so it is not Python source")
    content = Content(text, plain, has_mark)
    if content.encode(text) != data:
        raise UnreadableError(f"its {plain} cannot be written back byte for byte")
    return content


def write(path: Path, data: bytes, before: bytes) -> None:
    """Replaces a file atomically and keeps its mode; a link stays a link.

    Args:
        path: the file.
        data: its new content.
        before: the content that was ported.

    Raises:
        UnreadableError: the file is read-only, has changed since, or no file can be created in its folder.
    """
    if read(path) != before:
        raise UnreadableError("it changed while it was ported, so it was not written; run again")
    real = Path(os.path.realpath(path))
    mode = stat.S_IMODE(os.stat(real).st_mode)
    if not mode & 0o222 or not os.access(real, os.W_OK):
        raise UnreadableError("it is read-only and was not changed; make it writable and run again")
    try:
        replace_file(real, data, mode)
    except OSError as error:
        raise UnreadableError(f"it cannot be written: {error.strerror or error}") from error
