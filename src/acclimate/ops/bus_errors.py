"""Lets a command end with one line if a mapped file is truncated; otherwise SIGBUS just kills it."""

from __future__ import annotations

import ctypes
from pathlib import Path

_FUNCTION = "acclimate_explain_bus_errors"
_commands: list[bytes] = []


def explain_bus_errors(command: str) -> None:
    """Makes this process explain a bus error and exit with code 2, once native code is loaded.

    For commands only: a process has one handler of a signal, so a library must not choose it.

    Args:
        command: the command's name, for the message.
    """
    _commands[:] = [command.encode()]


def install(library: Path) -> None:
    """Installs the handler in a library that was loaded, if a command has asked for it."""
    if _commands:
        getattr(ctypes.CDLL(str(library)), _FUNCTION)(_commands[0])
