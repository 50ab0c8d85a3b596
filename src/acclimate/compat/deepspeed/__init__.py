"""Runs DeepSpeed on any accelerator, and code written for DeepSpeed without DeepSpeed.

If DeepSpeed is installed, :func:`register` makes it run on this process's accelerator. Call it before the
first ``import deepspeed``. ``acclimate run --deepspeed`` calls it for programs that cannot be edited.

If DeepSpeed is not installed, importing this package is enough: ``import deepspeed`` then offers the names of
DeepSpeed's accelerator layer and of the functions that acclimate implements
(:mod:`~acclimate.compat.deepspeed.names`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from acclimate.compat.deepspeed.adapter import ACCELERATOR_MODULE, OPS_VARIABLE, AcceleratorFinder
from acclimate.compat.deepspeed.names import offer
from acclimate.errors import ImportOrderError, InvalidEnvironmentError, excerpt

__all__ = ["OPS_VARIABLE", "STARTUP", "VARIABLE", "child_environment", "register", "start"]

VARIABLE = "ACCLIMATE_DEEPSPEED"
"""If this variable is ``1``, ``import acclimate`` calls :func:`register`, and a Python with :data:`STARTUP`
on its path does so at its start. With ``names``, such a Python only offers DeepSpeed's names."""
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's variable: ``1`` requests huge pages from Linux for CPU tensors of 2 MiB or more. torch reads it
once, at its first CPU allocation."""
STARTUP = Path(__file__).with_name("startup")
"""A folder for ``PYTHONPATH``: its ``sitecustomize`` registers in each Python that starts."""


def register(*, ops: bool | None = None) -> None:
    """Makes DeepSpeed run on this process's accelerator, here and in child Python processes.

    Large CPU tensors get huge pages, unless :data:`HUGE_PAGES` is set: DeepSpeed's offloading allocates and
    frees large tensors for each gradient, and each of their pages costs a page fault.

    Args:
        ops: whether DeepSpeed's optimizers, swappers and collectives use acclimate's native ops instead of
            DeepSpeed's, if both exist; ``None`` reads ``ACCLIMATE_DEEPSPEED_OPS``, which is off by default.

    Raises:
        ImportOrderError: DeepSpeed was already imported, and keeps its accelerator and op builders.
    """
    if ops is not None:
        if ACCELERATOR_MODULE in sys.modules and ops != (os.environ.get(OPS_VARIABLE) == "1"):
            raise ImportOrderError(
                "deepspeed was imported before acclimate.compat.deepspeed.register() was called with "
                f"ops={ops}, so it keeps its present op builders. Call register(ops={ops}) first."
            )
        os.environ[OPS_VARIABLE] = str(int(ops))
    if not any(isinstance(finder, AcceleratorFinder) for finder in sys.meta_path):
        if ACCELERATOR_MODULE in sys.modules:
            raise ImportOrderError(
                "deepspeed was imported before acclimate.compat.deepspeed.register() was called, so it keeps "
                "its own accelerator. Call register() first, or start the program with "
                "`acclimate run --deepspeed`."
            )
        sys.meta_path.insert(0, AcceleratorFinder())
    os.environ.setdefault(HUGE_PAGES, "1")
    os.environ.update(child_environment(os.environ.get("PYTHONPATH", "")))


def child_environment(python_path: str, asked: str = "1") -> dict[str, str]:
    """Returns the variables with which a Python process acts on :data:`VARIABLE` at its start.

    Args:
        python_path: the ``PYTHONPATH`` that the process would otherwise have.
        asked: the value of :data:`VARIABLE`.
    """
    folders = [folder for folder in python_path.split(os.pathsep) if folder and folder != str(STARTUP)]
    return {VARIABLE: asked, "PYTHONPATH": os.pathsep.join([str(STARTUP), *folders])}


def start() -> None:
    """Acts on the value of :data:`VARIABLE`; called when Python starts.

    Raises:
        InvalidEnvironmentError: the variable has an invalid value.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "0", "1", "names"):
        raise InvalidEnvironmentError(
            f'{VARIABLE} must be 0, 1 or names. Value "{excerpt(asked)}" is not supported.'
        )
    if asked == "1":
        register()


offer()
