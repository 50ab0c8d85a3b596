"""The header of a GGUF file, read and checked in well under a second.

``gguf.GGUFReader`` builds several numpy views per vocabulary entry: 11 s for 262,144 tokens, and
transformers runs it three times per load. Conversion needs only where each entry lies, so this reader
walks over the arrays. It also refuses what the other one would crash on: every length is checked against
the file. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from acclimate.errors import CorruptModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Scalar = int | float | bool | str


@dataclass(frozen=True)
class MetadataEntry:
    """One key of the header: its value, or its length if it is an array, and the bytes it occupies."""

    value: Scalar | None
    """The value; ``None`` for an array."""
    array_length: int | None
    start: int
    end: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its name in the file, its shape in torch's order, ggml's type number, and its bytes."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    """From the start of the data."""


@dataclass(frozen=True)
class GGUFHeader:
    """Everything a GGUF file says before its tensors' data."""

    path: Path
    version: int
    metadata: dict[str, MetadataEntry]
    tensors: tuple[TensorEntry, ...]
    tensors_start: int
    """Where the table of tensors begins, in bytes from the start of the file."""
    tensors_end: int
    data_start: int

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's kind, such as ``gemma3``."""
        value = self.value("general.architecture")
        if not isinstance(value, str):
            raise CorruptModelError(f"{self.path} does not say which architecture it holds")
        return value

    def value(self, key: str) -> Scalar | None:
        """The value of a key that is no array, or ``None``."""
        entry = self.metadata.get(key)
        return None if entry is None else entry.value


def read_gguf_header(path: Path) -> GGUFHeader:
    """Reads the header of a GGUF file.

    Raises:
        CorruptModelError: this is no GGUF file, or its header is truncated or makes no sense.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _parse(path, content)
    except (struct.error, IndexError, OverflowError) as error:
        raise CorruptModelError(f"{path} is truncated: it ends within its header") from error
    except ValueError as error:  # an empty file cannot be mapped; CorruptModelError is one too
        if isinstance(error, CorruptModelError):
            raise
        raise CorruptModelError(f"{path} is not a readable GGUF file: {error}") from error


def _parse(path: Path, content: mmap.mmap) -> GGUFHeader:
    if content[:4] != MAGIC:
        raise CorruptModelError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    version, tensor_count, entry_count = struct.unpack_from("<IQQ", content, 4)
    if version not in _VERSIONS:
        raise CorruptModelError(f"{path} has GGUF version {version}; versions 2 and 3 can be read")
    position = 24
    metadata = {}
    for _ in range(entry_count):
        start = position
        key, position = _string(content, position)
        (kind,) = struct.unpack_from("<I", content, position)
        value, length, position = _value(path, content, position + 4, kind)
        metadata[key] = MetadataEntry(value, length, start, position)
    tensors_start = position
    tensors = []
    for _ in range(tensor_count):
        name, position = _string(content, position)
        (dimensions,) = struct.unpack_from("<I", content, position)
        if dimensions > 4:  # GGML_MAX_DIMS
            raise CorruptModelError(f"{path} is corrupt: tensor {name!r} has {dimensions} dimensions")
        sizes = struct.unpack_from(f"<{dimensions}Q", content, position + 4)
        ggml_type, offset = struct.unpack_from("<IQ", content, position + 4 + 8 * dimensions)
        position += 16 + 8 * dimensions
        tensors.append(TensorEntry(name, sizes[::-1], ggml_type, offset))
    entry = metadata.get("general.alignment")
    alignment = entry.value if entry is not None else 32
    if not isinstance(alignment, int) or alignment <= 0:
        raise CorruptModelError(f"{path} is corrupt: its alignment is {alignment!r}")
    data_start = -(-position // alignment) * alignment
    if tensors and data_start > len(content):
        raise CorruptModelError(f"{path} is truncated: it ends within its header")
    return GGUFHeader(path, version, metadata, tuple(tensors), tensors_start, position, data_start)


def _string(content: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", content, position)
    end = position + 8 + length
    if end > len(content):
        raise IndexError("a string ends beyond the file")
    return content[position + 8 : end].decode("utf-8"), end


def _value(path: Path, content: mmap.mmap, position: int, kind: int) -> tuple[Scalar | None, int | None, int]:
    """One value, or ``None`` and the length of an array; and where it ends."""
    if kind in _SCALARS:
        code = "<" + _SCALARS[kind]
        return struct.unpack_from(code, content, position)[0], None, position + struct.calcsize(code)
    if kind == _STRING:
        text, end = _string(content, position)
        return text, None, end
    if kind != _ARRAY:
        raise CorruptModelError(f"{path} is corrupt: its header holds a value of type {kind}")
    element, count = struct.unpack_from("<IQ", content, position)
    position += 12
    if element in _SCALARS:
        position += count * struct.calcsize("<" + _SCALARS[element])
        if position > len(content):
            raise IndexError("an array ends beyond the file")
    elif element == _STRING:
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            position += 8 + length_at(content, position)[0]
    else:
        raise CorruptModelError(f"{path} is corrupt: its header holds an array of type {element}")
    return None, count, position


def element_count(tensor: TensorEntry) -> int:
    """How many values a tensor holds."""
    return prod(tensor.shape)
