"""The op builders that DeepSpeed gets by name: its own, or acclimate's under the names that it expects."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator

PACKAGE = "deepspeed.ops.op_builder"
"""DeepSpeed's builders for CUDA; those for other devices are in subpackages of it."""

OPS_VARIABLE = "ACCLIMATE_DEEPSPEED_OPS"
"""If this variable is ``1``, DeepSpeed uses acclimate's op builder for each op that has one."""

OURS = frozenset(
    {"AsyncIOBuilder", "CPUAdagradBuilder", "CPUAdamBuilder", "CPULionBuilder", "ShareMemCommBuilder"}
)
"""acclimate's builders whose modules have the functions of DeepSpeed's."""


def builder_package(device_type: str) -> str:
    """Returns the name of DeepSpeed's package of builders for a device; the CPU's, if there is none."""
    if device_type == "cuda":
        return PACKAGE
    of_device = f"{PACKAGE}.{device_type}"
    return of_device if find_spec(of_device) is not None else f"{PACKAGE}.cpu"


def builder_class(accelerator: Accelerator, class_name: str) -> type[Any]:
    """Returns a builder's class: acclimate's if ``ACCLIMATE_DEEPSPEED_OPS=1``, else DeepSpeed's.

    For an op that neither has, returns DeepSpeed's ``NotImplementedBuilder``, whose ``load()`` raises.
    """
    if os.environ.get(OPS_VARIABLE) == "1" and class_name in OURS:
        ours = accelerator.get_op_builder(class_name)
        if ours is not None:
            return ours
    theirs = _deepspeed_builders(builder_package(accelerator.device_type))
    return theirs.get(class_name) or theirs["NotImplementedBuilder"]


@functools.cache
def _deepspeed_builders(package: str) -> dict[str, type[Any]]:
    # The host's first: those of a device replace them.
    names = [f"{PACKAGE}.cpu"] if package != f"{PACKAGE}.cpu" else []
    found: dict[str, type[Any]] = {}
    for name in (*names, package):
        folder = importlib.import_module(name).__path__
        for module in pkgutil.iter_modules(folder):
            if not module.ispkg and module.name not in ("all_ops", "builder"):
                members = vars(importlib.import_module(f"{name}.{module.name}"))
                found.update({key: member for key, member in members.items() if _is_builder(key, member)})
    return found


def _is_builder(name: str, member: Any) -> bool:
    return name.endswith("Builder") and inspect.isclass(member) and not inspect.isabstract(member)
