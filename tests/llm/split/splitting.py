"""Splits a tiny model over threads, and compares what it gives with the whole one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from architectures import inputs, prompt, tiny_model
from torch import nn

from acclimate.llm.split import Plan, apply_plan, gather, make_plan
from acclimate.llm.split.apply import put_together
from acclimate.llm.split.collectives import ThreadRanks, on_threads

NEW_TOKENS = 12


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
        logits = model(**inputs(name, 2)).logits
    text = generate(model, name)
    whole = model.state_dict()

    def work(ranks: ThreadRanks) -> tuple[float, bool, bool, float]:
        part = apply_plan(copy.deepcopy(model), plan, ranks)
        with torch.no_grad():
            error = float((part(**inputs(name, 2)).logits - logits).abs().max())
        same_text = torch.equal(generate(part, name), text)
        same_weights = all(torch.equal(whole[n], tensor) for n, tensor in gather(plan, part, ranks))
        return error, same_text, same_weights, own_parameters(part) / own_parameters(model)

    found = on_threads(size, work)
    errors, texts, weights, shares = zip(*found, strict=True)
    return Comparison(plan, max(errors), all(texts), all(weights), max(shares))


def generate(model: Any, name: str) -> torch.Tensor:
    found = model.generate(**prompt(name, 1), max_new_tokens=NEW_TOKENS, do_sample=False)
    assert isinstance(found, torch.Tensor)
    return found


def own_parameters(model: nn.Module) -> int:
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    embeddings = {id(table.weight) for table in [*tables, *([head] if head is not None else [])]}
    return sum(p.numel() for p in model.parameters() if id(p) not in embeddings)


def worst_gradient(name: str, size: int, *, is_frozen_first: bool = False, **changes: Any) -> float:
    """The largest relative difference of a parameter's gradient, put together from the ranks'."""
    model = tiny_model(name, **changes)
    plan = make_plan(model, size)
    parts = [copy.deepcopy(model) for _ in range(size)]
    loss(model, name).backward()
    whole = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def work(ranks: ThreadRanks) -> float:
        part = apply_plan(parts[ranks.rank].requires_grad_(not is_frozen_first), plan, ranks)
        part.requires_grad_(True)
        loss(part, name).backward()
        own = dict(part.named_parameters(remove_duplicate=False))
        worst = 0.0
        for n, expected in whole.items():
            gradient = own[n].grad if n in own else None
            if plan.splits[n].kind == "replicated":
                assert gradient is not None, n
            else:
                gradient = put_together(gradient, plan.splits[n], ranks, expected)
            worst = max(
                worst, float((gradient - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
            )
        return worst

    return max(on_threads(size, work))


def loss(model: Any, name: str) -> torch.Tensor:
    found = -model(**inputs(name, 2)).logits.float().log_softmax(-1)[..., 5].mean()
    assert isinstance(found, torch.Tensor)
    return found
