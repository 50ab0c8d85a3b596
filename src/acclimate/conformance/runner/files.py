"""Writes a report's file atomically: a reader sees the old content or the new, never a part."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str) -> None:
    """Replaces a file's content.

    Raises:
        OSError: it cannot be written; the old content is still there.
    """
    if path.exists() and not path.is_file():  # a device or a pipe, which cannot be replaced
        path.write_text(content, encoding="utf-8", errors="replace")
        return
    target = Path(os.path.realpath(path))
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, target.stat().st_mode if target.exists() else 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
