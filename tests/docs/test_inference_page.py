"""The program at the beginning of docs/inference.md runs, and pages show their pictures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import DOCS, blocks

from fresh_process import plain_environment

PROGRAM = next(block for block in blocks(DOCS / "inference.md") if block.file)


@pytest.mark.usefixtures("warm_starts")
def test_the_first_program_writes_text(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    words = {word: number for number, word in enumerate(("The", "capital", "of", "France", "is", "?"))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    (tmp_path / "write.py").write_text(PROGRAM.content)
    done = subprocess.run(
        [sys.executable, "write.py", "model"], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env={**plain_environment(), "DS_ACCELERATOR": "cpu"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is")


@pytest.mark.parametrize("page", ["autotp", "launch"])
def test_a_page_shows_its_picture_and_the_script_that_draws_it_is_here(page: str) -> None:
    assert f"]({page}.svg)" in (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert "<svg" in (DOCS / f"{page}.svg").read_text(encoding="utf-8")
    assert f'"{page}"' in (DOCS / "make_pictures.py").read_text(encoding="utf-8")
