"""Checks of fake tensors, with which compilers compute sizes, strides and devices without data."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.nn import functional

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    all_told,
    device_names,
    is_host,
    is_on,
    note_of_lacks,
    require,
    short,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.sampled.places import tensors_in
from acclimate_conformance.checks.programs import there

_Call = Callable[..., Any]
_Made = Callable[[str], list[torch.Tensor]]


def _images(place: str) -> list[torch.Tensor]:
    return [there(place, 2, 4, 6, 6), there(place, 4, 4, 3, 3, seed=1), there(place, 4, seed=2)]


def _images_last(place: str) -> list[torch.Tensor]:
    return [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in _images(place)]


def _matrices(place: str) -> list[torch.Tensor]:
    return [there(place, 4, 6), there(place, 6, 4, seed=1), there(place, 6, seed=2)]


def _transposed(place: str) -> list[torch.Tensor]:
    return [there(place, 6, 4).t(), there(place, 4, 6, seed=1).t(), there(place, 12, seed=2)[::2]]


def _heads(place: str) -> list[torch.Tensor]:
    return [there(place, 2, 5, 3, 8, seed=n).transpose(1, 2) for n in range(3)]


_MADE: dict[str, _Made] = {
    "matrices": _matrices,
    "transposed matrices": _transposed,
    "images": _images,
    "images with channels last": _images_last,
    "heads": _heads,
}
_OF_MATRICES: dict[str, _Call] = {
    "x @ y": lambda x, y, z: x @ y,
    "linear": lambda x, y, z: functional.linear(x, y.t(), z[:4]),
    "addmm": lambda x, y, z: torch.addmm(z[:4], x, y),
    "x + y.t()": lambda x, y, z: x + y.t(),
    "x * z": lambda x, y, z: x * z,
    "exp": lambda x, y, z: x.exp(),
    "softmax": lambda x, y, z: x.softmax(-1),
    "gelu": lambda x, y, z: functional.gelu(x),
    "layer_norm": lambda x, y, z: functional.layer_norm(x, (6,), z, z),
    "rms_norm": lambda x, y, z: functional.rms_norm(x, (6,), z),
    "sum": lambda x, y, z: x.sum(0),
    "max": lambda x, y, z: x.max(0),
    "sort": lambda x, y, z: x.sort(),
    "topk": lambda x, y, z: x.topk(2, 0),
    "cumsum": lambda x, y, z: x.cumsum(1),
    "cat": lambda x, y, z: torch.cat([x, y.t()], 1),
    "stack": lambda x, y, z: torch.stack([x, x], 1),
    "where": lambda x, y, z: torch.where(x > 0, x, y.t()),
    "index": lambda x, y, z: x[[0, 2]],
    "embedding": lambda x, y, z: functional.embedding(z.argsort()[:3].clamp(max=3), x),
    "clone": lambda x, y, z: x.clone(),
    "contiguous": lambda x, y, z: x.contiguous(),
    "to bfloat16": lambda x, y, z: x.to(torch.bfloat16),
    "zeros_like": lambda x, y, z: torch.zeros_like(x),
    "empty_like": lambda x, y, z: torch.empty_like(x, dtype=torch.int32),
    "reshape": lambda x, y, z: x.reshape(-1),
    "expand": lambda x, y, z: z.expand(3, 6) * 2,
    "flip": lambda x, y, z: x.flip(0),
    "roll": lambda x, y, z: x.roll(1, 0),
    "add_": lambda x, y, z: x.add_(1),
    "relu_": lambda x, y, z: torch.relu_(x),
    "dropout": lambda x, y, z: functional.dropout(x),
    "bmm": lambda x, y, z: torch.bmm(x[None], y[None]),
    "einsum": lambda x, y, z: torch.einsum("ij,jk->ki", x, y),
    "var_mean": lambda x, y, z: torch.var_mean(x, 0),
    "cross_entropy": lambda x, y, z: functional.cross_entropy(x, x.argmax(-1)),
    "outer": lambda x, y, z: torch.outer(z, z),
    "tril": lambda x, y, z: x.tril(),
    "repeat": lambda x, y, z: x.repeat(2, 1),
    "index_select": lambda x, y, z: x.index_select(1, z.argsort()[:2]),
    "gather": lambda x, y, z: x.gather(1, x.argsort(1)),
    "scatter_add": lambda x, y, z: x.scatter_add(1, x.argsort(1), x),
    "masked_fill": lambda x, y, z: x.masked_fill(x > 0, 1.0),
    "arange": lambda x, y, z: torch.arange(3, device=x.device) + 1,
    "glu": lambda x, y, z: functional.glu(x),
    "rand_like": lambda x, y, z: torch.rand_like(x),
    "norm": lambda x, y, z: x.norm(dim=1),
    "mean": lambda x, y, z: x.mean(1, keepdim=True),
    "pad": lambda x, y, z: functional.pad(x, (1, 2)),
    "addcmul": lambda x, y, z: torch.addcmul(x, x, y.t()),
    "foreach_add": lambda x, y, z: torch._foreach_add([x, y], 1),
    "maximum": lambda x, y, z: torch.maximum(x, y.t()),
    "linalg.inv": lambda x, y, z: torch.linalg.inv(x[:, :4] + 9 * torch.eye(4, device=x.device)),
    "to another dtype and layout": lambda x, y, z: x.to(
        torch.int32, copy=True, memory_format=torch.contiguous_format
    ),
}
_OF_IMAGES: dict[str, _Call] = {
    "conv2d": lambda x, w, b: functional.conv2d(x, w, b, padding=1),
    "conv2d of groups": lambda x, w, b: functional.conv2d(x, w[:, :2], b, groups=2, stride=2),
    "conv2d of kernels of one element": lambda x, w, b: functional.conv2d(x, w[:, :, :1, :1]),
    "conv_transpose2d": lambda x, w, b: functional.conv_transpose2d(x, w, b, stride=2),
    "conv1d": lambda x, w, b: functional.conv1d(x[:, :, 0], w[:, :, 0]),
    "batch_norm": lambda x, w, b: functional.batch_norm(x, b, b.abs() + 1, b, b),
    "batch_norm in training": lambda x, w, b: functional.batch_norm(x, None, None, training=True),
    "group_norm": lambda x, w, b: functional.group_norm(x, 2, b, b),
    "max_pool2d": lambda x, w, b: functional.max_pool2d(x, 2),
    "avg_pool2d": lambda x, w, b: functional.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x, w, b: functional.adaptive_avg_pool2d(x, 1),
    "interpolate": lambda x, w, b: functional.interpolate(x, scale_factor=2),
    "interpolate (bilinear)": lambda x, w, b: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "relu": lambda x, w, b: functional.relu(x),
    "x + b": lambda x, w, b: x + b[:, None, None],
    "cat": lambda x, w, b: torch.cat([x, x], 1),
    "pad": lambda x, w, b: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "softmax": lambda x, w, b: x.softmax(1),
    "sum": lambda x, w, b: x.sum((2, 3)),
    "clone": lambda x, w, b: x.clone(),
    "to bfloat16": lambda x, w, b: x.bfloat16(),
    "empty_like": lambda x, w, b: torch.empty_like(x),
    "permute": lambda x, w, b: x.permute(0, 2, 3, 1).contiguous(),
    "dropout": lambda x, w, b: functional.dropout(x),
    "flatten": lambda x, w, b: x.flatten(1),
    "where": lambda x, w, b: torch.where(x > 0, x, -x),
}
_OF_HEADS: dict[str, _Call] = {
    "scaled_dot_product_attention": functional.scaled_dot_product_attention,
    "causal attention": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    "masked attention": lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, torch.ones(5, 5, dtype=torch.bool, device=q.device)
    ),
    "q @ k.mT": lambda q, k, v: q @ k.mT,
    "q * 2": lambda q, k, v: q * 2,
    "joined heads": lambda q, k, v: q.transpose(1, 2).reshape(2, 5, -1),
}
_CALLS = {
    "matrices": _OF_MATRICES,
    "transposed matrices": _OF_MATRICES,
    "images": _OF_IMAGES,
    "images with channels last": _OF_IMAGES,
    "heads": _OF_HEADS,
}

_DIFFERENTIATED = (
    "linear",
    "layer_norm",
    "embedding",
    "conv2d",
    "conv2d of groups",
    "conv_transpose2d",
    "batch_norm in training",
    "group_norm",
    "max_pool2d",
    "interpolate (bilinear)",
    "scaled_dot_product_attention",
    "causal attention",
)
"""Calls whose gradients have kernels of their own."""


def _seen(results: Any) -> list[str]:
    """Shapes, strides, dtypes and devices; of strides only those of dimensions with more than one element."""
    return [
        f"{short(t.dtype)}{list(t.shape)} with strides "
        f"{[stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]} on {t.device}"
        for t in tensors_in(results)
        if isinstance(t, torch.Tensor)
    ]


def _both(call: _Call, made: _Made, place: str, gradients: bool) -> tuple[list[str], list[str]]:
    """What a call gives of tensors, and what torch says that it will give."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def run(given: list[torch.Tensor]) -> Any:
        if not gradients:
            return call(*given)
        result = call(*(t.requires_grad_() for t in given))
        outputs = [t for t in tensors_in(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        return torch.autograd.grad(outputs, given, [torch.ones_like(t) for t in outputs], allow_unused=True)

    mode = FakeTensorMode()
    fakes: list[torch.Tensor] = [mode.from_tensor(t) for t in made(place)]
    with mode:
        told = _seen(run(fakes))
    return _seen(run(made(place))), told


@check(
    "current_device_name",
    "compile_backend",
    promise="Fake tensors, with which compilers plan, have the shapes, strides, dtypes and devices of real "
    "results, and take no memory.",
    of="operators",
    once=True,
)
def fake_tensors_tell_the_truth(accelerator: Accelerator) -> str | None:
    if is_host(accelerator):
        raise NotOfferedError("a host has no other device to be compared with")
    device = accelerator.current_device_name()
    is_known_to_torch = accelerator.device_type != torch._C._get_privateuse1_backend_name()
    lacks: set[str] = set()
    with warnings.catch_warnings(), all_told() as noted:
        warnings.simplefilter("ignore")
        for given, calls in _CALLS.items():
            for name, call in calls.items():
                for gradients in (False, True) if name in _DIFFERENTIATED else (False,):
                    if given == "images with channels last" and "conv" in name:
                        continue  # torch's fakes follow the convolution libraries that it was built with
                    what = f"{'the gradients of ' * gradients}{name} of {given}"
                    # Of some operators torch's own fakes are wrong, or have no gradient.
                    right, of_any_device = False, list[str]()
                    with suppress(Exception):
                        real, told = _both(call, _MADE[given], "cpu", gradients)
                        right = real == told
                        name_of_it = str(torch.empty(0, device=device).device)
                        of_any_device = [text.removesuffix("cpu") + name_of_it for text in told]
                    if not right:
                        continue
                    try:
                        real, told = _both(call, _MADE[given], device, gradients)
                    except NotImplementedError:
                        lacks.add(name)
                        continue
                    # Of a type that torch knows by name its rules may be wrong: of scaled images on CUDA.
                    noted(
                        real == told or (is_known_to_torch and real == of_any_device),
                        f"{what} are {'; '.join(real)}, and fake tensors say {'; '.join(told)}",
                    )
        _note_places(accelerator, noted)
    return note_of_lacks(lacks)


def _note_places(accelerator: Accelerator, noted: Callable[[bool, str], None]) -> None:
    """Fake tensors are where real ones would be, whichever device is current, and take no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kind = accelerator.device_type
    names = device_names(accelerator)
    gc.collect()
    accelerator.synchronize()
    for index, here in enumerate(names):
        large = 2**44 + index  # torch keeps what it computed for equal calls
        with accelerator.device(index):
            before = [accelerator.memory_allocated(i) for i in range(len(names))]
            with FakeTensorMode():
                host = torch.empty(large)
                made = {
                    "torch.empty": (torch.empty(large, device=kind), here),
                    "torch.zeros": (torch.zeros(large, device=kind), here),
                    "torch.arange": (torch.arange(3 + index, device=kind), here),
                    "to(type) of the host's": (host.to(kind), here),
                    **{f"to({name!r})": (host.to(name), name) for name in names},
                    **{f"torch.empty on {name}": (torch.empty(large, device=name), name) for name in names},
                    **{f"a sum of {name}": (torch.ones(large, device=name) + 1, name) for name in names},
                }
                for how, (tensor, wanted) in made.items():
                    noted(
                        is_on(tensor, wanted),
                        f"a fake tensor of {how} while {here} is current is on {tensor.device}",
                    )
            after = [accelerator.memory_allocated(i) for i in range(len(names))]
            noted(
                before == after,
                f"fake tensors change memory_allocated() of the devices from {before} to {after}",
            )
    require(True, "")
