"""The list of a GGUF file's tensors, which is stored in the file's folder in the cache.

With this list, a start need not read the file's vocabulary or build a model to find each parameter's tensor.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate.errors import CorruptModelError
from acclimate.llm.files.open_file import FileState
from acclimate.llm.gguf.config import ARCHITECTURES
from acclimate.llm.gguf.header import GGUFHeader, TensorEntry
from acclimate.llm.gguf.weights import Placement, TensorRows
from acclimate.llm.quiet import first_line

if TYPE_CHECKING:
    import torch

    from acclimate.llm.gguf.tensors import GGUFFile, GGUFTensor

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
    """Opens a GGUF file, and returns it with the tensors of its parameters.

    Args:
        folder: the cache folder that holds the list.
        path: the GGUF file.
        dtype: the dtype of unpacked parameters.
        state: the state of the file that the list describes, if it can have changed.

    Raises:
        CorruptModelError: the list is damaged, or the file has changed.
    """
    from acclimate.llm.gguf.tensors import GGUFFile, GGUFTensor

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
    return file, [GGUFTensor(file, architecture, heads, placement, dtype) for placement in placements]


def _placement(fields: dict[str, Any]) -> Placement:
    parts = tuple(_tensor_rows(part) for part in fields["parts"])
    return Placement(
        fields["parameter"], tuple(fields["shape"]), parts, fields["is_turned"], fields["takes_turns"]
    )


def _tensor_rows(fields: dict[str, Any]) -> TensorRows:
    source = fields["source"]
    entry = TensorEntry(source["name"], tuple(source["shape"]), source["ggml_type"], source["offset"])
    return TensorRows(entry, fields["first"], fields["count"])
