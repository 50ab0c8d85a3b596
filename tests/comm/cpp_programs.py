"""C++ programs that tests of the native code run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from acclimate.comm import backend as shm

SOURCE = Path(shm.__file__).parent / "csrc"
"""The folder of the native code."""


def cpp_compiler() -> str:
    """The C++ compiler; without one the test is skipped."""
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def compiled(folder: Path, *sources: Path, flags: tuple[str, ...] = ()) -> Path:
    """Compiles a program against the native code's headers, into a folder, and returns its path."""
    program = folder / sources[0].stem
    command = [cpp_compiler(), "-std=c++20", f"-I{SOURCE}", *flags, *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True)
    return program
