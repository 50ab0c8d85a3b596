"""Memory that a tokenizer frees goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
from pathlib import Path
from acclimate.llm.freed_memory import return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

# Small blocks with one kept above them: the C library alone gives none of this back.
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(65536))) for _ in range(1024)]
for block in blocks:
    ctypes.memset(block, 1, 65536)
kept = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(65536)))
before = resident()
for block in blocks:
    libc.free(block)
return_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can give memory back")
def test_freed_memory_below_a_block_in_use_is_given_back() -> None:
    command = [sys.executable, "-c", SCRIPT]
    given = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert given > 48 << 20
