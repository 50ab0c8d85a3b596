"""Publishes a folder in the cache: one process fills a private folder, flushes it, and renames it into place.

<parent>/<name>                           the published folder
<parent>/.<name>.lock                     the lock that the filling process holds
<parent>/.<name>.<8 hex digits>.partial   the private folder
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from acclimate.cache.folder import check_tree, make_folder, settle_modes
from acclimate.cache.lock import hold, try_hold
from acclimate.errors import AcclimateError, CacheWriteError

# The errors of a file system that takes no more bytes: full, over quota, over the process's size limit.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# The errors of a file system that cannot be written at all, or of a path that cannot be followed.
_REFUSED = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG,
    errno.ELOOP, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ENOENT,
}  # fmt: skip
UNWRITABLE = frozenset(_FULL | _REFUSED)
"""The ``errno`` values that come from the file system, as opposed to a bug in acclimate."""

_PARTIAL = ".partial"


def publish_once(
    folder: Path, build: Callable[[Path], None], is_whole: Callable[[], bool] | None = None
) -> Path:
    """Returns ``folder``; if it does not exist yet, fills it first with :func:`publish`.

    Args:
        folder: the folder to publish.
        build: fills the private folder that it gets.
        is_whole: whether ``folder`` needs no building; by default, whether it exists.

    Raises:
        CacheWriteError: the disk is full, the cache cannot be written, or others can write to it.
    """
    is_whole = is_whole or folder.is_dir
    try:
        if folder.is_dir():
            check_tree(folder)
        if not is_whole():
            publish(folder, build, is_whole, f"making {folder}", notice=logging.WARNING)
    except AcclimateError:
        raise
    except OSError as error:
        explained = _explained(error, folder)
        if explained is None:
            raise
        raise explained from error
    return folder


def publish(
    folder: Path,
    build: Callable[[Path], None],
    is_whole: Callable[[], bool],
    purpose: str,
    *,
    timeout_s: float = math.inf,
    notice: int = logging.INFO,
) -> None:
    """Fills ``folder`` with ``build(private_folder)``, unless another process does so first.

    The private folder is on the same file system, and is renamed into place after its content has reached
    the disk. So ``folder`` is complete or absent even if the builder is killed. Of several processes that
    call this at once, one builds and the others wait and use its result. The kernel releases the lock of a
    dead builder. Private folders of dead builders are removed.

    Args:
        folder: the folder to publish; it replaces an existing one that is not complete.
        build: fills the private folder that it gets.
        is_whole: returns whether ``folder`` is complete.
        purpose: the builder's work, for the messages of waiting processes: "building …".
        timeout_s: the longest wait for another process, in seconds.
        notice: the log level of the message that this process waits.

    Raises:
        OpLockTimeoutError: another process was building the folder until the timeout.
        UntrustedCacheError: others can change the content of the folder's parent.
        OSError: the folder cannot be written.
    """
    parent = folder.parent
    make_folder(parent)
    with hold(lock_file(folder), timeout_s, purpose, notice):
        if is_whole():  # another process built it while this one waited
            return
        _remove_leftovers(parent, held=folder.name)
        private = parent / f".{folder.name}.{secrets.token_hex(4)}{_PARTIAL}"
        private.mkdir(0o755)
        try:
            build(private)
            settle_modes(private)
            _flush(private)
            if os.path.lexists(folder) and not is_whole():  # truncated or overwritten, so unusable
                remove(folder)
            _rename(private, folder)
        finally:
            _discard(private)


def lock_file(folder: Path) -> Path:
    """Returns the lock file of a folder, which is held while the folder is filled.

    The file is never removed: two processes could then hold locks on two different files of this name.
    """
    return folder.with_name(f".{folder.name}.lock")


def leftovers(folder: Path) -> list[Path]:
    """Returns the private folders of a folder's builders: the lock's holder, and dead builders."""
    return sorted(folder.parent.glob(f".{folder.name}.*{_PARTIAL}"))


def _remove_leftovers(parent: Path, held: str) -> None:
    """Removes the private folders of dead builders: those whose lock is free or held by this process."""
    for leftover in parent.glob(f".*{_PARTIAL}"):
        name = leftover.name[1 : -len(_PARTIAL)].rpartition(".")[0]
        if name == held:
            _discard(leftover)
            continue
        lock = try_hold(lock_file(parent / name))
        if lock is not None:
            with lock:
                _discard(leftover)


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, and not a symbolic link to one."""
    return path.is_dir() and not path.is_symlink()


def remove(path: Path) -> None:
    """Removes a file or folder; removes a symbolic link, but not its target."""
    if is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _discard(path: Path) -> None:
    """Removes a builder's folder as far as possible; plain ``rmtree`` would block on a FIFO."""
    if is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _flush(folder: Path) -> None:
    """Syncs every file of a folder to disk, so that no data is lost if the power fails after the rename."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    """Syncs a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def _rename(private: Path, folder: Path) -> None:
    try:
        private.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        return  # on a file system without locks another process was first; its result is as good
    with contextlib.suppress(OSError):
        _sync(folder.parent)


def _explained(error: OSError, folder: Path) -> CacheWriteError | None:
    """Returns the error to raise if the cache caused it; ``None`` if reading ``build``'s input did."""
    named = error.filename
    if isinstance(named, str) and not Path(named).is_relative_to(folder.parent) and folder.parent.is_dir():
        return None
    if error.errno in _FULL:
        return full_disk_error(folder.parent)
    if error.errno in _REFUSED:
        return CacheWriteError(
            f"the cache {folder.parent} cannot be written ({refusal(error)}); "
            "set ACCLIMATE_CACHE to a writable folder"
        )
    return None


def refusal(error: OSError) -> str:
    """Returns the text of a file system's error, with the path if the error has one."""
    return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)


def full_disk_error(folder: Path, needed_bytes: int | None = None) -> CacheWriteError:
    """Returns the error for a full disk; ``needed_bytes`` is the missing space, if known."""
    amount = "" if needed_bytes is None else f": {needed_bytes / 1e6:.0f} MB are needed"
    with contextlib.suppress(OSError):
        amount += f"{',' if amount else ':'} {shutil.disk_usage(folder).free / 1e6:.0f} MB are free"
    return CacheWriteError(
        f"no space left under {folder}{amount}; free some, or set ACCLIMATE_CACHE to a folder on another disk"
    )
