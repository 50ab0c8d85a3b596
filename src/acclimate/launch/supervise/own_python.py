"""Starts one of our modules as a process, in any working directory."""

from __future__ import annotations

import sys


def own_python(module: str, *arguments: str) -> list[str]:
    """The command that runs the ``main`` of one of our modules.

    ``python -m`` would look for modules in the working directory first, which is the user's: a file ``re.py``
    there would take the place of Python's own. (``python -P`` does not, from 3.11 on.)
    """
    code = f"import sys; sys.path[:] = filter(None, sys.path); from {module} import main; sys.exit(main())"
    return [sys.executable, "-c", code, *arguments]
