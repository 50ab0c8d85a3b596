"""Defines ops in torch's registry: schema, fake kernel, and fallback for machines without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from acclimate.imports import ForkSafeLock

_NAMESPACE = "acclimate"

# torch refuses a second definition of an op, so one thread defines it and the others wait.
_lock = ForkSafeLock()
_schemas: set[str] = set()
_libraries: list[torch.library.Library] = []


def _library() -> torch.library.Library:
    if not _libraries:
        # Kept for the life of the process: its ops are removed with it.
        _libraries.append(torch.library.Library(_NAMESPACE, "FRAGMENT"))
    return _libraries[0]


def define(schemas: Sequence[str]) -> None:
    """Defines ops that only native code implements. Thread-safe; repeated calls do nothing."""
    with _lock:
        for schema in schemas:
            if schema not in _schemas:
                _library().define(schema)
                _schemas.add(schema)


def define_in_place(schema: str, plain: Callable[..., None], tags: tuple[torch.Tag, ...] = ()) -> Any:
    """Defines an op that changes its arguments and returns nothing. Thread-safe; repeated calls do nothing.

    Args:
        schema: ``"name_(Tensor(a!)[] x, …) -> ()"``.
        plain: the implementation in torch, for every device without a loaded native kernel.
        tags: further tags for the compiler.

    Returns:
        The op, which can be called.
    """
    return _define(schema, plain, _returns_nothing, tags)


def define_functional(schema: str, plain: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines an op that changes nothing. Thread-safe; repeated calls do nothing.

    Args:
        schema: ``"name(Tensor x, …) -> Tensor"``.
        plain: the implementation in torch, for every device without a loaded native kernel.
        fake: returns empty results of the right shapes and dtypes, for the compiler.
    """
    _define(schema, plain, fake)


def _define(
    schema: str, plain: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()
) -> Any:
    name = schema.partition("(")[0]
    with _lock:
        if schema not in _schemas:
            library = _library()
            library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
            library.impl(name, plain, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=library)
            _schemas.add(schema)
        # torch makes the object of an op when it is first asked for, and of threads that ask at the same time
        # each would get another one.
        return getattr(torch.ops.acclimate, name).default


def implement(name: str, device_type: str, function: Callable[..., Any]) -> None:
    """Computes a defined op with another function for tensors of a device. To be called once."""
    with _lock:
        torch.library.impl(f"{_NAMESPACE}::{name}", device_type, function, lib=_library())


def _returns_nothing(*arguments: Any, **options: Any) -> None:
    """The fake kernel of an in-place op."""
