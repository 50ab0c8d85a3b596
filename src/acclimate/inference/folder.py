"""Checks that a folder holds a complete model, before anything heavy is imported to load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from acclimate.errors import CorruptModelError, ModelNotFoundError

_INDEX = "model.safetensors.index.json"
# One of these is enough to build a tokenizer from.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
# Headers of real models are a few MB at most; the format itself allows 100 MB.
_LARGEST_HEADER = 100_000_000


def check_model_folder(folder: Path) -> None:
    """Returns if config, tokenizer and weights are there and the weights' files are whole.

    Raises:
        ModelNotFoundError: the folder holds no model, or only parts of one.
        CorruptModelError: a file is truncated or unreadable.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ModelNotFoundError(f"{folder} holds no model: there is no config.json in it")
    if not isinstance(_json(config), dict):
        raise CorruptModelError(f"{config} does not hold a model's config")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelNotFoundError(f"{folder} holds no tokenizer: there is no {_TOKENIZERS[0]} in it")
    for path in _weight_files(folder):
        if path.suffix == ".safetensors":
            check_safetensors(path)


def _weight_files(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / _INDEX
    if index.is_file():
        content = _json(index)
        names = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(names, dict) or not names:
            raise CorruptModelError(f"{index} names no files")
        paths = [folder / str(name) for name in sorted(set(names.values()))]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise CorruptModelError(f"{folder} is incomplete: {index.name} names {', '.join(missing)}")
        return paths
    older = sorted(folder.glob("pytorch_model*.bin"))
    if not older:
        raise ModelNotFoundError(f"{folder} holds no weights: there is no model.safetensors in it")
    return older


def check_safetensors(path: Path) -> None:
    """Raises :class:`CorruptModelError` unless the file has the length that its header describes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > _LARGEST_HEADER:
            raise CorruptModelError(f"{path} is no safetensors file, or a corrupt one")
        if 8 + length > size:
            raise CorruptModelError(f"{path} is truncated: it ends within its header")
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            needed = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise CorruptModelError(f"{path} is corrupt: its header cannot be read") from error
    if not ends:
        raise CorruptModelError(f"{path} holds no tensors")
    if needed != size:
        state = "truncated" if size < needed else "corrupt"
        raise CorruptModelError(f"{path} is {state}: it has {size:,} bytes, its header describes {needed:,}")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptModelError(f"{path} is corrupt: it is not valid JSON") from error
