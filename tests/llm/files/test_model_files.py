"""Damaged model files, and conversions that are killed, crowded out or run twice at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from generate_command import PROMPT, Run, assert_one_line_error
from tiny_models import save_tiny_model, write_tiny_gguf
from warm_processes import WarmProcesses

import acclimate as acclimate_package
from acclimate.cache import cache_root, publish_once
from acclimate.errors import CacheWriteError, CorruptModelError, ModelNotFoundError
from acclimate.llm.files.converted import write_manifest
from acclimate.llm.files.folder import check_model_folder
from acclimate.llm.gguf.convert import BLOCKS, converted_gguf
from pairs import all_pairs


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_folder, copy)
    return copy


def published(cache: Path) -> list[str]:
    models = cache / "models"
    return sorted(entry.name for entry in models.iterdir() if not entry.name.startswith("."))


def leftovers(cache: Path) -> list[str]:
    return [entry.name for entry in (cache / "models").glob("*.partial")]


# -- safetensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_safetensors(folder: Path, keep: float) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CorruptModelError, match=r"model\.safetensors"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 400, b"\x10\0\0\0\0\0\0\0{not json at all", b"\2\0\0\0\0\0\0\0[]"]
)
def test_corrupt_safetensors(folder: Path, garbage: bytes) -> None:
    (folder / "model.safetensors").write_bytes(garbage)
    with pytest.raises(CorruptModelError, match=r"model\.safetensors"):
        check_model_folder(folder)


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path, shard_size="40KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    check_model_folder(folder)
    shards[1].unlink()
    with pytest.raises(CorruptModelError, match=shards[1].name):
        check_model_folder(folder)


def test_parts_of_a_model_are_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError, match="tokenizer"):
        check_model_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptModelError, match=r"config\.json"):
        check_model_folder(folder)


def test_damaged_files_are_one_line_and_exit_code_2(acclimate: Run, folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 10)
    assert_one_line_error(acclimate(PROMPT, "--model", str(folder)), "truncated", "model.safetensors")
    shutil.copy(folder / "tokenizer_config.json", weights)
    assert_one_line_error(acclimate(PROMPT, "--model", str(folder)), "model.safetensors")


def test_a_config_that_transformers_does_not_know(acclimate: Run, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "made-up"}))
    assert_one_line_error(acclimate(PROMPT, "--model", str(folder)), "made-up")


def test_a_truncated_gguf_is_one_line_and_exit_code_2(
    acclimate: Run, tiny_gguf: Path, tmp_path: Path, private_cache: Path
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf.read_bytes()[:-100])
    assert_one_line_error(acclimate(PROMPT, "--model", str(path)), "truncated", "cut.gguf")
    assert published(private_cache) == leftovers(private_cache) == []


# -- conversion --------------------------------------------------------------------------------------


def test_a_gguf_file_is_converted_once_and_then_only_loaded(
    acclimate: Run, warm: WarmProcesses, tiny_gguf: Path, private_cache: Path
) -> None:
    first = acclimate(PROMPT, "--model", str(tiny_gguf), "--max-new-tokens", "5")
    again = warm.run(PROMPT, "--model", str(tiny_gguf), "--max-new-tokens", "5")
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert first.stdout == again.stdout
    assert "converting" in first.stderr
    assert "converting" not in again.stderr
    assert len(published(private_cache)) == 1


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def overwrite(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    all_pairs(
        ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "acclimate.json"],
        [cut, empty, overwrite, Path.unlink],
        column_id=lambda damage: str(damage.__name__),
    ),
)
def test_a_damaged_converted_model_is_made_again(
    tiny_gguf: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = converted_gguf(tiny_gguf, "float32")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder / name)
    assert converted_gguf(tiny_gguf, "float32") == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    has_manifest = name != "acclimate.json" or damage is not Path.unlink
    assert ("converting it again" in caplog.text) == has_manifest


def test_a_converted_model_that_seems_whole_but_does_not_load_is_made_again_once(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = acclimate_package.generate(PROMPT, model=tiny_gguf, max_new_tokens=3)
    (folder,) = (cache_root() / "models").glob(f"{tiny_gguf.stem}-*-{BLOCKS}")
    (folder / "config.json").write_text("{}")
    facts = {"source": "x", "dtype": BLOCKS, "converter": 0}
    (folder / "acclimate.json").unlink()
    write_manifest(folder, facts)  # as if nobody could tell
    assert acclimate_package.generate(PROMPT, model=tiny_gguf, max_new_tokens=3).tokens == first.tokens
    assert caplog.text.count("was damaged and is made again") == 1
    monkeypatch.setattr("acclimate.llm.text.tokenizers.ConvertedTokenizer.__init__", lambda *_: 1 / 0)
    with pytest.raises(CorruptModelError, match="tokenizer"):  # and not for ever
        acclimate_package.generate(PROMPT, model=tiny_gguf, max_new_tokens=3)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({}, "the scale of a block is infinite or NaN"),
        ({"dtype": "float32"}, r"it contains values .* \(NaN\)"),
    ],
)
def test_a_broken_block_is_told_once_with_the_users_file(
    options: dict[str, Any], fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny_gguf("llama", tmp_path / "tiny.gguf")
    tensor = next(t for t in gguf.GGUFReader(path).tensors if "ffn_down" in t.name)
    content = bytearray(path.read_bytes())
    content[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7e"  # NaN as the scale of the first block
    path.write_bytes(content)
    with pytest.raises(CorruptModelError, match=fault) as raised:
        acclimate_package.generate(PROMPT, model=path, max_new_tokens=3, **options)
    assert str(path) in str(raised.value)
    assert "damaged" not in caplog.text


# Converts the file named on the command line, but stays for ever in the middle of writing the weights.
STUCK = """
import sys, time
from pathlib import Path
from acclimate.llm.gguf import convert, tensors
def stop(tensor, region):
    print("writing", flush=True); time.sleep(600)
tensors.read = stop
convert.converted_gguf(Path(sys.argv[1]), "bfloat16")
"""


def test_a_killed_conversion_leaves_nothing_under_the_final_name_and_the_next_works(
    acclimate: Run, warm: WarmProcesses, tiny_gguf: Path, private_cache: Path
) -> None:
    process = warm.start(str(tiny_gguf), code=STUCK)
    assert process.stdout.readline() == b"writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    assert published(private_cache) == []
    assert leftovers(private_cache) != []
    done = acclimate(PROMPT, "--model", str(tiny_gguf), "--max-new-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert len(published(private_cache)) == 1
    assert leftovers(private_cache) == []


def test_of_several_processes_one_converts_and_all_use_the_result(
    warm: WarmProcesses, tiny_gguf: Path, private_cache: Path
) -> None:
    arguments = (PROMPT, "--model", str(tiny_gguf), "--max-new-tokens", "5")
    running = [warm.start(*arguments) for _ in range(3)]
    results = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], results
    assert len({stdout for stdout, _ in results}) == 1
    assert sum(b"converting" in stderr for _, stderr in results) == 1
    assert len(published(private_cache)) == 1


def test_who_waits_for_a_builder_that_is_killed_builds_itself(
    warm: WarmProcesses, tiny_gguf: Path, private_cache: Path
) -> None:
    stuck = warm.start(str(tiny_gguf), code=STUCK)
    stuck.stdout.readline()
    waiting = warm.start(PROMPT, "--model", str(tiny_gguf), "--max-new-tokens", "3")
    for line in waiting.stderr:
        if b"waiting for another process" in line:
            break
    stuck.kill()
    stuck.communicate()
    waiting.communicate()
    assert waiting.returncode == 0
    assert len(published(private_cache)) == 1


# The kernel refuses the write that passes the limit, as a full disk would.
SMALL_FILES = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
from acclimate.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_write_that_the_system_refuses_is_one_line_and_leaves_nothing(
    warm: WarmProcesses, tiny_gguf: Path, private_cache: Path
) -> None:
    done = warm.run("generate", PROMPT, "--model", str(tiny_gguf), "--dtype", "bfloat16", code=SMALL_FILES)
    assert_one_line_error(done, "no space left", str(private_cache), "ACCLIMATE_CACHE")
    assert published(private_cache) == leftovers(private_cache) == []


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    acclimate: Run, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreseen: bool
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        monkeypatch.setenv("ACCLIMATE_CACHE", str(disk / "cache"))
        if not foreseen:  # someone else fills the disk after we have asked how much is free
            monkeypatch.setattr("acclimate.llm.gguf.convert._check_space", lambda *_: None)
        done = acclimate(PROMPT, "--model", str(tiny_gguf), "--dtype", "bfloat16")
        assert_one_line_error(done, "no space left", str(disk))
        assert ("are needed" in done.stderr) == foreseen
        assert published(disk / "cache") == leftovers(disk / "cache") == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_cache_that_cannot_be_written_says_what_to_set(
    acclimate: Run, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ACCLIMATE_CACHE", str(tmp_path / "file"))
    assert_one_line_error(acclimate(PROMPT, "--model", str(tiny_gguf)), "ACCLIMATE_CACHE")


# -- the cache ---------------------------------------------------------------------------------------


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCLIMATE_CACHE", "/a")
    assert cache_root() == Path("/a")
    monkeypatch.delenv("ACCLIMATE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_root() == Path("/b/acclimate")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_root() == Path("/c/.cache/acclimate")


def test_a_build_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    target = tmp_path / "results" / "one"

    def fail(private: Path) -> None:
        (private / "half").write_text("x")
        raise CacheWriteError("broken off")

    with pytest.raises(CacheWriteError, match="broken off"):
        publish_once(target, fail)
    assert not target.exists()
    assert not list(target.parent.glob("*.partial"))
    publish_once(target, lambda private: (private / "whole").touch())
    assert (target / "whole").exists()


def test_leftovers_of_dead_builders_go_but_a_living_ones_work_stays(tmp_path: Path) -> None:
    parent = tmp_path / "results"
    parent.mkdir()
    (parent / ".other.1234abcd.partial").mkdir()
    ready = tmp_path / "ready"
    code = (
        "import sys, time; from pathlib import Path; from acclimate.cache import publish_once\n"
        f"publish_once(Path({str(parent / 'slow')!r}), "
        f"lambda private: (Path({str(ready)!r}).touch(), time.sleep(600)))"
    )
    builder = subprocess.Popen([sys.executable, "-c", code])
    while not ready.exists():
        time.sleep(0.02)
    publish_once(parent / "mine", lambda private: (private / "x").touch())
    assert len(list(parent.glob(".slow.*.partial"))) == 1
    assert not (parent / ".other.1234abcd.partial").exists()
    builder.kill()
    builder.wait()
    publish_once(parent / "yours", lambda private: (private / "x").touch())
    assert not list(parent.glob("*.partial"))
