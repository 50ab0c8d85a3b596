"""Split models that train: alone, and inside DDP or FSDP2 on a second mesh dimension."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import torch.distributed as dist
from architectures import randomise, tiny_config
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import acclimate
from acclimate.llm.split import apply_plan, make_plan
from acclimate.llm.split.apply import gather_tensors
from acclimate.llm.split.training import clip_grad_norm
from quick_parameters import quick
from rank_processes import RankProcesses


@pytest.fixture(scope="module")
def four() -> Iterator[RankProcesses]:
    with RankProcesses(4, backend="gloo", environment={"ACCLIMATE_ACCELERATOR": "cpu"}, models=True) as ranks:
        yield ranks


# One key/value head, of which each rank has a copy, and norms per head, of which each uses a part.
def model(**changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    small = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": 48}
    config = tiny_config("qwen3", **small, num_key_value_heads=1, attention_bias=True, **changes)
    torch.manual_seed(0)
    return randomise(AutoModelForCausalLM.from_config(config, dtype=torch.float32)).train()


def loss(module: Any, copy: int) -> Tensor:
    tokens = (torch.arange(14).view(2, 7) * 5 + 11 * copy) % 48
    found: Tensor = -module(tokens).logits.log_softmax(-1)[..., 5].mean()
    return found


def gradients_differ(rank: int, way: str) -> dict[str, float]:
    """How much each gradient differs from the whole model's, on two copies with samples of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    copy = mesh["data"].get_local_rank()
    whole, split = model(), model()
    (sum(loss(whole, sample) for sample in range(2)) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    plan = make_plan(split, 2)
    apply_plan(split, plan, mesh["tensor"])
    wrapped = wrap(split, way, mesh["data"])
    for _ in range(2):  # the second step must not sum what the first did
        split.zero_grad()
        loss(wrapped, copy).backward()
    found = clip_grad_norm(wrapped, plan, mesh["tensor"], 0.5)
    own = {n: full(p.grad) for n, p in split.named_parameters() if p.grad is not None}
    expected = dict(whole.named_parameters())
    differences = {
        name: float((tensor - expected[name].grad).abs().max())
        for name, tensor in gather_tensors(plan, own, mesh["tensor"])
    }
    return {"norm": abs(float(found - norm)), **differences}


def wrap(split: Any, way: str, mesh: DeviceMesh) -> Any:
    if way == "ddp":
        return DistributedDataParallel(split, process_group=mesh.get_group())
    for layer in split.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(split, mesh=mesh)


def full(gradient: Any) -> Tensor:
    found: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def train_with_dropout(rank: int) -> tuple[list[float], list[Tensor]]:
    """The logits and gradients of what all ranks have, with 6 heads on 4 ranks."""
    split = model(num_attention_heads=6, attention_dropout=0.5)
    plan = make_plan(split, 4)
    apply_plan(split, plan, dist.group.WORLD)
    add_dropout(split)
    torch.manual_seed(7)
    logits = split(torch.arange(10).view(2, 5)).logits
    logits.square().mean().backward()
    everywhere = [p.grad for n, p in split.named_parameters() if plan.splits[n].kind == "replicated"]
    return [float(torch.rand(()))], [logits.detach(), *everywhere]


def add_dropout(split: Any) -> None:
    for layer in split.model.layers:
        layer.mlp.register_forward_hook(lambda _, args, output: torch.dropout(output, 0.5, True))


def masks_of_ranks(rank: int) -> Tensor:
    """What dropout leaves of the hidden columns, which are each rank's own."""
    split = model()
    plan = make_plan(split, 4)
    apply_plan(split, plan, dist.group.WORLD)
    seen: list[Tensor] = []
    down = split.model.layers[0].mlp.down_proj
    down.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    mlp = split.model.layers[0].mlp
    mlp.act_fn.register_forward_hook(
        lambda _, args, output: torch.dropout(torch.ones_like(output), 0.5, True)
    )
    mlp.up_proj.register_forward_hook(lambda _, args, output: torch.ones_like(output))
    torch.manual_seed(7)
    split(torch.arange(10).view(2, 5))
    return seen[0].detach()


def load_and_differentiate(rank: int, folder: str) -> dict[str, float]:
    split = acclimate.init_inference(folder, dtype="float32").train()
    whole = model()
    loss(whole, 0).backward()
    loss(split, 0).backward()
    plan = split.tp_plan_applied
    own = {n: p.grad for n, p in split.named_parameters() if p.grad is not None}
    expected = dict(whole.named_parameters())
    return {
        name: float((tensor - expected[name].grad).abs().max())
        for name, tensor in gather_tensors(plan, own, dist.group.WORLD)
    }


@pytest.mark.parametrize("way", quick(("ddp", "fsdp2"), "fsdp2"))
def test_gradients_are_the_whole_models_where_copies_of_a_split_model_have_other_samples(
    way: str, four: RankProcesses
) -> None:
    for found in four.values(gradients_differ, way):
        assert {name: difference for name, difference in found.items() if not difference < 1e-5} == {}


def test_ranks_agree_on_what_all_of_them_have_when_dropout_drops_of_uneven_heads(four: RankProcesses) -> None:
    (first_random, first), *others = four.values(train_with_dropout)
    for random, tensors in others:
        assert random == first_random
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(tensors, first, strict=True))


def test_ranks_drop_different_columns_of_their_own(four: RankProcesses) -> None:
    first, second, *_ = four.values(masks_of_ranks)
    assert first.shape == second.shape
    assert not torch.equal(first, second)


def test_a_model_that_was_loaded_in_slices_has_the_whole_models_gradients(
    four: RankProcesses, tmp_path: Path
) -> None:
    model().save_pretrained(tmp_path)
    for found in four.values(load_and_differentiate, str(tmp_path)):
        assert {name: difference for name, difference in found.items() if not difference < 1e-5} == {}
