"""Keeps torch.compile from tracing into input and output, which it would run while it compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def outside_graphs(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function that compiled code calls between two graphs, as it is.

    The same as ``torch.compiler.disable``, except that the compiler, which takes a second to import, is only
    imported where something is compiled.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling():  # the compiler takes this way when it traces this very function
            return cast(_Result, torch.compiler.disable(function)(*args, **kwargs))
        return function(*args, **kwargs)

    return call
