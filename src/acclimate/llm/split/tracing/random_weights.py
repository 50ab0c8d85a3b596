"""Gives random values to the parameters and buffers of modules that run without weights."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import nn

from acclimate.llm.split.tracing.random_inputs import Numbers


def fill(modules: Iterable[nn.Module], left_out: Container[int], numbers: Numbers) -> None:
    """Replaces parameters and buffers on the meta device by random ones.

    Args:
        modules: the modules.
        left_out: the ids of parameters that stay as they are.
        numbers: makes random numbers.
    """
    filled: dict[int, nn.Parameter] = {}
    for module in modules:
        for name, p in module._parameters.items():
            if p is not None and id(p) not in left_out:
                if id(p) not in filled:
                    floating = p.is_floating_point()
                    new = numbers(*p.shape) if floating else torch.zeros_like(p, device="cpu")
                    filled[id(p)] = nn.Parameter(new, floating)
                module._parameters[name] = filled[id(p)]
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                if b.is_floating_point():
                    module._buffers[name] = numbers(*b.shape).to(b.dtype)
                elif b.dtype == torch.bool:
                    module._buffers[name] = torch.ones(b.shape, dtype=b.dtype)
                else:
                    module._buffers[name] = torch.zeros(b.shape, dtype=b.dtype)
            elif b is not None:
                module._buffers[name] = b.cpu()
