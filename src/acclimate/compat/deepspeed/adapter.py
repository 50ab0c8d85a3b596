"""Gives DeepSpeed an accelerator of its own class, and op builders under the names that it expects.

``deepspeed.ops.op_builder`` gets the accelerator once, during ``import deepspeed``, and keeps its builders:
a later ``deepspeed.accelerator.set_accelerator`` does not change them. So the accelerator is set as soon as
the module that stores it has run. Importing this module imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from acclimate.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from acclimate.accelerator import Accelerator


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
            from acclimate.selection import get_accelerator

            module.__dict__["ds_accelerator"] = adapt(get_accelerator())

        loader.exec_module = run_and_set
        return spec


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


_Answer: TypeAlias = "Callable[[Accelerator, str], Any]"
"""Returns an accelerator's member of a name, or raises."""

_PINNING = ("pin_memory", "pin_empty", "pin_empty_like", "is_pinned", "unpin_memory")
"""Methods that stay DeepSpeed's, if its base class has them: they count pinned bytes, and use DeepSpeed's own
allocator if ``DS_PIN_MEMORY_BACKEND=native``. Otherwise they call the ``_torch_…`` methods: ours."""
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The visible-devices variable for accelerators that have none: DeepSpeed's launcher always sets the first
variable of the list. DeepSpeed's CPU accelerator returns the same name."""


class _Differences:
    """The members whose form differs between DeepSpeed's interface and acclimate's."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._name = accelerator.device_type  # ZeRO stage 3 uses it as a device name
        self._communication_backend_name = accelerator.communication_backend_name()
        self._compile_backend = accelerator.get_compile_backend()

    def __getattr__(self, name: str) -> Any:
        """Returns members that only acclimate's interface has."""
        if name == "accelerator":  # not set yet, while copy or pickle creates the object
            raise AttributeError(name)
        return getattr(self.accelerator, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return adapt, (self.accelerator,), vars(self)  # each process creates the class itself

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.accelerator.name}>"

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.pin_memory(tensor)

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
        return self.accelerator.pin_empty(tuple(shape), dtype=tensor.dtype)

    def _torch_is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.accelerator.is_pinned(tensor)

    @property
    def _torch_pins_host_memory(self) -> bool:
        return self.accelerator._pins_host_memory()

    def op_builder_dir(self) -> str:
        return builder_package(self._name)

    def get_op_builder(self, class_name: str) -> type[Any]:
        return builder_class(self.accelerator, class_name)

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def visible_devices_envs(self) -> list[str]:
        return self.accelerator.visible_devices_envs() or [_VISIBLE_DEVICES]

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int | str]
    ) -> None:
        devices = ",".join(map(str, local_accelerator_ids))
        current_env.update(dict.fromkeys(self.visible_devices_envs(), devices))


def adapt(accelerator: Accelerator) -> Any:
    """Returns the accelerator as an object of a subclass of DeepSpeed's ``DeepSpeedAccelerator``.

    The object has all members of that class, of any release: acclimate's, else DeepSpeed's default. A member
    that has neither raises ``UnsupportedError`` when it is used. Members that only acclimate's interface has
    work too.
    """
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

    members = {}
    for name, member in inspect.getmembers_static(DeepSpeedAccelerator):
        is_abstract = getattr(member, "__isabstractmethod__", False)
        if hasattr(_Differences, name) or (name.startswith("_") and not is_abstract):
            continue
        if name in _PINNING and not is_abstract:
            continue
        answer = _ours if hasattr(type(accelerator), name) else _refuse if is_abstract else None
        if answer is not None:
            members[name] = _property(name, answer) if isinstance(member, property) else _method(name, answer)
    return type("AcclimateAccelerator", (_Differences, DeepSpeedAccelerator), members)(accelerator)


def _ours(accelerator: Accelerator, name: str) -> Any:
    return getattr(accelerator, name)


def _refuse(accelerator: Accelerator, name: str) -> Any:
    raise UnsupportedError(
        f"This release of DeepSpeed uses {name} of its accelerators, which acclimate does not have. Use an "
        "older release, or do without the feature that uses it."
    )


def _method(name: str, answer: _Answer) -> Any:
    def method(self: _Differences, *args: Any, **options: Any) -> Any:
        return answer(self.accelerator, name)(*args, **options)

    method.__name__ = name
    return method


def _property(name: str, answer: _Answer) -> property:
    return property(lambda self: answer(self.accelerator, name))
