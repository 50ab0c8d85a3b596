"""The command line of ``acclimate generate``, and what its errors look like."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

PROMPT = "The capital of France"

Run = Callable[..., subprocess.CompletedProcess[str]]
"""Runs ``acclimate generate`` with these arguments."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "acclimate", "generate", *arguments]


def assert_one_line_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("acclimate generate: error: ")
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == lines[0]
    for word in words:
        assert word in lines[0]
