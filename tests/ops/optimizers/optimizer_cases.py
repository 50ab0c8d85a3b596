"""What the optimizers' tests share: the optimizers, references to compare with, and tensors to step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acclimate.ops import CPUAdagrad, CPUAdam, CPULion, FusedAdam, FusedLamb, FusedLion

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ODD_SHAPES = ((), (1,), (3,), (15,), (16, 1), (17,), (0,), (63,), (64,), (65,), (7, 11, 13), (4099,))


class ReferenceLion(torch.optim.Optimizer):
    """Lion as in algorithm 2 of arXiv:2302.06675; torch has none."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        )

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                g = -p.grad if group["maximize"] else p.grad
                direction = (m * beta1 + g * (1 - beta1)).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction * group["lr"])
                m.mul_(beta2).add_(g * (1 - beta2))


class ReferenceLamb(torch.optim.Optimizer):
    """LAMB as in algorithm 2 of arXiv:1904.00962, with the trust ratio bounded."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("step", 0)
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                state["step"] += 1
                g = -p.grad if group["maximize"] else p.grad
                m.mul_(beta1).add_(g * (1 - beta1))
                v.mul_(beta2).add_(g * g * (1 - beta2))
                corrected = m / (1 - beta1 ** state["step"])
                u = corrected / ((v / (1 - beta2 ** state["step"])).sqrt() + group["eps"])
                u = u + group["weight_decay"] * p
                ratio = 1.0
                if p.norm() != 0 and u.norm() != 0:
                    ratio = float((p.norm() / u.norm()).clamp(0.01, 10.0))
                p.sub_(u * (group["lr"] * ratio))


@dataclass(frozen=True)
class Case:
    """An optimizer of ours and the one that it has to agree with."""

    name: str
    ours: Callable[..., torch.optim.Optimizer]
    reference: Callable[..., torch.optim.Optimizer]
    has_eps: bool = True


def _torch_adamw(params: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"weight_decay": 0.0, **settings})


def _adam_l2(params: Any, **settings: Any) -> torch.optim.Optimizer:
    return CPUAdam(params, adamw_mode=False, **settings)


CASES = (
    Case("CPUAdam", CPUAdam, _torch_adamw),
    Case("CPUAdam-L2", _adam_l2, torch.optim.Adam),
    Case("FusedAdam", FusedAdam, _torch_adamw),
    Case("CPUAdagrad", CPUAdagrad, torch.optim.Adagrad),
    Case("CPULion", CPULion, ReferenceLion, has_eps=False),
    Case("FusedLion", FusedLion, ReferenceLion, has_eps=False),
    Case("FusedLamb", FusedLamb, ReferenceLamb),
)
RULES = ("CPUAdam", "CPUAdam-L2", "CPUAdagrad", "FusedLion", "FusedLamb")
"""A case for each update rule: on the host, FusedAdam computes as CPUAdam, and CPULion as FusedLion."""


def parameters(
    shapes: Iterable[tuple[int, ...]] = ODD_SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.nn.Parameter]:
    """The same parameters each time."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(*sets: list[torch.nn.Parameter], seed: int) -> None:
    """Gives each set of parameters the same random gradients, in each one's dtype."""
    generator = torch.Generator().manual_seed(seed)
    for group in zip(*sets, strict=True):
        gradient = torch.randn(group[0].shape, generator=generator)
        for parameter in group:
            parameter.grad = gradient.to(parameter.dtype)
