"""The operators, modules and optimizers of torch's own tests, with the inputs that these use.

They are in a private module of torch, which changes torch when it is imported (it wraps calls of TorchScript
and freezes flags of backends). So only a child process of the checks imports it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_WITHOUT_ONE_RESULT = (
    "empty",
    "new_empty",
    "jiterator",
    "sparse",
    "to_sparse",
    "torch._scaled_mm",
    "torch.ops.aten._flash",
    "torch.ops.aten._efficient",
    "svd",
    "linalg.svd",
    "linalg.eig",
    "pca_lowrank",
    "linalg.lobpcg",
    "qr",
    "linalg.qr",
    "geqrf",
    "ormqr",
    "linalg.ldl",
    "linalg.lstsq",
    "hash_tensor",
    "masked.median",
    "mode",
    "linalg.tensorsolve",
    "_segment_reduce",
    "histogramdd",
)
"""How the names of operators begin that are not compared: they have several right results, or no values."""
_FEW, _STEP = 6, 3
_LARGEST = 1 << 16
NOT_FLOATING = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
PLACES_ARE_FREE = (
    "sort",
    "msort",
    "argsort",
    "topk",
    "kthvalue",
    "median",
    "nanmedian",
    "cummax",
    "cummin",
)
"""Operators that may name any place of several equal numbers."""
_KEEP_FOR_GRADIENTS = (
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
)
"""Operators whose other results each device keeps for its own gradients, in its own dtype and form."""
_TO_INTEGERS = {
    "byte": torch.uint8,
    "char": torch.int8,
    "short": torch.int16,
    "int": torch.int32,
    "long": torch.int64,
}
"""Operators of which C leaves the value undefined for numbers beyond a dtype's range."""


@dataclass(frozen=True)
class Sample:
    """One call of an operator, with tensors on the host."""

    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grads_of: Callable[[Any], Any]
    """Chooses the results that have gradients."""
    broadcasts: bool
    """Whether the result has another shape than the first input, so that there is no in-place form."""

    def __str__(self) -> str:
        parts = [_told(self.value), *map(_told, self.args)]
        parts += [f"{name}={_told(value)}" for name, value in self.kwargs.items()]
        text = ", ".join(parts)
        return text if len(text) <= 160 else f"{text[:160]}…"


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
        return f"[{', '.join(map(_told, value))}]"
    return repr(value)


def operators() -> list[Any]:
    """torch's descriptions of its operators."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [
        op
        for op in op_db
        if not op.name.startswith(_WITHOUT_ONE_RESULT)
        and not getattr(op, "has_nondeterministic_output", False)
        and op.supported_dtypes("cpu")
    ]


def lists_of_tensors() -> list[Any]:
    """torch's descriptions of operators on lists of tensors, with which optimizers compute."""
    from torch.testing._internal import common_methods_invocations as theirs

    parts = ("unary", "binary", "pointwise", "reduce", "other")
    return [op for part in parts for op in getattr(theirs, f"foreach_{part}_op_db")]


def name_of(op: Any) -> str:
    """An operator's name in torch, as a program writes it."""
    variant = f" ({op.variant_test_name.replace('_', ' ')})" if op.variant_test_name else ""
    name = op.name if op.name.startswith("torch.") else f"torch.{op.name}"
    return f"{name}{variant}"


def is_private(op: Any) -> bool:
    """Whether torch calls an operator from functions of its own only; ``__add__`` is Python's, and public."""
    name = op.name.rpartition(".")[2]
    return name.startswith("_") and not name.startswith("__")


def samples_of(
    op: Any, dtype: torch.dtype, most: int, requires_grad: bool = False, more: bool = False
) -> Iterator[Sample]:
    """Inputs of an operator.

    Args:
        op: torch's description of it.
        dtype: the dtype of its main inputs.
        most: how many to choose: if few, of the first ones, else from all parts of torch's list.
        requires_grad: whether floating-point inputs require gradients.
        more: whether to take torch's larger list.
    """
    reset()
    # Not op.sample_inputs(), which looks for the running test in every caller's source: most of the time.
    source = op.reference_inputs_func if more else op.sample_inputs_func
    try:
        theirs = source(op, "cpu", dtype, requires_grad)
        # torch's lists have up to 1,400 inputs, which take longer to make than a few calls.
        found = list(itertools.islice(theirs, most * _STEP) if most <= _FEW else theirs)
    except Exception:  # noqa: BLE001 - torch's own lists fail for some dtypes, in any way
        return
    usable = [s for s in found if elements(s.input) <= _LARGEST and _is_defined(op, s.input)]
    for sample in spread(usable, most):
        yield Sample(
            sample.input, sample.args, sample.kwargs, sample.output_process_fn_grad, sample.broadcasts_input
        )


def without_places(result: Any) -> Any:
    """The numbers of a result whose places may be any of several equal ones."""
    if isinstance(result, torch.Tensor):
        return result if result.is_floating_point() else result.shape
    return result[0]


def defined(op: Any, values: torch.Tensor) -> torch.Tensor:
    """For which numbers the result of an operator of one tensor is defined."""
    if op.name not in _TO_INTEGERS or not values.is_floating_point():
        return torch.ones(values.shape, dtype=torch.bool)
    limits = torch.iinfo(_TO_INTEGERS[op.name])
    wide = values.detach().double()
    return (wide >= limits.min) & (wide < float(limits.max))


def _is_defined(op: Any, value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or bool(defined(op, value).all())


def promised_part(op: Any, result: Any) -> Any:
    """What torch promises of a result: no places of equal numbers, and nothing kept for gradients."""
    if op.name in PLACES_ARE_FREE:
        return without_places(result)
    keeps = op.name in _KEEP_FOR_GRADIENTS and not isinstance(result, torch.Tensor)
    return result[0] if keeps else result


def fails_in_torch(op: Any, test: str, device: str, dtype: torch.dtype) -> bool:
    """Whether torch's own tests expect a test of an operator to fail on this type of device, or skip it."""
    from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride

    return any(
        (mark.test_name, mark.device_type) == (test, torch.device(device).type)
        and mark.active_if
        and (mark.dtypes is None or dtype in mark.dtypes)
        and any(not isinstance(d, (precisionOverride, toleranceOverride)) for d in mark.decorators)
        for mark in op.decorators
        if hasattr(mark, "test_name")
    )


def elements(value: Any) -> int:
    """How many elements the first input has; large ones take long, and another check has them."""
    return value.numel() if isinstance(value, torch.Tensor) else 0


def spread(items: Sequence[Any], most: int) -> Iterable[Any]:
    """At most so many of some items, from all parts of the list."""
    if len(items) <= most:
        return items
    return [items[number * len(items) // most] for number in range(most)]


def seed_host(seed: int) -> None:
    """Seeds torch's generator of the host.

    torch.manual_seed also seeds devices. For those that nobody uses it notes the whole stack, which takes
    longer than most calls.
    """
    torch.default_generator.manual_seed(seed)


def reset() -> None:
    """Seeds every generator of the host that torch's tests use."""
    import numpy as np

    seed_host(0)
    np.random.seed(0)
    random.seed(0)
