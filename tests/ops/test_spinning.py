"""A thread moves away from a processor to another one that it may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import acclimate.ops

sys.path.insert(0, str(Path(__file__).parents[1] / "comm"))

from cpp_programs import compiled

PROGRAM = Path(__file__).with_name("move_away.cpp")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no threads")
def test_a_thread_moves_to_another_of_its_processors_and_keeps_them_all(tmp_path: Path) -> None:
    csrc = Path(acclimate.ops.__file__).parent / "csrc"
    program = compiled(tmp_path, PROGRAM, flags=(f"-I{csrc}",))
    processors = [str(processor) for processor in sorted(os.sched_getaffinity(0))]

    def moved(*mask: str) -> list[str]:
        return subprocess.run([program, *mask], capture_output=True, text=True, check=True).stdout.split()

    assert moved(processors[0]) == ["stayed", "same"]
    if len(processors) > 1:
        assert moved(*processors[:2]) == ["moved", "same"]
