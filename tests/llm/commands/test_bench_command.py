"""``acclimate bench`` says how fast a model runs and which kernels run it, and refuses bad options."""

from __future__ import annotations

import json
import subprocess
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acclimate import get_accelerator

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``acclimate bench`` in this process."""
    from acclimate.cli import main

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = main(["bench", *arguments])
        out = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, out.out, out.err)

    return run


def test_bench_measures_a_quantised_model_and_writes_its_figures(
    bench: Run, tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    options = ("--quantize", "int8", "--prompt-tokens", "8", "--new-tokens", "4", "--json", str(file))
    done = bench(str(tiny_folder), *options, "--sequences", "4")
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert set(report["kernels"]) == {"int8", "norms and biases"}
    assert report["kernels"]["int8"] == 15  # 7 in each of 2 layers, and the head
    assert [speed["batch"] for speed in report["speeds"]] == [1, 4]
    assert all(speed["decode_tokens_per_second"] > 0 for speed in report["speeds"])
    assert report["bytes_per_token"] == sum(report["bytes_by_kernel"].values()) > 0
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "; the model reached" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--quantize", "int3"), "quantize must be int8 or int4, or left out; it is 'int3'"),
        (("--kv-cache-dtype", "q8_0"), "kv_cache_dtype must be auto or int8; it is 'q8_0'"),
        (("--num_accelerators", "0"), "--num_accelerators must be from 1 to 1024; it is 0"),
        (("--new-tokens", "many"), "--new_tokens must be a whole number; it is 'many'"),
        (("--json", "/nowhere/figures.json"), "--json cannot write to '/nowhere/figures.json'"),
        (
            ("--prompt-tokens", "60", "--new-tokens", "30"),
            "the model's context of 64 tokens is too short for 60 prompt tokens and 30 new tokens",
        ),
    ],
)
def test_a_bad_option_of_bench_is_one_line(
    bench: Run, tiny_folder: Path, options: tuple[str, ...], told: str
) -> None:
    done = bench(str(tiny_folder), *options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert told in done.stderr


class SlowToStart:
    """A model that reads its prompt for 0.2 s, and then needs 5 ms for a token."""

    def __init__(self) -> None:
        self.generation_config = types.SimpleNamespace(eos_token_id=1, pad_token_id=None)

    def generate(self, ids: Any, *, max_new_tokens: int, streamer: Any, **_: Any) -> None:
        streamer.put(ids)
        time.sleep(0.2)
        for _token in range(max_new_tokens):
            time.sleep(0.005)
            streamer.put(ids[:, 0])
        streamer.end()


def test_the_decoding_speed_has_nothing_of_the_time_for_the_prompt() -> None:
    from acclimate.llm.commands.benchmark import measure_speed

    loaded = types.SimpleNamespace(module=SlowToStart(), tokens=10, accelerator=get_accelerator())
    speed = measure_speed(loaded, batch=2, prompt_tokens=8, new_tokens=4)  # type: ignore[arg-type]
    assert speed.first_token_seconds >= 0.2
    assert 0 < speed.decode_tokens_per_second <= 2 / 0.005
    # With the prompt's time: at most 8 / 0.225 s, also on a busy machine 36 tokens/s.
    assert speed.decode_tokens_per_second > 36
