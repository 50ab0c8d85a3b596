"""How a folder appears in the cache: filled in private by one process, flushed, and renamed into place.

<parent>/<name>                           what is published
<parent>/.<name>.lock                     held by the process that fills it
<parent>/.<name>.<8 hex digits>.partial   where it does
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

# What a file system answers when it takes no more bytes: full, over quota, over the process's size limit.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# What it answers when it takes none at all, or when the path cannot be followed.
_REFUSED = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG,
    errno.ELOOP, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ENOENT,
}  # fmt: skip
UNWRITABLE = frozenset(_FULL | _REFUSED)
"""The numbers of errors that are the file system's, as opposed to a bug of ours."""

_PARTIAL = ".partial"


def publish_once(
    folder: Path, build: Callable[[Path], None], is_whole: Callable[[], bool] | None = None
) -> Path:
    """Returns ``folder``, after filling it as :func:`publish` does if it does not exist yet.

    Args:
        folder: to be filled.
        build: fills the folder that it is given.
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
    """Fills ``folder`` with ``build(private_folder)``, unless another process has meanwhile.

    The private folder is on the same file system and is renamed into place after everything in it has
    reached the disk, so ``folder`` is complete or absent, whatever kills the builder. Of several
    processes that ask at once, one builds and the others wait and use its result; the lock belongs to
    the kernel, so a dead builder never blocks. Private folders that dead builders left are removed.

    Args:
        folder: to be filled; what it holds now is replaced if it is not whole.
        build: fills the folder that it is given.
        is_whole: whether ``folder`` needs no building.
        purpose: what the builder does, for those who wait: "building …".
        timeout_s: the longest wait for another process, in seconds.
        notice: the log's level of the message that this process waits.

    Raises:
        OpLockTimeoutError: another process was building it all the time.
        UntrustedCacheError: others can change what is in the folder's parent.
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
            if os.path.lexists(folder) and not is_whole():  # truncated, or overwritten: of no use to anybody
                remove(folder)
            _rename(private, folder)
        finally:
            _discard(private)


def lock_file(folder: Path) -> Path:
    """Whose lock is held while a folder is filled.

    The file stays: removing it would let two processes hold "the" lock on two different files.
    """
    return folder.with_name(f".{folder.name}.lock")


def leftovers(folder: Path) -> list[Path]:
    """The private folders of one folder's builders: of the one that holds the lock, and of dead ones."""
    return sorted(folder.parent.glob(f".{folder.name}.*{_PARTIAL}"))


def _remove_leftovers(parent: Path, held: str) -> None:
    """Removes the private folders of dead builders: those whose lock nobody holds, or this process does."""
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
    """Whether there is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def remove(path: Path) -> None:
    """Removes what is under a name; of a link, only the link."""
    if is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _discard(path: Path) -> None:
    """Removes what a builder left, as far as that can be done; ``rmtree`` alone would wait at a FIFO."""
    if is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _flush(folder: Path) -> None:
    """Makes every file of a folder reach the disk, so that a power cut after the rename loses nothing."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    """Makes a file, or the entries of a folder, reach the disk."""
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
    """The error for a person, where it is about the cache and not about what is read to fill it."""
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
    """What the file system refused, with the path where the error has one."""
    return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)


def full_disk_error(folder: Path, needed_bytes: int | None = None) -> CacheWriteError:
    """The error for a file system that cannot take ``needed_bytes`` more (``None``: it just refused some)."""
    amount = "" if needed_bytes is None else f": {needed_bytes / 1e6:.0f} MB are needed"
    with contextlib.suppress(OSError):
        amount += f"{',' if amount else ':'} {shutil.disk_usage(folder).free / 1e6:.0f} MB are free"
    return CacheWriteError(
        f"no space left under {folder}{amount}; free some, or set ACCLIMATE_CACHE to a folder on another disk"
    )
