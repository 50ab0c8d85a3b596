"""A file of a model, open for reading at any position; detects changes of the file.

What a path names can change at any time, so everything that must fit together is read from one open file, and
the file's state is compared at the end. Files that a loaded model uses in place are compared at each use.
"""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from acclimate.errors import CorruptModelError, ModelNotFoundError

_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


class FileState(NamedTuple):
    """Which file it is, and values that change with its content."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """Takes them from the result of a system call."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def open_regular(path: Path) -> int:
    """Opens a file for reading, and returns its descriptor; never waits, as opening a named pipe would.

    Raises:
        ModelNotFoundError: the path names nothing, or something other than a regular file.
        CorruptModelError: the file cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | _NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = "is a link to nothing" if path.is_symlink() else "does not exist"
        raise ModelNotFoundError(f"{path} {reason}") from error
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket cannot be opened
            raise ModelNotFoundError(f"{path} is a socket, not a file") from error
        if error.errno == errno.ELOOP:
            raise ModelNotFoundError(f"{path} is a loop of links") from error
        raise CorruptModelError(f"{path} cannot be read: {error.strerror}") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = next((noun for is_kind, noun in _KINDS.items() if is_kind(mode)), "something else")
        raise ModelNotFoundError(f"{path} is {kind}, not a file")
    return descriptor


def read_start(path: Path, length: int) -> bytes:
    """Returns the first bytes of a regular file.

    Raises:
        ModelNotFoundError: it is not a regular file.
        CorruptModelError: it cannot be read.
    """
    with open(open_regular(path), "rb") as file:
        return file.read(length)


class OpenFile:
    """An open file of a model; of a file that is open already, whatever its path names now."""

    digest: str = ""
    """The digest of its header, which ranks compare."""
    tensor_count: int = 0
    """The number of tensors in it."""

    path: Path
    state: FileState
    """Its state when it was opened."""
    _descriptor: int = -1

    def __init__(self, source: Path | OpenFile) -> None:
        if isinstance(source, OpenFile):
            self.path = source.path
            self._descriptor = os.dup(source._descriptor)
            self.state = source.state
        else:
            self.path = source
            self._descriptor = open_regular(source)
            self.state = self._state()

    @property
    def size_bytes(self) -> int:
        """The file's size when it was opened."""
        return self.state.size_bytes

    @property
    def own_path(self) -> Path:
        """A path that names this open file, whatever its own path names now, if the system has such paths."""
        path = Path(f"/proc/self/fd/{self._descriptor}")
        return path if path.exists() else self.path.resolve()

    def _state(self) -> FileState:
        return FileState.of(os.fstat(self._descriptor))

    @property
    def identity(self) -> tuple[str, str, int, int]:
        """Values that must be equal on all ranks, which may read copies of the file on their own disks."""
        return self.path.name, self.digest, self.size_bytes, self.tensor_count

    def check_unchanged(self, action: str = "read") -> None:
        """Raises :class:`CorruptModelError` if the file was replaced or written to since it was opened.

        Args:
            action: what was done meanwhile, for the message: "read".
        """
        if self._state() != self.state:
            raise self._changed(action)
        try:
            named = FileState.of(os.stat(self.path))
        except OSError as error:
            raise self._changed(action) from error
        if named != self.state:
            raise self._changed(action)

    def _changed(self, action: str) -> CorruptModelError:
        return CorruptModelError(
            f"{self.path} was replaced or changed while it was {action}; load the model again"
        )

    def read(self, length: int, position: int = 0) -> bytes:
        """Returns bytes from a position; fewer if the file ends before."""
        pieces = []
        while length > 0:
            piece = os.pread(self._descriptor, length, position)
            if not piece:
                break
            pieces.append(piece)
            length, position = length - len(piece), position + len(piece)
        return b"".join(pieces)

    def pread(self, tensor: str, target: memoryview, position: int) -> None:
        """Fills memory from a position of the file."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:]], position + done)
            except OSError as error:
                raise CorruptModelError(
                    f"the tensor {tensor} in {self.path} cannot be read: {error.strerror}"
                ) from error
            if count == 0:
                raise CorruptModelError(
                    f"the tensor {tensor} in {self.path} was cut off while it was read: the file ends at "
                    f"byte {position + done:,}"
                )
            done += count

    def fileno(self) -> int:
        """Returns its descriptor, which stays this object's."""
        return self._descriptor

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class MappedFile(NamedTuple):
    """A file that a model's weights are mapped from."""

    path: Path
    state: FileState
    """Its state when the model was loaded."""

    def check_unchanged(self) -> None:
        """Raises :class:`CorruptModelError` if the file was written to.

        A file that was replaced by another or removed is no error: its content stays until the model is gone.
        """
        try:
            now = FileState.of(os.stat(self.path))
        except OSError:
            return
        if now[:2] == self.state[:2] and now[:4] != self.state[:4]:
            raise CorruptModelError(
                f"{self.path} was changed while a model used its content, which makes the model's numbers "
                "wrong; load the model again, and replace files instead of writing to them"
            )


def mapped_files(model: Any, files: Iterable[OpenFile]) -> tuple[MappedFile, ...]:
    """Returns those of the files that weights of a model are mapped from; none if the system does not say."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ()
    regions = []
    for line in lines:
        addresses, _, _, _, inode = line.split(maxsplit=5)[:5]
        start, stop = (int(address, 16) for address in addresses.split("-"))
        regions.append((start, stop, int(inode)))
    starts = [start for start, _, _ in regions]
    used = set()
    for tensor in model.parameters():
        if tensor.device.type == "cpu" and tensor.numel():
            place = bisect_right(starts, tensor.data_ptr()) - 1
            if place >= 0 and tensor.data_ptr() < regions[place][1]:
                used.add(regions[place][2])
    return tuple(MappedFile(file.path, file.state) for file in files if file.state.inode in used)
