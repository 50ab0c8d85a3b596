"""The user's cache folder, and how a folder is published in it: whole, once, or not at all."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from acclimate.errors import AcclimateError, CacheWriteError

try:
    import fcntl
except ImportError:  # no flock on this system: two builders may both work, one result is kept
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("acclimate")

# What a file system answers when it takes no more bytes: full, over quota, over the process's size limit.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PARTIAL = ".partial"
_LOCK = ".lock"


def cache_root() -> Path:
    """The folder all of acclimate's cached files live under; not created here.

    ``ACCLIMATE_CACHE``, else ``$XDG_CACHE_HOME/acclimate``, else ``~/.cache/acclimate``.
    """
    if chosen := os.environ.get("ACCLIMATE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "acclimate"


def publish_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns ``folder``, after filling it with ``build(private_folder)`` if it does not exist yet.

    The private folder is on the same file system and is renamed into place after everything in it has
    reached the disk, so ``folder`` is complete or absent, whatever kills the builder. Of several
    processes that ask at once, one builds and the others wait and use its result; the lock belongs to
    the kernel, so a dead builder never blocks. Private folders that dead builders left are removed.

    Raises:
        CacheWriteError: the disk is full or the cache cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if folder.is_dir():  # another process built it while this one waited
                return folder
            _remove_leftovers(folder.parent, held=folder.name)
            private = folder.parent / f".{folder.name}.{secrets.token_hex(4)}{_PARTIAL}"
            private.mkdir()
            try:
                build(private)
                flush(private)
                _rename(private, folder)
            finally:
                shutil.rmtree(private, ignore_errors=True)
    except AcclimateError:
        raise
    except OSError as error:
        explained = _explained(error, folder)
        if explained is None:
            raise
        raise explained from error
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the kernel's lock for one folder; waits for whoever has it.

    The lock's file stays: removing it would let two processes hold "the" lock on two different files.
    """
    if fcntl is None:
        yield
        return
    with _lock_file(folder.parent, folder.name).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("waiting for another process that is making %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # a network file system without locks: the rename still decides
            logger.debug("no lock for %s: %s", folder, error)
        yield


def _lock_file(parent: Path, name: str) -> Path:
    return parent / f".{name}{_LOCK}"


def _remove_leftovers(parent: Path, held: str) -> None:
    """Removes private folders whose builder is dead: those whose lock nobody holds."""
    for leftover in parent.glob(f".*{_PARTIAL}"):
        name = leftover.name[1 : -len(_PARTIAL)].rpartition(".")[0]
        if name == held:  # this process has the lock, so whoever made it is gone
            shutil.rmtree(leftover, ignore_errors=True)
        elif fcntl is not None:
            with contextlib.suppress(OSError), _lock_file(parent, name).open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover, ignore_errors=True)


def flush(folder: Path) -> None:
    """Makes every file of a folder reach the disk, so that a power cut after the rename loses nothing."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
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
        return  # without locks another process can be first; its result is as good
    with contextlib.suppress(OSError):
        sync(folder.parent)


def _explained(error: OSError, folder: Path) -> CacheWriteError | None:
    if error.errno in _FULL:
        return full_disk_error(folder.parent)
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}:
        return CacheWriteError(
            f"the cache {folder.parent} cannot be written ({error.strerror}); "
            "set ACCLIMATE_CACHE to a folder that can"
        )
    return None


def full_disk_error(folder: Path, needed_bytes: int | None = None) -> CacheWriteError:
    """The error for a file system that cannot take ``needed_bytes`` more (``None``: it just refused some)."""
    amount = "" if needed_bytes is None else f": {needed_bytes / 1e6:.0f} MB are needed"
    with contextlib.suppress(OSError):
        amount += f"{',' if amount else ':'} {shutil.disk_usage(folder).free / 1e6:.0f} MB are free"
    return CacheWriteError(
        f"no space left under {folder}{amount}; free some, or set ACCLIMATE_CACHE to a folder on another disk"
    )
