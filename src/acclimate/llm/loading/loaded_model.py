"""The loaded model, and the dtypes, tokenizers and errors that all ways of loading share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate.errors import (
    CorruptModelError,
    DeviceMemoryError,
    GenerationOptionError,
    MissingExtraError,
    excerpt,
)
from acclimate.host.install_hints import install_extra
from acclimate.llm.files.converted import MANIFEST, fact, model_name
from acclimate.llm.freed_memory import return_freed_memory
from acclimate.llm.loading.inference_model import Whole
from acclimate.llm.loading.packer import Packer
from acclimate.llm.quiet import first_line, is_out_of_memory, quiet_transformers, why_unusable
from acclimate.llm.ranks import ModelRanks
from acclimate.llm.text.tokenizers import ConvertedTokenizer, HubTokenizer, Tokenizer

if TYPE_CHECKING:
    import torch

    from acclimate.accelerator import Accelerator

DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes a model can run in; ``auto`` takes the first that the accelerator supports."""

_DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
}


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
    """From the call until the model is ready, with imports and any conversion or download, and without
    :attr:`compile_seconds`."""
    compile_seconds: float
    """The time for compiling kernels, which happens once on a machine."""

    @property
    def name(self) -> str:
        """The model's name: that of its folder, its GGUF file or its id on the hub."""
        return model_name(self.folder)

    @property
    def weights(self) -> str:
        """The format of the weights: ``int8``, ``int4``, llama.cpp's, such as ``Q4_K_M``, or the dtype."""
        packing: Packer = self.module.packing
        if not packing.packed:
            return str(self.dtype).removeprefix("torch.")
        return packing.format or fact(self.folder, "weights") or ", ".join(sorted(packing.packed))

    @property
    def description(self) -> str:
        """What the model computes in and where, such as ``Q4_K_M in bfloat16 on cpu, 2 ranks``."""
        dtype = str(self.dtype).removeprefix("torch.")
        form = dtype if self.weights == dtype else f"{self.weights} in {dtype}"
        several = f", {self.ranks.size} ranks" if self.ranks.size > 1 else ""
        return f"{form} on {self.accelerator.current_device_name()}{several}"

    @property
    def parameters(self) -> int:
        """The number of parameters, including those of other ranks; tied ones count once."""
        whole: Whole = self.module.whole
        return whole.parameters

    @property
    def tokens(self) -> int:
        """The number of rows of the input embeddings."""
        whole: Whole = self.module.whole
        return whole.tokens

    @property
    def ranks(self) -> ModelRanks:
        """The ranks that share the model."""
        ranks: ModelRanks = self.module.model_ranks
        return ranks

    @property
    def context_length(self) -> int | None:
        """The most tokens that a prompt and its continuation can have together; ``None``: no limit."""
        length = getattr(self.module.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    """Loads the tokenizer of a model's folder.

    Raises:
        CorruptModelError: it cannot be loaded.
        MissingExtraError: it needs a package that is not installed.
    """
    if (folder / MANIFEST).is_file():
        return _load_with(folder, ConvertedTokenizer)
    with quiet_transformers():
        return _load_with(folder, partial(HubTokenizer, trust_remote_code=trust_remote_code))


def dtype_name(name: str) -> str:
    """Returns ``auto`` or the one of :data:`DTYPES` that a name means, such as ``bf16``.

    Raises:
        GenerationOptionError: it means none.
    """
    full = _DTYPE_ALIASES.get(name, name)
    if full not in ("auto", *DTYPES):
        raise GenerationOptionError(
            f"dtype must be one of auto, {', '.join(DTYPES)}; it is '{excerpt(name)}'"
        )
    return full


def choose_dtype(accelerator: Accelerator, name: str) -> torch.dtype:
    """Returns the dtype with this name; for ``auto``, the first supported one of :data:`DTYPES`.

    Raises:
        GenerationOptionError: the accelerator does not compute in it.
    """
    supported = {str(dtype).removeprefix("torch."): dtype for dtype in accelerator.supported_dtypes()}
    for candidate in DTYPES if name == "auto" else (name,):
        if candidate in supported:
            return supported[candidate]
    usable = ", ".join(candidate for candidate in DTYPES if candidate in supported)
    raise GenerationOptionError(
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


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library written in Rust, which is not an ``Exception``."""
    return type(error).__name__ == "PanicException"


def require_transformers() -> None:
    """Raises :class:`MissingExtraError` unless transformers is installed."""
    try:
        for package in ("numpy", "safetensors", "transformers"):
            import_module(package)
    except ImportError as error:  # transformers raises another kind of it for what it lacks itself
        raise MissingExtraError(
            f"a language model needs {error.name or first_line(error)}: {install_extra('llm')}"
        ) from error


def _load_with(folder: Path, load: Callable[[Path], Tokenizer]) -> Tokenizer:
    """Loads a tokenizer by calling ``load``; raises the errors of :func:`load_tokenizer`."""
    try:
        tokenizer = load(folder)
    except ImportError as error:
        raise MissingExtraError(
            f"the tokenizer in {folder} needs one more package: {first_line(error)}"
        ) from error
    except BaseException as error:  # the tokenizers library raises plain Exception, and panics
        if isinstance(error, MemoryError) or not (isinstance(error, Exception) or is_panic(error)):
            raise
        reason = why_unusable(error)
        raise CorruptModelError(f"the tokenizer in {folder} cannot be loaded: {reason}") from error
    return_freed_memory()
    return tokenizer
