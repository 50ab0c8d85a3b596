"""Finds an MPI's program: the programs of all MPIs have the same names, but ``--version`` differs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from acclimate.errors import EngineNotFoundError

VERSION_TIMEOUT_S = 20.0
"""How long ``--version`` may take."""


def find_program(names: Sequence[str], says: str, environ: Mapping[str, str]) -> str | None:
    """Returns the path of the first of these programs on ``PATH`` whose ``--version`` contains ``says``.

    Several MPIs may be on ``PATH``, with programs of the same names.

    Raises:
        EngineNotFoundError: there is none, and a program with one of the names did not answer.
    """
    silent = ""
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        for name in names:
            program = Path(folder or os.curdir) / name
            if program.is_file() and os.access(program, os.X_OK):
                try:
                    if says in _version(program, environ):
                        return str(program.absolute())
                except subprocess.TimeoutExpired:
                    silent = silent or str(program.absolute())
    if silent:
        raise EngineNotFoundError(
            f"{silent} --version did not answer within {VERSION_TIMEOUT_S:g} s, so it cannot be used. Repair "
            "it, or choose another engine with --launcher."
        )
    return None


def _version(program: Path, environ: Mapping[str, str]) -> str:
    with suppress(OSError):
        asked = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return asked.stdout + asked.stderr
    return ""
