"""Data stored past the caches is visible once it is published, which ThreadSanitizer cannot check."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest
from cpp_programs import compiled

ROUNDS = 2000


def stale_words(folder: Path, *flags: str) -> int:
    """How many words of earlier rounds a process read that another one had overwritten."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or platform.machine() != "x86_64":
        pytest.skip("needs two cores of x86_64")
    program = compiled(folder, Path(__file__).with_name("streamed_stores.cpp"), flags=("-O2", *flags))
    command = [str(program), str(ROUNDS), str(cores[0]), str(cores[-1])]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout)


@pytest.mark.slow
def test_no_word_is_stale_when_it_is_published(tmp_path: Path) -> None:
    assert stale_words(tmp_path) == 0


@pytest.mark.slow
def test_without_the_fence_words_are_stale(tmp_path: Path) -> None:
    if stale_words(tmp_path, "-DWITHOUT_FENCE") == 0:
        pytest.skip("this processor finishes such stores before the next one")
