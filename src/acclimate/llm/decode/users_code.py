"""Follows the user's own code in a model: what it reads besides tensors and arguments.

The code of Python, torch, transformers and this package is not followed. Variables that hold numbers, text,
functions or classes are read again before each text (``staleness.py``), and so are attributes of modules.
Code that reads something else, which may change in place, or changes a variable itself, raises.
"""

from __future__ import annotations

import dis
import enum
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from acclimate.llm.decode.description import NotRepresentedError

_KNOWN = {"torch", "transformers", "acclimate", *sys.stdlib_module_names} - {"__main__"}
"""The packages whose code is not followed."""
_CHANGING = {
    "time", "random", "_random", "datetime", "os", "posix", "secrets", "uuid", "threading", "numpy",
    "numpy.random",
}  # fmt: skip
"""Python modules whose functions may answer otherwise at the next call."""
_HIDING = {"globals", "locals", "vars", "eval", "exec", "open", "input", "__import__", "id", "hash"}
"""Python's functions whose results depend on more than the names in the code."""
_FIXED = (
    type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, np.generic,
    logging.Logger,
)  # fmt: skip
_OF_CLASSES = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)


@dataclass(frozen=True)
class Read:
    """A variable that code reads."""

    name: str
    value: Any
    again: Callable[[], Any]
    """Returns what it holds at the time of the call."""

    @property
    def is_current(self) -> bool:
        """Whether it still holds the same."""
        now = self.again()
        if now is self.value:
            return True
        is_fixed = type(now) is type(self.value) and isinstance(now, (*_FIXED, tuple))
        return is_fixed and bool(now == self.value)


def is_known(thing: Any) -> bool:
    """Whether a function or class is Python's, torch's, transformers' or this package's."""
    if isinstance(thing, types.FunctionType):  # not __module__, which a decorator copies
        own = thing.__globals__.get("__name__", "")
    else:
        own = getattr(thing, "__module__", None) or type(thing).__module__
    return own.partition(".")[0] in _KNOWN


def users_classes(module: nn.Module) -> list[type]:
    """Returns the classes of a module that are the user's own."""
    return [kind for kind in type(module).__mro__ if not is_known(kind)]


def variables_read(model: nn.Module) -> list[Read]:
    """Returns the variables that the user's code in a model reads.

    Raises:
        NotRepresentedError: the code reads something that may change in place, or changes a variable.
    """
    modules = list(model.modules())
    walk = _Walk({id(module) for module in modules})
    for module in modules:
        for kind in users_classes(module):
            walk.class_(kind)
        for kind in type(module).__mro__:
            walk.replaced(kind)
        for name, value in vars(module).items():
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                walk.value(type(module).__name__, name, value)
    for module in modules:
        classes = users_classes(module)
        for kind in classes:
            for name in sorted(walk.names & vars(kind).keys()):
                walk.member(kind.__qualname__, name, vars(kind)[name])
        if classes:
            for name in sorted(walk.names & vars(module).keys()):
                walk.attribute(type(module).__name__, name, vars(module)[name])
    return walk.reads


class _Walk:
    """Follows code.

    Args:
        modules: the identities of a model's modules.
    """

    def __init__(self, modules: set[int]) -> None:
        self.reads: list[Read] = []
        self.names: set[str] = set()
        """The names of variables and attributes in the code."""
        self._modules = modules
        self._seen: dict[Any, Any] = {}  # its values keep identities from being reused

    def _is_new(self, value: Any, names: frozenset[str] = frozenset()) -> bool:
        before = len(self._seen)
        self._seen.setdefault((id(value), names), value)
        return len(self._seen) > before

    def class_(self, kind: type) -> None:
        """Follows the functions of a class."""
        if self._is_new(kind):
            for name, member in vars(kind).items():
                is_maker = name == "__init__" and issubclass(kind, nn.Module)  # runs before the program
                if isinstance(member, _OF_CLASSES) and not is_maker:
                    self.member(kind.__qualname__, name, member)

    def replaced(self, kind: type) -> None:
        """Follows those functions of a known class that the user has put there."""
        if is_known(kind) and self._is_new(kind):
            for name, member in vars(kind).items():
                if isinstance(member, types.FunctionType) and not is_known(member):
                    self.member(kind.__qualname__, name, member)

    def member(self, where: str, name: str, member: Any) -> None:
        """Follows what a class holds."""
        if isinstance(member, (staticmethod, classmethod)):
            self.member(where, name, member.__func__)
        elif isinstance(member, property):
            for function in (member.fget, member.fset):
                self.member(where, name, function)
        elif isinstance(member, functools.cached_property):
            self.member(where, name, member.func)
        else:
            self.value(where, name, member)

    def attribute(self, where: str, name: str, value: Any) -> None:
        """Follows what an attribute of a module holds, which is compared before each text."""
        from transformers import GenerationConfig, PretrainedConfig

        if isinstance(value, (Tensor, PretrainedConfig, GenerationConfig)) or id(value) in self._modules:
            return
        if isinstance(value, (list, set, tuple)):
            for item in value:
                self.attribute(where, name, item)
        elif isinstance(value, dict):
            for item in value.values():
                self.attribute(where, name, item)
        elif not type(value).__module__.startswith("acclimate."):
            self.value(where, name, value)

    def value(
        self,
        where: str,
        name: str,
        value: Any,
        names: frozenset[str] = frozenset(),
        again: Callable[[], Any] | None = None,
    ) -> None:
        """Follows what a variable holds, and notes the variable.

        Args:
            where: whose code it is, for messages.
            name: the variable's name.
            value: what it holds.
            names: all names in that code, among which are those of the value's attributes.
            again: returns what the variable holds later; ``None``: it always holds the same.
        """
        if again is not None:
            self.reads.append(Read(name, value, again))
        parts = self._parts(value)
        if parts is not None:
            for part in parts:
                self.value(where, name, part, names)
        elif isinstance(value, type):
            if not is_known(value):
                self.class_(value)
                self._named(where, name, value, names)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.ModuleType) and value.__name__ not in _CHANGING:
            if value.__name__.partition(".")[0] not in _KNOWN:
                self._named(where, name, value, names)
        elif not _is_fixed(value):
            raise NotRepresentedError(f"{where} uses {name}, which may change")

    def _parts(self, value: Any) -> Iterable[Any] | None:
        """Returns the values of which a value consists; ``None``: it is a single one."""
        if isinstance(value, (tuple, frozenset)):
            return value
        if isinstance(value, types.MethodType):
            is_models = id(value.__self__) in self._modules
            return (value.__func__,) if is_models else (value.__func__, value.__self__)
        if isinstance(value, functools.partial):
            return (value.func, value.args, *value.keywords.values())
        return (value.value,) if isinstance(value, enum.Enum) else None

    def _named(self, where: str, name: str, owner: Any, names: frozenset[str]) -> None:
        """Follows those attributes of a Python module or a class that code names."""
        if not names or not self._is_new(owner, names):
            return
        held = vars(owner)
        for attribute in sorted(names & held.keys()):
            if isinstance(held[attribute], (staticmethod, classmethod, property)):
                self.member(where, attribute, held[attribute])
            else:
                again = functools.partial(getattr, owner, attribute, None)
                self.value(where, f"{name}.{attribute}", held[attribute], names, again)

    def _function(self, function: types.FunctionType) -> None:
        if not self._is_new(function):
            return
        where, names = function.__qualname__, frozenset[str]()
        if not is_known(function):
            codes = list(_codes(function.__code__))
            names = frozenset(name for code in codes for name in code.co_names)
            self.names |= names
            self.reads.append(Read(where, code_of(function), functools.partial(code_of, function)))
            loaded = {name for code in codes for name in self._variables(function, code, names)}
            space = function.__globals__
            for name in sorted(loaded):
                if name in space:
                    self.value(where, name, space[name], names, functools.partial(space.get, name))
                elif name in _HIDING:
                    raise NotRepresentedError(f"{where} uses {name}, so that what it reads is unknown")
            self.value(where, "a default", function.__defaults__ or (), names)
            for name, default in (function.__kwdefaults__ or {}).items():
                self.value(where, name, default, names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # it is empty
                continue
            # A decorator of torch or transformers encloses the user's function.
            if not is_known(function) or isinstance(content, types.FunctionType):
                self.value(
                    where, name, content, names, functools.partial(getattr, cell, "cell_contents", None)
                )

    def _variables(
        self, function: types.FunctionType, code: types.CodeType, names: frozenset[str]
    ) -> Iterator[str]:
        """Yields the variables of its file that code reads.

        Raises:
            NotRepresentedError: it changes a variable outside of it, or imports what is not there yet.
        """
        outside = function.__code__.co_freevars
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield step.argval
            changes = step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
            if changes or (step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in outside):
                raise NotRepresentedError(f"{function.__qualname__} changes the variable {step.argval}")
            if step.opname == "IMPORT_NAME":
                self.value(function.__qualname__, step.argval, sys.modules.get(step.argval, object()), names)


def code_of(function: types.FunctionType) -> tuple[Any, ...]:
    """Returns what a function runs, besides the variables of its file."""
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _is_fixed(value: Any) -> bool:
    """Whether a value that is no Python function, class or module can never change."""
    if isinstance(value, types.BuiltinFunctionType):
        owners = type(None), types.ModuleType, type, *_FIXED
        return value.__module__ not in _CHANGING and isinstance(value.__self__, owners)
    # torch's operators and compiled functions, and special forms of typing, for example.
    is_known_function = callable(value) and is_known(type(value)) and not isinstance(value, nn.Module)
    is_cache = isinstance(value, functools._lru_cache_wrapper)
    return isinstance(value, _FIXED) or (is_known_function and not is_cache)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a function's code and that of the functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
