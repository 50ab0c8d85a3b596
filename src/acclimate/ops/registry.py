"""Defines ops in torch's registry: schema, effect on shapes, and how to run one without a compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "acclimate"


@functools.cache
def _library() -> torch.library.Library:
    # Kept for the life of the process: when it goes, so do its ops.
    return torch.library.Library(NAMESPACE, "FRAGMENT")


@functools.cache
def define_in_place(schema: str, plain: Callable[..., None], tags: tuple[torch.Tag, ...] = ()) -> Any:
    """Defines an op that changes its arguments and returns nothing; once, however often it is called.

    Args:
        schema: ``"name_(Tensor(a!)[] x, …) -> ()"``.
        plain: the same in torch. It runs on every device for which no native kernel is loaded.
        tags: what else the compiler is told of it.

    Returns:
        The op, to be called.
    """
    name = schema.partition("(")[0]
    library = _library()
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    library.impl(name, plain, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _returns_nothing, lib=library)
    return getattr(torch.ops.acclimate, name).default


def _returns_nothing(*arguments: Any, **options: Any) -> None:
    """What an in-place op does to shapes."""
