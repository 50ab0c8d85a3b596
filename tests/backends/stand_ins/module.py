"""Makes a module of a recorded surface and of what emulates it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from stand_ins.log import note
from stand_ins.surface import Name


class NotEmulatedError(RuntimeError):
    """The vendor's module has this, and the stand-in can do nothing like it."""


class StandInModule(ModuleType):
    """A module with the names of a surface, and no other public one.

    Args:
        name: the module's, such as ``torch.npu``.
        surface: what the real one has.
        emulated: what stands behind the names; what it has for names that the surface lacks is not shown.
        private: what torch itself asks of a device's module under names with an underscore.
    """

    def __init__(
        self, name: str, surface: Mapping[str, Name], emulated: Mapping[str, Any], private: Mapping[str, Any]
    ) -> None:
        super().__init__(name)
        self.__dict__.update(private)
        self._surface = surface
        for attribute, recorded in surface.items():
            emulation = emulated.get(attribute, private.get(attribute))
            if recorded.kind == "module":
                made = _part(f"{name}.{attribute}", recorded, emulation, emulated)
            else:
                made = _make(f"{name}.{attribute}", recorded, emulation)
            if made is not None:
                self.__dict__[attribute] = made

    def __getattr__(self, attribute: str) -> Any:
        """Called for what is not there."""
        recorded = self._surface.get(attribute)
        if recorded is None:
            raise AttributeError(f"the recorded {self.__name__} has no {attribute}")
        raise _not_emulated(f"{self.__name__}.{attribute}")


def _not_emulated(name: str) -> NotEmulatedError:
    note("not-emulated", name)
    return NotEmulatedError(f"{name} exists, and the stand-in does not emulate it")


def internals(module: ModuleType | None) -> dict[str, Any]:
    """What torch's other modules use of one that is replaced, under names that are not public."""
    names = vars(module or ModuleType("")).items()
    return {
        name: value
        for name, value in names
        if name.startswith("_") and (name[1] != "_" or name == "__path__")
    }


def submodules(module: ModuleType | None) -> dict[str, ModuleType]:
    """The modules within one that is replaced; torch's own code goes through them."""
    names = vars(module or ModuleType("")).items()
    return {name: value for name, value in names if isinstance(value, ModuleType)}


def _part(name: str, recorded: Name, emulation: Any, around: Mapping[str, Any]) -> StandInModule:
    """A module within a vendor's, which mostly has functions of the one around it."""
    real = emulation if isinstance(emulation, ModuleType) else None
    own = emulation if isinstance(emulation, dict) else {}
    kept = {**submodules(real), **internals(real)}
    return StandInModule(name, recorded.names, {**around, **own}, kept)


def _make(name: str, recorded: Name, emulation: Any) -> Any:
    """What stands at a name; ``None`` where asking for it should raise."""
    if recorded.kind in ("function", "class") and emulation is None:
        return _refusal(name)
    if isinstance(emulation, type):
        return _bound_class(name, recorded, emulation) if recorded.kind == "class" else emulation
    if callable(emulation):
        return _bound(name, recorded.signature, emulation)
    return emulation


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _not_emulated(name)

    return refuse


def _bound(
    name: str, signature: inspect.Signature | None, emulation: Callable[..., Any]
) -> Callable[..., Any]:
    """The emulation, for the arguments that were recorded: positional ones may have other names there."""

    @functools.wraps(emulation)
    def call(*args: Any, **kwargs: Any) -> Any:
        note("called", name)
        if signature is None:
            return emulation(*args, **kwargs)
        given = _bind(name, signature, args, kwargs)
        return emulation(*given.args, **given.kwargs)

    if signature is not None:  # backends ask which arguments a vendor's function takes
        call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _bind(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        note("wrong-arguments", f"{name}{signature}: {error}")
        raise TypeError(f"{name}{signature} was called with other arguments: {error}") from None


def _bound_class(name: str, recorded: Name, emulation: type[Any]) -> type[Any]:
    """A subclass whose constructor and methods take what was recorded."""
    if issubclass(emulation, BaseException):
        return emulation  # the very type that torch raises
    signature = recorded.signature
    members: dict[str, Any] = {"__module__": name.rpartition(".")[0], "__qualname__": emulation.__name__}

    if signature is not None:
        constructor = "__new__" if emulation.__new__ is not object.__new__ else "__init__"
        made = getattr(emulation, constructor)

        def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
            note("called", name)
            given = _bind(name, signature, args, kwargs)
            return made(self, *given.args, **given.kwargs)

        members[constructor] = construct
        members["__signature__"] = signature
    for method, arguments in recorded.methods.items():
        inherited = inspect.getattr_static(emulation, method, None)
        if inherited is None and arguments is not None:
            members[method] = _refusal(f"{name}.{method}")
        elif arguments is not None and not method.startswith("__"):
            members[method] = _bound_method(f"{name}.{method}", arguments, inherited)
    return type(emulation.__name__, (emulation,), members)


def _bound_method(name: str, signature: inspect.Signature, inherited: Any) -> Any:
    if isinstance(inherited, staticmethod):
        return staticmethod(_bound(name, signature, inherited.__func__))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        note("called", name)
        given = _bind(name, signature, args, kwargs)
        return inherited.__get__(self)(*given.args, **given.kwargs)

    return call
