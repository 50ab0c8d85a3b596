"""The recorded surface of a vendor's module: its names, and the arguments of each."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SURFACES = Path(__file__).parent.parent / "surfaces"


@dataclass(frozen=True)
class Name:
    """One name of a module."""

    kind: str
    """``function``, ``class``, ``module``, ``value``; ``reexport`` where its arguments could not be read."""
    signature: inspect.Signature | None = None
    methods: Mapping[str, inspect.Signature | None] = field(default_factory=dict)
    """Of a class, without ``self``; ``None`` for what is no method."""
    names: Mapping[str, Name] = field(default_factory=dict)
    """Of a module."""


@dataclass(frozen=True)
class Surface:
    """One module of one release of a package."""

    package: str
    version: str
    names: Mapping[str, Name]


def read_surface(file: str) -> Surface:
    """Reads a recorded surface.

    Args:
        file: its name without ``.json``.
    """
    recorded = json.loads((SURFACES / f"{file}.json").read_text())
    return Surface(recorded["package"], recorded["version"], _names(recorded["names"]))


def read_signature(text: str) -> inspect.Signature:
    """The arguments that a recorded text such as ``(device=None, **kwargs)`` says; defaults are left out.

    A leading ``static``, ``self`` or ``cls`` is not an argument of who calls.
    """
    declared = ast.parse(f"def f{text.removeprefix('static ')}: ...").body[0]
    if not isinstance(declared, ast.FunctionDef):
        raise ValueError(f"{text!r} is not a list of arguments")
    arguments = declared.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parameters = [
        _parameter(argument.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, index < required)
        for index, argument in enumerate(positional)
    ]
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL, True))
    parameters += [
        _parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default is None)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD, True))
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    return inspect.Signature(parameters)


def _parameter(name: str, kind: Any, required: bool) -> inspect.Parameter:
    # What the default is does not matter: who leaves the argument out gets the emulation's.
    return inspect.Parameter(name, kind, default=inspect.Parameter.empty if required else ...)


def _names(recorded: Mapping[str, Any]) -> dict[str, Name]:
    return {name: _name(entry) for name, entry in recorded.items()}


def _name(entry: Mapping[str, Any]) -> Name:
    methods = entry.get("methods", {})
    return Name(
        entry["kind"],
        _optional(entry.get("signature")),
        {name: _optional(text) for name, text in methods.items()},
        _names(entry.get("names", {})),
    )


def _optional(text: str | None) -> inspect.Signature | None:
    return None if text is None else read_signature(text)
