"""The promises of `acclimate.generate` to a program that calls it."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import CONTEXT, save_tiny_model

import acclimate
from acclimate.errors import (
    CorruptModelError,
    DeviceMemoryError,
    GenerationOptionError,
    PromptError,
)
from acclimate.llm import GenerationInterrupted, load_model
from acclimate.llm.loading.loaded_model import choose_dtype
from acclimate.llm.text.tokenizers import TextStream
from quick_parameters import quick

PROMPT = "The capital of France"
KINDS = ("llama", "gemma3", "gpt2")


def reference(folder: Path, prompt: str, new_tokens: int, dtype: torch.dtype, **options: Any) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=new_tokens, **options)
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("kind", quick(KINDS, "gemma3"))
def test_greedy_tokens_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = save_tiny_model(kind, tmp_path)
    result = acclimate.generate(PROMPT, model=folder, max_new_tokens=30, dtype="float32")
    assert list(result.tokens) == reference(folder, PROMPT, 30, torch.float32, do_sample=False)


@pytest.mark.parametrize("kind", quick(KINDS, "gpt2"))
def test_each_greedy_token_in_bfloat16_is_the_best_of_transformers_or_within_its_rounding(
    kind: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(kind, tmp_path)
    tokens = list(acclimate.generate(PROMPT, model=folder, max_new_tokens=30, dtype="bfloat16").tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    prompt = transformers.AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")["input_ids"]
    text = torch.cat([prompt, torch.tensor([tokens])], dim=1)
    with torch.no_grad():
        logits = model(text).logits[0, prompt.shape[1] - 1 : -1].float()
    best = logits.max(dim=1).values
    chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    # Sums in another order move a logit by a step or two, as do transformers' own two attention functions.
    assert len(tokens) == 30
    assert (best - chosen <= 2 * best.abs() * torch.finfo(torch.bfloat16).eps).all()
    assert (best == chosen).sum() >= 27


@pytest.mark.slow
def test_penalties_a_model_asks_for_are_applied_as_transformers_does(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text('{"repetition_penalty": 2.5, "eos_token_id": 1}')
    result = acclimate.generate(PROMPT, model=folder, max_new_tokens=20, dtype="float32")
    assert list(result.tokens) == reference(folder, PROMPT, 20, torch.float32, do_sample=False)
    assert result.tokens != acclimate.generate(PROMPT, model=tiny_folder, max_new_tokens=20).tokens


@pytest.mark.parametrize("layers", [pytest.param(count, marks=pytest.mark.slow) for count in (0, 1, 10**9)])
def test_a_model_that_asks_to_guess_with_its_first_layers_writes_the_same_text_and_ends(
    layers: int, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(f'{{"assistant_early_exit": {layers}}}')
    result = acclimate.generate(PROMPT, model=folder, max_new_tokens=5, dtype="float32")
    assert (
        result.tokens
        == acclimate.generate(PROMPT, model=tiny_folder, max_new_tokens=5, dtype="float32").tokens
    )


def test_a_repetition_penalty_of_the_call_is_applied_as_transformers_does(tiny_folder: Path) -> None:
    options = {"model": tiny_folder, "max_new_tokens": 20, "dtype": "float32"}
    result = acclimate.generate(PROMPT, repetition_penalty=2.5, **options)  # type: ignore[arg-type]
    expected = reference(tiny_folder, PROMPT, 20, torch.float32, do_sample=False, repetition_penalty=2.5)
    assert list(result.tokens) == expected


def test_a_seed_repeats_a_drawn_text_and_another_seed_gives_another(tiny_folder: Path) -> None:
    loaded = load_model(tiny_folder, dtype="float32")

    def tokens(seed: int) -> tuple[int, ...]:
        return acclimate.generate(PROMPT, model=loaded, max_new_tokens=20, temperature=1.0, seed=seed).tokens

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_the_pieces_are_the_text_and_arrive_while_it_is_written(tiny_folder: Path) -> None:
    arrivals: list[tuple[float, str]] = []
    result = acclimate.generate(
        PROMPT,
        model=tiny_folder,
        max_new_tokens=40,
        on_text=lambda piece: arrivals.append((time.perf_counter(), piece)),
    )
    assert "".join(piece for _, piece in arrivals) == result.text
    assert len(arrivals) > 5


def test_the_figures_are_of_this_run(tiny_folder: Path) -> None:
    result = acclimate.generate(PROMPT, model=tiny_folder, max_new_tokens=10, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert result.accelerator == "cpu"
    assert result.dtype == "float32"
    assert result.parameters == model.num_parameters()
    assert result.prompt_tokens == len(
        transformers.AutoTokenizer.from_pretrained(tiny_folder)(PROMPT)["input_ids"]
    )
    assert result.generated_tokens == len(result.tokens) == 10
    assert result.load_seconds > 0
    assert result.time_to_first_token_seconds > 0  # type: ignore[operator]
    assert result.tokens_per_second > 0  # type: ignore[operator]
    assert result.peak_memory_bytes > 1_000_000
    assert result.finish_reason == "length"
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.text = ""  # type: ignore[misc]


def test_the_models_end_token_stops_the_text_and_is_not_part_of_it(tiny_folder: Path, tmp_path: Path) -> None:
    free = acclimate.generate(PROMPT, model=tiny_folder, max_new_tokens=20, dtype="float32").tokens
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {free[4]}}}')
    result = acclimate.generate(PROMPT, model=folder, max_new_tokens=20, dtype="float32")
    assert result.tokens == free[: free.index(free[4]) + 1]
    assert result.finish_reason == "end"


def test_auto_takes_bfloat16_then_float16_then_float32() -> None:
    class Device:
        name = "made-up"

        def __init__(self, *dtypes: torch.dtype) -> None:
            self._dtypes = list(dtypes)

        def supported_dtypes(self) -> list[torch.dtype]:
            return self._dtypes

    def auto(*dtypes: torch.dtype) -> torch.dtype:
        return choose_dtype(Device(*dtypes), "auto")  # type: ignore[arg-type]

    assert auto(torch.float32, torch.float16, torch.bfloat16) is torch.bfloat16
    assert auto(torch.float32, torch.float16) is torch.float16
    assert auto(torch.float32) is torch.float32
    with pytest.raises(GenerationOptionError, match=r"float16.*float32"):
        choose_dtype(Device(torch.float32), "float16")  # type: ignore[arg-type]


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(tiny_folder: Path) -> None:
    prompt = "x y " * CONTEXT
    count = len(transformers.AutoTokenizer.from_pretrained(tiny_folder)(prompt)["input_ids"])
    with pytest.raises(PromptError, match=rf"{count} tokens.*{CONTEXT}"):
        acclimate.generate(prompt, model=tiny_folder)


def test_a_text_that_outgrows_the_context_stops_there_and_says_so(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = acclimate.generate(PROMPT, model=tiny_folder, max_new_tokens=1000)
    assert result.prompt_tokens + result.generated_tokens == CONTEXT
    assert result.finish_reason == "context"
    assert f"context of {CONTEXT}" in caplog.text


@pytest.mark.parametrize("prompt", ["", "  \n\t"])
def test_an_empty_prompt_is_refused_before_anything_is_loaded(prompt: str) -> None:
    with pytest.raises(PromptError, match="empty"):
        acclimate.generate(prompt, model="/nowhere")


@pytest.mark.parametrize(
    "options",
    [{"max_new_tokens": 0}, {"max_new_tokens": -3}, {"temperature": -0.1}, {"temperature": float("nan")}],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(GenerationOptionError, match=next(iter(options))):
        acclimate.generate(PROMPT, model="/nowhere", **options)


def test_weights_missing_from_a_readable_file_are_an_error_not_random_numbers(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptModelError, match="up_proj"):
        acclimate.generate(PROMPT, model=folder)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    import tiny_models

    folder = save_tiny_model("llama", tmp_path)
    transformers.AutoModelForCausalLM.from_config(tiny_models.config("llama", 20)).save_pretrained(folder)
    with pytest.raises(CorruptModelError, match="does not belong"):
        acclimate.generate(PROMPT, model=folder)


def test_memory_that_runs_out_is_named_as_such(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(tiny_folder)

    def exhaust(*_arguments: object, **_options: object) -> None:
        torch.empty(1 << 60)  # torch's host allocator answers for real

    monkeypatch.setattr(loaded.module, "generate", exhaust)
    with pytest.raises(DeviceMemoryError, match="does not fit into the memory of cpu"):
        acclimate.generate(PROMPT, model=loaded)


def test_an_interrupted_call_hands_over_what_there_is(tiny_folder: Path) -> None:
    pieces: list[str] = []

    def stop_after_three(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    with pytest.raises(GenerationInterrupted) as caught:
        acclimate.generate(PROMPT, model=tiny_folder, max_new_tokens=40, on_text=stop_after_three)
    assert caught.value.partial.finish_reason == "interrupted"
    assert caught.value.partial.text.startswith("".join(pieces))


# -- text from tokens ----------------------------------------------------------------------------


class ByteTokens:
    """A tokenizer whose tokens are bytes."""

    end_token = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Any) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def streamed(tokenizer: Any, prompt: list[int], tokens: list[int]) -> list[str]:
    pieces: list[str] = []
    stream = TextStream(tokenizer, prompt, pieces.append)
    for token in tokens:
        stream.put(token)
    stream.end()
    return pieces


def test_characters_split_over_tokens_arrive_whole() -> None:
    text = "é日本語🤦🏽 x"
    assert streamed(ByteTokens(), [], list(text.encode())) == list(text)


def test_half_a_character_at_the_end_is_dropped() -> None:
    assert streamed(ByteTokens(), [], list("ab🤦".encode())[:-1]) == ["a", "b"]


def test_bytes_that_never_become_a_character_do_not_hold_up_the_rest() -> None:
    pieces = streamed(ByteTokens(), [], [0xFF] * 8 + list(b"abc"))
    assert "".join(pieces).endswith("abc")


def test_the_first_piece_keeps_its_space_with_sentencepiece(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "▁The": 1, "▁capital": 2, "▁is": 3}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    assert backend.decode([3]) == "is"  # what a naive stream would show
    assert streamed(backend, [1, 2], [3]) == [" is"]


def test_importing_the_package_imports_nothing_heavy() -> None:
    import subprocess

    code = (
        "import acclimate, acclimate.llm, sys; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_an_empty_list_of_end_tokens_is_no_end_token(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": []}')
    model = acclimate.init_inference(folder, dtype="float32")
    text = model.generate(torch.arange(3, 9)[None], do_sample=False, max_new_tokens=4)
    assert text.shape == (1, 10)
