"""Saves a model that is split over ranks as one folder that transformers loads.

The ranks gather one tensor at a time, and rank 0 writes it to its position in a file. So rank 0 needs memory
only for the few tensors that transformers' file format combines, not for the model.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from acclimate.errors import SaveError, UnsupportedError
from acclimate.host.replace_file import umask
from acclimate.llm.files.checkpoint import safetensors_header
from acclimate.llm.files.deferred_tensors import cut, deferred, read, sources
from acclimate.llm.files.regions import Region
from acclimate.llm.quiet import quiet_transformers
from acclimate.llm.split import gather

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


@dataclass
class _Gathered:
    """A whole tensor that the ranks gather when it is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor | None = None

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        if self.values is None:
            raise RuntimeError(f"{self.name} has not been gathered")
        out.copy_(cut(self.values, region))


@dataclass
class _File:
    """A weight file whose tensors can be written in any order."""

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)

    def header(self) -> bytes:
        """Returns the file's header, and computes the position of each tensor."""
        header, self.positions = safetensors_header(self.tensors)
        return header


def save_split_model(
    model: Any,
    save_directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    save_original_format: bool = True,
    **others: Any,
) -> None:
    """Saves a model; see :meth:`acclimate.llm.loading.inference_model.InferenceModel.save_pretrained`.

    Raises:
        SaveError: the folder cannot be written; no part of it has been created.
        UnsupportedError: an argument of transformers does not apply to a split model.
    """
    wanted = sorted(name for name, value in others.items() if value not in (None, False, True))
    if wanted or others.get("push_to_hub"):
        raise UnsupportedError(
            f"save_pretrained of a split model does not support {', '.join(wanted) or 'push_to_hub'}; "
            "save to a folder, and upload the folder"
        )
    folder, ranks = Path(save_directory).expanduser().absolute(), model.model_ranks
    with ranks.all_or_none():
        leaves, saved = _tensors_to_save(model, save_original_format)
        files = _files(saved, _size(max_shard_size))
        private = _begin(folder, files) if ranks.is_first else None
    try:
        with ranks.all_or_none(), _disk_errors(folder):
            _write(model, leaves, files, private)
            if private is not None:
                _write_settings(model, private, files)
                _publish(private, folder)
    finally:
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)


def _tensors_to_save(
    model: Any, save_original_format: bool
) -> tuple[dict[str, _Gathered], dict[str, torch.Tensor]]:
    """Returns the tensors to gather, by name in the model, and those to write, by name in the files."""
    from transformers.core_model_loading import revert_weight_conversion

    plan = model.tp_plan_applied
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    present = model.state_dict(keep_vars=True)
    dtype = next(model.parameters()).dtype
    leaves = {
        name: _Gathered(name, split.shape, present[name].dtype if name in present else dtype)
        for name, split in plan.splits.items()
        if name not in plan.shared and name not in ignored
    }
    saved: dict[str, Any] = {name: deferred(leaf) for name, leaf in leaves.items()}
    if save_original_format:
        whole = _whole_on_meta(model)
        whole._weight_conversions = getattr(model, "_weight_conversions", None)
        if whole._weight_conversions is None:
            del whole._weight_conversions
        with quiet_transformers():
            saved = revert_weight_conversion(whole, saved)
    return leaves, saved


def _whole_on_meta(model: Any) -> Any:
    own = next(base for base in type(model).__mro__[1:] if base.__name__ == type(model).__name__)
    with torch.device("meta"), quiet_transformers():
        return own(copy.deepcopy(model.whole.config))


def _files(saved: Mapping[str, torch.Tensor], most_bytes: int) -> list[_File]:
    """Distributes tensors over as few files as possible, of at most ``most_bytes`` bytes each."""
    files = [_File("")]
    size = 0
    for name, tensor in saved.items():
        if size + _bytes(tensor) > most_bytes and size:
            files.append(_File(""))
            size = 0
        files[-1].tensors[name] = tensor
        size += _bytes(tensor)
    count = len(files)
    for index, file in enumerate(files, 1):
        file.name = "model.safetensors" if count == 1 else f"model-{index:05}-of-{count:05}.safetensors"
    return files


def _bytes(tensor: torch.Tensor) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize


def _size(text: int | str) -> int:
    """Returns bytes for a number or text such as ``5GB``."""
    found = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", str(text))
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise UnsupportedError(f"max_shard_size must be a size such as 5GB; it is {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _begin(folder: Path, files: list[_File]) -> Path:
    """Creates the private folder, with files that have their headers and final lengths."""
    if folder.exists() and not folder.is_dir():
        raise SaveError(f"{folder} is a file; save_pretrained needs a folder")
    with _disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        needed = sum(_bytes(tensor) for file in files for tensor in file.tensors.values())
        free = shutil.disk_usage(folder.parent).free
        if free < needed:
            raise SaveError(
                f"{folder} cannot be written: {needed / 1e6:,.0f} MB are needed, "
                f"{free / 1e6:,.0f} MB are free"
            )
        private = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.partial"
        private.mkdir()
        try:
            for file in files:
                (private / file.name).write_bytes(file.header())
        except BaseException:
            shutil.rmtree(private, ignore_errors=True)
            raise
    return private


def _write(model: Any, leaves: Mapping[str, _Gathered], files: list[_File], private: Path | None) -> None:
    """Gathers the tensors, on all ranks, and writes them on rank 0.

    A rank that cannot write continues to gather, because the others wait for it.
    """
    waiting = {
        name: (file, tensor, {source.name for source in sources(tensor)})
        for file in files
        for name, tensor in file.tensors.items()
    }
    failure: OSError | None = None
    with contextlib.ExitStack() as opened:
        streams = {
            file.name: opened.enter_context((private / file.name).open("r+b")) for file in files if private
        }
        for name, values in gather(model.tp_plan_applied, model, model.model_ranks.group):
            if private is None or name not in leaves or failure is not None:
                continue
            leaves[name].values = values.detach().to("cpu", leaves[name].dtype)
            ready = [
                waiting_name
                for waiting_name, (_, _, needed) in waiting.items()
                if name in needed and all(leaves[leaf].values is not None for leaf in needed)
            ]
            try:
                for ready_name in ready:
                    file, tensor, _ = waiting.pop(ready_name)
                    streams[file.name].seek(file.positions[ready_name])
                    streams[file.name].write(_memory(read(tensor)))
            except OSError as error:
                failure = error
            _forget_written(leaves, waiting)
        for stream in streams.values():
            stream.flush()
            os.fsync(stream.fileno())
    if failure is not None:
        raise failure
    if private is not None and waiting:
        raise SaveError(f"the ranks did not gather {', '.join(sorted(waiting)[:3])}")


def _forget_written(
    leaves: Mapping[str, _Gathered], waiting: Mapping[str, tuple[_File, torch.Tensor, set[str]]]
) -> None:
    needed = set().union(*(names for _, _, names in waiting.values()))
    for name, leaf in leaves.items():
        if leaf.values is not None and name not in needed:
            leaf.values = None


def _memory(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write_settings(model: Any, private: Path, files: list[_File]) -> None:
    config = copy.deepcopy(model.whole.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    with quiet_transformers():
        config.save_pretrained(private)
        if model.can_generate():
            model.generation_config.save_pretrained(private)
        if model.is_remote_code():
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(model, private, config=config)
    if len(files) > 1:
        total = sum(_bytes(tensor) for file in files for tensor in file.tensors.values())
        index = {
            "metadata": {"total_parameters": model.whole.parameters, "total_size": total},
            "weight_map": {name: file.name for file in files for name in file.tensors},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (private / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _publish(private: Path, folder: Path) -> None:
    """Puts the complete files under their final names."""
    private.chmod(0o755 & ~umask())
    if not folder.exists():
        private.rename(folder)
        return
    if not any(folder.iterdir()):
        folder.rmdir()
        private.rename(folder)
        return
    # The folder may hold other files, such as a tokenizer's. A folder without config.json is not a model, so
    # a reader finds the old model, no model, or the new one.
    new = {path.name for path in private.iterdir()}
    (folder / "config.json").unlink(missing_ok=True)
    for path in folder.iterdir():
        if _WEIGHTS.fullmatch(path.name) and path.name not in new:
            path.unlink()
    for name in sorted(new, key=lambda name: (name == "config.json", name)):
        (private / name).replace(folder / name)


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, SaveError):
            raise
        raise SaveError(f"{folder} cannot be written: {error.strerror}") from error
