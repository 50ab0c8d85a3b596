"""Triton's compiler accepts the kernels; no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; torch brings it only with builds for GPUs")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["linear", "pointwise", "attention", "products"])
def test_kernels_are_compiled_for_a_gpu_that_is_not_here(module: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_triton.py")), module],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
    )
