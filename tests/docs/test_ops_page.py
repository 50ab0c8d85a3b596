"""The code in docs/ops.md runs as printed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from fresh_process import FreshProcesses

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def example(language: str, containing: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if containing in block)
    return str(found)


@pytest.mark.parametrize("compiler", ["there", "missing"])
def test_the_op_that_the_page_writes_doubles_a_tensor(
    compiler: str, tmp_path: Path, fresh: FreshProcesses
) -> None:
    if compiler == "there" and shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here")
    (tmp_path / "double.cpp").write_text(example("cpp", "STABLE_TORCH_LIBRARY_IMPL"))
    (tmp_path / "double.py").write_text(example("python", "class DoubleBuilder"))
    env = {"ACCLIMATE_CACHE": str(tmp_path / "cache")} | (
        {"PATH": "", "CXX": ""} if compiler == "missing" else {}
    )
    outcome = fresh.check(
        "import torch, double\n"
        "x = torch.arange(4.0)\n"
        "double.DoubleBuilder().load().double_(x)\n"
        "tell(x=x.tolist())",
        path=[tmp_path],
        env=env,
    )
    assert outcome.told == {"x": [0, 2, 4, 6]}
    assert ("runs on plain torch" in outcome.stderr) == (compiler == "missing")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_the_compiled_step_of_the_page_reads_and_writes_its_files(
    tmp_path: Path, fresh: FreshProcesses
) -> None:
    fresh.check(
        f"import os; os.chdir({str(tmp_path)!r})\n"
        + example("python", "torch.compile")
        + "stored, x = torch.randn(8, 4), torch.randn(2, 8)\n"
        "handle.write(stored, 'weight.bin')\n"
        "out, written = step(x, torch.empty(8, 4)), torch.empty(2, 4)\n"
        "handle.read(written, 'activation.bin')\n"
        "torch.testing.assert_close(written, x @ stored)\n"
        "assert torch.equal(out, written.relu())\n",
        env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")},
        timeout_s=300,
    )
