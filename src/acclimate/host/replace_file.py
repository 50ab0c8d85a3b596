"""Replaces a file's content atomically: a reader sees the old content or the new, never a part of it."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int | None = None) -> None:
    """Writes content to the disk, and then gives it the file's name. A link stays a link.

    Args:
        path: the file; it need not exist. A device or a pipe is written, since it cannot be replaced.
        content: the new content.
        mode: its permissions. ``None``: those of the file, and of any new file if there is none yet.

    Raises:
        OSError: it cannot be written; the old content is still there.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = Path(os.path.realpath(path))
    if mode is None:
        try:
            mode = target.stat().st_mode & 0o7777
        except FileNotFoundError:
            mode = 0o666 & ~umask()
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".acclimate.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def umask() -> int:
    """The bits that new files of this process do not get.

    Linux tells them. Elsewhere they are told only in exchange for others, which files that another thread
    makes meanwhile get.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(errors="replace").splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
