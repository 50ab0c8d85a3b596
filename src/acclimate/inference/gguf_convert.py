"""A GGUF file as a folder that transformers loads in seconds, made once and kept in the user's cache.

What made loading a GGUF through transformers take close to a minute each time (gemma-3-270m, two cores):
its reader parses the header three times at 11 to 14 s each, because it wraps each of the 786,432 vocabulary
entries in numpy arrays; merges are derived from the vocabulary (2 s); the embedding is unpacked in one piece
(4 s). Here the header is walked once (0.04 s), transformers' own code still derives the config, from a copy
of the header without the vocabulary, and the tokenizer; and tensors are unpacked in blocks.

The folder holds one dtype, the one it will run in: each value is unpacked to float32 and rounded once, so
``bfloat16`` starts from half the bytes with nothing to convert, and who asks for ``float32`` gets a folder
of its own with the exact values, which no bfloat16 copy could give back.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate.cache import cache_root, full_disk_error, publish_once
from acclimate.errors import CorruptModelError, MissingExtraError, UnsupportedModelError
from acclimate.inference.gguf_header import MAGIC, GGUFHeader, read_gguf_header
from acclimate.inference.progress import progress_bar
from acclimate.inference.quiet import quiet_transformers

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("acclimate.inference")

CONVERTER_VERSION = 1
"""Raised whenever the folder made from the same file would differ."""

_HASHED_WHOLE = 32 << 20
_SAMPLES, _SAMPLE_BYTES = 256, 16 << 10


def converted_gguf(source: Path, dtype_name: str) -> Path:
    """Returns the folder in the cache that holds this GGUF file in this dtype; makes it if need be.

    Raises:
        CorruptModelError: the file is truncated, or no GGUF.
        UnsupportedModelError: its architecture cannot be converted.
        MissingExtraError: a package that conversion needs is not installed.
        CacheWriteError: the disk is full or the cache cannot be written.
    """
    return convert_once(source.stem, identity(source), dtype_name, lambda _private: source)


def convert_once(name: str, key: str, dtype_name: str, provide: Callable[[Path], Path]) -> Path:
    """As :func:`converted_gguf`, for a file whose key is known and that ``provide(folder)`` can make."""
    folder = cache_root() / "models" / f"{name}-{_key(key)}-{dtype_name}"

    def build(private: Path) -> None:
        with tempfile.TemporaryDirectory(dir=private, prefix=".scratch") as scratch:
            _convert(provide(Path(scratch)), private, dtype_name, Path(scratch))

    return publish_once(folder, build)


def identity(path: Path) -> str:
    """A digest that changes when a file's content does, without reading all of a large file.

    Files up to 32 MiB are read whole. Of larger ones: the size, the time of the last change (so a download
    that repairs one spoiled block counts as another file), the first 8 MiB, where the header is, and 256
    samples spread over the rest, which any other weights would differ in. The path does not count: a file
    that is moved is not converted again.
    """
    status = path.stat()
    digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        if status.st_size <= _HASHED_WHOLE:
            digest.update(file.read())
        else:
            digest.update(file.read(8 << 20))
            for sample in range(1, _SAMPLES + 1):
                file.seek((status.st_size - _SAMPLE_BYTES) * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _key(content: str) -> str:
    """The content, and what converts it: another transformers can derive another tokenizer."""
    try:
        transformers_version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtraError(
            'a language model needs transformers: pip install "acclimate[llm]"'
        ) from error
    parts = f"{content} {CONVERTER_VERSION} {transformers_version}"
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def _convert(source: Path, target: Path, dtype_name: str, scratch: Path) -> None:
    """Fills ``target`` with config, tokenizer and weights."""
    header = read_gguf_header(source)
    try:
        import torch

        from acclimate.inference import gguf_weights
    except ImportError as error:
        raise MissingExtraError(f'reading {source.name} needs gguf: pip install "acclimate[llm]"') from error
    gguf_weights.check_size(header, source.stat().st_size)
    dtype: torch.dtype = getattr(torch, dtype_name)
    logger.info("converting %s to %s, once", source.name, dtype_name)
    with quiet_transformers():
        if header.architecture not in gguf_weights.DIRECT_ARCHITECTURES:
            _convert_through_transformers(source, target, dtype)
        else:
            _convert_directly(header, target, dtype, scratch)
    (target / "acclimate.json").write_text(
        json.dumps({"source": source.name, "dtype": dtype_name, "converter": CONVERTER_VERSION}) + "\n"
    )


def _convert_directly(header: GGUFHeader, target: Path, dtype: torch.dtype, scratch: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

    from acclimate.inference.gguf_weights import place_tensors, write_safetensors

    config = _config(header, scratch)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    placements = place_tensors(header, model)
    total = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    _check_space(target, total)
    heads = {"query": config.num_attention_heads, "key": config.num_key_value_heads}
    with progress_bar(f"converting {header.path.name}", total) as advance:
        write_safetensors(header, placements, heads, dtype, target / "model.safetensors", advance)
    config.architectures, config.dtype = [type(model).__name__], dtype
    config.save_pretrained(target)
    generation = GenerationConfig.from_model_config(config)
    generation._from_model_config = False  # else transformers prefers the config's single end token
    if ends := _end_tokens(header):
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    generation.save_pretrained(target)
    # The generic class: it loads tokenizer.json as it stands, where the model's own class, with the
    # same result, would build the tokenizer again from its vocabulary at each start (3 s instead of 1 s).
    source = header.path
    PreTrainedTokenizerFast.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def _check_space(target: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(target).free < needed_bytes:
        raise full_disk_error(target.parent, needed_bytes)


def _end_tokens(header: GGUFHeader) -> list[int]:
    """The tokens that end a text; an instruction-tuned model has one more, that ends its turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [value for key in keys if isinstance(value := header.value(key), int)]
    return list(dict.fromkeys(found))


def _config(header: GGUFHeader, scratch: Path) -> Any:
    """What transformers itself makes of the header, without the vocabulary that it takes 14 s to parse."""
    from transformers import AutoConfig

    stub = scratch / "header.gguf"
    _write_header_alone(header, stub)
    try:
        return AutoConfig.from_pretrained(scratch, gguf_file=stub.name, local_files_only=True)
    except (KeyError, ValueError) as error:  # a version of transformers that wants the vocabulary there
        logger.debug("the header alone was not enough for a config: %s", error)
    try:
        return AutoConfig.from_pretrained(
            header.path.parent, gguf_file=header.path.name, local_files_only=True
        )
    except (KeyError, ValueError) as error:
        raise CorruptModelError(f"{header.path} lacks something its model needs: {error}") from error


def _write_header_alone(header: GGUFHeader, stub: Path) -> None:
    """Writes a GGUF file with the same keys and tensors but no vocabulary, whose data is a hole."""
    vocabulary = header.metadata.get("tokenizer.ggml.tokens")
    size_key = f"{header.architecture}.vocab_size"
    kept = [e for k, e in header.metadata.items() if e.array_length is None or not k.startswith("tokenizer.")]
    extra = b""
    if size_key not in header.metadata and vocabulary is not None and vocabulary.array_length is not None:
        name = size_key.encode()
        extra = struct.pack("<Q", len(name)) + name + struct.pack("<II", 4, vocabulary.array_length)
    with header.path.open("rb") as source, stub.open("wb") as file:
        count = len(kept) + bool(extra)
        file.write(MAGIC + struct.pack("<IQQ", header.version, len(header.tensors), count) + extra)
        for entry in kept:
            source.seek(entry.start)
            file.write(source.read(entry.end - entry.start))
        source.seek(header.tensors_start)
        file.write(source.read(header.tensors_end - header.tensors_start))
        file.truncate(file.tell() + os.fstat(source.fileno()).st_size - header.tensors_end + 4096)


def _convert_through_transformers(source: Path, target: Path, dtype: torch.dtype) -> None:
    """The general path: slow, but it knows every architecture that transformers reads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=dtype, **place)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **place)
    except ImportError as error:
        raise MissingExtraError(f"converting {source.name}: {error}") from error
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, ValueError) and "accelerate" in str(error):
            raise MissingExtraError(
                f"transformers needs one more package to read {source.name}: pip install accelerate"
            ) from error
        raise UnsupportedModelError(f"transformers cannot convert {source.name}: {error}") from error
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
