"""Checks parameters, gradients, outputs and saved state before an optimizer changes anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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


def check_memory(tensors: Iterable[Tensor], what: str = "parameters") -> None:
    """Checks that no two elements of the tensors that a step writes share memory.

    Kernels update tensors in parallel, so a shared element would get one update or both.

    Raises:
        UnsupportedParameterError: two tensors share memory, or two elements of one tensor.
    """
    runs: dict[torch.device, list[tuple[Tensor, int]]] = {}
    for tensor in map(local, tensors):
        begin = tensor.data_ptr()
        if begin and tensor.numel() > 0:  # storage that FSDP has freed has no address
            starts, length = _runs(tensor)
            if _collide([(starts, length)]):
                raise UnsupportedParameterError(
                    f"Among the {what}, several elements of a tensor of shape {tuple(tensor.shape)} and "
                    f"strides {tensor.stride()} share memory. Use a clone()."
                )
            runs.setdefault(tensor.device, []).append((starts + begin, length))
    if any(map(_collide, runs.values())):
        raise UnsupportedParameterError(
            f"Two {what} share memory, so both would be updated at the same time. To tie weights, use the "
            "same torch.nn.Parameter in both places of the model."
        )


def _runs(tensor: Tensor) -> tuple[Tensor, int]:
    """Returns where each run of adjacent bytes of a tensor starts, from its first byte, and their length."""
    length = tensor.element_size()
    strides = sorted((stride * length, size) for stride, size in _layout(tensor))
    while strides and strides[0][0] == length:
        length *= strides.pop(0)[1]
    span = sum(stride * (size - 1) for stride, size in strides) + length
    if tensor.nbytes > span:  # has fewer bytes than its elements need; there may be too many runs to list
        return torch.zeros(2, dtype=torch.int64), length
    starts = torch.zeros(1, dtype=torch.int64)
    for stride, size in strides:
        starts = (starts + torch.arange(size)[:, None] * stride).flatten()
    return starts, length


def _collide(runs: Sequence[tuple[Tensor, int]]) -> bool:
    """Whether two of these runs have a byte in common."""
    if len(runs) == 1 and runs[0][0].numel() == 1:
        return False
    begins = torch.cat([starts for starts, _ in runs])
    ends = torch.cat([starts + length for starts, length in runs])
    begins, order = begins.sort()
    return bool((ends[order][:-1] > begins[1:]).any())


def are_laid_out_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether each tensor fills one range of memory, with equal offsets for equal elements."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    first, *others = map(_layout, tensors)
    expected = 1
    for stride, size in sorted(first):
        if stride != expected:
            return False
        expected *= size
    return all(other == first for other in others)


def _layout(tensor: Tensor) -> list[tuple[int, int]]:
    """Returns the stride and size of each dimension in which a tensor has several elements."""
    return [pair for pair in zip(tensor.stride(), tensor.shape, strict=True) if pair[1] != 1]


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
        check_tensor(f"{name}[{index}]", tensor, parameter)
        if tensor.shape != parameter.shape:
            raise InvalidOptimizerArgumentError(
                f"{name}[{index}] has shape {tuple(tensor.shape)}, its parameter {tuple(parameter.shape)}."
            )


def check_sizes(params: Sequence[Tensor], **others: Sequence[Tensor]) -> None:
    """Checks, like native kernels, that tensors fit their parameters.

    Raises:
        RuntimeError: the numbers of elements differ.
        UnsupportedParameterError: a tensor is sparse, on another device, or of an unsupported dtype.
    """
    for role, tensors in others.items():
        for parameter, tensor in zip(params, tensors, strict=False):
            check_tensor(f"A {role}", tensor, parameter)
            if tensor.numel() != parameter.numel():
                raise RuntimeError(
                    f"A {role} has {tensor.numel()} elements, its parameter {parameter.numel()}."
                )


def check_tensor(name: str, tensor: Tensor, parameter: Tensor) -> None:
    """Checks that a gradient, state or output is dense, on its parameter's device and of a supported dtype.

    Raises:
        UnsupportedParameterError: it is not.
    """
    if tensor.layout is not torch.strided:
        raise UnsupportedParameterError(
            f"{name} is {tensor.layout}, but this optimizer needs dense tensors. Make it dense, or use "
            "torch.optim.SparseAdam."
        )
    if tensor.device != parameter.device:
        raise UnsupportedParameterError(
            f"{name} is on {tensor.device} and its parameter on {parameter.device}; move it."
        )
    if tensor.dtype not in SUPPORTED_DTYPES:
        raise UnsupportedParameterError(
            f"{name} is {tensor.dtype}; convert it to float32, bfloat16 or float16."
        )


def check_state(name: str, value: Any, parameter: Tensor) -> None:
    """Checks a tensor of a parameter's state, since the parameter's ``data`` may have been replaced.

    Raises:
        UnsupportedParameterError: it does not fit the parameter.
    """
    check_tensor(f"{name} in the state of a parameter", value, parameter)
    if value.shape != parameter.shape:
        raise UnsupportedParameterError(
            f"{name} in the state of a parameter has shape {tuple(value.shape)}, the parameter now has "
            f"{tuple(parameter.shape)}. Create a new optimizer."
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
