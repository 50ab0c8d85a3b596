"""Traces a model, if needed in another dtype or with modules that run without stand-ins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from acclimate.errors import TraceError
from acclimate.llm.split.tracing.random_inputs import richer_inputs
from acclimate.llm.split.tracing.trace import Trace


def traced(model: nn.Module, example: Callable[[nn.Module], Any] | None) -> Trace:
    """Runs the model's copy, with inputs that reach most of it."""
    first = _traced(model, example)
    missed = _unreached(first)
    if example is not None or not missed or first.tokens is None:
        return first
    if any(True for _ in richer_inputs(first.model, first.tokens, first.numbers)):
        with contextlib.suppress(TraceError):  # the text-only run already works
            rich = _traced(model, None, is_rich=True)
            if _unreached(rich) < missed:
                rich.text_inputs = first.inputs
                return rich
    return first


def _unreached(trace: Trace) -> set[str]:
    dims = trace.linears.keys() | trace.opaque_linears
    return {name for name in dims if name not in trace.calls and name not in trace.called_linears}


def _traced(model: nn.Module, example: Callable[[nn.Module], Any] | None, is_rich: bool = False) -> Trace:
    """Runs the model's copy.

    Uses float32 if the model's code works only in float32. A module whose code uses the weights of linear
    modules directly runs without stand-ins and stays whole.
    """
    opaque: list[type[nn.Module]] = []
    while True:
        try:
            return Trace(model, example, opaque=opaque, is_rich=is_rich)
        except TraceError as error:
            first = error
        try:
            return Trace(model, example, torch.float32, opaque, is_rich)
        except TraceError as error:
            module = error.module
            if not isinstance(module, nn.Module) or type(module) in opaque or type(module) is type(model):
                raise first from None
            if not _holds_linears(module):
                raise first from None
            opaque.append(type(module))


def _holds_linears(module: nn.Module) -> bool:
    weights = (
        submodule._parameters.get("weight")
        for submodule in module.modules()
        if not isinstance(submodule, nn.Embedding)
    )
    return any(weight is not None and weight.dim() == 2 for weight in weights)
