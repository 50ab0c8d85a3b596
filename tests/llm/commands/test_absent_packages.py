"""A command that needs a package which is not installed names it in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from acclimate.host.install_hints import install_extra, pip_install

# Python raises ModuleNotFoundError for a module whose entry is None, as for one that is not installed.
COMMAND = """
import sys, warnings
warnings.simplefilter("error")
sys.modules[sys.argv.pop(1)] = None
from acclimate.cli import main
sys.exit(main())
"""


warm = pytest.mark.usefixtures("warm_starts")


def run(absent: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMMAND, absent, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@warm
@pytest.mark.parametrize("absent", ["transformers", "safetensors", "numpy"])
def test_plan_names_the_package_and_the_extra(absent: str, tiny_folder: Path) -> None:
    done = run(absent, "plan", str(tiny_folder))
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"acclimate plan: error: a language model needs {absent}: {install_extra('llm')}"
    )


@warm
def test_plan_of_a_gguf_file_names_the_package_and_the_extra(tiny_gguf: Path) -> None:
    done = run("gguf", "plan", str(tiny_gguf))
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"acclimate plan: error: reading {tiny_gguf.name} needs gguf: {install_extra('llm')}"
    )


@warm
def test_a_missing_dependency_is_no_internal_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch\n")
    done = run("libcst", "port", str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert (
        'acclimate port: error: the package "libcst" is not installed: ' + pip_install("libcst")
        in done.stderr
    )


@pytest.mark.slow  # a real start, as numpy is imported with torch
def test_info_needs_no_numpy_even_if_warnings_are_errors() -> None:
    done = run("numpy", "info")
    assert done.returncode == 0, done.stderr
