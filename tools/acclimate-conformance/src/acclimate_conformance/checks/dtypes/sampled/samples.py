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
    "mode",
    "cummax",
    "cummin",
)
"""Operators that may name any place of several equal numbers."""


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
    for sample in spread([sample for sample in found if elements(sample.input) <= _LARGEST], most):
        yield Sample(
            sample.input, sample.args, sample.kwargs, sample.output_process_fn_grad, sample.broadcasts_input
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
