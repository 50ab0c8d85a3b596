"""Checks of data types on larger tensors: batches, strides, many elements, layers of models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch.nn import functional

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    TOLERANCE,
    device_names,
    distance,
    equal,
    require,
    require_close,
    short,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import numbers, supported

_Operation = Callable[..., torch.Tensor]

_PRODUCTS: dict[str, tuple[_Operation, tuple[int, ...], tuple[int, ...]]] = {
    "a product of larger matrices": (torch.matmul, (193, 320), (320, 131)),
    "a batched product": (torch.bmm, (5, 17, 33), (5, 33, 9)),
    "a product of a batch and a matrix": (torch.matmul, (3, 4, 19, 32), (32, 24)),
    "a product of two batches that broadcast": (torch.matmul, (4, 1, 8, 40), (1, 3, 40, 6)),
    "a product of a matrix and a vector": (torch.mv, (65, 48), (48,)),
    "a product of a row and a matrix": (torch.matmul, (1, 512), (512, 70)),
    "a dot product": (torch.dot, (1000,), (1000,)),
    "an outer product": (torch.outer, (33,), (21,)),
    "a product with a transposed matrix": (lambda a, b: a @ b.transpose(-2, -1), (6, 20, 36), (6, 28, 36)),
    "a product of every second column and row": (lambda a, b: a[:, ::2] @ b[::2], (40, 64), (64, 24)),
    "a product of an expanded matrix": (
        lambda a, b: a.expand(4, -1, -1) @ b.expand(4, -1, -1),
        (10, 30),
        (30, 12),
    ),
    "an einsum over heads": (
        lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b),
        (2, 3, 9, 16),
        (2, 3, 11, 16),
    ),
}


@check(
    "supported_dtypes",
    promise="Every supported dtype multiplies large, batched, transposed and strided matrices correctly.",
    timeout_s=240,
)  # fmt: skip
def products_of_any_shape(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    for dtype in supported(accelerator):
        for what, (multiply, left_shape, right_shape) in _PRODUCTS.items():
            left, right = numbers(*left_shape), numbers(*right_shape, seed=1)
            product = multiply(left.to(dtype).to(device), right.to(dtype).to(device))
            require(product.dtype == dtype, f"{what} of {short(dtype)} is {short(product.dtype)}")
            require_close(product, multiply(left, right), dtype, what)


_REDUCTIONS: dict[str, _Operation] = {
    "a sum over the last dimension": lambda x: x.sum(-1),
    "a sum over the first dimension": lambda x: x.sum(0),
    "a sum of everything": lambda x: x[0].abs().sum(),
    "a mean": lambda x: x[:, :256].abs().mean(-1),
    "a maximum": lambda x: x.amax(-1),
    "a minimum over the first dimension": lambda x: x.amin(0),
    "a norm": lambda x: x[:, :200].norm(dim=-1),
    "a running sum": lambda x: x[:, :96].cumsum(-1),
    "a log-softmax": lambda x: x[:, :300].log_softmax(-1),
    "a product with a mask": lambda x: x.masked_fill(x > 1, 0).sum(-1),
    "a sum of a transposed tensor": lambda x: x.t().sum(-1),
    "a sum of every third column": lambda x: x[:, ::3].sum(-1),
}


@check(
    "supported_dtypes",
    promise="Every supported dtype reduces many elements, over any dimension and stride, within its "
    "precision.",
)  # fmt: skip
def reductions(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    values = numbers(33, 8192 + 5)
    for dtype in supported(accelerator):
        on_device = values.to(dtype).to(device)
        for what, reduce in _REDUCTIONS.items():
            require_close(reduce(on_device), reduce(values), dtype, what)
        highest = on_device.argmax(-1).cpu()
        require(
            equal(values.gather(1, highest[:, None])[:, 0], values.amax(-1)),
            f"argmax of {short(dtype)} gives wrong places",
        )


REARRANGED: dict[str, _Operation] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.t(),
    "every second column": lambda x: x[:, ::2],
    "a block of it": lambda x: x[3:20, 5:41],
    "in reverse": lambda x: x.flip(0, 1),
    "one column": lambda x: x[:, 7],
    "expanded": lambda x: x[:1].expand(9, -1),
    "permuted": lambda x: x[:40].view(4, 10, -1).permute(2, 0, 1),
    "a single element": lambda x: x[1, 1],
    "nothing of it": lambda x: x[:0],
}


@check(
    "supported_dtypes", "synchronize",
    promise="Copying tensors of any dtype, size and stride to the device and back keeps their values.",
    timeout_s=240,
)  # fmt: skip
def transfers(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    exact = numbers(61, 517)
    large = numbers((1 << 20) + 7)
    others = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    for dtype in (*accelerator.supported_dtypes(), *others):
        values = (exact.abs() * 4 if dtype in others else exact).to(dtype)
        there = values.to(device)
        for what, rearranged in REARRANGED.items():
            wanted = rearranged(values)
            for how, found in (
                ("copied to it", wanted.to(device)),
                ("taken on it", rearranged(there)),
                ("made contiguous on it", rearranged(there).contiguous()),
                ("cloned on it", rearranged(there).clone()),
            ):
                require(
                    equal(found, wanted),
                    f"a matrix of {short(dtype)}, {what}, {how} and back, has other values",
                )
            target = torch.zeros_like(there)
            rearranged(target).copy_(wanted) if what not in {"expanded", "in reverse"} else None
            require(
                what in {"expanded", "in reverse"} or equal(rearranged(target), wanted),
                f"writing to a matrix of {short(dtype)} on the device, {what}, gives other values",
            )
    for dtype in (torch.float32, torch.int64, torch.uint8):
        values = large.to(dtype) if dtype.is_floating_point else (large.abs() * 4).to(dtype)
        there = values.to(device)
        require(
            equal(there, values),
            f"{len(values)} elements of {short(dtype)} change when copied",
        )
        joined = torch.cat([there, there[:5]])
        require(equal(joined[-6:], torch.cat([values[-1:], values[:5]])), f"joining {short(dtype)} is wrong")
    # More than drivers move at once, which is up to 64 MiB, from and to no boundary of a page.
    bytes_of_host = torch.arange(_LONG // 4, dtype=torch.int32).view(torch.uint8)[3:-2]
    there = bytes_of_host.to(device)
    beside = torch.zeros(_LONG, dtype=torch.uint8, device=device)
    beside[1 : len(there) + 1].copy_(there)
    for how, found in (
        ("copied to the device", there),
        ("cloned", there.clone()),
        ("copied to another device", there.to(device_names(accelerator)[0], non_blocking=True)),
        ("copied to a part of a tensor", beside[1 : len(there) + 1]),
    ):
        require(equal(found, bytes_of_host), f"{len(there)} bytes change when they are {how}")
    require(int(beside[0]) == int(beside[-1]) == 0, f"a copy of {len(there)} bytes writes beside its target")
    whole = torch.tensor([2**40 + 1, -(2**62), 2**53 + 1])
    require(equal(whole.to(device), whole), "large int64 numbers change when copied to the device and back")


_LONG = (1 << 26) + 4096
"""Bytes."""


def _attention(dimension: int) -> torch.nn.Module:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward = torch.nn.Linear(dimension, 3 * dimension)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.inward(x).unflatten(-1, (3, 2, dimension // 2)).permute(2, 0, 3, 1, 4)
            query, key, value = parts
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    return Attention()


class _Embedded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table((x.abs() * 4).long()[..., 0])
        return rows


class _Classified(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(16, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(x)
        targets = torch.arange(logits.shape[0] * logits.shape[1], device=x.device) % 11
        return functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")


_LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "a linear layer with a bias": lambda: torch.nn.Linear(16, 24),
    "a layer norm": lambda: torch.nn.LayerNorm(16),
    "an embedding": _Embedded,
    "an attention layer": lambda: _attention(16),
    "a cross entropy": _Classified,
    "a feed-forward block": lambda: torch.nn.Sequential(
        torch.nn.Linear(16, 40), torch.nn.GELU(), torch.nn.Linear(40, 16), torch.nn.SiLU()
    ),
    "a convolution": lambda: torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 6)), torch.nn.Conv2d(1, 3, 3, padding=1)
    ),
}


@check(
    "supported_dtypes",
    promise="Common layers give right results and gradients on batches in every supported dtype.",
    timeout_s=240, once=True,
)  # fmt: skip
def layers(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    inputs = numbers(4, 6, 16)
    for dtype in supported(accelerator):
        allowed = 4 * TOLERANCE[dtype]
        for what, make in _LAYERS.items():
            if what == "a convolution" and dtype == torch.float64:
                continue  # models do not use it, and libraries of convolutions lack it
            reference = make().double()
            with torch.no_grad():
                for seed, parameter in enumerate(reference.parameters()):
                    parameter.copy_(numbers(*parameter.shape, seed=seed + 3) / 4)
            found, gradients = _run(
                copy.deepcopy(reference).to(dtype).to(device), inputs.to(dtype).to(device)
            )
            wanted, wanted_gradients = _run(reference, inputs)
            apart = distance(found, wanted)
            require(apart <= allowed, f"the result of {what} in {short(dtype)} is off by {apart:.1e}")
            for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
                apart = distance(gradient, wanted_gradient)
                require(apart <= allowed, f"a gradient of {what} in {short(dtype)} is off by {apart:.1e}")


def _run(module: torch.nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result, and the gradients of its mean square for the inputs and the parameters."""
    given = inputs.detach().clone().requires_grad_()
    result = module(given)
    wanted = [given, *module.parameters()]
    gradients = torch.autograd.grad(result.square().mean(), wanted, allow_unused=True)
    return result, [gradient for gradient in gradients if gradient is not None]
