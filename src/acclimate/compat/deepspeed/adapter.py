"""Adapts an acclimate accelerator to DeepSpeed's accelerator class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

from acclimate.compat.deepspeed.builders import builder_class, builder_package
from acclimate.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from acclimate.accelerator import Accelerator

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
        f"This release of DeepSpeed uses {name} of its accelerators, which acclimate does not have. Use a "
        "release that docs/deepspeed.md lists, or do without the feature that uses it."
    )


def _method(name: str, answer: _Answer) -> Any:
    def method(self: _Differences, *args: Any, **options: Any) -> Any:
        return answer(self.accelerator, name)(*args, **options)

    method.__name__ = name
    return method


def _property(name: str, answer: _Answer) -> property:
    return property(lambda self: answer(self.accelerator, name))
