"""What to type to install a missing package: a command that works for this Python, here."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

_IN_A_CLONE = " in a clone of acclimate's repository"


def pip_install(what: str) -> str:
    """Returns the command that installs packages for this Python, whose pip need not be the shell's."""
    beside = Path(sys.executable).parent
    found = shutil.which("pip")
    is_ours = found is not None and Path(found).parent == beside
    return f"{'pip' if is_ours else f'{_shortest(Path(sys.executable))} -m pip'} install {what}"


def install_extra(extra: str) -> str:
    """Returns the command that installs an optional extra of acclimate.

    The command needs no package index with acclimate: it names the clone that runs, or asks for one.
    """
    clone = _clone()
    if clone is None:
        return pip_install(f'".[{extra}]"') + _IN_A_CLONE
    return pip_install(f'-e "{_shortest(clone)}[{extra}]"')


def install_tool(package: str) -> str:
    """Returns the command that installs a package of acclimate's folder ``tools``."""
    clone = _clone()
    if clone is None:
        return pip_install(f"./tools/{package}") + _IN_A_CLONE
    folder = str(_shortest(clone / "tools" / package))
    return pip_install(folder if folder.startswith("/") else f"./{folder}")


def _clone() -> Path | None:
    """Returns the clone that this package runs from; ``None`` if it was installed as a copy."""
    root = Path(__file__).parents[3]
    return root if (root / "pyproject.toml").is_file() and (root / "tools").is_dir() else None


def _shortest(path: Path) -> Path:
    """Returns a path relative to the working directory, if it is below it."""
    try:
        return path.relative_to(os.getcwd())
    except (ValueError, OSError):
        return path
