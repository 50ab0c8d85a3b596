"""Checks parameters, gradients, outputs and saved state before an optimizer changes anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from acclimate.errors import InvalidOptimizerArgumentError, UnsupportedParameterError
from acclimate.ops.optimizers.shards import local

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def number(value: float | Tensor) -> float:
    """Returns a setting's value; schedulers may have replaced the number by a tensor."""
    return value.item() if isinstance(value, Tensor) else value


def check_settings(settings: Mapping[str, Any]) -> None:
    """Checks the numbers among the settings of a parameter group.

    Raises:
        InvalidOptimizerArgumentError: a number is negative or NaN, or a beta is not in [0, 1).
    """
    numbers = dict(settings)
    betas = numbers.pop("betas", ())
    if "betas" in settings and len(betas) != 2:
        raise InvalidOptimizerArgumentError(f"betas must be two numbers. Value {betas} is not.")
    numbers.update({f"beta{index}": beta for index, beta in enumerate(betas, start=1)})
    for name, setting in numbers.items():
        if isinstance(setting, bool) or not isinstance(setting, Real | Tensor):
            continue
        value = float(setting)
        if not value >= 0.0 or (name.startswith("beta") and not value < 1.0):
            limit = "from 0 to below 1" if name.startswith("beta") else "0 or more"
            raise InvalidOptimizerArgumentError(f"{name} must be {limit}. Value {value} is not.")


def check_memory(parameters: Iterable[Tensor]) -> None:
    """Checks that no two elements of the host's parameters share memory.

    Threads update parameters in parallel, so a shared element would get one update or both.

    Raises:
        UnsupportedParameterError: two parameters share memory, or a parameter is expanded.
    """
    spans = []
    for parameter in map(local, parameters):
        if any(
            stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True)
        ):
            raise UnsupportedParameterError(
                f"A parameter of shape {tuple(parameter.shape)} is expanded (strides {parameter.stride()}), "
                "so several of its elements share memory. Optimize a clone()."
            )
        if parameter.device.type == "cpu" and parameter.is_contiguous() and parameter.numel() > 0:
            begin = parameter.data_ptr()
            if begin:  # storage that FSDP has freed has no address
                spans.append((begin, begin + parameter.numel() * parameter.element_size()))
    for (_, end), (begin, _) in pairwise(sorted(spans)):
        if begin < end:
            raise UnsupportedParameterError(
                "Two parameters share memory, so both would be updated at the same time. To tie weights, use "
                "the same torch.nn.Parameter twice."
            )


def check_like(name: str, tensors: Sequence[Any], parameters: Sequence[Tensor]) -> None:
    """Checks the ``grads`` or ``outputs`` of a step: one for each parameter; a gradient may be ``None``.

    Raises:
        InvalidOptimizerArgumentError: their number is wrong, or one is not a tensor or has another shape.
        UnsupportedParameterError: one has an unsupported dtype or layout, or is on another device.
    """
    if len(tensors) != len(parameters):
        raise InvalidOptimizerArgumentError(
            f"{name} has {len(tensors)} tensors for {len(parameters)} parameters; give one for each."
        )
    for index, (tensor, parameter) in enumerate(zip(tensors, parameters, strict=True)):
        if tensor is None and name == "grads":
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidOptimizerArgumentError(
                f"{name}[{index}] is a {type(tensor).__name__}, not a tensor."
            )
        check_layout(f"{name}[{index}]", tensor)
        if tensor.device != parameter.device:
            raise UnsupportedParameterError(
                f"{name}[{index}] is on {tensor.device} and its parameter on {parameter.device}; move it."
            )
        if tensor.dtype not in SUPPORTED_DTYPES:
            raise UnsupportedParameterError(
                f"{name}[{index}] is {tensor.dtype}; convert it to float32, bfloat16 or float16."
            )
        if tensor.shape != parameter.shape:
            raise InvalidOptimizerArgumentError(
                f"{name}[{index}] has shape {tuple(tensor.shape)}, its parameter {tuple(parameter.shape)}."
            )


def check_sizes(params: Sequence[Tensor], **others: Sequence[Tensor]) -> None:
    """Checks, like native kernels, that tensors are dense and have as many elements as their parameters.

    Raises:
        RuntimeError: the numbers of elements differ.
        UnsupportedParameterError: a tensor is sparse.
    """
    for role, tensors in others.items():
        for parameter, tensor in zip(params, tensors, strict=False):
            check_layout(f"A {role}", tensor)
            if tensor.numel() != parameter.numel():
                raise RuntimeError(
                    f"A {role} has {tensor.numel()} elements, its parameter {parameter.numel()}."
                )


def check_layout(name: str, tensor: Tensor) -> None:
    """Checks that a tensor is dense.

    Raises:
        UnsupportedParameterError: it is sparse.
    """
    if tensor.layout is not torch.strided:
        raise UnsupportedParameterError(
            f"{name} is {tensor.layout}, but this optimizer needs dense tensors. Make it dense, or use "
            "torch.optim.SparseAdam."
        )


def check_saved_state(
    saved: Mapping[str, Any], parameter: Tensor, required: Sequence[str], optional: Sequence[str], place: str
) -> None:
    """Checks the saved state of one parameter.

    Args:
        saved: the state by name.
        parameter: the parameter, whose shape the state tensors must have.
        required: the names of state tensors that must be there.
        optional: the names of those that may be there.
        place: the parameter's position, for the message.

    Raises:
        InvalidOptimizerArgumentError: a tensor is missing, unknown, of another shape or not floating-point.
    """
    for name in required:
        if name not in saved:
            raise InvalidOptimizerArgumentError(
                f"The saved state of {place} has {_listed(saved)} but no {name}; it is another optimizer's."
            )
    for name, value in saved.items():
        if name == "step" or not isinstance(value, Tensor):
            continue
        if name not in (*required, *optional):
            raise InvalidOptimizerArgumentError(
                f"The saved state of {place} has {name}, which this optimizer does not use; it was saved "
                f"with {_REASONS.get(name, 'another optimizer')}."
            )
        if value.shape != parameter.shape:
            raise InvalidOptimizerArgumentError(
                f"{name} in the saved state of {place} has shape {tuple(value.shape)}, its parameter "
                f"{tuple(parameter.shape)}; load the state of the same model."
            )
        if not value.is_floating_point() or value.layout is not torch.strided or value.is_meta:
            kind = "without data" if value.is_meta else f"{value.layout}, {value.dtype}"
            raise InvalidOptimizerArgumentError(
                f"{name} in the saved state of {place} is {kind}; it must be a dense floating-point tensor."
            )
    for name in required:
        if not isinstance(saved[name], Tensor):
            raise InvalidOptimizerArgumentError(
                f"{name} in the saved state of {place} is a {type(saved[name]).__name__}, not a tensor."
            )


def saved_step(saved: Mapping[str, Any], place: str, is_needed: bool) -> float:
    """Returns how often a parameter had been updated when its state was saved.

    Raises:
        InvalidOptimizerArgumentError: the count is missing or is not a finite number of 0 or more.
    """
    if "step" not in saved and not is_needed:
        return 0.0
    step = saved.get("step")
    if isinstance(step, Tensor):
        step = step.item() if step.numel() == 1 and not step.is_meta else None
    if isinstance(step, bool) or not isinstance(step, int | float) or not 0 <= step < math.inf:
        raise InvalidOptimizerArgumentError(
            f"step in the saved state of {place} must be the number of updates. "
            f"Value {saved.get('step')} is not."
        )
    return float(step)


_REASONS = {"max_exp_avg_sq": "amsgrad=True", "master": "master_weights=True"}


def _listed(saved: Mapping[str, Any]) -> str:
    return ", ".join(map(str, saved)) or "nothing"
