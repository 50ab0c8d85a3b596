"""Gives DeepSpeed its accelerator while DeepSpeed is being imported.

``deepspeed.ops.op_builder`` gets the accelerator once, during ``import deepspeed``, and keeps its op
builders: a later ``deepspeed.accelerator.set_accelerator`` does not change them. So this module sets the
accelerator as soon as the module that stores it has run. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, cast

ACCELERATOR_MODULE = "deepspeed.accelerator.real_accelerator"


class AcceleratorFinder(MetaPathFinder):
    """Finds the module that stores DeepSpeed's accelerator, and sets the accelerator once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the module's own spec, whose loader also sets the accelerator; else ``None``."""
        if fullname != ACCELERATOR_MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        loader = cast(Any, spec.loader)
        run = loader.exec_module

        def run_and_set(module: ModuleType) -> None:
            run(module)
            # Imported only here, because it imports torch and a class of DeepSpeed's.
            from acclimate.compat.deepspeed.adapter import adapt
            from acclimate.selection import get_accelerator

            module.__dict__["ds_accelerator"] = adapt(get_accelerator())

        loader.exec_module = run_and_set
        return spec
