"""Checks that a call does not depend on other calls: on their options, their inputs, or their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import note_of_lacks, require
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.operations import LAYERS, REDUCTIONS, Operation, values
from acclimate_conformance.checks.dtypes.operators import _flat, require_alike
from acclimate_conformance.checks.target import blamed

_Options = tuple[dict[str, Any], ...]
_OPTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], _Options]] = {
    "layer_norm": (
        lambda x, w, b, **o: functional.layer_norm(x, (8,), w, b, **o),
        ((4, 8), (8,), (8,)),
        ({"eps": 1e-5}, {"eps": 1.0}, {"eps": 0.1}),
    ),
    "rms_norm": (
        lambda x, w, **o: functional.rms_norm(x, (8,), w, **o),
        ((4, 8), (8,)),
        ({"eps": 1e-5}, {"eps": 1.0}, {}),
    ),
    "group_norm": (
        functional.group_norm,
        ((3, 8, 2),),
        ({"num_groups": 2}, {"num_groups": 4}, {"num_groups": 2, "eps": 1.0}),
    ),
    "batch_norm": (
        lambda x, **o: functional.batch_norm(x, None, None, training=True, **o),
        ((4, 8),),
        ({"eps": 1e-5}, {"eps": 1.0}),
    ),
    "softmax": (torch.softmax, ((5, 5),), ({"dim": 0}, {"dim": 1})),
    "log_softmax": (torch.log_softmax, ((5, 5),), ({"dim": 0}, {"dim": 1})),
    "sum": (torch.sum, ((5, 5),), ({"dim": 0}, {"dim": 1}, {"dim": (0, 1)}, {"dim": 0, "keepdim": True})),
    "amax": (torch.amax, ((5, 5),), ({"dim": 0}, {"dim": 1})),
    "cumsum": (torch.cumsum, ((5, 5),), ({"dim": 0}, {"dim": 1})),
    "var": (torch.var, ((5, 5),), ({"dim": 0}, {"dim": 0, "correction": 0}, {"dim": 1, "correction": 2})),
    "norm": (
        torch.linalg.vector_norm,
        ((5, 5),),
        ({"ord": 1, "dim": 0}, {"ord": 2, "dim": 0}, {"ord": 3, "dim": 1}),
    ),
    "sort": (
        lambda x, **o: x.sort(**o).values,
        ((5, 5),),
        ({"dim": 0}, {"dim": 1}, {"dim": 1, "descending": True}),
    ),
    "topk": (
        lambda x, **o: x.topk(2, **o).values,
        ((5, 5),),
        ({"dim": 0}, {"dim": 1}, {"dim": 1, "largest": False}),
    ),
    "add": (torch.add, ((5, 5), (5, 5)), ({}, {"alpha": 2}, {"alpha": -0.5})),
    "addmm": (torch.addmm, ((5, 5), (5, 5), (5, 5)), ({}, {"beta": 0.5}, {"alpha": 2}, {"beta": 0})),
    "addcmul": (torch.addcmul, ((5,), (5,), (5,)), ({}, {"value": 2}, {"value": -1})),
    "div": (torch.div, ((5,), (5,)), ({}, {"rounding_mode": "floor"}, {"rounding_mode": "trunc"})),
    "clamp": (torch.clamp, ((5, 5),), ({"min": 0}, {"max": 1}, {"min": -1, "max": 0.5})),
    "round": (torch.round, ((5, 5),), ({}, {"decimals": 1}, {"decimals": -1})),
    "gelu": (functional.gelu, ((5, 5),), ({}, {"approximate": "tanh"})),
    "leaky_relu": (functional.leaky_relu, ((5, 5),), ({"negative_slope": 0.5}, {"negative_slope": 0.25})),
    "elu": (functional.elu, ((5, 5),), ({"alpha": 1.0}, {"alpha": 3.0})),
    "softplus": (functional.softplus, ((5, 5),), ({"beta": 1}, {"beta": 3}, {"threshold": 1})),
    "hardtanh": (functional.hardtanh, ((5, 5),), ({}, {"min_val": -3.0, "max_val": 2.0})),
    "threshold": (
        functional.threshold,
        ((5, 5),),
        ({"threshold": 0.5, "value": 9.0}, {"threshold": 1.5, "value": 2.0}),
    ),
    "linear": (
        lambda x, w, b, bias: functional.linear(x, w, b if bias else None),
        ((4, 5), (3, 5), (3,)),
        ({"bias": True}, {"bias": False}),
    ),
    "conv1d": (
        functional.conv1d,
        ((2, 4, 9), (4, 4, 3)),
        ({"padding": 1}, {"padding": 2, "dilation": 2}, {"stride": 1, "padding": 1}),
    ),
    "conv2d": (
        functional.conv2d,
        ((2, 4, 7, 7), (4, 1, 3, 3)),
        ({"groups": 4, "padding": 1}, {"groups": 4, "padding": 2, "dilation": 2}, {"groups": 4, "stride": 2}),
    ),
    "max_pool2d": (
        functional.max_pool2d,
        ((2, 3, 8, 8),),
        (
            {"kernel_size": 2},
            {"kernel_size": 3, "stride": 2, "padding": 1},
            {"kernel_size": 2, "ceil_mode": True},
        ),
    ),
    "avg_pool2d": (
        lambda x, **o: functional.avg_pool2d(x, 3, 2, 1, **o),
        ((2, 3, 8, 8),),
        ({}, {"count_include_pad": False}, {"divisor_override": 2}),
    ),
    "interpolate": (
        lambda x, **o: functional.interpolate(x, (6, 4), **o),
        ((2, 3, 4, 6),),
        ({}, {"mode": "bilinear"}, {"mode": "bilinear", "align_corners": True}, {"mode": "bicubic"}),
    ),
    "grid_sample": (
        lambda x, g, **o: functional.grid_sample(x, g / 3, align_corners=False, **o),
        ((2, 3, 4, 5), (2, 3, 2, 2)),
        ({}, {"mode": "nearest"}, {"padding_mode": "border"}, {"padding_mode": "reflection"}),
    ),
    "pad": (
        lambda x, **o: functional.pad(x, (1, 2), **o),
        ((2, 3, 6),),
        ({}, {"value": 3.0}, {"mode": "reflect"}, {"mode": "replicate"}, {"mode": "circular"}),
    ),
    "attention": (
        functional.scaled_dot_product_attention,
        ((2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        ({}, {"is_causal": True}, {"scale": 0.1}, {"scale": 1.0, "is_causal": True}),
    ),
    "cross_entropy": (
        lambda x, **o: functional.cross_entropy(x, x.detach().argmin(1), **o),
        ((6, 5),),
        ({}, {"reduction": "sum"}, {"label_smoothing": 0.25}, {"ignore_index": 2}, {"reduction": "none"}),
    ),
    "smooth_l1_loss": (
        functional.smooth_l1_loss,
        ((6, 5), (6, 5)),
        ({}, {"beta": 3.0}, {"reduction": "sum"}),
    ),
    "huber_loss": (functional.huber_loss, ((6, 5), (6, 5)), ({}, {"delta": 0.25}, {"reduction": "sum"})),
    "triu": (torch.triu, ((5, 5),), ({}, {"diagonal": 1}, {"diagonal": -2})),
    "roll": (torch.roll, ((5, 5),), ({"shifts": 1, "dims": 0}, {"shifts": 1, "dims": 1}, {"shifts": 2})),
    "index_add": (
        lambda x, y, **o: x.index_add(0, torch.tensor([1, 0, 1], device=x.device), y[:3], **o),
        ((5, 5), (5, 5)),
        ({}, {"alpha": 3}),
    ),
    "scatter_reduce": (
        lambda x, y, **o: x.scatter_reduce(0, (y.detach() > 0).long(), y, **o),
        ((5, 5), (5, 5)),
        ({"reduce": "sum"}, {"reduce": "amax"}, {"reduce": "mean", "include_self": False}),
    ),
    "embedding_bag": (
        lambda w, **o: functional.embedding_bag(torch.tensor([[0, 1], [3, 3]], device=w.device), w, **o),
        ((5, 4),),
        ({}, {"mode": "sum"}, {"mode": "max"}, {"padding_idx": 3}),
    ),
    "cdist": (torch.cdist, ((4, 5), (3, 5)), ({"p": 1.0}, {"p": 2.0}, {"p": float("inf")})),
    "quantile": (
        lambda x, **o: torch.quantile(x, 0.3, **o),
        ((5, 5),),
        ({"dim": 0}, {"dim": 1}, {"dim": 1, "interpolation": "lower"}),
    ),
    "lerp": (torch.lerp, ((5,), (5,)), ({"weight": 0.25}, {"weight": 2.0})),
    "glu": (functional.glu, ((4, 4),), ({"dim": 0}, {"dim": 1})),
    "one_hot": (
        lambda x, **o: functional.one_hot((x.detach() > 0).long(), **o),
        ((5,),),
        ({"num_classes": 2}, {"num_classes": 4}),
    ),
}
"""Operators with the shapes that they are given, and options that are taken in turn."""


@check(
    "supported_dtypes",
    promise="An operator obeys the options of each call, though calls before it had the same tensors and "
    "others, "
    "and so does its gradient.",
    once=True,
)  # fmt: skip
def options_are_those_of_the_call(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    lacking: set[str] = set()
    for name, (function, shapes, options) in _OPTIONS.items():
        here = [values(*shape, seed=n + 1) + 0.125 for n, shape in enumerate(shapes)]
        there = [tensor.to(device) for tensor in here]
        for turn, chosen in enumerate((*options, *options[::-1])):
            wanted = _with_gradients(function, here, chosen)
            try:
                found = _with_gradients(function, there, chosen)
            except NotImplementedError:
                lacking.add(name)
                break
            told = ", ".join(f"{key}={value!r}" for key, value in chosen.items())
            for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
                whose = f"{'a gradient of ' * (number > 0)}{name}({told})"
                what = f"{whose} in call {turn + 1}, after other options,"
                require_alike(ours, theirs, what, by_element=False)
    return note_of_lacks(lacking)


def _with_gradients(
    function: Callable[..., Any], given: list[torch.Tensor], options: dict[str, Any]
) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    result = function(*leaves, **options)
    if not result.requires_grad:
        return [result]
    weights = (torch.arange(1, result.numel() + 1).reshape(result.shape) % 7 - 2.5).to(result.device)
    slopes = torch.autograd.grad(result, leaves, weights, allow_unused=True)
    return [result, *(slope for slope in slopes if slope is not None)]


@check(
    "supported_dtypes",
    promise="The gradients of a call are those of its own inputs, though the operator was called with "
    "others, of "
    "the same shapes, before backward().",
    once=True,
)  # fmt: skip
def gradients_are_those_of_their_call(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    lacking: set[str] = set()
    for name, operation in {**LAYERS, **REDUCTIONS}.items():
        # The host first: a number that it refuses, such as a negative chance, may end a device's work.
        try:
            _ = [_backward(*_called(operation, "cpu", factor)) for factor in (1.0, -0.5)]
        except RuntimeError:
            continue
        try:
            with blamed(accelerator, name):
                alone = _called(operation, device, 1.0)
                wanted = _backward(*alone)
                first = _called(operation, device, 1.0)
                second = _called(operation, device, -0.5)
                found = _backward(*first)
                _backward(*second)
        except NotImplementedError:
            lacking.add(name)
            continue
        except RuntimeError:  # it has no gradients, as other checks compare with the host
            continue
        for ours, theirs in zip(found, wanted, strict=True):
            same = ours.shape == theirs.shape and torch.allclose(
                ours.cpu(), theirs.cpu(), rtol=1e-3, atol=1e-4, equal_nan=True
            )
            require(same, f"a gradient of {name} depends on a call that was made before backward()")
    return note_of_lacks(lacking)


def _called(
    operation: Operation, device: str, factor: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The inputs of an operation, and those of its results that have gradients."""
    leaves: list[torch.Tensor] = []

    def to(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.to(device)
        leaves.append((tensor * factor).to(device).requires_grad_())
        return leaves[-1]

    results = [result for result in _flat(operation(to, torch.float32)) if result.requires_grad]
    return leaves, results


def _backward(leaves: list[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor]:
    if not results:
        return []
    weights = [
        (torch.arange(1, t.numel() + 1).reshape(t.shape) % 7 - 2.5).to(t.dtype).to(t.device) for t in results
    ]
    found = torch.autograd.grad(results, leaves, weights, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]
