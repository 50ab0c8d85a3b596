"""The example's checkpoints are complete or absent, even if the writer is killed or the disk is full."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from example_modules import example_module
from training import EXAMPLES

checkpoint = example_module("checkpoint")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    checkpoints = checkpoint.Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpoints.save(step, {"step": step, "model": torch.full((1000,), float(step))})
    folder: Path = checkpoints.folder
    return folder


def load(folder: Path) -> tuple[int | None, list[str]]:
    said: list[str] = []
    found = checkpoint.Checkpoints(folder).load_newest(said.append)
    return (found[1]["step"] if found is not None else None), said


def test_the_newest_is_loaded(kept: Path) -> None:
    assert load(kept) == (2, [])


def test_there_may_be_none(tmp_path: Path) -> None:
    assert load(tmp_path / "nothing") == (None, [])


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def turn_one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((8,), 2.0).numpy().tobytes())] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut_short, turn_one_bit, empty])
def test_a_damaged_one_is_named_and_the_one_before_it_is_taken(
    kept: Path, damage: Callable[[Path], None]
) -> None:
    damage(kept / "step_00000002.pt")
    step, said = load(kept)
    assert step == 1
    assert len(said) == 1
    assert "step_00000002.pt is damaged" in said[0]


def test_if_all_are_damaged_nothing_begins_anew_in_their_place(kept: Path) -> None:
    for path in kept.iterdir():
        cut_short(path)
    with pytest.raises(checkpoint.CheckpointError, match="None of the 2 checkpoints in"):
        load(kept)


@pytest.mark.usefixtures("warm_starts")
def test_a_writer_killed_in_mid_write_leaves_the_others_and_its_rest_is_swept_up(kept: Path) -> None:
    code = f"""
import sys, torch
sys.path.insert(0, {str(EXAMPLES)!r})
from checkpoint import Checkpoints
from pathlib import Path
state = {{"step": 3, "model": torch.zeros(100_000_000)}}
Checkpoints(Path({str(kept)!r})).save(3, state)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as writer:
        while not list(kept.glob("*.partial")):
            assert writer.poll() is None
            time.sleep(0.005)
        writer.kill()
    assert list(kept.glob("*.partial"))
    assert load(kept) == (2, [])
    checkpoint.Checkpoints(kept).save(4, {"step": 4})
    assert sorted(path.name for path in kept.iterdir()) == ["step_00000002.pt", "step_00000004.pt"]


def test_the_error_at_the_root_is_what_is_told() -> None:
    inner = OSError(28, "No space left on device")
    outer = RuntimeError("PytorchStreamWriter failed\nat some line")
    outer.__context__ = inner
    assert checkpoint.cause(outer) == "No space left on device"
    assert checkpoint.cause(RuntimeError("one line\nanother")) == "one line"
