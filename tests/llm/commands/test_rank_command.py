"""``--num_accelerators`` of ``generate`` and ``bench``: however they end, all ranks end, with one message."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from generate_command import command

from rank_processes import named_memory

pytestmark = pytest.mark.slow

Ending = Callable[["subprocess.Popen[bytes]", list[psutil.Process]], None]


def endless_model(folder: Path, tmp_path: Path) -> Path:
    """A copy of a model that goes on for a million tokens."""
    endless = tmp_path / "endless"
    shutil.copytree(folder, endless)
    config = json.loads((endless / "config.json").read_text())
    (endless / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1_000_000}))
    # Not among this model's first 20,000 tokens.
    (endless / "generation_config.json").write_text('{"eos_token_id": 318}')
    return endless


def start(folder: Path, tmp_path: Path) -> subprocess.Popen[bytes]:
    """Starts two ranks that generate without an end."""
    endless = endless_model(folder, tmp_path)
    options = ("--model", str(endless), "--max-new-tokens", "900000", "--num_accelerators", "2")
    return _start(command("hello", *options))


def start_bench(folder: Path, tmp_path: Path) -> subprocess.Popen[bytes]:
    """Starts two ranks that measure for hours."""
    options = ("--prompt-tokens", "8", "--new-tokens", "900000", "--num_accelerators", "2")
    bench = [sys.executable, "-m", "acclimate", "bench", *options]
    return _start([*bench, str(endless_model(folder, tmp_path))])


def _start(arguments: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "ACCLIMATE_COMM": "gloo"},  # shm would be compiled for each test
        start_new_session=True,
    )
    _started.append(process)
    return process


_started: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def no_program_runs_on() -> Iterator[None]:
    """Ends what a test has started, which would run for hours after a failed one."""
    yield
    while _started:
        with _started.pop() as process:
            process.terminate()


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "--as_rank" in " ".join(child.cmdline())]


def ctrl_c(process: subprocess.Popen[bytes], ranks: list[psutil.Process]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def terminate(process: subprocess.Popen[bytes], ranks: list[psutil.Process]) -> None:
    process.terminate()


def kill_one(process: subprocess.Popen[bytes], ranks: list[psutil.Process]) -> None:
    ranks[1].kill()


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [(ctrl_c, 130, "| interrupted]"), (terminate, 143, ""), (kill_one, 137, "was killed by SIGKILL")],
)
def test_all_ranks_end_while_they_generate(
    end: Ending, code: int, words: str, tiny_folder: Path, tmp_path: Path
) -> None:
    process = start(tiny_folder, tmp_path)
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    end(process, ranks)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == code, errors
    assert words in errors.decode()
    assert len(errors.decode().splitlines()) <= 1
    assert not any(rank.is_running() for rank in ranks)
    assert named_memory(rank.pid for rank in ranks) == []


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (ctrl_c, 130, "acclimate bench: interrupted"),
        (terminate, 143, ""),
        (kill_one, 137, "was killed by SIGKILL"),
    ],
)
@pytest.mark.parametrize("after_s", [0.5, 8.0], ids=["start", "measure"])
def test_all_ranks_end_while_they(
    after_s: float, end: Ending, code: int, words: str, tiny_folder: Path, tmp_path: Path
) -> None:
    process = start_bench(tiny_folder, tmp_path)
    deadline = time.monotonic() + 60
    while len(ranks_of(process)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(after_s)
    ranks = ranks_of(process)
    end(process, ranks)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == code, errors
    assert output == b""
    assert words in errors.decode()
    assert len(errors.decode().splitlines()) <= 1
    assert not any(rank.is_running() for rank in ranks)
    assert named_memory(rank.pid for rank in ranks) == []


def test_an_error_that_all_ranks_of_bench_have_is_reported_once(tiny_folder: Path) -> None:
    options = ("--prompt-tokens", "60", "--new-tokens", "30", "--num_accelerators", "2")
    bench = [sys.executable, "-m", "acclimate", "bench", *options, str(tiny_folder)]
    done = subprocess.run(bench, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("acclimate bench: error: the model's context of 64 tokens is too short for 60 ")


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.5, 2.0, 4.0])
def test_ctrl_c_while_the_ranks_start_gives_one_line(
    after_s: float, tiny_folder: Path, tmp_path: Path
) -> None:
    process = start(tiny_folder, tmp_path)
    assert process.stdout is not None
    deadline = time.monotonic() + 60
    while len(ranks_of(process)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    select.select([process.stdout], [], [], after_s)  # at various points of the start
    ctrl_c(process, [])
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    (line,) = filter(None, errors.decode().splitlines())
    assert "interrupted" in line


def test_two_ranks_generate_on_emulated_devices_what_one_does_on_the_host(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("acclimate_sim")

    def generated(*options: str) -> dict[str, Any]:
        given = (
            "--model",
            str(tiny_folder),
            "--max-new-tokens",
            "8",
            "--dtype",
            "float32",
            "--json",
            *options,
        )
        done = subprocess.run(command("hello", *given), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    expected = generated()
    monkeypatch.setenv("ACCLIMATE_ACCELERATOR", "sim")
    found = generated("--num_accelerators", "2")
    assert (found["accelerator"], found["ranks"]) == ("sim", 2)
    assert found["tokens"] == expected["tokens"]
