"""Registers acclimate with DeepSpeed when Python starts, if this folder is on ``PYTHONPATH``.

This file is not part of the package. It also runs the ``sitecustomize`` that it shadows.
"""

import importlib.machinery
import importlib.util
import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))
_path = [folder for folder in sys.path if os.path.abspath(folder) != _folder]

if importlib.machinery.PathFinder.find_spec("acclimate", _path) is None:
    if os.environ.get("ACCLIMATE_DEEPSPEED") == "1":
        sys.stderr.write(
            f"acclimate is not installed for {sys.executable}: DeepSpeed keeps its own accelerator.\n"
        )
else:
    from acclimate.compat.deepspeed import start

    start()

_hidden = importlib.machinery.PathFinder.find_spec(__name__, _path)
if _hidden is not None and _hidden.loader is not None:
    _module = importlib.util.module_from_spec(_hidden)
    _hidden.loader.exec_module(_module)
