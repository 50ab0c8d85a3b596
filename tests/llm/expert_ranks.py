"""Two ranks of a model with experts in MXFP4, each with a part of every expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import acclimate
from acclimate.llm.decode.loop import step_kind
from rank_processes import RankProcesses

IDS = torch.tensor([[0, 5, 9, 17, 40, 3]])


def error(logits: torch.Tensor, expected: Any) -> float:
    """How far logits in bfloat16 are from those of a model in float32."""
    exact = expected(IDS).logits.detach()
    return float((logits - exact).norm() / exact.norm())


@torch.no_grad()
def parts_of_experts(rank: int, path: str) -> tuple[torch.Tensor, str, dict[str, int], Any]:
    model = acclimate.init_inference(path)
    stacks = model.model.layers[1].mlp.experts.packed_stacks
    parts = {name: stack.dequantize() for name, stack in stacks.items()}
    return model(IDS).logits.float(), step_kind(model), dict(model.packing.packed), parts


def check_parts_of_experts(two: RankProcesses, path: Path, whole: Any) -> None:
    """Both ranks compute what the whole model does, and their parts together are its experts, bit for bit."""
    found = two.values(parts_of_experts, str(path))
    for logits, kind, packed, _ in found:
        assert (kind, packed) == ("native", {"mxfp4": 4})
        assert error(logits, whole) < 0.03
    experts = whole.model.layers[1].mlp.experts
    one, other = (parts for *_, parts in found)
    assert torch.equal(torch.cat((one["gate_up_proj"], other["gate_up_proj"]), 2), experts.gate_up_proj)
    assert torch.equal(torch.cat((one["down_proj"], other["down_proj"]), 1), experts.down_proj)
