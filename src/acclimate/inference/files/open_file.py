"""A model's weight file, open for reading at any position; detects changes of the file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from acclimate.errors import CorruptModelError


class OpenFile:
    """An open file of weights."""

    digest: str = ""
    """The digest of its header, which ranks compare."""
    tensor_count: int = 0
    """The number of tensors in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptModelError(f"{path} cannot be read: {error.strerror}") from error
        self._opened = self._state()

    @property
    def size_bytes(self) -> int:
        """The file's size when it was opened."""
        return self._opened[1]

    def _state(self) -> tuple[int, int, int]:
        state = os.fstat(self._descriptor)
        return state.st_ino, state.st_size, state.st_mtime_ns

    @property
    def identity(self) -> tuple[str, str, int, int]:
        """Values that must be equal on all ranks, which may read copies of the file on their own disks."""
        return self.path.name, self.digest, self.size_bytes, self.tensor_count

    def check_unchanged(self) -> None:
        """Raises :class:`CorruptModelError` if the file was replaced or written to since it was opened."""
        with contextlib.suppress(OSError):
            now = os.stat(self.path)
            if self._state() == self._opened == (now.st_ino, now.st_size, now.st_mtime_ns):
                return
        raise CorruptModelError(
            f"{self.path} was replaced or changed while it was read; load the model again"
        )

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

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
