"""Splits a tiny model over threads, and compares what it gives with the whole one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from architectures import tiny_model
from thread_ranks import ThreadRanks, on_threads
from torch import nn

from acclimate.parallel import Plan, apply_plan, gather, make_plan

PROMPT, NEW_TOKENS = 9, 12


@dataclass
class Comparison:
    plan: Plan
    error: float
    """The largest difference of a logit on any rank."""
    same_text: bool
    same_weights: bool
    largest_share: float
    """Of the parameters besides embeddings, on the rank that has most."""


def compare(name: str, size: int, **changes: Any) -> Comparison:
    model = tiny_model(name, **changes)
    plan = make_plan(model, size)
    with torch.no_grad():
        logits = model(tokens(2)).logits
    text = generate(model)
    whole = model.state_dict()

    def work(ranks: ThreadRanks) -> tuple[float, bool, bool, float]:
        part = apply_plan(copy.deepcopy(model), plan, ranks)
        with torch.no_grad():
            error = float((part(tokens(2)).logits - logits).abs().max())
        same_text = torch.equal(generate(part), text)
        same_weights = all(torch.equal(whole[n], each) for n, each in gather(plan, part, ranks))
        return error, same_text, same_weights, own_parameters(part) / own_parameters(model)

    found = on_threads(size, work)
    errors, texts, weights, shares = zip(*found, strict=True)
    return Comparison(plan, max(errors), all(texts), all(weights), max(shares))


def tokens(batch: int) -> torch.Tensor:
    return torch.arange(batch * PROMPT).view(batch, PROMPT) * 7 % 150 + 3


def generate(model: Any) -> torch.Tensor:
    found = model.generate(tokens(1), max_new_tokens=NEW_TOKENS, do_sample=False)
    assert isinstance(found, torch.Tensor)
    return found


def own_parameters(model: nn.Module) -> int:
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]
    embeddings = {id(each.weight) for each in ends if each is not None}
    return sum(p.numel() for p in model.parameters() if id(p) not in embeddings)
