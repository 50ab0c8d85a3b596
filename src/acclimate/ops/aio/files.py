"""Files as asynchronous I/O opens them: twice, through the page cache and past it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from dataclasses import dataclass, field
from typing import Any, cast

Name = str | bytes | int
"""A path, or a descriptor that the caller has opened."""

# What open(2) and a reopening through /proc need; absent where there is no direct I/O.
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_UNNAMED: int = getattr(os, "O_TMPFILE", 0)
_SMALLEST_DIRECT_BYTES = 4096
_NEW_FILE_MODE = 0o666


@dataclass
class OpenFile:
    """One file, open for reading or for writing."""

    name: Name
    fd: int
    """Through the page cache."""
    direct_fd: int = -1
    """Past the page cache; -1 where that is not possible or not worth it."""
    status: os.stat_result = field(init=False)

    def __post_init__(self) -> None:
        self.status = os.fstat(self.fd)
        if not _is_disk(self.status):
            # Raises ESPIPE where there are no offsets: a read of a pipe would wait for its other end.
            os.lseek(self.fd, 0, os.SEEK_CUR)

    def close(self) -> None:
        """Closes both descriptors; a second call does nothing."""
        for fd in (self.fd, self.direct_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):  # the data's errors were told by the transfers
                    os.close(fd)
        self.fd = self.direct_fd = -1


def open_file(name: Name, writes: bool, length: int) -> OpenFile:
    """Opens a file for a transfer of ``length`` bytes; makes it if it is to be written and missing.

    Raises:
        OSError: as :func:`os.open` says; a directory cannot be opened either way.
    """
    flags = os.O_WRONLY | os.O_CREAT if writes else os.O_RDONLY
    fd = _own(name, flags & ~os.O_CREAT) if isinstance(name, int) else _open(name, flags)
    return _with_direct(name, fd, flags & ~os.O_CREAT, length)


def _open(name: str | bytes, flags: int) -> int:
    # Without O_NONBLOCK a pipe without a partner would block here for ever, instead of being refused later.
    fd = os.open(name, flags | os.O_CLOEXEC | os.O_NONBLOCK, _NEW_FILE_MODE)
    # io_uring takes O_NONBLOCK to mean that a transfer which has to wait shall fail.
    os.set_blocking(fd, True)
    return fd


def _own(fd: int, flags: int) -> int:
    """A descriptor of our own for a file the caller has opened, which the caller may then close."""
    mode = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = (os.O_RDWR, os.O_WRONLY if flags & os.O_WRONLY else os.O_RDONLY)
    if mode & os.O_ACCMODE not in wanted:
        raise OSError(errno.EBADF, "Descriptor is not open for writing")
    try:
        # Opened anew, so that the caller's O_APPEND or O_DIRECT does not apply.
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    except OSError:  # no /proc, or the file's mode has changed since
        return os.dup(fd)


def _with_direct(name: Name, fd: int, flags: int, length: int) -> OpenFile:
    try:
        file = OpenFile(name, fd)
        if stat.S_ISDIR(file.status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError:
        os.close(fd)
        raise
    if _DIRECT and _is_disk(file.status) and length >= _SMALLEST_DIRECT_BYTES:
        # Through /proc, so that it is the same file even when the name has been given to another since.
        with contextlib.suppress(OSError):
            file.direct_fd = os.open(f"/proc/self/fd/{fd}", flags | _DIRECT | os.O_CLOEXEC)
    return file


def _is_disk(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)


def open_for_validation(file: OpenFile) -> int:
    """A descriptor that reads, through the page cache, the file that another is open for.

    Raises:
        OSError: it may be written but not read, or there is no /proc and the file came as a descriptor.
    """
    if os.path.isdir("/proc/self/fd"):
        return os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC)
    if isinstance(file.name, int):
        raise OSError(errno.ENOSYS, "Without /proc, a file given as a descriptor cannot be read back")
    return os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)


class Replacement:
    """A new content for a file that is written beside it and takes its name when it is complete.

    Where the file system can (``O_TMPFILE``), the new content has no name until then, so a writer that is
    killed leaves nothing behind at all.

    Raises:
        OSError: the folder cannot be written, or ``name`` is a directory.
    """

    def __init__(self, name: str | bytes, length: int) -> None:
        self._target = os.path.realpath(os.fsdecode(name))  # of a link, what it points to is replaced
        folder, base = os.path.split(self._target)
        self._temporary = os.path.join(folder, f".{base}.{secrets.token_hex(6)}.partial")
        self._has_name = False
        if os.path.isdir(self._target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        self.file = _with_direct(name, self._open(folder), os.O_WRONLY, length)
        with contextlib.suppress(OSError):  # no old content, or its mode is not ours to give
            os.fchmod(self.file.fd, stat.S_IMODE(os.stat(self._target).st_mode))

    def _open(self, folder: str) -> int:
        if _UNNAMED and os.path.isdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # not on every file system
                return os.open(folder, _UNNAMED | os.O_WRONLY | os.O_CLOEXEC, _NEW_FILE_MODE)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(self._temporary, flags, _NEW_FILE_MODE)
        self._has_name = True
        return fd

    def publish(self) -> None:
        """Waits until the content has reached the disk, then gives it the name.

        Raises:
            OSError: the disk failed, or the folder changed meanwhile. The old content stays.
        """
        try:
            os.fsync(self.file.fd)
            folder = os.open(os.path.dirname(self._target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if not self._has_name:
                    # Only with a folder's descriptor does os.link follow the link in /proc.
                    unnamed = f"/proc/self/fd/{self.file.fd}"
                    os.link(unnamed, self._temporary, src_dir_fd=folder, dst_dir_fd=folder)
                    self._has_name = True
                os.replace(self._temporary, self._target)
                self._has_name = False
                os.fsync(folder)
            finally:
                os.close(folder)
        finally:
            self.discard()

    def discard(self) -> None:
        """Removes what was not published."""
        self.file.close()
        if self._has_name:
            self._has_name = False
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)


def path_of(name: Any) -> Name:
    """A path or descriptor as given by a caller.

    Raises:
        TypeError: it is neither.
    """
    return name if isinstance(name, int) else cast("str | bytes", os.fspath(name))
