"""Converts a GGUF file, once, to a folder in the user's cache that transformers loads in seconds.

Loading a GGUF file through transformers is slow at each start: it derives merges from the vocabulary and
unpacks each tensor in one piece. Here the config comes from the file's own keys (``config.py``), the
tokenizer from its vocabulary (``tokenizer.py``), and tensors are unpacked in blocks (``tensors.py``).
A file that cannot be converted to exactly its model is refused before the first block.

Each dtype gets its own folder. Each value is unpacked to float32 and rounded once, so ``bfloat16`` loads half
the bytes and needs no conversion, and ``float32`` gives the exact values. A folder of the form
:data:`BLOCKS` has no weights: they are read from the GGUF file itself, in its own quantised blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate.cache import cache_root, full_disk_error, publish_once
from acclimate.errors import CorruptModelError, MissingExtraError
from acclimate.host.install_hints import install_extra
from acclimate.llm.files.converted import is_whole, write_manifest
from acclimate.llm.files.model_limits import WeightTotals, bounded_model
from acclimate.llm.files.open_file import OpenFile
from acclimate.llm.gguf.architectures import find_architecture
from acclimate.llm.gguf.config import config_fields
from acclimate.llm.gguf.header import GGUFHeader, element_count, read_gguf_header
from acclimate.llm.progress import progress_bar
from acclimate.llm.quiet import explained_failures, quiet_transformers
from acclimate.llm.text.vocabulary import write_vocabulary

if TYPE_CHECKING:
    import torch

    from acclimate.llm.gguf.tensors import GGUFTensor

logger = logging.getLogger("acclimate.llm")

BLOCKS = "blocks"
"""The form of a converted GGUF file whose weights stay in the file, as its own quantised blocks."""

_CONVERTER_VERSION = 7
"""Increased whenever the same file would give a different folder."""

_LONGEST_NAME = 100
_HASHED_WHOLE = 32 << 20
_SAMPLES, _SAMPLE_BYTES = 256, 16 << 10


def converted_gguf(source: Path | OpenFile, form: str) -> Path:
    """Returns the cache folder of this GGUF file in this form; converts the file if there is none.

    The folder's key and everything in it come from one open file, whatever its path names meanwhile.

    Args:
        source: the file.
        form: the name of a dtype, or :data:`BLOCKS`.

    Raises:
        CorruptModelError: the file is truncated or is not a GGUF file.
        UnsupportedModelError: its architecture cannot be converted.
        MissingExtraError: a package that conversion needs is not installed.
        CacheWriteError: the disk is full or the cache cannot be written.
    """
    with contextlib.closing(OpenFile(source)) as file:
        key = identity(file)

        def build(private: Path) -> None:
            try:
                _convert(file, private, form)
            finally:
                file.check_unchanged("converted")  # first: a change can be the reason of another error
            if identity(file) != key:  # the clock of a file system can be too coarse to show a change
                raise CorruptModelError(
                    f"{file.path} was changed while it was converted; load the model again"
                )

        return _published(file.path.stem, key, form, build)


def convert_once(name: str, key: str, form: str, provide: Callable[[Path], Path]) -> Path:
    """Like :func:`converted_gguf`, for a file with a known key, which ``provide(folder)`` makes if needed.

    In the form :data:`BLOCKS`, a file that ``provide`` makes stays in the folder.
    """

    def convert(source: Path, private: Path) -> None:
        with contextlib.closing(OpenFile(source)) as file:
            _convert(file, private, form)

    def build(private: Path) -> None:
        if form == BLOCKS:
            convert(provide(private), private)
            return
        with tempfile.TemporaryDirectory(dir=private, prefix=".scratch") as scratch:
            convert(provide(Path(scratch)), private)

    return _published(name, key, form, build)


def _published(name: str, key: str, form: str, build: Callable[[Path], None]) -> Path:
    folder = cache_root() / "models" / f"{name[:_LONGEST_NAME]}-{_key(key)}-{form}"

    return publish_once(folder, build, lambda: is_whole(folder))


def identity(file: OpenFile) -> str:
    """Returns a digest that changes with a file's content, without reading all of a large file.

    It covers the size, the modification time (a download may repair a single block), and the content: all
    of a file of up to 32 MiB, else the first 8 MiB, where the header is, and 256 samples spread over the
    rest. It does not cover the path: a file that was moved is not converted again.
    """
    size = file.size_bytes
    digest = hashlib.sha256(f"{size} {file.state.modified_ns}".encode())
    if size <= _HASHED_WHOLE:
        digest.update(file.read(size))
    else:
        digest.update(file.read(8 << 20))
        for sample in range(1, _SAMPLES + 1):
            digest.update(file.read(_SAMPLE_BYTES, (size - _SAMPLE_BYTES) * sample // _SAMPLES))
    return digest.hexdigest()


def _key(content: str) -> str:
    """Returns a cache key of the content and of the converting code, including transformers."""
    try:
        transformers_version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtraError(f"a language model needs transformers: {install_extra('llm')}") from error
    parts = f"{content} {_CONVERTER_VERSION} {transformers_version}"
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def _convert(source: OpenFile, target: Path, form: str) -> None:
    """Fills ``target`` with config, tokenizer and weights."""
    header = read_gguf_header(source)
    name = source.path.name
    architecture = find_architecture(header)
    _require_gguf(name)
    import torch

    from acclimate.llm.gguf.tensors import GGUFFile, gguf_tensors, write_index
    from acclimate.llm.gguf.tokenizer import check_vocabulary, convert_tokenizer
    from acclimate.llm.gguf.vocabulary import read_vocabulary
    from acclimate.llm.gguf.weights import check_tensors

    check_tensors(header, source.size_bytes)
    check_vocabulary(header)
    fields = config_fields(header, architecture)
    if form == BLOCKS:
        logger.info("converting the tokenizer of %s, once", name)
    else:
        logger.info("converting %s to %s, once", name, form)
    dtype = torch.bfloat16 if form == BLOCKS else getattr(torch, form)
    with quiet_transformers(), contextlib.closing(GGUFFile(source, header.data_start)) as file:
        model = _empty_model(header, fields)
        tensors = gguf_tensors(file, header, architecture, model, dtype)
        # The tokenizer comes before the weights, because it is small and its errors then appear sooner.
        vocabulary = read_vocabulary(header)
        convert_tokenizer(header, vocabulary, target)
        write_vocabulary(target)
        if form == BLOCKS:
            write_index(header, tensors, target)
        else:
            _write_weights(header, tensors, target)
        _write_settings(model, target, dtype, vocabulary.ends)
    facts = {"source": name, "form": form, "weights": weights_format(header)}
    write_manifest(target, facts | {"converter": _CONVERTER_VERSION})


def weights_format(header: GGUFHeader) -> str:
    """Returns llama.cpp's name for the format of a file's weights, such as ``Q4_K_M``.

    A file may not say it, or say what its tensors do not bear out; then it is the type of most of its bytes.
    """
    import gguf

    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        values, size_bytes = gguf.GGML_QUANT_SIZES[kind]
        sizes[kind.name] += element_count(tensor) // values * size_bytes
    said = header.value("general.file_type")
    if isinstance(said, int) and said in set(gguf.LlamaFileType):
        name = str(gguf.LlamaFileType(said).name).removeprefix("MOSTLY_").removeprefix("ALL_")
        if any(name.startswith(kind) for kind in sizes):
            return name
    return max(sizes, key=lambda name: sizes[name], default="")


def empty_gguf_model(source: Path) -> Any:
    """Builds a GGUF file's model on the meta device; reads only the file's header.

    Raises:
        CorruptModelError: the file is truncated or damaged.
        UnsupportedModelError: transformers has no such model.
    """
    header = read_gguf_header(source)
    _require_gguf(source.name)
    with quiet_transformers():
        return _empty_model(header, config_fields(header, find_architecture(header)))


def _require_gguf(name: str) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"reading {name} needs {error.name or 'gguf'}: {install_extra('llm')}"
        ) from error


def _empty_model(header: GGUFHeader, fields: dict[str, Any]) -> Any:
    """Builds the model on the meta device, without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    totals = WeightTotals(str(header.path), len(header.tensors), sum(map(element_count, header.tensors)))
    with (
        explained_failures("build", f"the {fields['model_type']} model in {header.path}"),
        torch.device("meta"),
        bounded_model(totals),
    ):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))


def _write_weights(header: GGUFHeader, tensors: list[GGUFTensor], target: Path) -> None:
    from acclimate.llm.gguf.tensors import write_safetensors

    total = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
    _check_space(target, total)
    with progress_bar(f"converting {header.path.name}", total) as advance:
        write_safetensors(tensors, target / "model.safetensors", advance)


def _write_settings(model: Any, target: Path, dtype: torch.dtype, ends: tuple[int, ...]) -> None:
    from transformers import GenerationConfig

    config = model.config
    config.architectures, config.dtype = [type(model).__name__], dtype
    config.save_pretrained(target)
    generation = GenerationConfig.from_model_config(config)
    generation._from_model_config = False  # else transformers prefers the config's single end token
    generation.eos_token_id = list(ends) if len(ends) > 1 else next(iter(ends), None)
    generation.save_pretrained(target)


def _check_space(target: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(target).free < needed_bytes:
        raise full_disk_error(target.parent, needed_bytes)
