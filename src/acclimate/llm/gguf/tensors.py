"""The parameters of a GGUF file's model, read in parts: as values, or as the file's own quantised blocks.

Values are unpacked with ``gguf.quants.dequantize``, as transformers does, but in groups of rows that fit into
the processor's cache (0.6 s instead of 4.3 s for a 262,144 × 640 table).

The parameters are written to a safetensors file, or their list is stored in the file's folder in the cache.
With the list, a start need not read the file's vocabulary or build a model to find each parameter's tensor.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby, pairwise
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from acclimate.errors import CorruptModelError
from acclimate.host import huge_pages
from acclimate.llm.files.checkpoint import safetensors_header
from acclimate.llm.files.deferred_tensors import Source, deferred, read, sources
from acclimate.llm.files.matrix_parts import MatrixPart, matrix_parts
from acclimate.llm.files.open_file import FileState, OpenFile
from acclimate.llm.files.regions import Region
from acclimate.llm.files.slices import refuse_nan
from acclimate.llm.gguf.architectures import ARCHITECTURES
from acclimate.llm.gguf.config import Architecture
from acclimate.llm.gguf.header import GGUFHeader, TensorEntry
from acclimate.llm.gguf.weights import (
    Placement,
    TensorRows,
    is_plus_one,
    is_transposed,
    place_tensors,
    rotary_order,
    stored_bytes,
)
from acclimate.llm.kernels.formats import GGUF_FORMATS, WEIGHT_FORMATS, WeightFormat
from acclimate.llm.quiet import first_line

Array = npt.NDArray[Any]

# Values unpacked at a time: these and the intermediates fit into the second-level cache.
_CHUNK_VALUES = 1 << 20
_LARGE_BYTES = 8 << 20
_DENSE = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GGUFFile(OpenFile):
    """An open GGUF file, whose tensors have been checked."""

    def __init__(self, source: Path | OpenFile, data_start: int) -> None:
        super().__init__(source)
        self.data_start = data_start
        """Where the tensors' data begins, in bytes from the start of the file."""

    def read_rows(self, tensor: TensorEntry, numbers: Array, content: Array) -> None:
        """Reads rows of a tensor as stored in the file into an array, one row of bytes each."""
        first, last, row_bytes = int(numbers.min()), int(numbers.max()), content.shape[1]
        position = self.data_start + tensor.offset + first * row_bytes
        if bool(np.all(np.diff(numbers) == 1)):
            self.pread(tensor.name, content.reshape(-1).data, position)
            return
        all_between = _memory(last - first + 1, row_bytes)
        self.pread(tensor.name, all_between.reshape(-1).data, position)
        np.take(all_between, numbers - first, axis=0, out=content, mode="clip")  # without a buffer


def _memory(rows: int, row_bytes: int) -> Array:
    """Returns memory for rows; if it is large, it is returned to the system as soon as it is freed.

    What malloc frees between weights that stay is not.
    """
    if rows * row_bytes < _LARGE_BYTES:
        return np.empty((rows, row_bytes), np.uint8)
    memory = mmap.mmap(-1, max(rows * row_bytes, 1))
    content: Array = np.frombuffer(memory, np.uint8, rows * row_bytes).reshape(rows, row_bytes)
    huge_pages.request(torch.from_numpy(content))  # it is used once, and page faults would take longest
    return content


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """A parameter whose values a GGUF file has."""

    file: GGUFFile
    architecture: Architecture
    """The architecture, which determines how llama.cpp's converter changed the tensor."""
    heads: Mapping[str, int]
    """The numbers of attention heads, ``query`` and ``key``, if their rows are interleaved."""
    placement: Placement
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.placement.parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.placement.shape

    @property
    def types(self) -> set[str]:
        """gguf's names of the types of its parts' values."""
        return {GGMLQuantizationType(part.source.ggml_type).name for part in self.placement.parts}

    @property
    def kind(self) -> str:
        """gguf's name of the type of its first part's values."""
        return str(GGMLQuantizationType(self.placement.parts[0].source.ggml_type).name)

    @property
    def stored_bits(self) -> float:
        """The bits of each value in the file; 0: its values are not quantised."""
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        return 8 * size / values if values > 1 else 0

    @cached_property
    def _is_transposed(self) -> bool:
        return is_transposed(self.architecture, self.placement.parts[0].source)

    @cached_property
    def has_rows(self) -> bool:
        """Whether each row of the parameter is a row of the file, so that they can be read one by one."""
        width = self.placement.parts[0].source.shape[-1]
        is_same = not self._is_transposed and not self.placement.is_turned
        return is_same and len(self.shape) > 1 and self.shape[-1] == width

    @cached_property
    def _places(self) -> tuple[Array, Array]:
        """For each row, the number of its part, and of the row in that part's tensor."""
        if self.placement.is_turned and self.placement.takes_turns:
            count = self.placement.parts[0].count
            return np.tile(np.arange(2, dtype=np.int32), count), np.repeat(np.arange(count), 2)
        parts, numbers = [], []
        for index, part in enumerate(self.placement.parts):
            stored = np.arange(part.first, part.first + part.count)
            order = self._order(part.source)
            numbers.append(stored if order is None else order[stored])
            parts.append(np.full(part.count, index, np.int32))
        return np.concatenate(parts), np.concatenate(numbers)

    def _order(self, source: TensorEntry) -> Array | None:
        """Returns the file's row for each row; ``None`` if they are the same, and for a bias (one row)."""
        return None if len(source.shape) == 1 else rotary_order(self.architecture, source, self.heads)

    def stored_rows(self, rows: Array, kind: GGMLQuantizationType | None = None) -> Array:
        """Returns the bytes of rows of the parameter in a type that all have, or of :func:`common_type`.

        Default: the first row's.
        """
        source = self.placement.parts[self._places[0][rows[0]]].source
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType(source.ggml_type) if kind is None else kind]
        content = _memory(len(rows), source.shape[-1] // values * size)
        self._read_stored(rows, content)
        return content

    def _read_stored(self, rows: Array, content: Array) -> None:
        """Reads the stored bytes of rows into an array."""
        parts, numbers = self._places[0][rows], self._places[1][rows]
        for begin, end in _runs(parts):
            source = self.placement.parts[parts[begin]].source
            size, _ = stored_bytes(self.file.path, source)
            row_bytes = size // prod(source.shape[:-1])
            if row_bytes == content.shape[1]:
                self.file.read_rows(source, numbers[begin:end], content[begin:end])
            else:
                stored = _memory(end - begin, row_bytes)
                self.file.read_rows(source, numbers[begin:end], stored)
                content[begin:end] = _as_q5_k(stored)

    def pieces(self) -> Iterator[Region]:
        """Divides the tensor into regions to read one after the other."""
        whole = tuple((0, size) for size in self.shape)
        if not self.has_rows or len(self.shape) != 2:
            yield whole
            return
        step = max(1, _CHUNK_VALUES // self.shape[1])
        for first in range(0, self.shape[0], step):
            yield (first, min(first + step, self.shape[0])), whole[1]

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        """Unpacks a region."""
        if self.placement.is_turned:
            experts, inputs, outputs = region
            count, _, width = self.shape
            return self._read_rows((count, width), (experts, outputs), inputs, out.transpose(1, 2))
        if not self.has_rows:
            values = self._all().reshape(self.shape)
            for dim, (start, stop) in enumerate(region):
                values = values.narrow(dim, start, stop - start)
            out.copy_(values)
            return None
        return self._read_rows(self.shape[:-1], region[:-1], region[-1], out)

    def _read_rows(
        self, leading: tuple[int, ...], region: Region, columns: tuple[int, int], out: torch.Tensor
    ) -> None:
        """Unpacks columns of some of the file's rows, which have all dimensions but the last."""
        cut = tuple(slice(start, stop) for start, stop in region)
        rows = np.arange(prod(leading)).reshape(leading)[cut].reshape(-1)
        start, stop = columns
        whole = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
        flat = whole.view(len(rows), stop - start)
        is_whole = stop - start == self.placement.parts[0].source.shape[-1]
        order = self._column_order
        if is_whole and order is None and self._has_dtype(out.dtype):
            self._read_stored(rows, flat.view(torch.uint8).numpy())
        else:
            done = 0
            for values in self._unpacked(rows):
                wanted = values[:, start:stop] if order is None else values[:, order[start:stop]]
                flat[done : done + len(values)].copy_(wanted)
                done += len(values)
        if whole is not out:
            out.copy_(whole)

    @cached_property
    def _column_order(self) -> torch.Tensor | None:
        """The number of each column in a row of the file; ``None``: the same."""
        ranges = self.placement.columns
        return torch.cat([torch.arange(start, stop) for start, stop in ranges]) if ranges else None

    def _has_dtype(self, dtype: torch.dtype) -> bool:
        """Whether the file has all values in a dtype."""
        return all(_DENSE.get(part.source.ggml_type) == dtype for part in self.placement.parts)

    def _unpacked(self, rows: Array) -> Iterator[torch.Tensor]:
        """Yields the values of rows, a few rows at a time: as in the file, or unpacked to float32."""
        # Parts of one parameter can have different types; a group of rows is of one part.
        parts = self._places[0][rows]
        step = max(1, _CHUNK_VALUES // self.placement.parts[0].source.shape[-1])
        for begin, end in _runs(parts):
            kind = GGMLQuantizationType(self.placement.parts[parts[begin]].source.ggml_type)
            for first in range(begin, end, step):
                stored = self.stored_rows(rows[first : min(first + step, end)])
                if kind in _DENSE:
                    yield torch.from_numpy(stored).view(_DENSE[kind])
                else:
                    yield torch.from_numpy(dequantize(stored, kind))

    def _all(self) -> torch.Tensor:
        """Returns all values of a vector or a transposed matrix in float32; its rows are not the file's."""
        source = self.placement.parts[0].source
        values = torch.cat([some.float() for some in self._unpacked(np.arange(len(self._places[0])))])
        if self.placement.takes_turns:
            return torch.stack(values.chunk(2), -1)
        if is_plus_one(self.architecture, source):
            values -= 1
        if source.name.endswith(".ssm_a"):  # llama.cpp has the decay itself, transformers its logarithm
            if not bool((values <= 0).all()):
                raise CorruptModelError(
                    f"{self.file.path} is corrupt: tensor {source.name!r} must hold numbers below 0"
                )
            values = (-values).log()
        if self._column_order is not None:
            values = values[..., self._column_order]
        order = rotary_order(self.architecture, source, self.heads) if len(source.shape) == 1 else None
        if order is not None:
            values = values[..., torch.from_numpy(order)]
        return values.T if self._is_transposed else values


def _runs(numbers: Array) -> Iterator[tuple[int, int]]:
    """Divides an array into runs of equal numbers; yields the begin and end of each."""
    return pairwise([0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)])


def gguf_tensors(
    file: GGUFFile, header: GGUFHeader, architecture: Architecture, model: torch.nn.Module, dtype: torch.dtype
) -> list[GGUFTensor]:
    """Returns the tensors of all parameters of a model, which may be on the meta device.

    Raises:
        CorruptModelError: the file lacks a tensor or has it in another shape.
        UnsupportedModelError: the file has tensors that the model does not use.
    """
    config: Any = model.config
    heads = {}
    if architecture.rotary_rows_interleaved:
        query = config.num_attention_heads
        heads = {"query": query, "key": getattr(config, "num_key_value_heads", None) or query}
    return _tensors(file, architecture, heads, place_tensors(header, architecture, model), dtype)


def _tensors(
    file: GGUFFile,
    architecture: Architecture,
    heads: Mapping[str, int],
    placements: list[Placement],
    dtype: torch.dtype,
) -> list[GGUFTensor]:
    return [
        GGUFTensor(file, architecture, heads, placement, torch.float32 if placement.is_buffer else dtype)
        for placement in placements
    ]


def common_type(types: set[str]) -> str | None:
    """Returns a type of blocks that holds those of all these types exactly; ``None`` if there is none."""
    if types == {"Q4_K", "Q5_K"}:
        return "Q5_K"
    return next(iter(types)) if len(types) == 1 else None


def _as_q5_k(rows: Array) -> Array:
    """Returns rows of Q4_K blocks as blocks of Q5_K, which also have the fifth bits of 256 codes: zeros."""
    blocks = rows.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType.Q4_K][1])
    fifth_bits = np.zeros((len(blocks), 32), np.uint8)
    return np.concatenate([blocks[:, :16], fifth_bits, blocks[:, 16:]], axis=1).reshape(len(rows), -1)


# -- blocks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """A matrix, or the matrices of experts, as blocks of a file that have not been read yet."""

    matrices: list[MatrixPart]
    """They have the same columns."""
    columns: tuple[tuple[int, int], ...]
    """The ranges of the files' columns, which begin and end between blocks, in the matrices' order."""
    format: WeightFormat
    """The format that the blocks are in."""

    @property
    def shape(self) -> tuple[int, int]:
        """The rows of all matrices, and columns."""
        return sum(part.shape[0] for part in self.matrices), self.matrices[0].shape[1]

    def read(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Returns the bytes of the blocks of some rows, row by row; default: of all."""
        values, size = self.format.columns, self.format.gguf_bytes
        kind = GGMLQuantizationType[self.format.name.upper()]
        ranges = [(start // values * size, stop // values * size) for start, stop in self.columns]
        found, at, last = [], 0, self.shape[0] if last is None else last
        rows = [rows for part in self.matrices for rows in part.rows]
        for tensor, some in groupby(rows, itemgetter(0)):
            numbers = np.concatenate([np.arange(begin, end) for _, begin, end in some])
            own = numbers[max(first - at, 0) : max(last - at, 0)]
            at += len(numbers)
            if len(own) == 0:
                continue
            content = cast(GGUFTensor, tensor).stored_rows(own, kind)
            if ranges != [(0, content.shape[1])]:
                content = np.concatenate([content[:, start:stop] for start, stop in ranges], axis=1)
            found.append(content)
        return torch.from_numpy(found[0] if len(found) == 1 else np.concatenate(found))

    def has_broken_scales(self, blocks: torch.Tensor) -> bool:
        """Whether the scale of a block that :meth:`read` returned is infinite or not a number."""
        stored = blocks.numpy().reshape(-1, self.format.gguf_bytes)
        bits = stored[:, self.format.gguf_scales].view(np.uint16)
        return bool(((bits & _EXPONENT) == _EXPONENT).any())


_EXPONENT = 0x7C00
"""The exponent bits of a half-precision number, which are all set in infinities and NaNs."""


def source_types(tensor: torch.Tensor) -> set[str]:
    """Returns gguf's type names of the files' tensors from which a tensor is computed."""
    return set().union(*(source.types for source in sources(tensor) if isinstance(source, GGUFTensor)))


def stored_blocks(tensor: torch.Tensor, *, is_turned: bool = False) -> Blocks | None:
    """Returns a deferred matrix, or the matrices of experts, as blocks of a GGUF file.

    ``is_turned`` says whether the tensor is experts x columns x rows.

    Returns ``None`` if the file's tensors have no common type or one without kernels, or if the matrix is not
    made of whole rows and whole blocks.
    """

    def is_accepted(source: Source) -> bool:
        if not isinstance(source, GGUFTensor):
            return False
        return source.placement.is_turned if is_turned else source.has_rows

    matrices = matrix_parts(tensor, is_accepted, is_turned=is_turned)
    stored_type = common_type(source_types(tensor))
    if not matrices or stored_type is None:
        return None
    columns, name = matrices[0].columns, stored_type.lower()
    if name not in GGUF_FORMATS or any(part.columns != columns for part in matrices):
        return None
    stored = _stored_columns(matrices)
    kind = WEIGHT_FORMATS[name]
    if stored is None or any(place % kind.columns for both in stored for place in both):
        return None
    return Blocks(matrices, stored, kind)


def _stored_columns(matrices: list[MatrixPart]) -> tuple[tuple[int, int], ...] | None:
    """Returns the ranges of the files' columns that matrices have; ``None`` if these differ."""
    columns = matrices[0].columns
    orders = {cast(GGUFTensor, tensor).placement.columns for part in matrices for tensor in part.sources}
    order, *others = orders
    if others or not order:
        return None if others else columns
    row = MatrixPart((), order)
    found = (row.between(-1, start, stop) for start, stop in columns)
    return tuple(piece for part in found if part is not None for piece in part.columns)


INDEX = "gguf_tensors.json"


def write_index(header: GGUFHeader, tensors: list[GGUFTensor], folder: Path) -> None:
    """Writes the list: the position of each parameter in the file."""
    content = {
        "architecture": header.architecture,
        "heads": dict(tensors[0].heads),
        "data_start": header.data_start,
        "file_bytes": header.file.size_bytes,
        "placements": [asdict(tensor.placement) for tensor in tensors],
    }
    (folder / INDEX).write_text(json.dumps(content, separators=(",", ":")) + "\n")


def read_index(
    folder: Path, path: Path, dtype: torch.dtype, state: FileState | None = None
) -> tuple[GGUFFile, list[GGUFTensor]]:
    """Opens a GGUF file, and returns it with the tensors of its parameters, from the list in a cache folder.

    ``dtype`` is that of unpacked parameters; ``state`` is the file's when the list was made, if it can have
    changed.

    Raises:
        CorruptModelError: the list is damaged, or the file has changed.
    """
    try:
        text = (folder / INDEX).read_bytes()
        content = json.loads(text)
        placements = [_placement(fields) for fields in content["placements"]]
        architecture, heads = ARCHITECTURES[content["architecture"]], dict(content["heads"])
        data_start, file_bytes = int(content["data_start"]), int(content["file_bytes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptModelError(f"{folder / INDEX} is damaged: {first_line(error)}") from error
    file = GGUFFile(path, data_start)
    if state is not None and file.state != state:
        file.close()
        raise CorruptModelError(f"{path} was replaced or changed while it was loaded; load the model again")
    if file.size_bytes < file_bytes:
        file.close()
        raise CorruptModelError(
            f"{path} is truncated: it has {file.size_bytes:,} bytes, but had {file_bytes:,} when converted"
        )
    file.tensor_count, file.digest = len(placements), hashlib.sha256(text).hexdigest()
    return file, _tensors(file, architecture, heads, placements, dtype)


def _placement(fields: dict[str, Any]) -> Placement:
    parts = tuple(_tensor_rows(part) for part in fields["parts"])
    columns = tuple((int(start), int(stop)) for start, stop in fields["columns"])
    return Placement(
        fields["parameter"],
        tuple(fields["shape"]),
        parts,
        fields["is_turned"],
        fields["takes_turns"],
        columns,
        fields["is_buffer"],
    )


def _tensor_rows(fields: dict[str, Any]) -> TensorRows:
    source = fields["source"]
    entry = TensorEntry(source["name"], tuple(source["shape"]), source["ggml_type"], source["offset"])
    return TensorRows(entry, fields["first"], fields["count"])


def write_safetensors(tensors: list[GGUFTensor], target: Path, advance: Callable[[int], None]) -> None:
    """Writes tensors to one safetensors file, a few rows at a time.

    Each value is unpacked to float32 and rounded once. ``advance`` gets the number of bytes since its last
    call.

    Raises:
        CorruptModelError: a value is NaN; the message names the source.
    """
    header, _ = safetensors_header({tensor.name: tensor for tensor in tensors})
    with target.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            whole = deferred(tensor)
            for region in tensor.pieces():
                values = read(whole, region)
                refuse_nan(values, tensor.name, tensor.file.path)
                data = values.view(torch.uint8).numpy()  # as bytes: numpy has no bfloat16
                file.write(data.data)
                advance(data.nbytes)
