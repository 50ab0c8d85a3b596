"""A model and its tokenizer, loaded onto the accelerator of this process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate.errors import (
    CorruptModelError,
    DeviceMemoryError,
    MissingExtraError,
    UnsupportedDtypeError,
    UnsupportedModelError,
)
from acclimate.inference.locate import find_model
from acclimate.inference.quiet import first_line, quiet_transformers
from acclimate.inference.text import ConvertedTokenizer, HubTokenizer, Tokenizer
from acclimate.selection import get_accelerator

if TYPE_CHECKING:
    import torch

    from acclimate.accelerator import Accelerator

DTYPES = ("bfloat16", "float16", "float32")
"""What a model can be run in; ``auto`` takes the first that the accelerator supports."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to generate."""

    module: Any
    """The Hugging Face model object, in evaluation mode, on the accelerator."""
    tokenizer: Tokenizer
    folder: Path
    """Where its files lie."""
    accelerator: Accelerator
    dtype: torch.dtype
    load_seconds: float
    """From the call to the model being ready, imports and any conversion or download included."""

    @property
    def parameters(self) -> int:
        """How many parameters the model has; tied ones count once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def context_length(self) -> int | None:
        """How many tokens a prompt and its continuation can have together; ``None``: any number."""
        length = getattr(self.module.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None


def load_model(model: str | os.PathLike[str] | None = None, *, dtype: str = "auto") -> LoadedModel:
    """Loads a model onto this process's accelerator.

    Args:
        model: A folder, a ``.gguf`` file, the id of a model on the Hugging Face hub, or ``None`` for the
            demo model.
        dtype: ``bfloat16``, ``float16``, ``float32``, or ``auto``: the first of these that the accelerator
            supports.

    Raises:
        ModelNotFoundError: there is no such model.
        CorruptModelError: its files are truncated, unreadable or do not fit together.
        UnsupportedModelError: it is no language model that transformers can run.
        UnsupportedDtypeError: no such dtype, or the accelerator lacks it.
        DeviceMemoryError: it does not fit into the accelerator's memory.
        MissingExtraError: a package that is needed is not installed.
        CacheWriteError: a converted model cannot be written to the cache.
    """
    start = time.perf_counter()
    if dtype not in ("auto", *DTYPES):
        raise UnsupportedDtypeError(f"dtype must be one of auto, {', '.join(DTYPES)}; it is {dtype!r}")
    _require_transformers()
    accelerator = get_accelerator()
    chosen = choose_dtype(accelerator, dtype)
    accelerator.reset_peak_memory_stats()
    folder = find_model(model, str(chosen).removeprefix("torch."))
    with ThreadPoolExecutor(1) as worker, memory_errors(accelerator, f"the model {folder.name}"):
        tokenizer = _start_loading_tokenizer(folder, worker)
        module = _load_module(folder, chosen).to(accelerator.current_device_name())
        loaded_tokenizer = tokenizer.result() if tokenizer is not None else _hub_tokenizer(folder)
    accelerator.synchronize()
    return LoadedModel(module, loaded_tokenizer, folder, accelerator, chosen, time.perf_counter() - start)


def choose_dtype(accelerator: Accelerator, name: str) -> torch.dtype:
    """Returns the dtype of a name; for ``auto`` the first of :data:`DTYPES` that is supported.

    Raises:
        UnsupportedDtypeError: the accelerator does not compute in it.
    """
    supported = {str(dtype).removeprefix("torch."): dtype for dtype in accelerator.supported_dtypes()}
    for candidate in DTYPES if name == "auto" else (name,):
        if candidate in supported:
            return supported[candidate]
    usable = ", ".join(candidate for candidate in DTYPES if candidate in supported)
    raise UnsupportedDtypeError(
        f"{accelerator.name} does not compute in {name} on this machine; choose auto or one of: {usable}"
    )


@contextlib.contextmanager
def memory_errors(accelerator: Accelerator, what: str) -> Iterator[None]:
    """Names what did not fit when the device, or the host, is out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch's allocator for the host raises a plain RuntimeError.
        host_is_full = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        if not host_is_full and not isinstance(error, accelerator.OutOfMemoryError):
            raise
        raise DeviceMemoryError(
            f"{what} does not fit into the memory of {accelerator.current_device_name()}; "
            "try a smaller model, a shorter text, or bfloat16"
        ) from error


def _require_transformers() -> None:
    try:
        for package in ("safetensors", "transformers"):
            import_module(package)
    except ImportError as error:
        raise MissingExtraError(
            f'a language model needs {error.name}: pip install "acclimate[llm]"'
        ) from error


def _start_loading_tokenizer(folder: Path, worker: ThreadPoolExecutor) -> Future[Tokenizer] | None:
    """Loads the tokenizer beside the model, where that needs nothing of transformers.

    Its lazy imports are not made for two threads that import at once.
    """
    if not (folder / "acclimate.json").is_file():
        return None
    return worker.submit(ConvertedTokenizer, folder)


def _hub_tokenizer(folder: Path) -> Tokenizer:
    with quiet_transformers():
        try:
            return HubTokenizer(folder)
        except ImportError as error:
            raise MissingExtraError(f"the tokenizer in {folder} needs one more package: {error}") from error
        except Exception as error:  # the tokenizers library raises plain Exception
            raise CorruptModelError(
                f"the tokenizer in {folder} cannot be loaded: {first_line(error)}"
            ) from error


def _load_module(folder: Path, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        try:
            module, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        except SafetensorError as error:
            raise CorruptModelError(f"the weights in {folder} cannot be read: {first_line(error)}") from error
        except ImportError as error:
            raise MissingExtraError(f"the model in {folder} needs one more package: {error}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnsupportedModelError(
                f"transformers cannot load the model in {folder}: {first_line(error)}"
            ) from error
    # transformers fills parameters that have no weights with random numbers and only warns.
    for kind, names in (
        ("lacks", report["missing_keys"]),
        ("has in another shape", report["mismatched_keys"]),
    ):
        if names:
            shown = sorted(name if isinstance(name, str) else str(name[0]) for name in names)
            more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
            raise CorruptModelError(
                f"{folder} {kind} weights its config asks for: {', '.join(shown[:3])}{more}"
            )
    return module.eval()
