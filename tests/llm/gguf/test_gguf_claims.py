"""A GGUF header that claims more than its file holds is refused in a time and memory that fit the file."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import make_model, write_gguf

from acclimate.errors import AcclimateError, CorruptModelError
from acclimate.llm.gguf.convert import converted_gguf
from acclimate.llm.gguf.header import read_gguf_header
from quick_parameters import few_of


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(element: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", element, count) + content


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


ARCHITECTURE = key("general.architecture", 8, text("llama"))


def raw(*entries: bytes, tensors: tuple[bytes, ...] = (), counts: tuple[int, int] | None = None) -> bytes:
    counted = (len(tensors), len(entries)) if counts is None else counts
    return b"GGUF" + struct.pack("<IQQ", 3, *counted) + b"".join(entries) + b"".join(tensors) + bytes(4096)


CLAIMS: dict[str, bytes | Callable[[], bytes]] = {
    "3 million tensors": raw(ARCHITECTURE, counts=(3_000_000, 1)),
    "2^63 tensors": raw(ARCHITECTURE, counts=(1 << 63, 1)),
    "2^64 - 1 keys": raw(ARCHITECTURE, counts=(0, (1 << 64) - 1)),
    "300,000 keys that are there": lambda: raw(*(key(f"k{i}", 0, b"\0") for i in range(300_000))),
    "a text of 2^62 bytes": raw(key("general.name", 8, struct.pack("<Q", 1 << 62))),
    "a key of 2^64 - 1 bytes": raw(struct.pack("<Q", (1 << 64) - 1)),
    "an array of 2^60 bytes": raw(key("a", 9, array(0, 1 << 60))),
    "an array of 2^64 - 1 doubles": raw(key("a", 9, array(12, (1 << 64) - 1))),
    "an array of 2^60 texts": raw(key("a", 9, array(8, 1 << 60))),
    "a text in an array of 2^63 bytes": raw(key("a", 9, array(8, 2, struct.pack("<Q", 1 << 63)))),
    "arrays of arrays": raw(key("a", 9, array(9, 1 << 40, array(9, 1 << 40, array(9, 1 << 40))))),
    "arrays of arrays of arrays that are there": raw(
        key("a", 9, array(9, 1, array(9, 1, array(0, 1, b"1"))))
    ),
    "an unknown type": raw(key("a", 77, b"")),
    "the same key twice": raw(ARCHITECTURE, ARCHITECTURE),
    "the same tensor twice": raw(ARCHITECTURE, tensors=(tensor("a", (1,)), tensor("a", (1,)))),
    "no dimensions": raw(ARCHITECTURE, tensors=(tensor("a", ()),)),
    "2^32 - 1 dimensions": raw(ARCHITECTURE, tensors=(text("a") + struct.pack("<I", (1 << 32) - 1),)),
    "a tensor of nothing": raw(ARCHITECTURE, tensors=(tensor("a", (0, 32)),)),
    "a tensor of 2^252 values": raw(ARCHITECTURE, tensors=(tensor("a", (1 << 63,) * 4),)),
    "an odd offset": raw(ARCHITECTURE, tensors=(tensor("a", (1,), offset=7),)),
    "an offset of 2^63": raw(ARCHITECTURE, tensors=(tensor("a", (1,), offset=1 << 63),)),
    "overlapping tensors": raw(ARCHITECTURE, tensors=(tensor("a", (64,)), tensor("b", (64,), offset=32))),
    "an alignment of 0": raw(ARCHITECTURE, key("general.alignment", 4, struct.pack("<I", 0))),
    "an alignment of 2^32 - 1": raw(ARCHITECTURE, key("general.alignment", 4, b"\xff" * 4)),
    "a name that is no text": raw(key("general.name", 8, text(b"\xff\xfe"))),
    "version 1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(100),
    "nothing": b"",
    "a web page": b"<!DOCTYPE html>",
}


def assert_cheaply_refused(path: Path, error: type[AcclimateError] = AcclimateError) -> str:
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(error) as caught:
            converted_gguf(path, "float32")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 10
    assert peak < 100e6
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("claim", few_of(CLAIMS, 2))
def test_a_claim_beyond_the_file_is_refused_cheaply(claim: str, tmp_path: Path) -> None:
    path = tmp_path / "claim.gguf"
    content = CLAIMS[claim]
    path.write_bytes(content() if callable(content) else content)
    assert_cheaply_refused(path)


def setting(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda keys, _tensors: keys.__setitem__(name, value)


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("llama", setting("llama.block_count", 100_000), "100,000 blocks"),
        ("llama", setting("llama.block_count", 4_000_000_000), "block_count"),
        ("llama", setting("llama.embedding_length", 1 << 31), "token_embd.weight"),
        ("llama", setting("llama.feed_forward_length", 1 << 31), "larger than"),
        ("llama", setting("llama.attention.key_length", 1 << 30), "heads of 1073741824"),
        ("gpt2", setting("gpt2.context_length", 1 << 31), "larger than"),
        ("mixtral", setting("llama.expert_count", 1 << 31), "experts"),
        ("mixtral", setting("llama.expert_used_count", 1 << 31), "experts"),
        ("stablelm2", setting("stablelm.attention.head_count", 1 << 31), "heads"),
        ("llama", setting("tokenizer.ggml.tokens", ["a" * 1_000_000, "b"]), "1,000,000 bytes"),
        ("llama", setting("tokenizer.ggml.tokens", [f"t{i}" for i in range(1000)]), "1,000 tokens"),
    ],
)
def test_a_config_beyond_the_file_is_refused_cheaply(
    name: str, change: Callable[[dict[str, Any], dict[str, Any]], None], word: str, tmp_path: Path
) -> None:
    def both(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        change(keys, tensors)
        if len(keys["tokenizer.ggml.tokens"]) != len(keys["tokenizer.ggml.token_type"]):
            del keys["tokenizer.ggml.token_type"]

    path = write_gguf(name, make_model(name), tmp_path / "claim.gguf", both)
    assert word in assert_cheaply_refused(path)


def test_a_block_that_is_not_promised_is_refused(tmp_path: Path) -> None:
    def add(_keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["blk.2.attn_norm.weight"] = np.ones(32, np.float32)

    path = write_gguf("llama", make_model("llama"), tmp_path / "claim.gguf", add)
    assert "3" in assert_cheaply_refused(path, CorruptModelError)


def test_a_header_of_a_large_vocabulary_is_read_in_little_memory(tmp_path: Path) -> None:
    words = b"".join(text(f"word{i}") for i in range(50_000))
    path = tmp_path / "large.gguf"
    path.write_bytes(raw(ARCHITECTURE, key("tokenizer.ggml.tokens", 9, array(8, 50_000, words))))
    tracemalloc.start()
    header = read_gguf_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert header.metadata["tokenizer.ggml.tokens"].array_length == 50_000
    assert peak < 1e6
