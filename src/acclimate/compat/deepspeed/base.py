"""A base class for accelerators that were written for DeepSpeed."""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable
from types import new_class
from typing import Any

from acclimate.accelerator import Accelerator, MixedPrecision
from acclimate.backends import BUILTIN
from acclimate.errors import InvalidBackendError


class _Constructed(ABCMeta):
    """Gives a CPU accelerator the methods of ``CPUAccelerator``, once its constructor has set its name.

    Other accelerators get the defaults, which call ``torch.<device>``; ``torch.cpu`` lacks most of these.
    """

    def __call__(cls, *args: Any, **options: Any) -> Any:
        made: Any = super().__call__(*args, **options)
        if made._name == "cpu":
            made.__class__ = _on_the_host(made.__class__)
        return made


@functools.cache
def _on_the_host(cls: type[Any]) -> type[Any]:
    """Returns the class with CPUAccelerator's methods in place of the general ones."""
    from acclimate.backends.cpu import CPUAccelerator

    if issubclass(cls, CPUAccelerator):
        return cls
    names = ("__module__", "__qualname__", "__doc__")
    members = {name: getattr(cls, name) for name in names}
    # pickle must find the original class under this name, not this one.
    members["__reduce__"] = lambda self: (_host_object, (cls,), vars(self))
    return new_class(cls.__name__, (cls, CPUAccelerator), exec_body=lambda body: body.update(members))


def _host_object(cls: Any) -> Any:
    return object.__new__(_on_the_host(cls))


class DeepSpeedAccelerator(Accelerator, metaclass=_Constructed):
    """DeepSpeed's base class, with a default for everything that a subclass lacks.

    A subclass sets ``_name`` and ``_communication_backend_name``, as DeepSpeed's do; acclimate's ``name``,
    ``device_type``, ``communication_backend`` and ``visible_devices_variable`` are derived from them. A
    method that an older release of DeepSpeed declared with fewer arguments accepts acclimate's as well.
    """

    _name: str | None = None  # type: ignore[assignment] # a subclass sets it
    _communication_backend_name: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, own in list(vars(cls).items()):
            ours = inspect.getattr_static(Accelerator, name, None)
            if not inspect.isfunction(own):
                continue
            if inspect.isfunction(ours):
                setattr(cls, name, _with_our_arguments(cls, own, ours))
            elif name == "amp":  # a method then, a property now
                setattr(cls, name, property(functools.partial(_Amp, amp=own)))

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        # Code checks with isinstance() for an accelerator, and all acclimate accelerators must pass.
        return True if cls is DeepSpeedAccelerator and Accelerator in other.__mro__ else NotImplemented

    @property
    def device_type(self) -> str:
        return self.name.partition(".")[0]

    @property
    def name(self) -> str:
        return self._set("_name")

    @property
    def communication_backend(self) -> str:
        return self._set("_communication_backend_name")

    @property
    def visible_devices_variable(self) -> str | None:
        record = next((record for record in BUILTIN if record.name == self.name), None)
        return record.visible_devices_variable() if record is not None else None

    def _set(self, attribute: str) -> str:
        value: str | None = getattr(self, attribute)
        if value is None:
            raise InvalidBackendError(f"{type(self).__name__} must set {attribute} in its constructor.")
        return value


class _Amp(MixedPrecision):
    """Supports both acclimate's ``acc.amp.autocast(…)`` and the subclass's ``acc.amp()``."""

    def __init__(self, accelerator: Any, amp: Callable[[Any], Any]) -> None:
        super().__init__(accelerator)
        self._amp = functools.partial(amp, accelerator)

    def __call__(self) -> Any:
        return self._amp()


def _with_our_arguments(
    cls: type[Any], own: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a method that accepts both the subclass's arguments and acclimate's.

    An argument that ``own`` lacks is left out if it has its default value. If only ``own`` needs a
    ``device_index``, it gets the current device's. Other calls go to the method that the class overrides.
    """
    theirs, wanted = inspect.signature(own), inspect.signature(ours)
    taken = theirs.parameters
    if any(accepted.kind in (accepted.VAR_KEYWORD, accepted.VAR_POSITIONAL) for accepted in taken.values()):
        return own
    needed = {name for name, accepted in taken.items() if accepted.default is accepted.empty}
    if needed <= {
        name for name, parameter in wanted.parameters.items() if parameter.default is parameter.empty
    } and set(wanted.parameters) <= set(taken):
        return own

    @functools.wraps(own)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        try:
            theirs.bind(self, *args, **options)
        except TypeError:
            pass
        else:
            return own(self, *args, **options)
        given = wanted.bind(self, *args, **options).arguments
        if "device_index" in needed - set(given):
            given["device_index"] = self.current_device()
        left_out = {name: value for name, value in given.items() if name not in taken}
        if needed <= set(given) and all(
            value == wanted.parameters[name].default for name, value in left_out.items()
        ):
            return own(**{name: value for name, value in given.items() if name in taken})
        return getattr(super(cls, self), own.__name__)(*args, **options)

    return method
