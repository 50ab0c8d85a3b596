"""Loads a model and its tokenizer onto this process's accelerator."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate.cache import cache_root
from acclimate.errors import (
    AcclimateError,
    CorruptModelError,
    DeviceMemoryError,
    MissingExtraError,
    UnsupportedDtypeError,
    UnsupportedModelError,
    excerpt,
    some_of,
)
from acclimate.inference.converted import MANIFEST, discard
from acclimate.inference.folder import weight_totals
from acclimate.inference.inference_model import InferenceModel
from acclimate.inference.locate import find_model
from acclimate.inference.model_limits import bounded_model
from acclimate.inference.quiet import first_line, quiet_transformers, why_unusable
from acclimate.inference.ranks import ModelRanks
from acclimate.inference.text import ConvertedTokenizer, HubTokenizer, Tokenizer
from acclimate.selection import get_accelerator

if TYPE_CHECKING:
    import torch

    from acclimate.accelerator import Accelerator

logger = logging.getLogger("acclimate.inference")

_NUMBER = re.compile(r"\d+")

DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes a model can run in; ``auto`` takes the first that the accelerator supports."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to generate."""

    module: Any
    """The Hugging Face model object, in evaluation mode, on the accelerator."""
    tokenizer: Tokenizer
    folder: Path
    """The folder of its files."""
    accelerator: Accelerator
    dtype: torch.dtype
    load_seconds: float
    """From the call until the model is ready, including imports and any conversion or download."""

    @property
    def parameters(self) -> int:
        """The number of parameters; tied ones count once, and those of other ranks too."""
        if isinstance(self.module, InferenceModel):
            return self.module.whole.parameters
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def tokens(self) -> int:
        """The number of tokens that the model knows."""
        if isinstance(self.module, InferenceModel):
            return self.module.whole.tokens
        return int(self.module.get_input_embeddings().weight.shape[0])

    @property
    def ranks(self) -> ModelRanks:
        """The ranks that share the model."""
        return self.module.model_ranks if isinstance(self.module, InferenceModel) else ModelRanks()

    @property
    def context_length(self) -> int | None:
        """The most tokens that a prompt and its continuation can have together; ``None``: no limit."""
        length = getattr(self.module.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None


def load_model(
    model: str | os.PathLike[str] | None = None, *, dtype: str = "auto", trust_remote_code: bool = False
) -> LoadedModel:
    """Loads a model onto this process's accelerator.

    Args:
        model: a folder, a ``.gguf`` file, the id of a model on the Hugging Face hub, or ``None`` for the
            demo model.
        dtype: ``bfloat16``, ``float16``, ``float32``, or ``auto``: the first of these that the accelerator
            supports.
        trust_remote_code: whether Python code that comes with the model may run.

    Raises:
        ModelNotFoundError: there is no such model.
        CorruptModelError: its files are truncated, unreadable or do not fit together.
        UnsupportedModelError: it is not a language model that transformers can run.
        RemoteCodeError: it needs its own Python code, which may not run.
        UnsupportedDtypeError: there is no such dtype, or the accelerator does not support it.
        DeviceMemoryError: it does not fit into the accelerator's memory.
        MissingExtraError: a required package is not installed.
        CacheWriteError: a converted model cannot be written to the cache.
    """
    start = time.perf_counter()
    check_dtype_name(dtype)
    require_transformers()
    accelerator = get_accelerator()
    chosen = choose_dtype(accelerator, dtype)
    accelerator.reset_peak_memory_stats()

    def find() -> Path:
        return find_model(model, str(chosen).removeprefix("torch."), trust_remote_code=trust_remote_code)

    folder = find()
    try:
        module, tokenizer = _load_folder(folder, accelerator, chosen, trust_remote_code)
    except (CorruptModelError, UnsupportedModelError) as error:
        if not folder.is_relative_to(cache_root()):
            raise
        logger.warning("the converted model in %s is damaged (%s); converting it again", folder, error)
        discard(folder)
        folder = find()
        module, tokenizer = _load_folder(folder, accelerator, chosen, trust_remote_code)
    accelerator.synchronize()
    return LoadedModel(module, tokenizer, folder, accelerator, chosen, time.perf_counter() - start)


def _load_folder(
    folder: Path, accelerator: Accelerator, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[Any, Tokenizer]:
    converted = (folder / MANIFEST).is_file()
    with ThreadPoolExecutor(1) as worker, memory_errors(accelerator, f"the model {folder.name}"):
        # In parallel only without transformers, whose lazy imports are not thread-safe.
        early = worker.submit(_load_tokenizer, folder, ConvertedTokenizer) if converted else None
        module = _load_module(folder, dtype, trust_remote_code).to(accelerator.current_device_name())
        return module, load_tokenizer(folder, trust_remote_code) if early is None else early.result()


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    """Loads the tokenizer of a model's folder.

    Raises:
        CorruptModelError: it cannot be loaded.
        MissingExtraError: it needs a package that is not installed.
    """
    if (folder / MANIFEST).is_file():
        return _load_tokenizer(folder, ConvertedTokenizer)
    with quiet_transformers():
        return _load_tokenizer(folder, partial(HubTokenizer, trust_remote_code=trust_remote_code))


def check_dtype_name(name: str) -> None:
    """Raises :class:`UnsupportedDtypeError` unless a model can be asked to run in this dtype."""
    if name not in ("auto", *DTYPES):
        raise UnsupportedDtypeError(
            f"dtype must be one of auto, {', '.join(DTYPES)}; it is '{excerpt(name)}'"
        )


def choose_dtype(accelerator: Accelerator, name: str) -> torch.dtype:
    """Returns the dtype with this name; for ``auto``, the first supported one of :data:`DTYPES`.

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
    """Turns out-of-memory errors of the device or the host into one that names what did not fit."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) and not isinstance(error, accelerator.OutOfMemoryError):
            raise
        raise DeviceMemoryError(
            f"{what} does not fit into the memory of {accelerator.current_device_name()}; "
            "try a smaller model, a shorter text, or bfloat16"
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that the host or a device is out of memory."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's allocator for the host raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library written in Rust, which is not an ``Exception``."""
    return type(error).__name__ == "PanicException"


def require_transformers() -> None:
    """Raises :class:`MissingExtraError` unless transformers is installed."""
    try:
        for package in ("safetensors", "transformers"):
            import_module(package)
    except ImportError as error:
        raise MissingExtraError(
            f'a language model needs {error.name}: pip install "acclimate[llm]"'
        ) from error


def _load_tokenizer(folder: Path, load: Callable[[Path], Tokenizer]) -> Tokenizer:
    try:
        return load(folder)
    except ImportError as error:
        raise MissingExtraError(
            f"the tokenizer in {folder} needs one more package: {first_line(error)}"
        ) from error
    except BaseException as error:  # the tokenizers library raises plain Exception, and panics
        if isinstance(error, MemoryError) or not (isinstance(error, Exception) or is_panic(error)):
            raise
        reason = why_unusable(error)
        raise CorruptModelError(f"the tokenizer in {folder} cannot be loaded: {reason}") from error


def _load_module(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    totals = weight_totals(folder)
    with quiet_transformers(), explained_failures("load", folder):
        try:
            with bounded_model(totals):
                module, report = AutoModelForCausalLM.from_pretrained(
                    folder,
                    dtype=dtype,
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # _check_report names them
                    trust_remote_code=trust_remote_code,
                )
        except (pickle.UnpicklingError, EOFError) as error:  # torch's message advises weights_only=False
            raise CorruptModelError(
                f"the .bin files in {folder} are damaged, or hold something other than tensors"
            ) from error
    _check_report(folder, module, report)
    return module.eval()


@contextlib.contextmanager
def explained_failures(action: str, folder: Path) -> Iterator[None]:
    """Turns what transformers raises in the block into errors that name the model's folder.

    Args:
        action: what is done with the model there, such as ``"load"``.
        folder: the model's.

    Raises:
        MissingExtraError: the model needs a package that is not installed.
        UnsupportedModelError: transformers raised any other error, except when memory ran out.
    """
    try:
        yield
    except AcclimateError:
        raise
    except ImportError as error:
        raise MissingExtraError(
            f"the model in {folder} needs one more package: {first_line(error)}"
        ) from error
    except Exception as error:  # any type: transformers does not check a config's fields
        if is_out_of_memory(error):
            raise
        raise UnsupportedModelError(
            f"transformers cannot {action} the model in {folder}: {why_unusable(error)}"
        ) from error


def _check_report(folder: Path, module: Any, report: dict[str, Any]) -> None:
    """Raises :class:`CorruptModelError` unless each parameter has its weights.

    transformers only warns, and fills parameters without weights with random numbers.
    """
    # The tensors of a layer that the config leaves out are named like those of another layer, except for
    # the number.
    known = {_NUMBER.sub("#", name) for name, _ in module.named_parameters()}
    left_out = [name for name in report["unexpected_keys"] if _NUMBER.sub("#", str(name)) in known]
    for problem, names in (
        ("lacks weights its config asks for", report["missing_keys"]),
        ("has weights in another shape than its config asks for", report["mismatched_keys"]),
        ("has weights that its config leaves out", left_out),
    ):
        if names:
            shown = some_of(name if isinstance(name, str) else str(name[0]) for name in names)
            raise CorruptModelError(f"{folder} {problem}: {shown}")
