"""Checks of operators against other ways to their numbers: single samples, slopes, sums, Python's order."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn import functional

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import distance, note_of_lacks, require, short
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import numbers, supported
from acclimate_conformance.checks.dtypes.operations import (
    ACTIVATIONS,
    LAYERS,
    PLACES,
    REDUCTIONS,
    SIMPLE,
    Operation,
)
from acclimate_conformance.checks.dtypes.operators import _flat
from acclimate_conformance.checks.target import blamed

_LENGTHS = (5, 16, 17, 33, 129, 1003, 4097)
_DTYPES = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)


@check(
    "supported_dtypes",
    promise="Stable sorts keep the order of equal numbers, in both directions, along any dimension.",
)  # fmt: skip
def equal_numbers_keep_their_order(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    for length in _LENGTHS:
        for kinds in (1, 2, 7):
            values = [place * place % 11 % kinds for place in range(length)]
            for dtype in _DTYPES:
                given = torch.tensor(values).to(dtype)
                if dtype is torch.float32:  # zeros of both signs are equal
                    given[1::2] = -given[1::2].abs() * (given[1::2] == 0) + given[1::2]
                given = given.to(device)
                held = given.cpu().tolist()
                for descending in (False, True):
                    # Python's sort is stable, also in reverse.
                    wanted = sorted(range(length), key=lambda place: held[place], reverse=descending)
                    beside = torch.stack([given, given], 1)
                    for what, found in (
                        ("sort", given.sort(stable=True, descending=descending)[1]),
                        ("argsort", given.argsort(stable=True, descending=descending)),
                        ("sort of columns", beside.sort(dim=0, stable=True, descending=descending)[1][:, 1]),
                    ):
                        told = f"a stable {what} of {length} {short(dtype)} numbers, descending={descending},"
                        require(found.tolist() == wanted, f"{told} changes the order of equal ones")


_SIZES = (7, 33, 129, 1003, 4099, 70_001)
_ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{f"torch.{name}": getattr(torch, name) for name in SIMPLE},
    **{name: getattr(functional, name) for name in ACTIVATIONS},
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "x + y": lambda x: x + x.flip(0).flip(0) * 3,
    "x - y, with alpha": lambda x: torch.sub(x, x.square(), alpha=2),
    "x / y": lambda x: (x + 1) / (x * x + 0.5),
    "x ** y": lambda x: (x + 2) ** (x / 2),
    "atan2": lambda x: torch.atan2(x, x + 0.5),
    "maximum": lambda x: torch.maximum(x, -x),
    "minimum": lambda x: torch.minimum(x, -x),
    "fmod": lambda x: torch.fmod(x, x.square() + 0.5),
    "hypot": lambda x: torch.hypot(x, x + 1),
    "where": lambda x: torch.where(x > 0.25, x, -x),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "masked_fill": lambda x: x.masked_fill(x > 0.25, 3),
    "lerp": lambda x: torch.lerp(x, x + 1, 0.25),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=3),
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 2, value=3),
    "comparisons": lambda x: (x > 0.25).float() + torch.mul(x <= 0.5, 2) + torch.mul(x == x, 4),
    "casts": lambda x: (x * 9).int().float() + x.bool().float(),
    "integers": lambda x: ((x * 99).long() % 7 * 3 // 2 + ((x * 99).int() >> 1)).float(),
    "fill": lambda x: torch.full_like(x, 2.5) + torch.ones_like(x) + x.clone().zero_() + x.clone().fill_(4),
    "in place": lambda x: x.clone().add_(1).mul_(2).sub_(x).div_(3).neg_().abs_().exp_(),
}
_LAID_OUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    ", with gaps": lambda x: torch.stack([x, x + 9], -1)[..., 0],
    ", from the second element on": lambda x: torch.cat([x[:1], x])[1:],
    ", transposed": lambda x: torch.stack([x, x], 1).t().contiguous().t(),
}


@check(
    "supported_dtypes",
    promise="Operators give of a tensor of any length, in any layout, what they give of each part of it.",
    timeout_s=240, once=True,
)  # fmt: skip
def long_tensors_are_their_parts(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    absent: set[str] = set()
    for length in _SIZES:
        generator = torch.Generator().manual_seed(length)
        values = torch.randperm(length, generator=generator).float().div(length).mul(2).sub(0.9).to(device)
        bounds = sorted({0, 1, 4, length // 3, length // 2 + 1, length - 1, length})
        for name, function in _ELEMENTWISE.items():
            if name in absent:
                continue
            try:
                wanted = torch.cat([function(values[a:b].clone()) for a, b in pairwise(bounds)]).cpu().float()
            except NotImplementedError:
                absent.add(name)
                continue
            for what, layout in _LAID_OUT.items():
                found = function(layout(values)).cpu().float()
                for column in found.unbind(1) if found.dim() > 1 else (found,):
                    near = torch.isclose(column, wanted, rtol=1e-4, atol=1e-6, equal_nan=True)
                    wrong = (~near).nonzero().flatten().tolist()
                    told = f"{name} of {length} numbers{what} differs from that of its parts"
                    require(not wrong, f"{told} at {len(wrong)} places, first at {wrong[:1]}")
    return note_of_lacks(absent)


@check(
    "supported_dtypes",
    promise="Sums, products, extremes, running sums and orders of any length are those that Python finds.",
    once=True,
)  # fmt: skip
def long_reductions(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    for length in _SIZES:
        generator = torch.Generator().manual_seed(length)
        # All different, of which the last two are the least and the largest: a tail that is left out shows.
        places = torch.cat(
            [torch.randperm(length - 2, generator=generator) + 1, torch.tensor([0, length - 1])]
        )
        values = (places - length // 3).float() / 8
        held = values.tolist()
        order = sorted(range(length), key=held.__getitem__)
        running = list(accumulate(value * 8 % 7 for value in held))
        least, most = held[order[0]], held[order[-1]]
        wanted: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any]] = {
            "sum": (lambda x: x.sum(-1), math.fsum(held)),
            "mean": (lambda x: x.mean(-1), math.fsum(held) / length),
            "amax": (lambda x: x.amax(-1), most),
            "amin": (lambda x: x.amin(-1), least),
            "argmax": (lambda x: x.argmax(-1), order[-1]),
            "argmin": (lambda x: x.argmin(-1), order[0]),
            "max": (lambda x: x.max(-1).indices, order[-1]),
            "min": (lambda x: x.min(-1).values, least),
            "a sum of integers": (lambda x: (x * 8).long().sum(-1), round(math.fsum(held) * 8)),
            "norm": (lambda x: x.norm(dim=-1), math.sqrt(math.fsum(x * x for x in held))),
            "norm of 1": (lambda x: x.norm(1, -1), math.fsum(map(abs, held))),
            "any": (lambda x: (x == x[..., -1:]).any(-1), True),
            "all": (lambda x: (x != x[..., -1:]).all(-1), False),
            "count_nonzero": (lambda x: x.count_nonzero(-1), sum(x != 0 for x in held)),
            "var": (lambda x: x.var(-1), statistics.variance(held)),
            "median": (lambda x: x.median(-1).values, held[order[(length - 1) // 2]]),
            "cumsum": (lambda x: (x * 8).remainder(7).cumsum(-1), running),
            "sum of truth values": (lambda x: (x > 0).sum(-1), sum(x > 0 for x in held)),
            "cumsum of truth values": (lambda x: (x > 0).cumsum(-1), list(accumulate(x > 0 for x in held))),
            "cummax": (lambda x: x.cummax(-1).values, list(accumulate(held, max))),
            "sort": (lambda x: x.sort(-1).values, [held[n] for n in order]),
            "argsort, descending": (lambda x: x.argsort(-1, descending=True), order[::-1]),
            "topk": (lambda x: x.topk(3, -1).indices, order[::-1][:3]),
            "the smallest of topk": (
                lambda x: x.topk(5, -1, largest=False).values,
                [held[n] for n in order[:5]],
            ),
            "kthvalue": (lambda x: x.kthvalue(3, -1).values, held[order[2]]),
            "logsumexp": (lambda x: (x * 0).logsumexp(-1), math.log(length)),
            "softmax": (lambda x: (x * 0).softmax(-1)[..., -1], 1 / length),
            "gather": (lambda x: x.gather(-1, x.argsort(-1)), [held[n] for n in order]),
            "flip": (lambda x: x.flip(-1), held[::-1]),
            "diff": (lambda x: x.diff(dim=-1), [b - a for a, b in pairwise(held)]),
            "roll": (lambda x: x.roll(3, -1), [*held[-3:], *held[:-3]]),
            "cat": (lambda x: torch.cat([x, x[..., :2]], -1), [*held, *held[:2]]),
            "a product with ones": (lambda x: x @ torch.ones_like(x[0]), math.fsum(held)),
        }
        for dtype in _SMALL:
            total, sums = _sums_in(dtype)
            wanted |= {
                f"sum of {short(dtype)}": (total, running[-1]),
                f"cumsum of {short(dtype)}": (sums, running),
            }
        alone: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any]] = {
            "nonzero": (
                lambda x: (x > x.amin()).nonzero().flatten(),
                [n for n in range(length) if n != order[0]],
            ),
            "masked_select": (lambda x: x[x > 0], [x for x in held if x > 0]),
            "unique": (lambda x: x.int().unique(), sorted({int(x) for x in held})),
            "searchsorted": (lambda x: torch.searchsorted(x.sort().values, x), _ranks(order)),
            "dot": (lambda x: torch.dot(x, torch.ones_like(x)), math.fsum(held)),
        }
        there = values.to(device)
        several = {"rows": torch.stack([there, there]), "columns": torch.stack([there, there], 1).t()}
        for name, (reduce, exact) in wanted.items():
            for what, given in several.items():
                _require_listed(reduce(given)[1], exact, f"{name} of {what} of {length} numbers", name)
        for name, (reduce, exact) in alone.items():
            _require_listed(reduce(there), exact, f"{name} of {length} numbers", name)


_SMALL = (torch.uint8, torch.int8, torch.int16, torch.int32)
"""Dtypes of which sums are int64."""
_Reduction = Callable[[torch.Tensor], torch.Tensor]


def _sums_in(dtype: torch.dtype) -> tuple[_Reduction, _Reduction]:
    """Functions that add up small whole numbers of a dtype: all of them, and up to each."""

    def whole(x: torch.Tensor) -> torch.Tensor:
        return (x * 8).remainder(7).to(dtype)

    return (lambda x: whole(x).sum(-1)), (lambda x: whole(x).cumsum(-1))


def _ranks(order: list[int]) -> list[int]:
    ranks = [0] * len(order)
    for rank, place in enumerate(order):
        ranks[place] = rank
    return ranks


_ROUNDED = ("sum", "mean", "norm", "norm of 1", "var", "logsumexp", "softmax", "a product with ones", "dot")
_SHARE = 1e-3
"""How far these may be off: devices may round the numbers of products to 10 bits."""


def _require_listed(found: torch.Tensor, wanted: Any, what: str, name: str) -> None:
    exact = torch.tensor(wanted, dtype=torch.float64)
    ours = found.detach().cpu().double()
    near = ours.shape == exact.shape and torch.allclose(
        ours, exact, rtol=_SHARE if name in _ROUNDED else 0, atol=0
    )
    told = f"{ours.flatten()[:5].tolist()}… of shape {tuple(ours.shape)}"
    require(near, f"{what} gives {told}, not {exact.flatten()[:5].tolist()}…")


_Loss = Callable[..., torch.Tensor]
_LOSSES: dict[str, tuple[_Loss, dict[str, Any]]] = {
    "mse_loss": (functional.mse_loss, {}),
    "l1_loss": (functional.l1_loss, {}),
    "smooth_l1_loss": (functional.smooth_l1_loss, {"beta": 0.5}),
    "huber_loss": (functional.huber_loss, {"delta": 0.5}),
    "soft_margin_loss": (functional.soft_margin_loss, {}),
    "binary_cross_entropy": (
        lambda x, y, **o: functional.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **o),
        {},
    ),
    "binary_cross_entropy_with_logits": (
        lambda x, y, **o: functional.binary_cross_entropy_with_logits(x, y.sigmoid(), **o),
        {},
    ),
    "kl_div": (functional.kl_div, {"log_target": True}),
    "poisson_nll_loss": (functional.poisson_nll_loss, {"full": False}),
    "hinge_embedding_loss": (lambda x, y, **o: functional.hinge_embedding_loss(x, y.sign(), **o), {}),
    "margin_ranking_loss": (
        lambda x, y, **o: functional.margin_ranking_loss(x, x.detach().flip(0), y.sign(), **o),
        {"margin": 0.5},
    ),
    "cross_entropy": (
        lambda x, y, **o: functional.cross_entropy(x.flatten(1), y.flatten(1).argmax(1), **o),
        {},
    ),
    "cross_entropy of places": (
        lambda x, y, **o: functional.cross_entropy(x[None].flatten(2), y[None].argmax(1).flatten(1), **o),
        {},
    ),
}
_SHAPES = ((6, 1), (5, 3), (2, 3, 4), (2, 1, 3, 5), (3, 2, 1, 2, 2))


@check(
    "supported_dtypes",
    promise="A loss is the mean or the sum over its elements, for any shape, and so is its gradient.",
)  # fmt: skip
def losses_are_means_of_their_elements(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    for shape in _SHAPES:
        for name, (loss, options) in _LOSSES.items():
            x = numbers(*shape, seed=1).float().to(device).requires_grad_()
            y = numbers(*shape, seed=2).float().to(device)
            losses = loss(x, y, reduction="none", **options)
            (slope,) = torch.autograd.grad(losses, x, torch.ones_like(losses))
            for reduction, share in (("mean", 1 / losses.numel()), ("sum", 1.0)):
                whole = loss(x, y, reduction=reduction, **options)
                (gradient,) = torch.autograd.grad(whole, x)
                for what, found, wanted in (
                    ("", whole, losses.sum() * share),
                    (" has a gradient that", gradient, slope * share),
                ):
                    apart = distance(found, wanted)
                    told = f"{name}(reduction={reduction!r}) of shape {shape}{what}"
                    require(apart <= 1e-4, f"{told} is off by {apart:.1e} from that of its elements")


_Layer = Callable[..., torch.Tensor]
_BATCHED: dict[str, tuple[_Layer, tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "linear": (functional.linear, (5,), ((3, 5), (3,))),
    "linear of sequences": (functional.linear, (3, 5), ((4, 5), (4,))),
    "bilinear": (lambda x, w, b: functional.bilinear(x, x.flip(-1), w, b), (4,), ((3, 4, 4), (3,))),
    "conv1d": (functional.conv1d, (4, 9), ((3, 4, 3), (3,))),
    "conv2d": (functional.conv2d, (2, 6, 6), ((3, 2, 3, 3), (3,))),
    "conv2d with steps": (
        lambda x, w, b: functional.conv2d(x, w, b, 2, 1), (3, 7, 6), ((4, 3, 3, 3), (4,))
    ),
    "conv2d of groups": (
        lambda x, w, b: functional.conv2d(x, w, b, groups=2), (4, 5, 5), ((6, 2, 3, 3), (6,))
    ),
    "conv2d by channel": (
        lambda x, w, b: functional.conv2d(x, w, b, padding=1, groups=4), (4, 5, 5), ((8, 1, 3, 3), (8,))
    ),
    "conv2d of single points": (functional.conv2d, (4, 5, 5), ((6, 4, 1, 1), (6,))),
    "conv3d": (functional.conv3d, (2, 4, 4, 4), ((3, 2, 3, 2, 3), (3,))),
    "conv_transpose1d": (
        lambda x, w, b: functional.conv_transpose1d(x, w, b, 2, 1, 1), (3, 5), ((3, 2, 3), (2,))
    ),
    "conv_transpose2d": (
        lambda x, w, b: functional.conv_transpose2d(x, w, b, 2, groups=2), (4, 3, 4), ((4, 2, 3, 3), (4,))
    ),
    "layer_norm": (lambda x, w, b: functional.layer_norm(x, (6,), w, b), (3, 6), ((6,), (6,))),
    "rms_norm": (lambda x, w: functional.rms_norm(x, (6,), w), (3, 6), ((6,),)),
    "group_norm": (lambda x, w, b: functional.group_norm(x, 2, w, b), (4, 5), ((4,), (4,))),
    "instance_norm": (
        lambda x, w, b: functional.instance_norm(x, weight=w, bias=b), (4, 7), ((4,), (4,))
    ),
    "batch_norm with statistics": (
        lambda x, w, b: functional.batch_norm(x, b.detach(), w.detach().abs() + 1, w, b), (4, 5), ((4,), (4,))
    ),
    "prelu": (functional.prelu, (4, 5), ((4,),)),
    "embedding": (
        lambda x, w: functional.embedding((x.detach().abs() * 7).long() % 9, w), (3,), ((9, 4),)
    ),
    "embedding_bag": (
        lambda x, w: functional.embedding_bag((x.detach().abs() * 7).long() % 9, w), (3,), ((9, 4),)
    ),
    "matmul": (torch.matmul, (3, 5), ((5, 4),)),
    "baddbmm": (lambda x, w: torch.baddbmm(x, x, w.expand(len(x), -1, -1), beta=0.5), (4, 4), ((4, 4),)),
    "attention": (
        lambda x, w: functional.scaled_dot_product_attention(x * w, x, x, is_causal=True, scale=0.5),
        (2, 5, 8), ((8,),),
    ),
    "attention with a mask": (
        lambda x, w: functional.scaled_dot_product_attention(x, x, x, w, scale=0.5), (2, 5, 8), ((5, 5),)
    ),
    "max_pool2d": (lambda x: functional.max_pool2d(x, 3, 2, 1), (3, 7, 6), ()),
    "avg_pool2d": (lambda x: functional.avg_pool2d(x, 3, 2, 1), (3, 7, 6), ()),
    "adaptive_avg_pool2d": (lambda x: functional.adaptive_avg_pool2d(x, (2, 3)), (3, 7, 5), ()),
    "interpolate": (
        lambda x: functional.interpolate(x, (4, 9), mode="bilinear", align_corners=True), (2, 5, 5), ()
    ),
    "softmax": (lambda x: x.softmax(1), (5, 3), ()),
}  # fmt: skip
"""By layer: the function, the shape of a sample, and those of its weights."""
_BATCHES = (0, 1, 2, 3, 5, 7, 9, 17)


@check(
    "supported_dtypes",
    promise="A batch of any size gives what its samples give, and their gradients add up for the weights.",
    timeout_s=240,
)  # fmt: skip
def batches_are_their_samples(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    absent: set[str] = set()
    for name, (layer, shape, others) in _BATCHED.items():
        weights = [
            numbers(*other, seed=n).float().to(device).requires_grad_() for n, other in enumerate(others)
        ]
        batch = numbers(max(_BATCHES), *shape, seed=9).float().to(device)
        try:
            singles = [_passed(layer, sample[None], weights) for sample in batch]
        except NotImplementedError:
            absent.add(name)
            continue
        for size in _BATCHES:
            for how, laid_out in _in_memory(batch[:size]).items():
                if not size and not _takes_no_samples(layer, shape, others):
                    continue
                for place, found in enumerate(_passed(layer, laid_out, weights)):
                    parts = [single[place] for single in singles[: max(size, 1)]]
                    wanted = torch.cat(parts) if place < 2 else torch.stack(parts).sum(0)
                    if not size:  # of no samples, a gradient for the weights is 0
                        wanted = wanted[:0] if place < 2 else wanted * 0
                        same = found.shape == wanted.shape and not bool(found.any())
                        what = ("result", "gradient", "gradient for the weights")[min(place, 2)]
                        require(same, f"{name} of a batch of no samples: the {what} is {found.flatten()[:3]}")
                        continue
                    apart = distance(found, wanted)
                    what = ("result", "gradient", "gradient for the weights")[min(place, 2)]
                    told = f"{name} of a batch of {size}{how}: the {what}"
                    require(
                        apart <= 1e-2, f"{told} is off by {apart:.1e} from that of the samples one by one"
                    )
    return note_of_lacks(absent)


def _takes_no_samples(layer: _Layer, shape: tuple[int, ...], others: tuple[tuple[int, ...], ...]) -> bool:
    """Whether torch has a layer's results and gradients of a batch of no samples."""
    try:
        _passed(layer, torch.ones(0, *shape), [torch.ones(other, requires_grad=True) for other in others])
    except (RuntimeError, IndexError):
        return False
    return True


def _in_memory(batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """A batch in each order in memory that torch has for it, by a text."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    found = {"": batch}
    if batch.dim() in formats:
        found[" with channels last"] = batch.to(memory_format=formats[batch.dim()])
    return found


def _passed(layer: _Layer, batch: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result of a layer, and its gradients for the batch and for each weight."""
    leaves = [batch.detach().clone().requires_grad_(), *weights]
    result = layer(*leaves)
    shape = result.shape[1:]
    factors = torch.arange(1, shape.numel() + 1).reshape(shape) % 7 - 2.5
    slopes = torch.autograd.grad(
        result, leaves, factors.to(result.device).expand_as(result), allow_unused=True
    )
    zeros = [torch.zeros_like(t) if g is None else g for g, t in zip(slopes, leaves, strict=True)]
    return [t.detach().cpu() for t in (result, *zeros)]


_STEP = 1e-6
_WITHOUT_SLOPES = (
    "addmm with beta 0 of NaN",
    "cat of two dtypes",
    "embedding with options",
    "fake_quantize at the ends of its range",
    "long rows, decided by their last element",
    "results in every second column",
    "unique",
)
"""Whose gradients are not their slopes or not defined, and that have no gradients."""


@check(
    "supported_dtypes",
    promise="Gradients of operators with options are the slopes of their results.",
    timeout_s=240, once=True,
)  # fmt: skip
def gradients_are_slopes(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    if torch.float64 not in supported(accelerator):
        return "it has no float64, in which slopes are measured"
    absent: set[str] = set()
    for name, operation in {**REDUCTIONS, **PLACES, **LAYERS}.items():
        # The host first: a number that it refuses may end a device's work.
        if name in _WITHOUT_SLOPES or not _has_slopes_on_the_host(operation):
            continue
        try:
            with blamed(accelerator, name):
                gradients = _gradients(operation, device)
                measured = [_total(operation, device, step, gradients) for step in (_STEP, -_STEP)]
        except NotImplementedError:
            absent.add(name)
            continue
        slope = float(measured[0] - measured[1]) / (2 * _STEP)
        told = sum(float((g * _direction(g, n)).sum()) for n, g in enumerate(gradients) if g is not None)
        apart = abs(told - slope) / max(1.0, abs(slope))
        require(apart <= 1e-4, f"the gradient of {name} says that it changes by {told}; it does by {slope}")
    return note_of_lacks(absent)


def _has_slopes_on_the_host(operation: Operation) -> bool:
    """Whether this release of torch has the operator's derivative at all, for these numbers."""
    try:
        gradients = _gradients(operation, "cpu")
        _ = [_total(operation, "cpu", step, gradients) for step in (_STEP, -_STEP)]
    except RuntimeError:
        return False
    return True


def _total(
    operation: Operation, device: str, step: float, gradients: list[torch.Tensor | None] | None = None,
    leaves: list[torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """A weighted sum of the results of an operator.

    Args:
        operation: the operator.
        device: where it runs.
        step: how far its inputs are moved, each in its own direction.
        gradients: of its inputs; one without a gradient stays where it is.
        leaves: receives the inputs.
    """
    moved: list[torch.Tensor] = []

    def to(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.to(device)
        number = len(moved)
        # Numbers that are all different: a slope is not defined where two are equal.
        apart = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        exact = tensor.detach().double() + (apart + 0.01) / 20
        if gradients is not None and gradients[number] is not None:
            exact += step * _direction(exact, number)
        moved.append(exact.to(device).requires_grad_(gradients is None))
        return moved[-1]

    total = torch.zeros((), dtype=torch.float64)
    for part in _flat(operation(to, torch.float64)):
        if part.dtype is torch.float64:
            weights = torch.arange(1, part.numel() + 1).reshape(part.shape) % 7 - 2.5
            total = total + (part * weights.to(device)).cpu().nan_to_num(0, 0, 0).sum()
    if leaves is not None:
        leaves.extend(moved)
    return total


def _direction(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return torch.randn(
        tensor.shape, generator=torch.Generator().manual_seed(100 + number), dtype=torch.float64
    )


def _gradients(operation: Operation, device: str) -> list[torch.Tensor | None]:
    leaves: list[torch.Tensor] = []
    total = _total(operation, device, 0, leaves=leaves)
    if not total.requires_grad:
        return [None] * len(leaves)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [None if gradient is None else gradient.cpu() for gradient in found]
