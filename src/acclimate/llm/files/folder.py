"""Checks that a folder holds a complete model, before torch and transformers are imported to load it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from acclimate.errors import (
    AcclimateError,
    CorruptModelError,
    ModelNotFoundError,
    UnsupportedModelError,
    excerpt,
    some_of,
)
from acclimate.llm.files.model_limits import WeightTotals
from acclimate.llm.files.open_file import OpenFile, open_regular, read_start
from acclimate.llm.quiet import first_line

# A tokenizer can be built from any one of these.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
ADAPTER = "adapter_config.json"
"""The settings of a PEFT adapter."""
# The JSON objects that transformers reads beside config.json.
_SETTINGS = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    ADAPTER,
)
# Far above the size of any real settings file: the vocabulary is elsewhere.
_LARGEST_SETTINGS = 64 << 20
# More tensors than any real model has; reading their names alone would take seconds.
_MOST_TENSORS = 200_000
# For more layers or labels than this, config classes build long lists before any model exists to compare.
_MOST_COUNTED = 100_000
_COUNTS = re.compile(r"(^|_)(n|num|number)_|(layers?|blocks?|heads?|experts?|depth|labels)$")
_NOT_COUNTS = re.compile(r"position|ctx|context|token|param|step|sample|length|size|dim|id$")


def check_model_folder(folder: Path, with_tokenizer: bool = True) -> WeightTotals:
    """Checks config, weights and, unless told otherwise, tokenizer; returns the totals of the weights.

    Raises:
        ModelNotFoundError: the folder holds no model, or only parts of one.
        CorruptModelError: a file is truncated or unreadable.
        UnsupportedModelError: the config does not say what kind of model it describes.
    """
    check_config(folder)
    if with_tokenizer and not has_tokenizer(folder):
        raise ModelNotFoundError(f"{folder} holds no tokenizer: there is no {_TOKENIZERS[0]} in it")
    for name in _SETTINGS:
        if (folder / name).is_file():
            read_settings(folder / name)
    return weight_totals(folder)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a file from which a tokenizer can be built."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def check_config(folder: Path) -> None:
    """Checks that a folder's config describes a model of a possible size.

    Raises:
        ModelNotFoundError: there is none.
        CorruptModelError: it cannot be read, or counts more layers, heads or experts than any model has.
        UnsupportedModelError: it does not say what kind of model it describes.
    """
    path = folder / "config.json"
    if not os.path.lexists(path):
        raise _incomplete(folder, "model: there is no config.json in it")
    config = read_settings(path)
    if not isinstance(config.get("model_type"), str):
        raise UnsupportedModelError(
            f"{path} does not say what kind of model it describes: model_type is missing"
        )
    weights = config.get("transformers_weights")
    if weights is not None and weights != "model.safetensors":
        raise UnsupportedModelError(
            f"{path} stores the weights in another file than model.safetensors (field transformers_weights)"
        )
    for name, value in _numbers(config):
        if value > _MOST_COUNTED and _COUNTS.search(name) and not _NOT_COUNTS.search(name):
            raise CorruptModelError(f"{path} is corrupt: {name} is {value:,}, more than any model has")


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        CorruptModelError: the file cannot be read or holds something else.
    """
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _LARGEST_SETTINGS:
                raise CorruptModelError(f"{path} is corrupt: it has {size:,} bytes")
            content = json.loads(file.read(_LARGEST_SETTINGS), parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CorruptModelError):
            raise
        raise CorruptModelError(f"{path} is corrupt: {_not_what_it_should_be(path, 'valid JSON')}") from error
    except OSError as error:
        if isinstance(error, ModelNotFoundError):
            raise
        raise CorruptModelError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise CorruptModelError(f"{path} is corrupt: it must hold a JSON object, not {_kind(content)}")
    return content


def _incomplete(folder: Path, missing: str) -> ModelNotFoundError:
    """Returns the error for a folder that lacks something, which may be an adapter of a model."""
    adapter = folder / ADAPTER
    if not adapter.is_file():
        return ModelNotFoundError(f"{folder} holds no {missing}")
    base = read_settings(adapter).get("base_model_name_or_path")
    named = (
        f"the model {excerpt(base)}" if isinstance(base, str) and base else "a model that it does not name"
    )
    return ModelNotFoundError(
        f"{folder} holds an adapter (LoRA) of {named}, as its {ADAPTER} says, and not a whole model; merge "
        "both with peft (merge_and_unload), save the result, and give that folder"
    )


def _constant(name: str) -> float:
    """Accepts infinity, which some configs use as a limit, but not NaN, which spoils every result."""
    if name == "NaN":
        raise ValueError("NaN is not a number")
    return float(name)


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Yields the numbers in a config, each with the name of its field."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, name)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf"):
        yield name, int(value)


# -- weights -------------------------------------------------------------------------------------------


def weight_totals(folder: Path) -> WeightTotals:
    """Checks that the weights of a folder are complete, and returns their totals.

    Raises:
        ModelNotFoundError: the folder holds no weights.
        CorruptModelError: a file is truncated or unreadable.
    """
    tensors, values, seen = 0, 0, set[str]()
    for path, promised in _promised(folder).items():
        if path.suffix != ".safetensors":
            count, size = _check_pickle(path)
        else:
            shapes = check_safetensors(path)
            count, size = len(shapes), sum(shapes.values())
            if lost := sorted((promised or set()) - shapes.keys()):
                raise CorruptModelError(f"{path} lacks the tensor {lost[0]}, which the index places in it")
            if twice := sorted(seen & shapes.keys()):
                raise CorruptModelError(f"{folder} holds the tensor {twice[0]} in two files")
            seen |= shapes.keys()
        tensors, values = tensors + count, values + size
    return WeightTotals(str(folder), tensors, values)


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of a folder's weights, all of one kind.

    Raises:
        ModelNotFoundError: the folder holds no weights.
        CorruptModelError: the index of the files is damaged, or a file is missing.
    """
    return list(_promised(folder))


def _promised(folder: Path) -> dict[Path, set[str] | None]:
    """Returns the files of the weights, each with the tensors that an index places in it."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        single, index = folder / name, folder / f"{name}.index.json"
        if os.path.lexists(single):
            return {single: None}
        if os.path.lexists(index):
            return _shards(folder, index)
    raise _incomplete(folder, "weights: there is no model.safetensors in it")


def _shards(folder: Path, index: Path) -> dict[Path, set[str] | None]:
    names = read_settings(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CorruptModelError(f"{index} is corrupt: weight_map names no files")
    files: dict[str, set[str]] = {}
    for tensor, name in names.items():
        if not isinstance(name, str):
            raise CorruptModelError(
                f"{index} is corrupt: weight_map must give a file name for {tensor!r}, not {_kind(name)}"
            )
        pure = PurePosixPath(name)
        if (
            pure.is_absolute()
            or ".." in pure.parts
            or "\0" in name
            or pure.suffix not in (".safetensors", ".bin")
        ):
            raise CorruptModelError(
                f"{index} is corrupt: weight_map names {name!r}, not a file of weights in this folder"
            )
        files.setdefault(name, set()).add(tensor)
    missing = [name for name in files if not _is_file(folder / name)]
    if missing:
        raise CorruptModelError(f"{folder} is incomplete: it lacks {some_of(missing)}, named in {index.name}")
    return {folder / name: tensors for name, tensors in sorted(files.items())}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long
        return False


def check_safetensors(path: Path) -> dict[str, int]:
    """Returns the names of a file's tensors, each with the largest number of values it can represent.

    Raises:
        CorruptModelError: safetensors' own reader refuses the file, or it holds no tensors.
    """
    from safetensors import safe_open

    shapes = {}
    try:
        with (
            contextlib.closing(OpenFile(path)) as opened,
            safe_open(opened.own_path, framework="np") as file,
        ):
            names = list(file.keys())
            if len(names) > _MOST_TENSORS:
                raise CorruptModelError(f"{path} is corrupt: its header describes {len(names):,} tensors")
            for name in names:
                tensor = file.get_slice(name)
                count = 1
                for size in tensor.get_shape():
                    count *= size
                # Each integer of quantised weights holds several values.
                packed = tensor.get_dtype().startswith(("I", "U", "BOOL"))
                shapes[name] = count * 32 if packed else count
    except (CorruptModelError, ModelNotFoundError):
        raise
    except Exception as error:  # the reader's own type, or OSError for an empty file
        reason = _cut_off(path) or _not_what_it_should_be(path, first_line(error))
        raise CorruptModelError(f"{path} is truncated or corrupt: {reason}") from error
    if not shapes:
        raise CorruptModelError(f"{path} holds no tensors")
    return shapes


def _cut_off(path: Path) -> str | None:
    """Names the first tensor of a safetensors file that ends beyond the file; ``None`` if there is none."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                return None
            header = json.loads(file.read(length))
        ends = {
            name: fields["data_offsets"][1] + 8 + length
            for name, fields in header.items()
            if name != "__metadata__"
        }
        end, name = min((end, name) for name, end in ends.items() if end > size)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
    return f"the tensor {excerpt(name)} is cut off: it ends at byte {end:,}, and the file has {size:,}"


def _check_pickle(path: Path) -> tuple[int, int]:
    """Returns the largest numbers of tensors and values that a ``.bin`` file can hold, without unpickling."""
    with contextlib.closing(OpenFile(path)) as opened:
        size, start = opened.size_bytes, opened.read(4)
    if start.startswith(b"\x80"):  # torch's format before 1.6, a bare pickle
        return size // 256 + 1_000, size
    if start != b"PK\x03\x04":
        raise CorruptModelError(
            f"{path} is corrupt: {_not_what_it_should_be(path, 'a file that torch.save writes')}"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise CorruptModelError(f"{path} is truncated or corrupt: {first_line(error)}") from error
    if sum(entry.file_size for entry in entries) > size:  # torch.save compresses nothing
        raise CorruptModelError(f"{path} is corrupt: it unpacks to more than its {size:,} bytes")
    return 4 * len(entries), size


def _not_what_it_should_be(path: Path, wanted: str) -> str:
    """Says what a file is instead, if its first bytes show that; else that it is not ``wanted``."""
    try:
        start = read_start(path, 200).lstrip()
    except (OSError, AcclimateError) as error:
        return first_line(error)
    if not start:
        return "it is empty"
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself; fetch the file with git lfs pull"
    if start[:1] == b"<":
        return "it is a web page, not a model file; download it again"
    return wanted if " " in wanted and wanted[0].isupper() else f"it is not {wanted}"
