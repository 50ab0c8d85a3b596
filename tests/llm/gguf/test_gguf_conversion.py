"""A converted GGUF is what transformers would have loaded from it, bit for bit and token for token."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from gguf_files import make_model, write_gguf
from safetensors.torch import load_file
from tiny_models import write_tiny_gguf

from acclimate.errors import CorruptModelError
from acclimate.llm.files.open_file import OpenFile
from acclimate.llm.gguf.convert import converted_gguf, identity
from acclimate.llm.gguf.header import read_gguf_header
from quick_parameters import quick

DIRECT = ("llama", "gemma2", "gemma3", "qwen2", "qwen3")
TEXTS = [
    "The capital of France is",
    "  two  spaces\n\nand lines\t",
    "é日本語 🤦🏽 <eos> <0x41>",
    "a" * 200,
    "x",
    "“quotes” — 12.5 €",
]


def file_identity(path: Path) -> str:
    with contextlib.closing(OpenFile(path)) as file:
        return identity(file)


def transformers_tensors(path: Path) -> dict[str, torch.Tensor]:
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    loaded: dict[str, torch.Tensor] = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    return loaded


@pytest.mark.parametrize("kind", quick(DIRECT, "gemma3"))
def test_weights_equal_those_transformers_loads_bit_for_bit(kind: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(kind, tmp_path / f"{kind}.gguf")
    theirs = transformers_tensors(path)
    for dtype in (torch.float32, torch.bfloat16):
        folder = converted_gguf(path, str(dtype).removeprefix("torch."))
        ours = load_file(folder / "model.safetensors")
        assert set(ours) == set(theirs)
        for name, expected in theirs.items():
            assert ours[name].dtype == dtype
            assert torch.equal(ours[name].view(torch.uint8), expected.to(dtype).view(torch.uint8)), name


@pytest.mark.parametrize("quantization", quick(("F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0"), "F16", "Q5_0"))
def test_every_common_packing_is_unpacked_as_transformers_does(quantization: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf", kind)
    ours = load_file(converted_gguf(path, "float32") / "model.safetensors")
    for name, expected in transformers_tensors(path).items():
        assert torch.equal(ours[name], expected.float()), name


@pytest.mark.parametrize("kind", quick(DIRECT, "gemma3"))
def test_config_equals_the_one_transformers_makes_of_the_whole_file(kind: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(kind, tmp_path / f"{kind}.gguf")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict()
    ours = transformers.AutoConfig.from_pretrained(converted_gguf(path, "float32")).to_dict()
    for added in ("architectures", "dtype", "_name_or_path"):
        ours.pop(added), theirs.pop(added)
    if kind in ("gemma2", "gemma3"):  # transformers takes 256 for heads of any size
        assert ours.pop("query_pre_attn_scalar") == ours["head_dim"] != theirs.pop("query_pre_attn_scalar")
    assert ours == theirs


# transformers drops add_space_prefix from other SentencePiece files; test_gguf_tokens.py has those.
@pytest.mark.parametrize("kind", quick(("gemma2", "gemma3", "qwen2", "qwen3"), "gemma3", "qwen2"))
def test_tokens_equal_those_of_transformers_tokenizer(kind: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(kind, tmp_path / f"{kind}.gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    folder = converted_gguf(path, "float32")
    from acclimate.llm.text.tokenizers import ConvertedTokenizer

    ours, reloaded = ConvertedTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        expected = theirs(text)["input_ids"]
        assert ours.encode(text) == expected, text
        assert reloaded(text)["input_ids"] == expected, text
        decoded = theirs.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(expected) == decoded


def test_the_second_request_finds_the_first_ones_folder_untouched(tiny_gguf: Path) -> None:
    first = converted_gguf(tiny_gguf, "bfloat16")
    before = (first / "model.safetensors").stat()
    assert converted_gguf(tiny_gguf, "bfloat16") == first
    assert (first / "model.safetensors").stat() == before


def test_each_dtype_has_a_folder_of_its_own_with_exact_values(tiny_gguf: Path) -> None:
    half, full = converted_gguf(tiny_gguf, "bfloat16"), converted_gguf(tiny_gguf, "float32")
    assert half != full
    exact = load_file(full / "model.safetensors")
    rounded = load_file(half / "model.safetensors")
    assert any(not torch.equal(exact[name], rounded[name].float()) for name in exact)


def test_replaced_content_is_another_identity_even_with_equal_size_and_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf("gemma3", path)
    before, status = file_identity(path), path.stat()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as `cp -p` or an unpacker does
    assert file_identity(path) != before


def test_a_large_file_is_told_apart_by_any_other_weights_and_by_its_time(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    path.write_bytes(bytes(40 << 20))
    os.utime(path, ns=(1, 1))
    before = file_identity(path)
    with path.open("r+b") as file:
        for block in range(0, 40 << 20, 64 << 10):  # other weights differ everywhere, not in one byte
            file.seek(block)
            file.write(b"\1" * (64 << 10))
    os.utime(path, ns=(1, 1))
    assert file_identity(path) != before
    path.write_bytes(bytes(40 << 20))
    assert file_identity(path) != before  # only its time differs


def test_a_moved_file_is_not_converted_again(tmp_path: Path) -> None:
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf")
    before = file_identity(path)
    (tmp_path / "elsewhere").mkdir()
    assert file_identity(path.rename(tmp_path / "elsewhere" / "model.gguf")) == before


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.2, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_refused_and_nothing_is_left(
    tiny_gguf: Path, tmp_path: Path, private_cache: Path, share: float
) -> None:
    content = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CorruptModelError, match=r"cut\.gguf"):
        converted_gguf(path, "float32")
    models = private_cache / "models"
    assert not [entry for entry in models.iterdir() if not entry.name.endswith(".lock")]


def test_a_damaged_header_never_ends_in_anything_but_our_error(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    header = read_gguf_header(tiny_gguf)
    source = random.Random(0)
    path = tmp_path / "damaged.gguf"
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(source.randint(1, 3)):
            damaged[source.randrange(header.data_start)] = source.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(CorruptModelError):
            _ = read_gguf_header(path).architecture


def test_a_missing_tensor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_models

    tensors = tiny_models._tensors
    monkeypatch.setattr(
        tiny_models,
        "_tensors",
        lambda kind, n: {k: v for k, v in tensors(kind, n).items() if k != "blk.1.ffn_up.weight"},
    )
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf")
    with pytest.raises(CorruptModelError, match=r"blk\.1\.ffn_up\.weight"):
        converted_gguf(path, "float32")


def test_texts_that_nobody_reads_may_have_any_encoding(tmp_path: Path) -> None:
    def describe(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        keys |= {"general.description": "Mod#~~#le", "general.tags": ["#~~#", "b"], "custom#~~#": "x"}
        keys["tokenizer.chat_template"] = "a#~~#"

    model = make_model("llama")
    plain = write_gguf("llama", model, tmp_path / "plain.gguf")
    path = write_gguf("llama", model, tmp_path / "latin-1.gguf", describe)
    path.write_bytes(path.read_bytes().replace(b"#~~#", "éèéè".encode("latin-1")))
    for name in ("tokenizer.json", "model.safetensors"):
        expected = (converted_gguf(plain, "float32") / name).read_bytes()
        assert (converted_gguf(path, "float32") / name).read_bytes() == expected


def test_a_text_that_is_read_must_be_utf_8(tmp_path: Path) -> None:
    path = write_gguf("llama", make_model("llama"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"gpt-2", b"gpt\xe92"))
    with pytest.raises(CorruptModelError, match=r"the text of its key tokenizer\.ggml\.pre is not UTF-8"):
        converted_gguf(path, "float32")
