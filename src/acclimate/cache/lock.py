"""A lock file that one process holds at a time, and that the kernel releases when the holder dies.

``filelock`` is not used: before version 4, which needs Python 3.11, it truncates the file before the opened
descriptor can be checked. If another user replaced the lock by a hard link, filelock would empty the target.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from acclimate.cache.folder import open_file, read_file
from acclimate.errors import OpLockTimeoutError

try:
    import fcntl
except ImportError:  # no flock on this system: two builders may both work, and one result is kept
    fcntl = None  # type: ignore[assignment]

_logger = logging.getLogger("acclimate")
_POLL_S = 0.02

# A child that this process forks (a data loader's worker, from another thread) must not keep the lock of a
# builder that was killed, so it closes what it inherited.
_held: set[int] = set()


def _close_inherited() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


@contextlib.contextmanager
def hold(path: Path, timeout_s: float, purpose: str, notice: int = logging.INFO) -> Iterator[None]:
    """Holds a lock file; waits until its holder releases it.

    The file names its holder. On a network file system without locks, every process gets the lock; the
    caller's rename then decides which builder's result is kept.

    Args:
        path: the lock file, in a folder that exists and was checked.
        timeout_s: the longest wait, in seconds.
        purpose: the holder's work, for the messages of waiting processes, such as "building …".
        notice: the log level of the message that this process waits.

    Raises:
        OpLockTimeoutError: another process held the lock until the timeout.
        UntrustedCacheError: others can write to the file, or it is a symbolic link.
        OSError: the file cannot be created.
    """
    if fcntl is None:
        yield
        return
    descriptor = _acquire(path, timeout_s, purpose, notice)
    with _held_open(descriptor):
        yield


def try_hold(path: Path) -> contextlib.AbstractContextManager[None] | None:
    """Returns the lock of a file if it is free; ``None`` if it is held or the system has no locks."""
    if fcntl is None:
        return None
    try:
        descriptor = _open(path)
        if not _lock(descriptor, path):
            os.close(descriptor)
            return None
    except OSError:
        return None
    return _held_open(descriptor)


@contextlib.contextmanager
def _held_open(descriptor: int) -> Iterator[None]:
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # not so in a child forked meanwhile
            _held.discard(descriptor)
            os.close(descriptor)


def _acquire(path: Path, timeout_s: float, purpose: str, notice: int) -> int:
    deadline = time.monotonic() + timeout_s
    descriptor = _open(path)
    said = False
    try:
        while True:
            try:
                if _lock(descriptor, path):
                    break
                if not _is_current(descriptor, path):  # `acclimate ops clean` removed it meanwhile
                    stale, descriptor = descriptor, _open(path)
                    os.close(stale)
                    continue
            except OSError as error:
                _logger.debug("no lock for %s: %s", path, error)
                break
            if time.monotonic() >= deadline:
                raise OpLockTimeoutError(
                    f"Waited {timeout_s:g} s for {_holder(path)}, which is {purpose}. Wait for it or "
                    "stop it, or set ACCLIMATE_BUILD_TIMEOUT to a longer time in seconds."
                )
            if not said:
                _logger.log(notice, "waiting for another process that is %s: %s", purpose, _holder(path))
                said = True
            time.sleep(_POLL_S)
        _sign(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open(path: Path) -> int:
    return open_file(path, os.O_RDWR | os.O_CREAT)


def _lock(descriptor: int, path: Path) -> bool:
    """Acquires the lock if it is free; returns whether that worked and the path still names this file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _is_current(descriptor, path)


def _is_current(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    if os.fstat(descriptor).st_nlink != 1:  # a hard link to another file, which must not be overwritten
        return
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    with contextlib.suppress(OSError):  # on a full disk the lock works, but does not name its holder
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(read_file(path))
        return f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return f"the holder of {path}"
