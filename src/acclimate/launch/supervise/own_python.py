"""Starts one of our modules as a process, in any working directory."""

from __future__ import annotations

import sys


def own_python(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs the ``main`` of one of our modules.

    Not ``python -m``, which looks for modules in the working directory first: a user's file ``re.py`` there
    would replace Python's. (``python -P`` does not, but needs Python 3.11.)
    """
    code = f"import sys; sys.path[:] = filter(None, sys.path); from {module} import main; sys.exit(main())"
    return [sys.executable, "-c", code, *arguments]
