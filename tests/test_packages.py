"""Each package, built as a wheel and installed beside its declared dependencies and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SOURCES = {
    "acclimate": ROOT,
    "acclimate-port": ROOT / "tools" / "acclimate-port",
    "acclimate-conformance": ROOT / "tools" / "acclimate-conformance",
}
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
CUDA_ONLY = "import torch\n\ntorch.cuda.synchronize()\n"


class Wheels(dict[str, Path]):
    """The wheel of each package, built when a test asks for it.

    Args:
        folder: where to build them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        source, copy = SOURCES[name], self._folder / name  # a build writes beside the source
        shutil.copytree(
            source / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            if (source / file).exists():
                shutil.copy(source / file, copy)
        build = [sys.executable, "-c", "from setuptools.build_meta import build_wheel; build_wheel('.')"]
        require(subprocess.run(build, cwd=copy, capture_output=True, text=True))
        (self[name],) = copy.glob("*.whl")
        return self[name]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    pytest.importorskip("setuptools")
    return Wheels(tmp_path_factory.mktemp("wheels"))


class Environment:
    """A virtual environment with some of our wheels, and links to what they declare that they need.

    Args:
        folder: where to create it.
        wheels: the wheels to install.
    """

    def __init__(self, folder: Path, wheels: list[Path]) -> None:
        self._folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        options = ["--no-deps", "--no-index", "--no-compile", *map(str, wheels)]
        pip = [*PIP, "--python", str(folder / "bin" / "python"), "install", *options]
        require(subprocess.run(pip, capture_output=True, text=True))
        (site,) = folder.glob("lib/python*/site-packages")
        installed = list(importlib.metadata.distributions(path=[str(site)]))
        for distribution in needed(installed):
            for path in top_level(distribution):
                if not (site / path.name).exists():
                    (site / path.name).symlink_to(path)

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment in its folder."""
        return subprocess.run(
            [str(self._folder / "bin" / program), *arguments],
            cwd=self._folder,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self._folder), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=600,
        )

    def missing(self, *modules: str) -> list[str]:
        """Those of some modules that cannot be imported."""
        code = (
            "import sys; from importlib.util import find_spec\n"
            "print(*(name for name in sys.argv[1:] if not find_spec(name)))"
        )
        return require(self.run("python", "-c", code, *modules)).stdout.split()

    def write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)


def needed(distributions: list[Distribution]) -> Iterator[Distribution]:
    """What distributions declare that they need, directly or through another, except our own packages."""
    found: dict[str, Distribution] = {}
    waiting = [requirement for distribution in distributions for requirement in distribution.requires or ()]
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if (
            name in found
            or name in SOURCES
            or (requirement.marker and not requirement.marker.evaluate({"extra": ""}))
        ):
            continue
        found[name] = importlib.metadata.distribution(name)
        waiting += found[name].requires or ()
    yield from found.values()


@cache
def top_level(distribution: Distribution) -> list[Path]:
    """The files and folders of a distribution that lie directly in site-packages."""
    names = {path.parts[0] for path in distribution.files or () if path.parts[0] not in ("..", "__pycache__")}
    return [Path(str(distribution.locate_file(name))) for name in sorted(names)]


def require(ended: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


@pytest.fixture(scope="module")
def runtime(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("runtime") / "venv", [wheels["acclimate"]])


def test_acclimate_alone_starts_and_lists_the_commands_that_it_lacks(runtime: Environment) -> None:
    shown = " ".join(require(runtime.run("acclimate", "--help")).stdout.split())
    for name, source in SOURCES.items():
        if source != ROOT:
            assert "(not installed: " in shown
            assert f"pip install ./tools/{name} in a clone of acclimate's repository)" in shown
    found = runtime.missing(
        "libcst", "transformers", "pytest", "acclimate_port", "acclimate_conformance", "torch"
    )
    assert found == ["libcst", "transformers", "pytest", "acclimate_port", "acclimate_conformance"]
    code = "import acclimate; print(acclimate.get_accelerator().device_count() > 0)"
    assert require(runtime.run("python", "-c", code)).stdout == "True\n"


@pytest.mark.parametrize(
    ("command", "package"), [("port", "acclimate-port"), ("conformance", "acclimate-conformance")]
)
def test_a_command_whose_package_is_absent_says_how_to_install_it(
    runtime: Environment, command: str, package: str
) -> None:
    ended = runtime.run("acclimate", command, "--no-matter")
    assert (ended.returncode, ended.stdout) == (2, "")
    told = f"acclimate {command}: error: this command is in the package {package}, which is not installed: "
    assert ended.stderr.startswith(told)
    assert ended.stderr.endswith(f"pip install ./tools/{package} in a clone of acclimate's repository\n")
    assert (ROOT / "tools" / package / "pyproject.toml").is_file()


@pytest.mark.slow
def test_acclimate_port_alone_ports_a_file_without_torch_and_acclimate(
    wheels: Wheels, tmp_path: Path
) -> None:
    alone = Environment(tmp_path / "venv", [wheels["acclimate-port"]])
    assert alone.missing("torch", "acclimate", "pytest", "libcst") == ["torch", "acclimate", "pytest"]
    assert require(alone.run("acclimate-port", "--version")).stdout.startswith("acclimate-port ")
    alone.write("a.py", CUDA_ONLY)
    assert "+get_accelerator().synchronize()" in require(alone.run("acclimate-port", "a.py")).stdout
    assert alone.run("acclimate-port", "--check", "a.py").returncode == 1
    refused = alone.run("acclimate-port", "--check", "--write", "a.py")
    assert refused.returncode == 2
    assert refused.stderr.startswith("acclimate port: error: --check writes nothing")


@pytest.mark.slow
def test_the_commands_of_all_packages_together(wheels: Wheels, tmp_path: Path) -> None:
    together = Environment(tmp_path / "venv", [wheels[name] for name in SOURCES])
    assert "not installed" not in require(together.run("acclimate", "--help")).stdout
    together.write("a.py", CUDA_ONLY)
    assert "+get_accelerator().synchronize()" in require(together.run("acclimate", "port", "a.py")).stdout
    assert require(together.run("acclimate", "conformance", "--help")).stdout.startswith(
        "usage: acclimate conf"
    )
    options = require(together.run("python", "-m", "pytest", "--help")).stdout
    assert "--acclimate-accelerator" in options
    assert "--on-accelerator" in options


def test_a_command_of_any_package_is_found_by_its_entry_point(runtime: Environment) -> None:
    (site,) = runtime._folder.glob("lib/python*/site-packages")
    information = site / "acme-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\nSummary: 100 % of acme\n"
    )
    (information / "entry_points.txt").write_text(
        "[acclimate.commands]\nacme = acme_command\ninfo = acme_command\n"
    )
    (site / "acme_command.py").write_text(
        "def add_arguments(parser):\n    parser.add_argument('word')\n\n"
        "def run(args):\n    print(args.word)\n    return 3\n"
    )
    try:
        assert "acme 100 % of acme" in " ".join(require(runtime.run("acclimate", "--help")).stdout.split())
        ended = runtime.run("acclimate", "acme", "hello")
        assert (ended.returncode, ended.stdout, ended.stderr) == (3, "hello\n", "")
        assert "accelerator" in require(runtime.run("acclimate", "info", "--help")).stdout
    finally:
        shutil.rmtree(information)


# -- a wheel with the CPU's libraries ----------------------------------------------------------------

WITHOUT_COMPILER = """
import acclimate, torch

cpu = acclimate.get_accelerator()
for name in ("InferenceBuilder", "CPUAdamBuilder", "CPULionBuilder", "CPUAdagradBuilder", "AsyncIOBuilder"):
    builder = cpu.create_op_builder(name)
    assert "no C++ compiler" in builder.incompatibility(), name
    builder.load()
    print(builder.built_library())
assert torch._C._dispatch_has_kernel_for_dispatch_key("acclimate::decode_step", "CompositeExplicitAutograd")
"""


@pytest.mark.slow
def test_a_wheel_with_libraries_needs_no_compiler(tmp_path: Path, wheel_with_libraries: Path) -> None:
    environment = Environment(tmp_path / "venv", [wheel_with_libraries])
    own = tmp_path / "venv" / "bin"
    done = subprocess.run(
        [str(own / "python"), "-c", WITHOUT_COMPILER],
        cwd=tmp_path,
        env={"PATH": str(own), "HOME": str(tmp_path), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    libraries = done.stdout.split()
    assert len(libraries) == 5
    assert all("site-packages" in library for library in libraries)
    assert "plain torch" not in done.stderr
    assert not list(tmp_path.rglob("*.log"))
    assert environment.missing("acclimate") == []


@pytest.fixture
def wheel_with_libraries(tmp_path: Path) -> Path:
    """A wheel that has the CPU's libraries; compiles those that the cache lacks."""
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    )
    for file in ("pyproject.toml", "README.md", "LICENSE", "setup.py"):
        shutil.copy(ROOT / file, source)
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(
        [*PIP, "wheel", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "ACCLIMATE_PREBUILT": "1"},
    )
    require(done)
    (wheel,) = tmp_path.glob("acclimate-*.whl")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    return wheel
