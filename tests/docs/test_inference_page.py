"""The programs at the beginning of docs/inference.md run, and pages show their pictures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import DOCS, blocks

from fresh_process import plain_environment
from served_model import told_address

PROGRAMS = {block.file: block.content for block in blocks(DOCS / "inference.md") if block.file}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder beside which programs run."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("programs") / "model"
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    made = transformers.LlamaForCausalLM(config)
    made.generation_config.min_new_tokens = 4  # a model of random weights may otherwise end at once
    made.save_pretrained(folder)
    words = {
        word: number for number, word in enumerate(("The", "capital", "of", "France", "is", "?", "</s>"))
    }
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(dict(zip(words, range(7), strict=True)), unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    made.chat_template = "{% for m in messages %}{{ m['content'] + ' ? ' }}{% endfor %}"
    made.save_pretrained(folder)
    return folder


def run(name: str, model: Path, *arguments: str) -> str:
    """Runs a program of the page beside the model; returns what it prints."""
    (model.parent / name).write_text(PROGRAMS[name])
    done = subprocess.run(
        [sys.executable, name, *arguments], cwd=model.parent, capture_output=True, text=True, timeout=600,
        env={**plain_environment(), "DS_ACCELERATOR": "cpu"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("warm_model_starts")
def test_the_first_program_writes_text(model: Path) -> None:
    assert run("write.py", model, "model").startswith("The capital of France is")


@pytest.mark.slow
def test_the_program_with_a_pipeline_writes_text(model: Path) -> None:
    assert run("pipe.py", model, "model").startswith("The capital of France is")


@pytest.mark.usefixtures("warm_model_starts")
def test_the_program_of_a_conversation_shows_two_answers(model: Path) -> None:
    assert len(run("talk.py", model, "model").splitlines()) == 2


def test_the_program_of_the_evaluation_harness_shows_a_score(model: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    told = run("evaluate.py", model, "model")
    assert "'acc,none': 0.5" in told.splitlines()[-1]  # both questions have the same likelier answer


@pytest.mark.slow
def test_the_client_of_the_server_shows_an_answer(model: Path) -> None:
    pytest.importorskip("openai", reason="the extra `serve` is not installed")
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    command = [sys.executable, "-m", "acclimate", "serve", str(model), "--port", "0"]
    environment = {**plain_environment(), "DS_ACCELERATOR": "cpu"}
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, env=environment) as server,
        told_address(server) as address,
    ):
        assert run("ask.py", model, address)


@pytest.mark.parametrize("page", ["autotp", "launch"])
def test_a_page_shows_its_picture_and_the_script_that_draws_it_is_here(page: str) -> None:
    assert f"]({page}.svg)" in (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert "<svg" in (DOCS / f"{page}.svg").read_text(encoding="utf-8")
    assert f'"{page}"' in (DOCS / "make_pictures.py").read_text(encoding="utf-8")
