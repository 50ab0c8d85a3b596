"""The calls of modules that a run of a model records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor


@dataclass
class Call:
    """One call of a module that a stand-in replaces."""

    name: str
    input: Tensor
    """Its first argument, on the graph."""
    output: Tensor
    """A leaf."""


@dataclass
class Invocation:
    """The arguments of one call of a module that runs unchanged."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Replay:
    """The outputs that stand-ins return while one block runs again, and the inputs that they get."""

    outputs: Mapping[str, Tensor]
    seen: dict[str, list[Tensor]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


Record: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
"""Receives the name and the arguments of a block that is called."""
