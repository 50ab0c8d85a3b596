"""DeepSpeed on any accelerator, and code written for DeepSpeed without it.

With DeepSpeed installed, :func:`register` makes it run on this process's accelerator. It must be called
before the first ``import deepspeed``. ``acclimate run --deepspeed`` does it for programs that cannot be
edited.

Without DeepSpeed, importing this package is enough: ``import deepspeed`` then finds the names of its
accelerator layer and of what runs here (:mod:`~acclimate.compat.deepspeed.names`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from acclimate.compat.deepspeed.builders import OPS_VARIABLE
from acclimate.compat.deepspeed.finder import ACCELERATOR_MODULE, AcceleratorFinder
from acclimate.compat.deepspeed.names import offer
from acclimate.errors import ImportOrderError, InvalidEnvironmentError, excerpt

__all__ = ["OPS_VARIABLE", "STARTUP", "VARIABLE", "child_environment", "register", "start"]

VARIABLE = "ACCLIMATE_DEEPSPEED"
"""``1`` in the environment: ``import acclimate`` calls :func:`register`. A Python with :data:`STARTUP` on its
path does so at its start; there, ``names`` only offers the names."""
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Torch's variable: ``1`` asks Linux for huge pages for host tensors of 2 MiB or more. Torch reads it once,
when it first allocates memory on the host."""
STARTUP = Path(__file__).with_name("startup")
"""A folder for ``PYTHONPATH``: its ``sitecustomize`` registers in each Python that starts."""


def register(*, ops: bool | None = None) -> None:
    """Makes DeepSpeed run on this process's accelerator, here and in Pythons that this process starts.

    Large host tensors get huge pages, unless the environment has :data:`HUGE_PAGES`: DeepSpeed's offloading
    makes and frees large tensors for each gradient, and each page of theirs costs a page fault.

    Args:
        ops: whether DeepSpeed's optimizers, swappers and collectives use acclimate's native ops instead of
            DeepSpeed's, where both have one; ``None``: as ``ACCLIMATE_DEEPSPEED_OPS`` says, or not.

    Raises:
        ImportOrderError: DeepSpeed was imported before, and has fixed its accelerator and its op builders.
    """
    if ops is not None:
        if ACCELERATOR_MODULE in sys.modules and ops != (os.environ.get(OPS_VARIABLE) == "1"):
            raise ImportOrderError(
                "deepspeed was imported before acclimate.compat.deepspeed.register() was called with "
                f"ops={ops}, so it keeps the op builders that it has. Call register(ops={ops}) first."
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
    """Returns the variables that make a Python do at its start what is asked for.

    Args:
        python_path: the ``PYTHONPATH`` that it would have without them.
        asked: the value of :data:`VARIABLE`.
    """
    folders = [folder for folder in python_path.split(os.pathsep) if folder and folder != str(STARTUP)]
    return {VARIABLE: asked, "PYTHONPATH": os.pathsep.join([str(STARTUP), *folders])}


def start() -> None:
    """Does what :data:`VARIABLE` asks for; called when a Python starts.

    Raises:
        InvalidEnvironmentError: the variable has a value that it cannot have.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "0", "1", "names"):
        raise InvalidEnvironmentError(
            f'{VARIABLE} must be 0, 1 or names. Value "{excerpt(asked)}" is not supported.'
        )
    if asked == "1":
        register()


offer()
