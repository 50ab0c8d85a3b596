"""Reads and checks the header of a GGUF file in well under a second.

``gguf.GGUFReader`` builds several numpy views per vocabulary entry: 11 s for 262,144 tokens. Conversion
needs only the position of each array, so this reader skips their elements. Each count and length is compared
with the bytes left in the file before anything of that size is allocated, so time and memory are bounded by
the file's size. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from acclimate.errors import AcclimateError, CorruptModelError, UnsupportedModelError
from acclimate.llm.files.open_file import OpenFile

GGUF_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# The fewest bytes that each can take: a key with an empty name and a byte; a tensor of one dimension.
_SMALLEST_ENTRY, _SMALLEST_TENSOR, _SMALLEST_STRING = 13, 32, 8
_LARGEST_ALIGNMENT = 1 << 20
# Real models have a few thousand; reading far more would take minutes and gigabytes.
_MOST_ENTRIES = 200_000

Scalar = int | float | bool | str


@dataclass(frozen=True)
class MetadataEntry:
    """One key of the header: its value or, for an array, its length, and where it lies in the file."""

    value: Scalar | None
    """The value; ``None`` for an array."""
    array_length: int | None
    start: int
    end: int
    numbers_start: int | None = None
    """Where the elements of a numeric array begin."""
    numbers_format: str = ""
    """The :mod:`struct` format of such an element."""
    strings_start: int | None = None
    """Where the elements of an array of strings begin."""
    longest_string: int = 0
    """The longest element of a string array, in bytes."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its name in the file, its shape in torch's order, ggml's type number, and its offset."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    """In bytes, from the start of the data."""


@dataclass(frozen=True)
class GGUFHeader:
    """Everything in a GGUF file before its tensors' data."""

    path: Path
    version: int
    metadata: dict[str, MetadataEntry]
    tensors: tuple[TensorEntry, ...]
    data_start: int
    """Where the tensors' data begins, in bytes from the start of the file."""
    file: OpenFile
    """The open file, from which longer values are read when they are needed."""

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the model's architecture, such as ``gemma3``."""
        value = self.value("general.architecture")
        if not isinstance(value, str):
            raise CorruptModelError(f"{self.path} does not say which architecture it holds")
        return value

    def value(self, key: str) -> Scalar | None:
        """Returns the value of a key; ``None`` if the key is missing or an array.

        Raises:
            CorruptModelError: it is a text that is not UTF-8.
        """
        entry = self.metadata.get(key)
        value = None if entry is None else entry.value
        if not is_text(value):
            raise CorruptModelError(f"{self.path} is corrupt: the text of its key {key} is not UTF-8")
        return value

    def numbers(self, key: str) -> tuple[int | float | bool, ...] | None:
        """Returns the elements of a numeric array; ``None`` if the key is missing or something else."""
        entry = self.metadata.get(key)
        if entry is None or entry.numbers_start is None or entry.array_length is None:
            return None
        content = self.file.read(entry.end - entry.numbers_start, entry.numbers_start)
        return struct.unpack(f"<{entry.array_length}{entry.numbers_format}", content)

    def strings(self, key: str) -> list[str] | None:
        """Returns the elements of an array of strings; ``None`` if the key is missing or something else.

        Raises:
            CorruptModelError: an element is not UTF-8.
        """
        entry = self.metadata.get(key)
        if entry is None or entry.strings_start is None or entry.array_length is None:
            return None
        content = self.file.read(entry.end - entry.strings_start, entry.strings_start)
        found, position = [], 0
        length_at = struct.Struct("<Q").unpack_from
        try:
            for _ in range(entry.array_length):
                end = position + 8 + length_at(content, position)[0]
                found.append(content[position + 8 : end].decode())
                position = end
        except (UnicodeDecodeError, struct.error) as error:
            raise CorruptModelError(f"{self.path} is corrupt: {key} holds text that is not UTF-8") from error
        return found


def read_gguf_header(source: Path | OpenFile) -> GGUFHeader:
    """Reads the header of a GGUF file.

    Raises:
        ModelNotFoundError: there is no such file.
        CorruptModelError: the file is not a GGUF file, or its header is truncated or contradicts itself.
        UnsupportedModelError: its numbers are big-endian.
    """
    file = source if isinstance(source, OpenFile) else OpenFile(source)
    path = file.path
    try:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _parse(file, content)
    except (struct.error, IndexError, OverflowError) as error:
        raise CorruptModelError(f"{path} is truncated: it ends within its header") from error
    except AcclimateError:
        raise
    except ValueError as error:  # an empty file cannot be mapped
        raise CorruptModelError(f"{path} is not a readable GGUF file: {error}") from error


def _parse(file: OpenFile, content: mmap.mmap) -> GGUFHeader:
    path = file.path
    if content[:4] != GGUF_MAGIC:
        raise CorruptModelError(f"{path} is not a GGUF file: it does not begin with {GGUF_MAGIC.decode()}")
    version, tensor_count, entry_count = struct.unpack_from("<IQQ", content, 4)
    if version not in _VERSIONS:
        if version.to_bytes(4, "big") in (number.to_bytes(4, "little") for number in _VERSIONS):
            raise UnsupportedModelError(
                f"{path} is a big-endian GGUF file; only little-endian ones can be read"
            )
        raise CorruptModelError(f"{path} has GGUF version {version}; versions 2 and 3 can be read")
    _check_count(path, content, 24, entry_count, _SMALLEST_ENTRY, "metadata keys")
    position = 24
    metadata: dict[str, MetadataEntry] = {}
    for _ in range(entry_count):
        start = position
        key, position = _string(content, position)
        if key in metadata:
            raise CorruptModelError(f"{path} is corrupt: its header has the key {key!r} twice")
        (kind,) = struct.unpack_from("<I", content, position)
        metadata[key] = entry = _entry(path, content, start, position + 4, kind)
        position = entry.end
    alignment = _alignment(path, metadata)
    _check_count(path, content, position, tensor_count, _SMALLEST_TENSOR, "tensors")
    tensors = []
    for _ in range(tensor_count):
        tensor, position = _tensor(path, content, position, alignment)
        tensors.append(tensor)
    repeated = [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1]
    if repeated:
        raise CorruptModelError(f"{path} is corrupt: it has the tensor {repeated[0]!r} twice")
    data_start = -(-position // alignment) * alignment
    if tensors and data_start > len(content):
        raise CorruptModelError(f"{path} is truncated: it ends within its header")
    return GGUFHeader(path, version, metadata, tuple(tensors), data_start, file)


def _tensor(path: Path, content: mmap.mmap, position: int, alignment: int) -> tuple[TensorEntry, int]:
    """Reads the description of a tensor; returns the position after it, too."""
    name, position = _string(content, position)
    (dimensions,) = struct.unpack_from("<I", content, position)
    if not 1 <= dimensions <= 4:  # GGML_MAX_DIMS
        raise CorruptModelError(f"{path} is corrupt: tensor {name!r} has {dimensions} dimensions")
    sizes = struct.unpack_from(f"<{dimensions}Q", content, position + 4)
    ggml_type, offset = struct.unpack_from("<IQ", content, position + 4 + 8 * dimensions)
    if 0 in sizes or offset % alignment:
        raise CorruptModelError(
            f"{path} is corrupt: tensor {name!r} has the shape {sizes[::-1]} and begins at byte {offset}"
        )
    return TensorEntry(name, sizes[::-1], ggml_type, offset), position + 16 + 8 * dimensions


def _check_count(path: Path, content: mmap.mmap, position: int, count: int, smallest: int, what: str) -> None:
    if count > (len(content) - position) // smallest:
        raise CorruptModelError(
            f"{path} is truncated or corrupt: its header says it has {count:,} {what}, "
            f"more than its {len(content):,} bytes can hold"
        )
    if count > _MOST_ENTRIES and smallest != _SMALLEST_STRING:
        raise CorruptModelError(f"{path} is corrupt: its header says it has {count:,} {what}")


def _alignment(path: Path, metadata: dict[str, MetadataEntry]) -> int:
    entry = metadata.get("general.alignment")
    alignment = entry.value if entry is not None else 32
    if (
        isinstance(alignment, bool)
        or not isinstance(alignment, int)
        or not 0 < alignment <= _LARGEST_ALIGNMENT
    ):
        raise CorruptModelError(f"{path} is corrupt: its alignment is {alignment!r}")
    return alignment


def _string(content: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", content, position)
    end = position + 8 + length
    if end > len(content):
        raise IndexError("a string ends beyond the file")
    # Some files have other encodings in texts that nobody reads, such as a description.
    return content[position + 8 : end].decode("utf-8", "surrogateescape"), end


def _entry(path: Path, content: mmap.mmap, start: int, position: int, kind: int) -> MetadataEntry:
    """Reads the value at ``position`` of the key that begins at ``start``."""
    if kind in _SCALARS:
        code = "<" + _SCALARS[kind]
        (value,) = struct.unpack_from(code, content, position)
        return MetadataEntry(value, None, start, position + struct.calcsize(code))
    if kind == _STRING:
        text, end = _string(content, position)
        return MetadataEntry(text, None, start, end)
    if kind != _ARRAY:
        raise CorruptModelError(f"{path} is corrupt: its header holds a value of type {kind}")
    element, count = struct.unpack_from("<IQ", content, position)
    position += 12
    if element in _SCALARS:
        code = _SCALARS[element]
        end = position + count * struct.calcsize("<" + code)
        if end > len(content):
            raise IndexError("an array ends beyond the file")
        return MetadataEntry(None, count, start, end, position, code)
    if element != _STRING:
        raise CorruptModelError(f"{path} is corrupt: its header holds an array of type {element}")
    _check_count(path, content, position, count, _SMALLEST_STRING, "strings in one array")
    length_at = struct.Struct("<Q").unpack_from
    longest, strings_start = 0, position
    for _ in range(count):
        (length,) = length_at(content, position)
        position += 8 + length
        longest = max(longest, length)
    if position > len(content):
        raise IndexError("an array ends beyond the file")
    return MetadataEntry(None, count, start, position, strings_start=strings_start, longest_string=longest)


def is_text(value: Scalar | None) -> bool:
    """Whether a value is not a text, or one that was UTF-8 in the file."""
    return not isinstance(value, str) or value.encode("utf-8", "ignore").decode() == value


def block_number(name: str) -> int | None:
    """Returns the number of the block that a tensor is in, by its name; ``None`` if it is in none."""
    head, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if head == "blk" and number.isdecimal() else None


def element_count(tensor: TensorEntry) -> int:
    """Returns the number of a tensor's elements."""
    return prod(tensor.shape)
