"""DeepSpeed's module names without DeepSpeed: a table of their replacements, and an importer for them.

A module is created when it is imported, and looks up a name when it is used. The table has only names of the
accelerator layer, the op builders and the functions that acclimate implements. Nothing claims that DeepSpeed
is installed: ``importlib.metadata`` does not list it, so transformers and Accelerate find no DeepSpeed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

_HERE = "acclimate.compat.deepspeed"
_CHOICE = {name: f"acclimate:{name}" for name in ("get_accelerator", "set_accelerator")}
_CHOICE["is_current_accelerator_supported"] = "acclimate:is_current_accelerator_supported"
_ADAM = {"DeepSpeedCPUAdam": "acclimate.ops:CPUAdam", "FusedAdam": "acclimate.ops:FusedAdam"}
_LION = {"DeepSpeedCPULion": "acclimate.ops:CPULion", "FusedLion": "acclimate.ops:FusedLion"}
_ADAGRAD = {"DeepSpeedCPUAdagrad": "acclimate.ops:CPUAdagrad"}
_LAMB = {"FusedLamb": "acclimate.ops:FusedLamb"}
_LOGGING = {"logger": f"{_HERE}.functions:logger", "log_dist": f"{_HERE}.functions:log_dist"}
_OP_BUILDER = f"{_HERE}.op_builder.builder:OpBuilder"
_BUILDER = {
    "OpBuilder": _OP_BUILDER,
    "CUDAOpBuilder": _OP_BUILDER,  # the accelerator's compiler knows what is CUDA
    "TorchCPUOpBuilder": _OP_BUILDER,
    "TORCH_MAJOR": f"{_HERE}.op_builder.builder:TORCH_MAJOR",
    "TORCH_MINOR": f"{_HERE}.op_builder.builder:TORCH_MINOR",
}

_COMM = {
    name: f"{_HERE}.functions:{name}"
    for name in ("get_local_rank", "get_world_group", "inference_all_reduce", "init_distributed")
}

_BY_NAME = f"{_HERE}.op_builder.by_name"
_BUILDERS = "deepspeed.ops.op_builder"
_WITHOUT_RECORD = ("klxpu", "supa")
"""The devices of DeepSpeed's builders for which acclimate has no record."""
_FILES = """
    async_io builder_names by_name cpu_adagrad cpu_adam cpu_lion dc evoformer_attn fp_quantizer fused_adam
    fused_lamb fused_lion gds inference_core_ops inference_cutlass_builder pin_memory quantizer ragged_ops
    ragged_utils random_ltd sparse_attn spatial_inference stochastic_transformer transformer
    transformer_inference utils
"""


@functools.cache
def _targets() -> dict[str, str]:
    """Returns the class of each device type in DeepSpeed's specification, as ``"module:name"``."""
    # Imported when a name is used, because every Python that starts with these names imports this module.
    from acclimate.backends import SPECIFIED, builtin

    return {name: builtin(name).target for name in SPECIFIED if name.isidentifier()}


@functools.cache
def devices() -> tuple[str, ...]:
    """Returns the subpackages of DeepSpeed's builders, one per device."""
    return *(name for name in _targets() if name != "cuda"), *_WITHOUT_RECORD


@functools.cache
def _of_device() -> tuple[str, ...]:
    """Returns the modules that offer all builders of one device or of this one's, unlike in DeepSpeed."""
    below = (*_FILES.split(), *devices(), *(f"{device}.by_name" for device in devices()))
    return tuple(f"{_BUILDERS}.{module}" for module in below)


@functools.cache
def offered_names() -> Mapping[str, Mapping[str, str]]:
    """Returns the names in each module, and the ``"module:name"`` that each refers to."""
    return {
        "deepspeed": {
            **_CHOICE,
            "init_distributed": f"{_HERE}.functions:init_distributed",
            "init_inference": f"{_HERE}.functions:init_inference",
            "initialize": f"{_HERE}.functions:initialize",
            **_LOGGING,
        },
        "deepspeed.accelerator": {
            **_CHOICE,
            "DeepSpeedAccelerator": f"{_HERE}.base:DeepSpeedAccelerator",
        },
        "deepspeed.accelerator.abstract_accelerator": {
            "DeepSpeedAccelerator": f"{_HERE}.base:DeepSpeedAccelerator",
        },
        "deepspeed.accelerator.real_accelerator": {
            **_CHOICE,
            "SUPPORTED_ACCELERATOR_LIST": "acclimate.backends:SPECIFIED",
        },
        **{
            f"deepspeed.accelerator.{name}_accelerator": {f"{name.upper()}_Accelerator": target}
            for name, target in _targets().items()
        },
        "deepspeed.comm": _COMM,
        "deepspeed.comm.comm": _COMM,
        "deepspeed.git_version_info": {
            "installed_ops": f"{_HERE}.functions:installed_ops",
            "torch_info": f"{_HERE}.functions:torch_info",
            "version": "acclimate:__version__",
        },
        "deepspeed.ops": {},
        **dict.fromkeys(("deepspeed.ops.adagrad", "deepspeed.ops.adagrad.cpu_adagrad"), _ADAGRAD),
        **{f"deepspeed.ops.adam{module}": _ADAM for module in ("", ".cpu_adam", ".fused_adam")},
        **dict.fromkeys(("deepspeed.ops.lamb", "deepspeed.ops.lamb.fused_lamb"), _LAMB),
        **{f"deepspeed.ops.lion{module}": _LION for module in ("", ".cpu_lion", ".fused_lion")},
        _BUILDERS: {"OpBuilder": _BUILDER["OpBuilder"]},
        f"{_BUILDERS}.builder": _BUILDER,
        **{module: {} for module in _of_device()},
        "deepspeed.runtime": {},
        "deepspeed.runtime.utils": {
            "noop_context": "contextlib:nullcontext",
            "see_memory_usage": f"{_HERE}.functions:see_memory_usage",
        },
        "deepspeed.utils": _LOGGING,
        "deepspeed.utils.logging": _LOGGING,
        "deepspeed.utils.numa": {"get_numa_cores": f"{_HERE}.functions:get_numa_cores"},
    }


def _others(module: str) -> str | None:
    """Returns the function that looks up any other name of a module, or raises ``AttributeError``."""
    if module in ("deepspeed.comm", "deepspeed.comm.comm"):
        return f"{_HERE}.functions:collective"
    if module in _of_device():
        return f"{_BY_NAME}:of_device"
    return f"{_BY_NAME}:of_this_accelerator" if module == _BUILDERS else None


def listed(module: str) -> set[str]:
    """Returns the names of builders that a module shows in ``dir()``, besides :func:`offered_names`."""
    is_of_device = module in _of_device()
    found: set[str] = resolve_name(f"{_BY_NAME}:builder_names")(module) if is_of_device else set()
    return found


def missing(module: str, name: str) -> str:
    """Returns the message for a DeepSpeed name that acclimate does not offer."""
    return (
        f"{module} has no {name} here: DeepSpeed is not installed, and acclimate offers only some of its "
        f"names; dir({module}) shows which. Install DeepSpeed and start the program with "
        "`acclimate run --deepspeed`: all of it then runs on this accelerator."
    )


class NamesFinder(MetaPathFinder, Loader):
    """Finds and creates the modules of :func:`offered_names`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module in the table; ``None`` for modules outside DeepSpeed, or if installed.

        Raises:
            ModuleNotFoundError: DeepSpeed may have such a module, but the table does not.
        """
        top, _, rest = fullname.partition(".")
        if top != "deepspeed" or (is_installed() if not rest else not _is_ours(sys.modules.get(top))):
            return None
        if fullname in offered_names():
            # All are packages, so that "from module import name" also calls this finder, which can explain.
            return ModuleSpec(fullname, self, origin=_HERE, is_package=True)
        parent, _, name = fullname.rpartition(".")
        # Without name=: with the module's own name, Python would replace this message by its own.
        raise ModuleNotFoundError(missing(parent, name), name=top)

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its names."""
        name = module.__name__
        own, others = offered_names()[name], _others(name)

        def get(wanted: str) -> Any:
            if wanted == "__all__":
                return sorted({*own, *listed(name)})
            if wanted in own:
                value = resolve_name(own[wanted])
                setattr(module, wanted, value)  # the next use does not call this function
                return value
            if f"{name}.{wanted}" in offered_names():  # "import deepspeed" alone gives all of its modules
                return import_module(f"{name}.{wanted}")
            if others is not None and not wanted.startswith("_"):
                return resolve_name(others)(name, wanted)
            raise AttributeError(missing(name, wanted))

        module.__doc__ = "Names of DeepSpeed, for code and extensions that were written for it."
        module.__dict__.update(__getattr__=get, __dir__=lambda: sorted({*vars(module), *own, *listed(name)}))
        if name.startswith(_BUILDERS):
            # Accelerators written for DeepSpeed list the modules in this file's folder.
            module.__file__ = str(Path(__file__).parent / "op_builder" / "__init__.py")


def is_installed() -> bool:
    """Whether another finder finds DeepSpeed as a package with a file."""
    for finder in sys.meta_path:
        if not isinstance(finder, NamesFinder):
            spec = finder.find_spec("deepspeed", None)
            if spec is not None and spec.origin is not None:
                return True
    return False


def _is_ours(module: ModuleType | None) -> bool:
    return isinstance(getattr(module, "__loader__", None), NamesFinder)


def offer() -> bool:
    """Makes ``import deepspeed`` find these names, unless DeepSpeed is installed.

    Returns:
        Whether ``import deepspeed`` gives these names.
    """
    if "deepspeed" in sys.modules:
        return _is_ours(sys.modules["deepspeed"])
    if not any(isinstance(finder, NamesFinder) for finder in sys.meta_path):
        # First in sys.meta_path, because Python would import any folder named deepspeed on its path.
        sys.meta_path.insert(0, NamesFinder())
    return not is_installed()
