"""Finds compilers of native source, without running them."""

from __future__ import annotations

import os
import shlex
import shutil

from acclimate.errors import CompilerNotFoundError, excerpt

CXX_SUFFIXES = (".cpp", ".cc", ".cxx")
"""The suffixes of C++ source files."""

HOST_COMPILERS = ("c++", "g++", "clang++")
"""The C++ compilers looked for on ``PATH``, in this order."""


def host_compiler() -> list[str]:
    """Returns the command of the C++ compiler: ``CXX`` if it is set, else the first compiler on ``PATH``.

    ``CXX`` may hold several words (``ccache g++``). The program is an absolute path.

    Raises:
        CompilerNotFoundError: there is none; the message says where it was looked for.
    """
    text = os.environ.get("CXX", "")
    try:
        chosen = shlex.split(text)
    except ValueError as error:  # an open quotation mark, or nothing after a backslash
        raise CompilerNotFoundError(
            f'CXX is "{excerpt(text)}", which is not a command: {error}. Correct it, or unset it to use the '
            f"first of "
            f"{', '.join(HOST_COMPILERS)}"
        ) from error
    if chosen:
        return [_program(chosen[0], f'CXX is "{excerpt(text)}"'), *chosen[1:]]
    for name in HOST_COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return [os.path.abspath(path)]
    raise CompilerNotFoundError(
        f"there is no C++ compiler: none of {', '.join(HOST_COMPILERS)} is on PATH, and CXX is not set. "
        "Install one (Debian: apt-get install g++)"
    )


def _program(name: str, why: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise CompilerNotFoundError(
            f"{why}, but there is no such program on PATH. Correct it, or unset it to use the first of "
            f"{', '.join(HOST_COMPILERS)}"
        )
    return os.path.abspath(path)
