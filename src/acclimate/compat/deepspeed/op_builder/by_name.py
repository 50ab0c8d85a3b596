"""Op builders under DeepSpeed's names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import NoReturn

from acclimate.accelerator import Accelerator
from acclimate.backends import BUILTIN
from acclimate.compat.deepspeed.names import devices
from acclimate.compat.deepspeed.op_builder.builder import OpBuilder
from acclimate.errors import OpBuildError
from acclimate.selection import get_accelerator

PACKAGE = "deepspeed.ops.op_builder"

_OF_DEEPSPEED = """
    AsyncIO CCLComm CPUAdagrad CPUAdam CPULion DeepCompile EvoformerAttn FPQuantizer FlashAttention FusedAdam
    FusedLamb FusedLion GDS Inference InferenceCore InferenceCutlass NotImplemented PinMemory Quantizer
    RaggedOps RaggedUtils RandomLTD ShareMemComm SparseAttn SpatialInference StochasticTransformer Transformer
    Utils
"""
OF_DEEPSPEED = frozenset(f"{name}Builder" for name in _OF_DEEPSPEED.split())
"""All builders that any DeepSpeed release has had: code imports them, and then checks if they are usable."""


class NotImplementedBuilder(OpBuilder):
    """The builder of an op that only DeepSpeed has: it is never compatible, and its ``load()`` raises."""

    BUILD_VAR = "DS_BUILD_NOT_IMPLEMENTED"
    NAME = "deepspeed_not_implemented"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or self.NAME)

    def incompatibility(self) -> str | None:
        return (
            f"acclimate has no op for DeepSpeed's {type(self).__name__}. Install DeepSpeed and start the "
            "program with `acclimate run --deepspeed`"
        )

    def load(self, verbose: bool = False) -> NoReturn:
        raise OpBuildError(f"{self.incompatibility()}.")


def of_this_accelerator(module: str, name: str) -> type[object]:
    """Returns this process's accelerator's builder of a name, as an attribute of the package.

    Raises:
        AttributeError: neither it nor DeepSpeed has such an op.
    """
    found = get_accelerator().get_op_builder(name) if name.endswith("Builder") else None
    return found or _missing(module, name)


def of_device(module: str, name: str) -> type[object]:
    """Returns the builder for a module's device, as an attribute of a module below the package.

    Does not call the accelerator's ``get_op_builder``, which in accelerators for DeepSpeed looks here itself.

    Raises:
        AttributeError: neither it nor DeepSpeed has such an op.
    """
    target = _targets(module).get(name)
    return resolve_name(target) if target is not None else _missing(module, name)


def builder_names(module: str) -> set[str]:
    """Returns the names that a module has for :func:`of_device`."""
    return {*_targets(module), *OF_DEEPSPEED}


def _targets(module: str) -> Mapping[str, str]:
    device = module.removeprefix(PACKAGE).split(".")[1]
    target = next((record.target for record in BUILTIN if record.name == device), None)
    if target is not None:
        builders: Mapping[str, str] = resolve_name(target).op_builders
        return builders
    # A device without an acclimate record has the builders of every device; other modules serve all devices.
    return Accelerator.op_builders if device in devices() else get_accelerator().op_builders


def _missing(module: str, name: str) -> type[object]:
    if name not in OF_DEEPSPEED:
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}: neither the {get_accelerator().name} accelerator "
            "nor DeepSpeed has such an op builder."
        )
    return _placeholder(name)


@functools.cache
def _placeholder(name: str) -> type[object]:
    if name == NotImplementedBuilder.__name__:
        return NotImplementedBuilder
    return type(name, (NotImplementedBuilder,), {"__module__": PACKAGE})  # where pickle finds it
