"""Opens files for asynchronous I/O, once through the page cache and once bypassing it."""

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

# Flags of open(2), which only Linux has.
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_UNNAMED: int = getattr(os, "O_TMPFILE", 0)
_SMALLEST_DIRECT_BYTES = 4096
_NEW_FILE_MODE = 0o666
_NAME_START_BYTES = 200
"""How much of a file's name, which may have 255 bytes, goes into the name of its temporary file."""


@dataclass
class OpenFile:
    """One file, open for reading or for writing."""

    name: Name
    fd: int
    """The descriptor that uses the page cache."""
    direct_fd: int = -1
    """The descriptor that bypasses the page cache; -1 if that is impossible or too slow."""
    status: os.stat_result = field(init=False)

    def __post_init__(self) -> None:
        self.status = os.fstat(self.fd)
        if not _is_disk(self.status):
            # Raises ESPIPE for a pipe or socket, whose read would block until its other end writes.
            os.lseek(self.fd, 0, os.SEEK_CUR)

    def close(self) -> None:
        """Closes both descriptors; a second call does nothing."""
        descriptors = self.fd, self.direct_fd
        # Cleared first: after a Ctrl-C, a second call must not close a number that another file got.
        self.fd = self.direct_fd = -1
        for fd in descriptors:
            if fd >= 0:
                with contextlib.suppress(OSError):  # the transfers have already reported errors
                    os.close(fd)


def open_file(name: Name, writes: bool, length: int) -> OpenFile:
    """Opens a file for a transfer of ``length`` bytes; creates a missing one for writing.

    Raises:
        OSError: as from :func:`os.open`; also for a directory.
    """
    flags = os.O_WRONLY | os.O_CREAT if writes else os.O_RDONLY
    fd = _own(name, flags & ~os.O_CREAT) if isinstance(name, int) else _open(name, flags)
    return _with_direct(name, fd, flags & ~os.O_CREAT, length)


def _open(name: str | bytes, flags: int) -> int:
    # Without O_NONBLOCK, opening a FIFO without a peer would never return; it is refused below.
    fd = os.open(name, flags | os.O_CLOEXEC | os.O_NONBLOCK, _NEW_FILE_MODE)
    # With O_NONBLOCK, io_uring fails transfers that would have to wait.
    os.set_blocking(fd, True)
    return fd


def _own(fd: int, flags: int) -> int:
    """Returns our own descriptor for a file that the caller has opened and may close at any time."""
    try:
        mode = fcntl.fcntl(fd, fcntl.F_GETFL)
    except OverflowError as error:  # more than a C int
        raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from error
    wanted = (os.O_RDWR, os.O_WRONLY if flags & os.O_WRONLY else os.O_RDONLY)
    if mode & os.O_ACCMODE not in wanted:
        raise OSError(errno.EBADF, "Descriptor is not open for writing")
    try:
        # Reopened, so that the caller's O_APPEND or O_DIRECT does not apply.
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
        # Through /proc, so that it is the same file even if the name has been reused since.
        with contextlib.suppress(OSError):
            file.direct_fd = os.open(f"/proc/self/fd/{fd}", flags | _DIRECT | os.O_CLOEXEC)
    return file


def _is_disk(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)


def open_for_validation(file: OpenFile) -> int:
    """Returns a descriptor that reads an open file again, through the page cache.

    Raises:
        OSError: the file is not readable, or it was given as a descriptor and there is no /proc.
    """
    if os.path.isdir("/proc/self/fd"):
        return os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC)
    if isinstance(file.name, int):
        raise OSError(errno.ENOSYS, "Without /proc, a file given as a descriptor cannot be read back")
    return os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)


class Replacement:
    """New content for a file, written to a temporary file that takes the file's name once it is complete.

    If the file system supports ``O_TMPFILE``, the temporary file has no name, so a killed writer leaves
    nothing behind.

    Raises:
        AsyncIOSettingError: ``name`` is a descriptor, or names a device, a pipe or a socket.
        OSError: the folder cannot be written, or ``name`` is a directory.
    """

    def __init__(self, name: Name, length: int) -> None:
        if isinstance(name, int):
            raise AsyncIOSettingError(
                f"atomic=True replaces the file of this name, but descriptor {name} has no name; "
                "give the path, or do not pass atomic."
            )
        self._target = os.path.realpath(os.fsdecode(name))  # replaces a link's target
        folder, base = os.path.split(self._target)
        # Cut, since the file's name may have the maximum length.
        start = os.fsdecode(os.fsencode(base)[:_NAME_START_BYTES])
        self._temporary = os.path.join(folder, f".{start}.{secrets.token_hex(6)}.partial")
        mode = _mode_of_file(self._target)
        self._is_unnamed = True
        self.file = _with_direct(name, self._open(folder), os.O_WRONLY, length)
        if mode is not None:
            with contextlib.suppress(OSError):  # not permitted
                os.fchmod(self.file.fd, mode)

    def _open(self, folder: str) -> int:
        if _UNNAMED and os.path.isdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # not on every file system
                return os.open(folder, _UNNAMED | os.O_WRONLY | os.O_CLOEXEC, _NEW_FILE_MODE)
        self._is_unnamed = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(self._temporary, flags, _NEW_FILE_MODE)

    def publish(self) -> None:
        """Waits until the content is on the disk, then gives it the file's name.

        Can be called again after a Ctrl-C at any point.

        Raises:
            OSError: the disk failed, or the folder was changed. The old content stays.
        """
        os.fsync(self.file.fd)
        folder = os.open(os.path.dirname(self._target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if self._is_unnamed:
                # os.link follows the link in /proc only with a folder's descriptor.
                unnamed = f"/proc/self/fd/{self.file.fd}"
                with contextlib.suppress(FileExistsError):  # from an earlier, interrupted call
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
        """Closes the file, and removes the temporary file unless it was published."""
        self.file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)


def _mode_of_file(path: str) -> int | None:
    """Returns the permissions of the file to replace; ``None`` if there is none yet."""
    try:
        mode = os.stat(path).st_mode
    except OSError:  # opening a file in the folder reports what is wrong with it
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise AsyncIOSettingError(
            f"atomic=True would replace {path}, which is a device, a pipe or a socket, by a file; "
            "to write to it, do not pass atomic."
        )
    return stat.S_IMODE(mode)


def path_of(name: Any) -> Name:
    """Returns a caller's path or descriptor.

    Raises:
        TypeError: it is neither.
    """
    return name if isinstance(name, int) else cast("str | bytes", os.fspath(name))
