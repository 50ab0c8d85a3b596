"""The distribution that offers DeepSpeed's names in each Python of an environment, built and installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import acclimate

SOURCE = Path(__file__).parents[2] / "extensions" / "acclimate-deepspeed-shim"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the distribution and acclimate."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("environment")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    built = subprocess.run(
        [*pip, "wheel", *options, str(SOURCE)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    wheel = next(folder.glob("*.whl"))
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    found = [str(Path(acclimate.__file__).parents[1]), sysconfig.get_path("purelib"), *sys.path]
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    (site / "zz_others.pth").write_text("\n".join(path for path in found if Path(path).is_dir()))
    return python


def printed(python: Path, program: str, folder: Path) -> str:
    done = subprocess.run(
        [str(python), "-c", program],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_program_that_knows_nothing_of_it_finds_the_names(python: Path, tmp_path: Path) -> None:
    program = (
        "from deepspeed.accelerator import get_accelerator; import deepspeed\n"
        "print(get_accelerator().device_name(), deepspeed.__spec__.origin)"
    )
    assert printed(python, program, tmp_path) == "cpu acclimate.compat.deepspeed\n"


@pytest.mark.slow
def test_nothing_is_imported_before_a_program_wants_the_names(python: Path, tmp_path: Path) -> None:
    program = (
        "import sys; print([name for name in ('acclimate', 'torch', 'deepspeed') if name in sys.modules])"
    )
    assert printed(python, program, tmp_path) == "[]\n"


@pytest.mark.slow
def test_a_real_deepspeed_is_what_is_imported(python: Path, tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("real = True")
    program = "import deepspeed; print(deepspeed.real, deepspeed.__spec__.origin.endswith('__init__.py'))"
    assert printed(python, program, tmp_path) == "True True\n"


@pytest.mark.slow
def test_metadata_and_transformers_and_accelerate_find_no_deepspeed(python: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    program = """
import importlib.metadata as metadata, importlib.util
assert importlib.util.find_spec("deepspeed") is not None
print([name for name in metadata.packages_distributions() if name == "deepspeed"])
from accelerate.utils import is_deepspeed_available
print(is_deepspeed_available())
from transformers.integrations import is_deepspeed_available
print(is_deepspeed_available())
"""
    assert printed(python, program, tmp_path) == "[]\nFalse\nFalse\n"


@pytest.mark.slow
def test_a_folder_called_deepspeed_does_not_hide_the_names(python: Path, tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    program = "import deepspeed, sys; print(deepspeed.__spec__.origin, len(sys.meta_path))"
    before = int(printed(python, "import sys; print(len(sys.meta_path))", tmp_path))
    assert printed(python, program, tmp_path) == f"acclimate.compat.deepspeed {before}\n"
