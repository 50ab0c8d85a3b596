"""Tiny models with random weights, made here: nothing is downloaded and no extra is needed."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `llm` is not installed")
# Not "gguf" alone, which would also find the folder of that name beside this file.
pytest.importorskip("gguf.constants", reason="the extra `llm` is not installed")

from generate_command import Run
from tiny_models import save_tiny_model, write_tiny_gguf
from warm_processes import WarmProcesses

from acclimate.cli import main
from rank_processes import RankProcesses
from shared_kernels import share_kernels
from warm_python import WarmPython


@pytest.fixture(scope="session")
def proved_descriptions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The descriptions of decoders that tests of this run have proved, in whichever process."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "proved"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def new_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of folders. pytest reads all of its folders' names for a new one: 2 ms after 1500 tests."""
    parent = tmp_path_factory.mktemp("caches")
    return (parent / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def private_cache(
    proved_descriptions: Path, new_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A cache folder of the test's own, for this process and those it starts.

    Only descriptions of decoders are from other tests: to prove one takes a second, and most tests load the
    same tiny model.
    """
    folder = next(new_folders)
    folder.mkdir()
    share_kernels(folder)
    (folder / "decoders").symlink_to(proved_descriptions)
    monkeypatch.setenv("ACCLIMATE_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setenv("ACCLIMATE_ACCELERATOR", "cpu")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return folder


@pytest.fixture
def own_descriptions(private_cache: Path) -> None:
    """The test's cache has no descriptions that other tests proved."""
    (private_cache / "decoders").unlink()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in transformers' own layout. Not to be changed: copy it first."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 as a GGUF file with a SentencePiece vocabulary."""
    return write_tiny_gguf("gemma3", tmp_path_factory.mktemp("gguf") / "tiny-gemma3.gguf")


@pytest.fixture
def acclimate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``acclimate generate …`` in this process: the imports that cost seconds are made once."""

    def run(*arguments: str, input: bytes | None = None) -> subprocess.CompletedProcess[str]:
        if input is not None:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(input)))
        capsys.readouterr()
        code = main(["generate", *arguments])
        output = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, output.out, output.err)

    return run


@pytest.fixture(scope="session")
def warm(warm_models: WarmPython) -> Iterator[WarmProcesses]:
    """Starts processes of ``acclimate generate`` in which the imports are made already."""
    with warm_models.in_place():
        processes = WarmProcesses()
    yield processes
    processes.close()


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose much when the machine is busy."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """Two ranks with a cache of their own."""
    cache = tmp_path_factory.mktemp("cache")
    share_kernels(cache)
    environment = {"ACCLIMATE_ACCELERATOR": "cpu", "ACCLIMATE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    with RankProcesses(2, backend="gloo", environment=environment, models=True) as ranks:
        yield ranks
