"""Hints name a command that works for this Python and in this folder."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import acclimate
from acclimate.host import install_hints
from acclimate.host.install_hints import install_extra, install_tool, pip_install

CLONE = Path(__file__).parents[2]


@pytest.fixture
def pip_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of PATH with a program called pip."""
    program = tmp_path / "pip"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_pip_is_named_only_if_the_shell_finds_that_of_this_python(
    pip_on_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shutil.which("pip") == str(pip_on_path / "pip")
    assert pip_install("x") != "pip install x"
    monkeypatch.setattr(sys, "executable", str(pip_on_path / "python"))
    assert pip_install("x") == "pip install x"


def test_another_pythons_pip_is_avoided_by_the_path_of_this_python(
    pip_on_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pip_on_path)
    assert pip_install("x") == f"{sys.executable} -m pip install x"


def test_an_extra_is_installed_from_the_clone_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(acclimate.__file__).is_relative_to(CLONE)
    monkeypatch.chdir(CLONE)
    assert install_extra("llm").endswith('pip install -e ".[llm]"')
    assert install_tool("acclimate-port").endswith("pip install ./tools/acclimate-port")
    monkeypatch.chdir("/")
    assert install_extra("llm").endswith(f'pip install -e "/{CLONE.relative_to("/")}[llm]"') or (
        install_extra("llm").endswith(f'pip install -e "{CLONE.relative_to("/")}[llm]"')
    )


def test_without_a_clone_the_hint_asks_for_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = tmp_path / "lib" / "site-packages" / "acclimate" / "host" / "install_hints.py"
    monkeypatch.setattr(install_hints, "__file__", str(copy))
    assert install_extra("llm").endswith('pip install ".[llm]" in a clone of acclimate\'s repository')
    tool = install_tool("acclimate-port")
    assert tool.endswith("pip install ./tools/acclimate-port in a clone of acclimate's repository")


def test_no_hint_names_an_index_that_carries_acclimate() -> None:
    sources = [*(CLONE / "src").rglob("*.py"), *(CLONE / "examples").glob("*.py")]
    found = [path for path in sources if 'pip install "acclimate' in path.read_text(encoding="utf-8")]
    assert found == []
