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

from acclimate.errors import AsyncIOSettingError

Name = str | bytes | int
"""A path, or a descriptor that the caller has opened."""

# What open(2) and a reopening through /proc need; absent where there is no direct I/O.
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_UNNAMED: int = getattr(os, "O_TMPFILE", 0)
_SMALLEST_DIRECT_BYTES = 4096
_NEW_FILE_MODE = 0o666
_NAME_START_BYTES = 200
"""How much of a file's name, of at most 255 bytes, the name of its new content repeats."""


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
        descriptors = self.fd, self.direct_fd
        # First, so that a call after a Ctrl-C in here closes no number that another file has by then.
        self.fd = self.direct_fd = -1
        for fd in descriptors:
            if fd >= 0:
                with contextlib.suppress(OSError):  # the transfers have reported the data's errors
                    os.close(fd)


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
    try:
        mode = fcntl.fcntl(fd, fcntl.F_GETFL)
    except OverflowError as error:  # more than a C int
        raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from error
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
        AsyncIOSettingError: ``name`` is a descriptor, or belongs to a device, a pipe or a socket.
        OSError: the folder cannot be written, or ``name`` is a directory.
    """

    def __init__(self, name: Name, length: int) -> None:
        if isinstance(name, int):
            raise AsyncIOSettingError(
                f"atomic=True gives the new content the file's name, and descriptor {name} has none; "
                "give the path, or leave atomic out."
            )
        self._target = os.path.realpath(os.fsdecode(name))  # of a link, what it points to is replaced
        folder, base = os.path.split(self._target)
        # Cut, as the file's name may be as long as a name can be.
        start = os.fsdecode(os.fsencode(base)[:_NAME_START_BYTES])
        self._temporary = os.path.join(folder, f".{start}.{secrets.token_hex(6)}.partial")
        mode = _mode_of_file(self._target)
        self._is_unnamed = True
        self.file = _with_direct(name, self._open(folder), os.O_WRONLY, length)
        if mode is not None:
            with contextlib.suppress(OSError):  # the mode is not ours to give
                os.fchmod(self.file.fd, mode)

    def _open(self, folder: str) -> int:
        if _UNNAMED and os.path.isdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # not on every file system
                return os.open(folder, _UNNAMED | os.O_WRONLY | os.O_CLOEXEC, _NEW_FILE_MODE)
        self._is_unnamed = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(self._temporary, flags, _NEW_FILE_MODE)

    def publish(self) -> None:
        """Waits until the content has reached the disk, then gives it the name.

        Can be called again after a Ctrl-C, at whatever point that came.

        Raises:
            OSError: the disk failed, or the folder changed meanwhile. The old content stays.
        """
        os.fsync(self.file.fd)
        folder = os.open(os.path.dirname(self._target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if self._is_unnamed:
                # Only with a folder's descriptor does os.link follow the link in /proc.
                unnamed = f"/proc/self/fd/{self.file.fd}"
                with contextlib.suppress(FileExistsError):  # from a call before, which was interrupted
                    os.link(unnamed, self._temporary, src_dir_fd=folder, dst_dir_fd=folder)
            if not self._is_published():
                os.replace(self._temporary, self._target)
            os.fsync(folder)
        finally:
            os.close(folder)

    def _is_published(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._target), os.fstat(self.file.fd))
        except FileNotFoundError:
            return False

    def discard(self) -> None:
        """Removes what was not published, and closes the file."""
        self.file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)


def _mode_of_file(path: str) -> int | None:
    """The permissions of the file that is to be replaced; ``None`` where there is none yet."""
    try:
        mode = os.stat(path).st_mode
    except OSError:  # what is wrong with the folder, opening a file in it says better
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise AsyncIOSettingError(
            f"atomic=True would replace {path}, which is a device, a pipe or a socket, by a file; "
            "leave atomic out to write to it."
        )
    return stat.S_IMODE(mode)


def path_of(name: Any) -> Name:
    """A path or descriptor as given by a caller.

    Raises:
        TypeError: it is neither.
    """
    return name if isinstance(name, int) else cast("str | bytes", os.fspath(name))
