"""The tensors of a model's safetensors files, read in parts, and the header of such a file.

safetensors' own ``safe_open`` either maps the file, so that every touched page counts as this process's
memory until the file is closed, or makes an extra copy of each slice. This module reads a slice from the file
directly into its final memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from acclimate.errors import CorruptModelError, UnsupportedModelError, excerpt
from acclimate.llm.files.deferred_tensors import Source, cut
from acclimate.llm.files.folder import weight_files
from acclimate.llm.files.open_file import OpenFile
from acclimate.llm.files.regions import Region

SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
# Large enough to make system calls rare, small enough to stay in a core's cache until it is copied.
_BLOCK_BYTES = 1 << 20
# Shorter runs of wanted bytes are read together with the bytes between them, which is faster.
_SHORT_RUN_BYTES = 1 << 16


def safetensors_header(tensors: Mapping[str, torch.Tensor | Source]) -> tuple[bytes, dict[str, int]]:
    """Returns the header of a file of these tensors, and the position of each in the file."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name, tensor in tensors.items():
        starts[name], end = end, end + prod(tensor.shape) * tensor.dtype.itemsize
        table[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format requires data aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + at for name, at in starts.items()}


class WeightFile(OpenFile):
    """An open safetensors file whose header has been checked."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            header = self._header()
            self.digest = hashlib.sha256(header).hexdigest()
            self.data_start = 8 + len(header)
            self.tensors = self._tensors(header)
            self.tensor_count = len(self.tensors)
        except BaseException:
            self.close()
            raise

    def _header(self) -> bytes:
        start = os.pread(self._descriptor, 8, 0)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > self.size_bytes - 8:
            raise CorruptModelError(f"{self.path} is truncated: its header is longer than the file")
        return os.pread(self._descriptor, length, 8)

    def _tensors(self, header: bytes) -> dict[str, FileTensor]:
        try:
            table: dict[str, Any] = json.loads(header)
            table.pop("__metadata__", None)
            return {name: self._tensor(name, fields) for name, fields in table.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, (CorruptModelError, UnsupportedModelError)):
                raise
            raise CorruptModelError(f"{self.path} is corrupt: it has no safetensors header") from error

    def _tensor(self, name: str, fields: dict[str, Any]) -> FileTensor:
        where = f"the tensor {excerpt(name)} in {self.path}"
        if fields["dtype"] not in SAFETENSORS_DTYPES:
            raise UnsupportedModelError(
                f"{where} has the dtype {fields['dtype']}, which cannot be read in parts"
            )
        dtype = SAFETENSORS_DTYPES[fields["dtype"]]
        shape = tuple(int(size) for size in fields["shape"])
        start, stop = fields["data_offsets"]
        if stop - start != prod(shape) * dtype.itemsize or start < 0:
            raise CorruptModelError(
                f"{where} is corrupt: {list(shape)} in {fields['dtype']} takes "
                f"{prod(shape) * dtype.itemsize:,} bytes, but the file has {stop - start:,} for it"
            )
        if self.data_start + stop > self.size_bytes:
            raise CorruptModelError(
                f"{where} is cut off: it ends at byte {self.data_start + stop:,}, and the file has "
                f"{self.size_bytes:,}"
            )
        return FileTensor(name, shape, dtype, self, self.data_start + start)


@dataclass(frozen=True)
class FileTensor:
    """A tensor of an open file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: WeightFile
    position: int
    """The position of its first byte in the file."""
    has_rows = True
    """Its rows can be read one by one."""

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        """Reads a region into a CPU tensor of the region's shape, which may have any strides."""
        wanted = [stop - start for start, stop in region]
        if prod(wanted) == 0:
            return
        # The dimensions from `row` on are read whole, so each index of the earlier ones is one run of bytes.
        row = len(region)
        while row and wanted[row - 1] == self.shape[row - 1]:
            row -= 1
        row = max(row - 1, 0)  # one dimension more, which may be cut
        run_bytes = prod(wanted[row:]) * self.dtype.itemsize
        if prod(wanted[:row]) == 1:
            self._read_run(region, out)
        elif run_bytes < _SHORT_RUN_BYTES and prod(self.shape[row:]) * self.dtype.itemsize <= _BLOCK_BYTES:
            self._read_rows(region, row, out)
        else:
            for index in product(*(range(start, stop) for start, stop in region[:row])):
                inside = out[tuple(at - start for at, (start, _) in zip(index, region, strict=False))]
                part = (*((at, at + 1) for at in index), *region[row:])
                self._read_run(part, inside)

    def _offset(self, region: Region) -> int:
        """The position of a region's first byte."""
        offset = 0
        for (start, _), size in zip(region, self.shape, strict=True):
            offset = offset * size + start
        return self.position + offset * self.dtype.itemsize

    def _read_run(self, region: Region, out: torch.Tensor) -> None:
        """Reads a region whose bytes lie together in the file."""
        position = self._offset(region)
        if out.is_contiguous():
            self.file.pread(self.name, _bytes(out), position)
            return
        values = torch.empty(out.shape, dtype=self.dtype)
        self.file.pread(self.name, _bytes(values), position)
        out.copy_(values)

    def _read_rows(self, region: Region, row: int, out: torch.Tensor) -> None:
        """Reads blocks of whole rows, which begin at dimension ``row``, and keeps a part of each."""
        row_shape = self.shape[row:]
        row_bytes = prod(row_shape) * self.dtype.itemsize
        last = row - 1
        (start, stop), per_block = region[last], max(1, _BLOCK_BYTES // row_bytes)
        buffer = _buffer()
        for index in product(*(range(first, end) for first, end in region[:last])):
            inside = out[tuple(at - first for at, (first, _) in zip(index, region, strict=False))]
            for at in range(start, stop, per_block):
                count = min(per_block, stop - at)
                block = buffer[: count * row_bytes]
                ends: Region = (*((position, position + 1) for position in index), (at, at + count))
                self.file.pread(
                    self.name, _bytes(block), self._offset((*ends, *((0, size) for size in row_shape)))
                )
                values = block.view(self.dtype).view(count, *row_shape)
                for dim, (first, end) in enumerate(region[row:]):
                    values = values.narrow(dim + 1, first, end - first)
                inside.narrow(0, at - start, count).copy_(values)


@dataclass(frozen=True)
class HostTensor:
    """A tensor in this process's memory, or in a file that the process maps."""

    name: str
    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.values.dtype

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        """Copies a region."""
        out.copy_(cut(self.values, region))


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


_buffers = threading.local()


def _buffer() -> torch.Tensor:
    if not hasattr(_buffers, "block"):
        _buffers.block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
    block: torch.Tensor = _buffers.block
    return block


@contextlib.contextmanager
def open_weights(folder: Path) -> Iterator[list[WeightFile]]:
    """Opens the safetensors files of a model's folder; yields none if its weights are ``.bin`` files.

    Raises:
        CorruptModelError: a file is truncated or unreadable.
    """
    with contextlib.ExitStack() as opened:
        files = []
        for path in weight_files(folder):
            if path.suffix == ".safetensors":
                files.append(WeightFile(path))
                opened.callback(files[-1].close)
        yield files
