"""Training with scaled gradients comes to what it comes to on the host, wherever scale and gradients lie.

A power of two scales exactly, so the same seed has to give the same weights to the last bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from acclimate import Accelerator, get_accelerator
from acclimate.backends.cpu import CPUAccelerator

SIM, HOST = get_accelerator(), CPUAccelerator()
MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.01),
    # Without momentum: torch leaves its buffer unwritten where the first fused step overflows.
    "SGD fused": partial(torch.optim.SGD, lr=0.01, fused=True),
}


def net_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(32, 8)


def weights_and_scale(
    accelerator: Accelerator,
    make_optimizer: MakeOptimizer,
    clip: bool = False,
    move: Callable[[nn.Module], Any] | None = None,
    loss_on_host: bool = False,
    overflow_at: int = -1,
) -> tuple[list[torch.Tensor], float]:
    net, batch = net_and_batch()
    target = batch.sum(1, keepdim=True)
    (move or partial(nn.Module.to, device=accelerator.device_name()))(net)
    optimizer = make_optimizer(net.parameters())
    scaler = accelerator.amp.GradScaler(init_scale=1024.0, growth_interval=4)
    for step in range(10):
        value = batch
        for layer in net.children():
            place = next(layer.parameters(), value).device
            value = layer(value.to(place))
        loss = (value - target.to(value.device)).square().mean()
        if step == overflow_at:
            loss = loss * math.inf
        optimizer.zero_grad()
        scaler.scale(loss.cpu() if loss_on_host else loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach().cpu() for parameter in net.parameters()], scaler.get_scale()


def require_same(
    found: tuple[list[torch.Tensor], float], wanted: tuple[list[torch.Tensor], float], tolerance: float = 0
) -> None:
    assert found[1] == wanted[1]
    for one, other in zip(found[0], wanted[0], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("overflow_at", [-1, 3])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_training_gives_the_weights_and_the_scale_of_the_host(
    name: str, clip: bool, overflow_at: int
) -> None:
    options: dict[str, Any] = {"clip": clip, "overflow_at": overflow_at}
    found = weights_and_scale(SIM, OPTIMIZERS[name], **options)
    require_same(found, weights_and_scale(HOST, OPTIMIZERS[name], **options))


def on_host(net: nn.Module) -> None:
    """All parameters stay on the host, as where an optimizer is offloaded."""


def half_on_host(net: nn.Module) -> None:
    net[0].to("sim")  # type: ignore[operator,index]


def on_two_devices(net: nn.Module) -> None:
    net[0].to("sim:0")  # type: ignore[operator,index]
    net[2].to("sim:1")  # type: ignore[operator,index]


@pytest.mark.parametrize("loss_on_host", [False, True], ids=["", "loss on host"])
@pytest.mark.parametrize("move", [on_host, half_on_host, on_two_devices])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_training_is_right_wherever_gradients_lie(
    name: str, move: Callable[[nn.Module], Any], loss_on_host: bool
) -> None:
    found = weights_and_scale(SIM, OPTIMIZERS[name], move=move, loss_on_host=loss_on_host, clip=True)
    # Clipping adds up the norm device by device, which rounds otherwise.
    require_same(found, weights_and_scale(HOST, OPTIMIZERS[name], clip=True), tolerance=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_offloaded_parameters_get_right_steps_though_the_loss_is_on_the_device(name: str) -> None:
    results = []
    for accelerator in (SIM, HOST):
        weight = torch.full((8,), 2.0, requires_grad=True)
        optimizer = OPTIMIZERS[name]([weight])
        scaler = accelerator.amp.GradScaler(init_scale=1024.0)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((weight.to(accelerator.device_name()) ** 2).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(([weight.detach()], scaler.get_scale()))
    require_same(*results)


def test_several_losses_are_scaled_alike_on_host_and_device() -> None:
    scaler = SIM.amp.GradScaler(init_scale=8.0)
    losses = [torch.ones((), device="sim:0"), torch.ones(()), torch.ones((), device="sim:1")]
    assert [scaled.item() for scaled in scaler.scale(losses)] == [8.0, 8.0, 8.0]


def test_a_scale_that_is_no_power_of_two_is_inverted_to_the_nearest_float() -> None:
    weight = torch.ones(4, device="sim", requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.0), SIM.amp.GradScaler(init_scale=1000.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.cpu(), torch.ones(4))


def test_the_state_of_a_scaler_goes_on_where_it_was() -> None:
    weight = torch.ones(4, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = SIM.amp.GradScaler(init_scale=64.0, growth_interval=2)

    def step(scaler: torch.amp.GradScaler) -> None:
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step(scaler)
    other, copied = SIM.amp.GradScaler(), copy.deepcopy(scaler.state_dict())
    other.load_state_dict(copied)
    for grad_scaler in (scaler, other):
        step(grad_scaler)
        assert grad_scaler.get_scale() == 128.0
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0


# -- a GPT, ported as docs/guide.md says -----------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.widen(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def gpt_losses(accelerator: Accelerator, fused: bool) -> list[float]:
    context, device = 32, accelerator.current_device_name()
    text = torch.tensor(list(("every good boy deserves fudge; all cows eat grass. " * 40).encode()))
    torch.manual_seed(0)
    model = GPT(128, context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=fused)
    scaler = accelerator.amp.GradScaler()
    chosen = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(40):
        for _ in range(2):  # gradients of two batches are summed
            starts = torch.randint(len(text) - context - 1, (8,), generator=chosen).tolist()
            batch = torch.stack([text[start : start + context + 1] for start in starts])
            tokens, targets = (
                accelerator.pin_memory(part.contiguous()).to(device, non_blocking=True)
                for part in (batch[:, :-1], batch[:, 1:])
            )
            with accelerator.amp.autocast(dtype=torch.float16):
                logits = model(tokens)
                loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(2 * loss.item())
    return losses


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_gpt_in_float16_trains_as_on_the_host(fused: bool) -> None:
    found, wanted = gpt_losses(SIM, fused), gpt_losses(HOST, fused)
    assert wanted[-1] < 0.6 * wanted[0]
    assert found == pytest.approx(wanted, rel=0.01)
