"""Checks of memory over steps of training: no layer keeps memory after its backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import NotOfferedError, is_host, require
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.memory.allocations import release, require_figures

_WARM_UPS = 3
_STEPS = 5
_Layer = tuple[Callable[[], nn.Module], tuple[int, ...]]
_LAYERS: dict[str, _Layer] = {
    "Linear": (lambda: nn.Linear(48, 32), (16, 48)),
    "Conv1d": (lambda: nn.Conv1d(8, 6, 3), (4, 8, 33)),
    "Conv2d": (lambda: nn.Conv2d(8, 6, 3, padding=1), (2, 8, 17, 17)),
    "Conv2d of groups": (lambda: nn.Conv2d(8, 8, 3, groups=8, stride=2), (2, 8, 17, 17)),
    "Conv3d": (lambda: nn.Conv3d(4, 3, 3), (2, 4, 7, 7, 7)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(8, 6, 3, stride=2), (2, 8, 9, 9)),
    "LayerNorm": (lambda: nn.LayerNorm(96), (16, 96)),
    "RMSNorm": (lambda: nn.RMSNorm(96), (16, 96)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), (4, 8, 33)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8), (2, 8, 17, 17)),
    "LSTM": (lambda: nn.LSTM(24, 16, num_layers=2), (5, 3, 24)),
    "GRU": (lambda: nn.GRU(24, 16), (5, 3, 24)),
    "MaxPool2d": (lambda: nn.MaxPool2d(3), (2, 8, 17, 17)),
    "AvgPool2d": (lambda: nn.AvgPool2d(3), (2, 8, 17, 17)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(5), (2, 8, 17, 17)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 8, 9, 9)),
    "Dropout": (lambda: nn.Dropout(0.25), (16, 96)),
    "GELU": (nn.GELU, (16, 96)),
    "SiLU": (nn.SiLU, (16, 96)),
    "Softmax": (lambda: nn.Softmax(-1), (16, 96)),
    "PReLU": (nn.PReLU, (16, 96)),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), (2, 17, 32),
    ),
}  # fmt: skip
"""Layers, each with the shape of its inputs."""


class _Embedded(nn.Module):
    """A table of vectors, looked up by what numbers begin with."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(x.detach().abs().mul(7).long().clamp(max=15))
        return found


class _Calls(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def _attention(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x * 2, x, is_causal=True)


def _entropy(x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(x, torch.arange(len(x), device=x.device))


_FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "scaled_dot_product_attention": (_attention, (2, 4, 17, 16)),
    "cross_entropy": (_entropy, (16, 96)),
    "a product of batches": (lambda x: x @ x.mT, (3, 17, 16)),
    "sort": (lambda x: x.sort().values, (16, 96)),
    "topk": (lambda x: x.topk(5).values, (16, 96)),
    "cumsum": (lambda x: x.cumsum(-1), (16, 96)),
    "gather": (lambda x: x.gather(1, x.detach().argsort(1)), (16, 96)),
    "index": (lambda x: x[[0, 3, 3]], (16, 96)),
    "cat": (lambda x: torch.cat([x, x * 2], 1), (16, 96)),
    "a norm": (lambda x: x.norm(dim=-1), (16, 96)),
    "pad": (lambda x: functional.pad(x, (1, 2), mode="reflect"), (4, 8, 33)),
}


def _layers() -> dict[str, _Layer]:
    return (
        _LAYERS
        | {what: (lambda f=f: _Calls(f), shape) for what, (f, shape) in _FUNCTIONS.items()}
        | {
            "Embedding": (lambda: _Embedded(nn.Embedding(16, 32)), (16, 96)),
            "EmbeddingBag": (lambda: _Embedded(nn.EmbeddingBag(16, 32)), (16, 96)),
        }
    )


@check(
    "memory_allocated",
    promise="Steps of training, with each kind of layer, end with as much memory in use as they began.",
    of="operators", timeout_s=240, once=True,
)  # fmt: skip
def no_layer_keeps_memory(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    if is_host(accelerator):
        raise NotOfferedError("a host's figures are those of the whole process")
    device = accelerator.current_device_name()
    release(accelerator)
    for what, (make, shape) in _layers().items():
        layer = make().to(device)
        given = torch.randn(shape).to(device).requires_grad_()

        def step(layer: nn.Module = layer, given: torch.Tensor = given) -> int:
            result = layer(given)
            (result[0] if isinstance(result, tuple) else result).square().sum().backward()
            layer.zero_grad()
            given.grad = None
            del result
            accelerator.synchronize()
            return accelerator.memory_allocated()

        try:
            for _ in range(_WARM_UPS):  # workspaces are made once
                before = step()
        except NotImplementedError:  # whether an operator is there is for others to check
            continue
        after = [step() for _ in range(_STEPS)]
        require(
            after[-1] <= before,
            f"memory_allocated() grows from {before} to {after[-1]} bytes over {_STEPS} steps of {what}, "
            "forward and backward",
        )
