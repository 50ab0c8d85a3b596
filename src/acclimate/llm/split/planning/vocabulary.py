"""Checks whether an embedding can be split by tokens: each rank looks up its own, and ranks sum them."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import Tensor, nn

from acclimate.llm.split.layers.changes import change_module
from acclimate.llm.split.layers.randomness import RankRandomness
from acclimate.llm.split.plan import Change

ROWS, CUT = 13, 8
TOKENS = tuple(torch.Size(shape) for shape in ((2, 13), (1, 1), (3, 5)))


class _Alone:
    """A rank whose collectives return only its own part."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor[None]


def splits_by_tokens(module: nn.Module) -> bool:
    """Whether a split embedding gives the same results; tries a few tokens if it has its own forward.

    Such a forward may depend on other tokens, or compute an index from a token.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
        return False
    if type(module).forward is nn.Embedding.forward:
        return True
    random = torch.Generator().manual_seed(0)
    weight = torch.rand(ROWS, module.weight.shape[-1], generator=random)
    whole = _with_rows(module, weight, random)
    parts = []
    for rank, (start, stop) in enumerate(((0, CUT), (CUT, ROWS))):
        part = _with_rows(module, weight[start:stop], random)
        part._parameters |= {n: p for n, p in whole._parameters.items() if n != "weight"}
        part._buffers = whole._buffers
        change = Change("vocabulary", width=ROWS, parts=(((0, CUT),), ((CUT, ROWS),)))
        change_module(part, change, _Alone(rank), RankRandomness(part, rank))
        parts.append(part)
    for shape in TOKENS:
        for offset in (0, ROWS - 1):
            tokens = (torch.arange(shape.numel()) * 5 + offset).view(shape) % (ROWS + offset)
            expected = _result(whole, tokens)
            if expected is None and offset == 0:
                return False
            found = [_result(part, tokens) for part in parts]
            if expected is None and all(parent is None for parent in found):
                continue
            if expected is None or found[0] is None or found[1] is None:
                return False
            if expected.shape != found[0].shape or not torch.allclose(expected, found[0] + found[1]):
                return False
    return True


def _with_rows(module: nn.Embedding, weight: Tensor, random: torch.Generator) -> nn.Embedding:
    """Returns a copy of an embedding with a few rows and no hooks; random values if it has none."""
    made = copy.copy(module)
    made._forward_hooks = type(made._forward_hooks)()
    made._forward_pre_hooks = type(made._forward_pre_hooks)()
    made._parameters = {
        name: p if p is None or not p.is_meta else nn.Parameter(torch.rand(p.shape, generator=random))
        for name, p in module._parameters.items()
        if name != "weight"
    }
    made._parameters["weight"] = nn.Parameter(weight)
    made._buffers = {
        name: b
        if b is None or not b.is_meta
        else (
            torch.rand(b.shape, generator=random)
            if b.is_floating_point()
            else torch.zeros_like(b, device="cpu")
        )
        for name, b in module._buffers.items()
    }
    for name, value in vars(module).items():
        if type(value) is int and value == module.weight.shape[0]:
            made.__dict__[name] = len(weight)
    made.padding_idx = None
    return made


def _result(module: nn.Module, tokens: Tensor) -> Tensor | None:
    # A forward may raise anything, for example for tokens beyond the vocabulary.
    with contextlib.suppress(Exception), torch.no_grad():
        found = module(tokens)
        return found if isinstance(found, Tensor) else None
    return None
