"""The files whose content a loaded model uses in place, and whether they have changed since it was loaded."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from acclimate.errors import CorruptModelError
from acclimate.llm.files.open_file import FileState, OpenFile


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
