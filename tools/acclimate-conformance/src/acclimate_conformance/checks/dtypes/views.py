"""Checks of operators in place on parts of tensors: every one of torch's, on views of every kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import equal, note_of_lacks, require
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import numbers
from acclimate_conformance.checks.dtypes.operators import require_alike

_View = Callable[[torch.Tensor], torch.Tensor]
_VIEWS: dict[str, _View] = {
    "a column": lambda x: x[:, 1],
    "a row": lambda x: x[2],
    "every second column": lambda x: x[:, ::2],
    "a block": lambda x: x[1:4, 2:5],
    "a transposed matrix": lambda x: x.t(),
    "the end": lambda x: x.view(-1)[3:],
}
_LARGE_VIEWS: dict[str, _View] = {
    "a large transposed matrix": lambda x: x.t(),
    "every second column of a large matrix": lambda x: x[:, ::2],
}
"""Of more than 4,096 elements, which a device may treat with another kernel."""
_ARGUMENTS: tuple[tuple[Any, ...], ...] = ((), (0.5,), (-0.25, 0.75), (2,), (torch.Tensor,))
"""What an operator may take beside its tensor; the last stands for another view of the same shape."""
_OTHERS = (
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
    "apply_", "map_", "map2_", "detach_", "rename_", "requires_grad_", "resize_", "resize_as_",
    "resize_as_sparse_", "set_", "share_memory_", "sparse_resize_", "sparse_resize_and_clear_", "squeeze_",
    "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_", "as_strided_", "retain_grad_",
)  # fmt: skip
"""Methods that draw numbers, or change what a tensor is and not its elements."""
_functional = torch.nn.functional
_FUNCTIONS: dict[str, Callable[[torch.Tensor], object]] = {
    f"{name} in place": lambda x, name=name: getattr(_functional, name)(x, inplace=True)
    for name in (
        "relu", "relu6", "elu", "selu", "celu", "silu", "mish", "hardtanh", "hardswish", "hardsigmoid",
        "leaky_relu",
    )
} | {
    "an assignment of a number": lambda x: x.__setitem__(..., 4),
    "an assignment to a part": lambda x: x[1:].__setitem__(..., x[:-1].clone()),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 3),
    "masked_fill_ of the rest": lambda x: x.masked_fill_(x <= 0, torch.tensor(2.0, device=x.device)),
    "threshold in place": lambda x: _functional.threshold(x, 0.5, 9.0, inplace=True),
    "clamp_ of the least": lambda x: x.clamp_(min=-0.5),
    "clamp_ of the largest": lambda x: x.clamp_(max=0.5),
    "add_ with alpha": lambda x: x.add_(x.clone(), alpha=3),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([1, 0], device=x.device), 5),
    "into out": lambda x: torch.mul(x.clone(), 3, out=x),
}  # fmt: skip


@cache
def _methods() -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """The methods of tensors that work in place, with arguments that the host takes."""
    found = []
    for name in dir(torch.Tensor):
        if not name.endswith("_") or name.startswith("_") or name in _OTHERS:
            continue
        for arguments in _ARGUMENTS:
            given = numbers(4, 3).float()
            try:
                getattr(given, name)(*_for(given, arguments))
            except Exception:  # noqa: BLE001 - it takes other arguments
                continue
            found.append((name, arguments))
    return tuple(found)


def _for(view: torch.Tensor, arguments: tuple[Any, ...]) -> list[Any]:
    return [_other(view) if value is torch.Tensor else value for value in arguments]


def _call(name: str, arguments: tuple[Any, ...], view: torch.Tensor) -> object:
    result: object = getattr(view, name)(*_for(view, arguments))
    return result


def _other(view: torch.Tensor) -> torch.Tensor:
    whole = (torch.arange(view.numel() * 2.0) % 7 - 3).reshape(*view.shape, 2)
    return whole.to(view.device)[..., 0]


@check(
    "supported_dtypes",
    promise="Operators in place change every element of a view and no other, whatever they take beside it.",
    once=True,
)  # fmt: skip
def operators_in_place_on_views(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    calls: dict[str, Callable[[torch.Tensor], object]] = dict(_FUNCTIONS)
    for name, arguments in _methods():
        told = ", ".join("a tensor" if value is torch.Tensor else str(value) for value in arguments)
        calls[f"{name}({told})"] = partial(_call, name, arguments)
    lacking = set()
    for what, call in calls.items():
        for kind, view in {**_VIEWS, **_LARGE_VIEWS}.items():
            whole = numbers(6, 7, seed=4).float() / 2
            if kind in _LARGE_VIEWS:
                whole = whole.repeat(15, 15)
            there = whole.to(device)
            try:
                call(view(whole))
            except RuntimeError:  # the host refuses this view
                continue
            try:
                returned = call(view(there))
            except NotImplementedError:
                lacking.add(what.partition("(")[0])
                break
            require_alike(there, whole, f"a tensor after {what} of {kind}", by_element=False)
            if isinstance(returned, torch.Tensor):
                require(
                    returned.data_ptr() == view(there).data_ptr(), f"{what} of {kind} returns another tensor"
                )
    return note_of_lacks(lacking)


_OVERLAPPING: dict[str, _View] = {
    "a row for all": lambda x: x[:1].expand(4, -1),
    "a column for all": lambda x: x[:, :1].expand(-1, 5),
    "one number for all": lambda x: x[0, 0].expand(3, 4),
    "windows": lambda x: x.view(-1).unfold(0, 3, 1),
    "a row in several batches": lambda x: x[:2].expand(3, -1, -1),
}
_WITH_NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone()": torch.clone,
    "clone(preserve_format)": lambda x: x.clone(memory_format=torch.preserve_format),
    "clone(contiguous_format)": lambda x: x.clone(memory_format=torch.contiguous_format),
    "to(copy=True)": lambda x: x.to(x.device, copy=True),
    "to(the same device and dtype, copy=True)": lambda x: x.to(x.device, x.dtype, copy=True),
    "to(the same dtype, copy=True)": lambda x: x.to(x.dtype, copy=True),
    "to(a tensor like it, copy=True)": lambda x: x.to(x, copy=True),
    "torch.asarray(copy=True)": lambda x: torch.asarray(x, copy=True),
    "a cast to integers and back": lambda x: (x * 4).int().to(x.dtype) / 4,
    "x * 1": lambda x: x * 1,
    "a sum with zeros": lambda x: x + torch.zeros_like(x),
    "positive and neg": lambda x: x.neg().neg(),
    "cat of one": lambda x: torch.cat([x]),
    "stack of one": lambda x: torch.stack([x])[0],
    "index_select": lambda x: x.index_select(0, torch.arange(len(x), device=x.device)),
    "where": lambda x: torch.where(x == x, x, 0),
    "repeat": lambda x: x.repeat(*[1] * x.dim()),
    "masked_fill": lambda x: x.masked_fill(x != x, 0),
    "relu of positive numbers": torch.relu,
}
_OF_OVERLAPPING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous()": lambda x: x.contiguous()
}
"""That give a tensor itself if it is in order."""
_WITHOUT_NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty_like": torch.empty_like,
    "zeros_like": torch.zeros_like,
    "full_like": lambda x: torch.full_like(x, 3),
    "rand_like": torch.rand_like,
    "new_empty": lambda x: x.new_empty(x.shape),
}


@check(
    "supported_dtypes", "FloatTensor",
    promise="What an operator makes of a tensor, also of an expanded one, has a place for each element.",
)  # fmt: skip
def new_tensors_own_their_elements(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    # torch's own classes, as torch.cuda.FloatTensor, share memory with a tensor of theirs.
    own = {} if isinstance(accelerator.FloatTensor, type) else {"FloatTensor": accelerator.FloatTensor}
    for kind, view in {"all": lambda x: x.clone(), **_VIEWS, **_OVERLAPPING}.items():
        overlapping = _OF_OVERLAPPING if kind in _OVERLAPPING else {}
        for what, make in {**_WITH_NUMBERS, **_WITHOUT_NUMBERS, **overlapping, **own}.items():
            whole = numbers(6, 7, seed=4).float().abs().add(1).to(device)
            given = view(whole)
            before, made = given.cpu().clone(), make(given)
            told = f"{what} of {kind}"
            require(made.shape == given.shape, f"{told} has the shape {tuple(made.shape)}")
            if what not in _WITHOUT_NUMBERS:
                require(equal(made, before), f"{told} gives other numbers")
            made.zero_()
            last = (-1,) * made.dim()
            made[last] = 9
            changed = made.cpu().count_nonzero()
            require(int(changed) == 1, f"writing one element of {told} changes {changed}")
            require(equal(given, before), f"writing to {told} changes the tensor that it was made of")
