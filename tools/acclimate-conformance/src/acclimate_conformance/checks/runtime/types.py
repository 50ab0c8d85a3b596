"""Checks of the types of attributes and results, and of the names of variables among them."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Mapping
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from acclimate.accelerator import CATEGORIES, Accelerator
from acclimate.errors import CompilerNotFoundError, UnsupportedError
from acclimate_conformance.checks.assertions import BrokenPromiseError, require
from acclimate_conformance.checks.check import check

_PLAIN = (bool, int, float, str)
"""Types of which no subclass will do: a ``bool`` is not a size."""


def _attributes() -> dict[str, Any]:
    """By name, the type that the interface states for each attribute."""
    stated: dict[str, Any] = {}
    for category in CATEGORIES:
        hints = get_type_hints(category)
        for name, member in vars(category).items():
            if name.startswith("_"):
                continue
            if isinstance(member, property):
                stated[name] = get_type_hints(member.fget).get("return", Any)
            elif name in hints:
                stated[name] = hints[name]
    return stated


def _questions() -> dict[str, Any]:
    """By name, the type that each method without required arguments returns, if it returns data."""
    stated: dict[str, Any] = {}
    for category in CATEGORIES:
        for name, member in vars(category).items():
            if name.startswith("_") or not inspect.isfunction(member):
                continue
            parameters = list(inspect.signature(member).parameters.values())[1:]
            returned = get_type_hints(member).get("return", Any)
            if all(p.default is not p.empty for p in parameters) and _is_data(returned):
                stated[name] = returned
    return stated


def _is_data(kind: Any) -> bool:
    """Whether a type is made of numbers and text alone."""
    parts = get_args(kind)
    return kind in (*_PLAIN, type(None)) or (bool(parts) and all(p is ... or _is_data(p) for p in parts))


def misfit(value: object, kind: Any, what: str) -> str:
    """The difference between a value and the stated type, as text; empty if there is none."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return ""
    if origin is ClassVar:
        return misfit(value, parts[0], what)
    if origin in (Union, types.UnionType):
        reasons = [misfit(value, part, what) for part in parts]
        return "" if "" in reasons else reasons[0]
    if origin is type:
        bound = parts[0]
        fits = isinstance(value, type) and (bound is Any or issubclass(value, bound))
        return "" if fits else f"{what} is {value!r:.120}, not a class that is a {_name(bound)}"
    base = origin or kind
    if base in (*_PLAIN, tuple, list):
        if type(value) is not base:
            return f"{what} is {value!r:.120}, of type {type(value).__name__} and not {_name(kind)}"
    elif not isinstance(value, base):
        return f"{what} is {value!r:.120}, of type {type(value).__name__} and not {_name(kind)}"
    return _misfit_of_entries(value, parts, what)


def _misfit_of_entries(value: Any, parts: tuple[Any, ...], what: str) -> str:
    if isinstance(value, Mapping):
        entries = [(f"a key of {what}", key, parts[0]) for key in value]
        entries += [(f"{what}[{key!r}]", entry, parts[1]) for key, entry in value.items()]
    elif isinstance(value, (tuple, list)) and parts:
        if isinstance(value, tuple) and ... not in parts and len(value) != len(parts):
            return f"{what} is {value!r:.120}, of {len(value)} entries and not {len(parts)}"
        kinds = parts if isinstance(value, tuple) and ... not in parts else [parts[0]] * len(value)
        entries = [
            (f"{what}[{n}]", entry, kind) for n, (entry, kind) in enumerate(zip(value, kinds, strict=True))
        ]
    else:
        return ""
    return next(filter(None, (misfit(entry, kind, name) for name, entry, kind in entries)), "")


def _name(kind: Any) -> str:
    return (
        kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")
    )


@check(
    *_attributes(),
    promise="Every attribute has the type that the interface states; a string is not a tuple of strings.",
)  # fmt: skip
def types_of_attributes(accelerator: Accelerator) -> None:
    for name, kind in _attributes().items():
        try:
            value = getattr(accelerator, name)
        except UnsupportedError:  # which says that the device does not offer it
            continue
        _require_fit(value, kind, name)


@check(
    *_questions(),
    promise="Every method that returns numbers or text returns them in the types that the interface states.",
)  # fmt: skip
def types_of_results(accelerator: Accelerator) -> None:
    for name, kind in _questions().items():
        try:
            value = getattr(accelerator, name)()
        except (UnsupportedError, CompilerNotFoundError):
            continue
        _require_fit(value, kind, f"{name}()")


def _require_fit(value: object, kind: Any, what: str) -> None:
    reason = misfit(value, kind, what)
    if reason:
        raise BrokenPromiseError(reason)


OF_ONE_HOST = ("PATH", "HOME", "PWD", "OLDPWD", "HOSTNAME", "USER", "SHELL", "TMPDIR", "TERM", "DISPLAY",
                "SSH_CONNECTION", "XDG_RUNTIME_DIR", "_", "RANK", "LOCAL_RANK")  # fmt: skip
"""Variables that describe one host, session or rank; another's would be wrong."""


@check(
    "exported_variable_prefixes", "export_envs", "visible_devices_variable", "visible_devices_envs",
    promise="Prefixes and variables are names; no prefix matches a variable that describes one host or rank.",
)  # fmt: skip
def names_of_variables(accelerator: Accelerator) -> None:
    prefixes = [
        *((f"export_envs()[{n}]", prefix) for n, prefix in enumerate(accelerator.export_envs())),
        *(
            (f"exported_variable_prefixes[{n}]", prefix)
            for n, prefix in enumerate(accelerator.exported_variable_prefixes)
        ),
    ]
    for what, prefix in prefixes:
        _require_name(what, prefix)
        matched = [variable for variable in OF_ONE_HOST if variable.startswith(prefix)]
        require(not matched, f"{what} is {prefix!r}, with which {', '.join(matched)} would be exported")
    limits = [(f"visible_devices_envs()[{n}]", v) for n, v in enumerate(accelerator.visible_devices_envs())]
    if accelerator.visible_devices_variable is not None:
        limits.append(("visible_devices_variable", accelerator.visible_devices_variable))
    for what, variable in limits:
        _require_name(what, variable)
        require(
            variable not in (*OF_ONE_HOST, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
            f"{what} is {variable!r}, which means something else",
        )


def _require_name(what: str, name: object) -> None:
    fits = isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
    require(bool(fits), f"{what} is {name!r}, which is no name of a variable")
