"""If a vendor's package that torch loads itself fails, torch, detection and the commands still work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fresh_process import plain_environment
from quick_parameters import quick
from shared_kernels import share_kernels

BROKEN = {
    "torch_npu": (
        "raise ImportError('libhccl.so: cannot open shared object file')",
        "ImportError: libhccl.so",
    ),
    "torch_mlu": ("import os; os._exit(3)", "it ends the process (exit code 3)"),
    "torch_sdaa": ("import os; os.kill(os.getpid(), 11)", "it ends the process (SIGSEGV)"),
    "torch_rbln": ("raise SystemExit('no driver')", "SystemExit: no driver"),
    "torch_opencl": (
        "import sys\nprint('ERROR! needs PyTorch 2.8')\nprint('ERROR! needs PyTorch 2.8')\nsys.exit(127)",
        'SystemExit: 127 (it printed: "ERROR! needs PyTorch 2.8")',
    ),
    "torch_blunt": ("class Blunt(BaseException): pass\nraise Blunt('enough')", "Blunt: enough"),
    "torch_late": ("def autoload(): raise RuntimeError('no card')", "RuntimeError: no card"),
    "torch_unspeakable": (
        "class Silent(Exception):\n    def __str__(self): raise ValueError\nraise Silent",
        "Silent",
    ),
}
"""By package, its source and what has to be told of it."""
HEALTHY = """
print("welcome to unheard_of")
def autoload():
    import torch
    torch.utils.backend_registration._setup_privateuseone_for_python_backend("unheard_of")
"""


def install(folder: Path, package: str, source: str) -> None:
    """Installs a package that torch loads by itself."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(source)
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{package} = {package}:autoload\n")


pytestmark = pytest.mark.usefixtures("warm_starts")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder of packages that fail, each in its own way."""
    for package, (source, _) in BROKEN.items():
        install(tmp_path, package, source)
    return tmp_path


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**plain_environment(), "PYTHONPATH": str(folder), "ACCLIMATE_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, *arguments], env={**env, **variables}, capture_output=True, text=True, timeout=600
    )


def report(folder: Path, **variables: str) -> dict[str, Any]:
    ended = run(folder, "-m", "acclimate", "info", "--json", **variables)
    assert ended.stdout.startswith("{"), ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_each_broken_package_has_a_row_with_its_reason_and_the_cpu_is_used(broken: Path) -> None:
    found = report(broken)
    assert (found["accelerator"]["name"], found["error"]) == ("cpu", None)
    for package, (_, why) in BROKEN.items():
        rows = [row["reason"] for row in found["candidates"] if package in (row["reason"] or "")]
        assert len(rows) == 1, (package, rows)
        assert f"fails to import: {why}" in rows[0]
    unclaimed = next(row["reason"] for row in found["candidates"] if "torch_opencl" in (row["reason"] or ""))
    assert unclaimed.endswith("Import acclimate before torch, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0.")


def test_torch_can_be_imported_in_both_ways_that_the_message_gives(broken: Path) -> None:
    assert run(broken, "-c", "import torch").returncode != 0
    assert run(broken, "-c", "import torch", TORCH_DEVICE_BACKEND_AUTOLOAD="0").returncode == 0
    assert run(broken, "-c", "import acclimate; acclimate.get_accelerator(); import torch").returncode == 0


def test_a_package_that_works_is_used_beside_those_that_fail(broken: Path) -> None:
    install(broken, "torch_healthy", HEALTHY)
    program = """
import os, sys
from acclimate import get_accelerator
accelerator = get_accelerator()
import torch
print(accelerator.name, torch.accelerator.current_accelerator(), file=sys.stderr)
assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ
"""
    ended = run(broken, "-c", program)
    assert "unheard_of unheard_of" in ended.stderr
    assert ended.stdout == ""  # what the packages print is not a program's output
    assert "torch_opencl, which torch loads at import, is not used: SystemExit: 127" in ended.stderr
    assert ended.returncode == 0
    again = run(broken, "-c", program)  # torch_healthy is known to work by now
    assert "unheard_of unheard_of" in again.stderr


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["ops"], 0),
        pytest.param(["conformance", "--only", "streams/current_stream"], 0, marks=pytest.mark.slow),
        pytest.param(["generate", "hello", "--model", "no_such_folder/x"], 2, marks=pytest.mark.slow),
    ],
    ids=["ops", "conformance", "generate"],
)
def test_no_command_is_taken_down(command: list[str], code: int, broken: Path) -> None:
    (broken / "cache").mkdir()
    share_kernels(broken / "cache")
    ended = run(broken, "-m", "acclimate", *command)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr


def test_a_device_whose_package_fails_or_finds_none_is_explained_by_its_package(broken: Path) -> None:
    install(broken, "torch_tpu", "def autoload(): pass")
    program = """
from acclimate.selection import load_by_name
for name in ("rbln", "tpu"):
    try:
        load_by_name(name, "DS_ACCELERATOR")
    except ValueError as error:
        print(error)
"""
    said = run(broken, "-c", program).stdout
    assert 'DS_ACCELERATOR is "rbln". Its package, torch_rbln, is installed, but fails to import' in said
    assert "SystemExit: no driver" in said
    assert "torch_tpu, is installed, but adds no such device to torch when" in said
    assert "did you mean" not in said


@pytest.mark.parametrize(
    "package", quick(("torchquasar", "torch_quasar", "torch_quasar_backend"), "torch_quasar_backend")
)
def test_a_device_chosen_by_name_is_found_in_a_package_that_torch_does_not_load(
    package: str, tmp_path: Path
) -> None:
    """As torchvulkan: importing it adds the device, but it is not one of torch's entry points."""
    source = """
import torch
torch.utils.backend_registration._setup_privateuseone_for_python_backend("quasar")
torch.quasar.device_count = lambda: 1
"""
    (tmp_path / f"{package}.py").write_text(source)
    program = "import acclimate; print(acclimate.get_accelerator())"
    chosen = run(tmp_path, "-c", program, ACCLIMATE_ACCELERATOR="quasar")
    assert chosen.stdout == "<GenericAccelerator quasar>\n", chosen.stderr
    assert "quasar" not in run(tmp_path, "-c", program).stdout  # detection imports nothing on its own


def test_a_package_that_is_imported_without_adding_its_device_is_named(tmp_path: Path) -> None:
    (tmp_path / "torchquasar.py").write_text("")
    ended = run(tmp_path, "-c", "import acclimate; acclimate.get_accelerator()", DS_ACCELERATOR="quasar")
    assert "Its package, torchquasar, is installed, but adds no such device to torch when" in ended.stderr


def test_a_user_who_switched_autoload_off_gets_none(broken: Path) -> None:
    program = "import acclimate, os; acclimate.get_accelerator(); print(os.environ['{0}'])"
    variable = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    ended = run(broken, "-c", program.format(variable), **{variable: "0"})
    assert ended.stdout == "0\n"
    assert "torch_opencl" not in ended.stderr


@pytest.mark.parametrize(
    "module",
    quick(("acclimate.accelerator", "acclimate.ops.build", "acclimate.selection"), "acclimate.accelerator"),
)
def test_a_package_that_torch_loads_may_import_the_interface_itself(module: str, tmp_path: Path) -> None:
    source = """
def autoload():
    from acclimate.accelerator import Accelerator
    from acclimate.backends.cpu import CPUAccelerator
    import torch
    torch.acme = issubclass(CPUAccelerator, Accelerator)
"""
    install(tmp_path, "torch_acme", source)
    program = f"import {module}, acclimate; acclimate.get_accelerator(); import torch; print(torch.acme)"
    ended = run(tmp_path, "-c", program)
    assert ended.stdout == "True\n", ended.stderr
