"""Tells the MPIs apart: their programs have the same names, and only their own words say whose they are."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_ANSWER_S = 20.0


def find_program(names: Sequence[str], says: str, environ: Mapping[str, str]) -> str | None:
    """The first program of these names on ``PATH`` whose ``--version`` says a certain thing.

    Several MPIs may be on ``PATH``, each behind the other's names.
    """
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        for name in names:
            program = Path(folder or os.curdir) / name
            if program.is_file() and os.access(program, os.X_OK) and says in _version(program, environ):
                return str(program.absolute())
    return None


def _version(program: Path, environ: Mapping[str, str]) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return asked.stdout + asked.stderr
    return ""
