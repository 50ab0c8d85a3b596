"""Operators on batches whose rows differ in what matters, and derivatives where numbers are equal.

A kernel that looks at the first row only, or finds the largest number, the error or the mask for a whole
batch, is right where all rows are alike, as random inputs are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from acclimate.accelerator import Accelerator
from acclimate.imports import describe
from acclimate_conformance.checks.dtypes.sampled.comparing import (
    Findings,
    Run,
    attempt,
    is_refusal,
)
from acclimate_conformance.checks.dtypes.sampled.places import HOST, Place, tensors_in, with_tensors
from acclimate_conformance.checks.dtypes.sampled.samples import (
    Sample,
    fails_in_torch,
    name_of,
    operators,
    promised_part,
    samples_of,
)
from acclimate_conformance.checks.dtypes.sampled.topics import (
    EQUAL_ROWS_ARE_OPEN,
    NAN_IS_OPEN,
    chooses_one,
    compare_if_taken,
    differentiable,
    gradients_of,
    results_of,
    text_of,
    weights_of,
    where_finite,
    with_matrix,
)

_SAMPLES = 4
_OPEN = re.compile(rf"{EQUAL_ROWS_ARE_OPEN.pattern}|attention")
"""Names of operators that are open for equal rows, and for a row that sees nothing."""
_OPEN_WITH_NAN = re.compile(rf"{NAN_IS_OPEN.pattern}|conv")
"""The same for NaN, which may be multiplied with the zeros of padding."""


def operators_on_rows_that_differ(accelerator: Accelerator, found: Findings) -> None:
    for op in operators():
        if torch.float32 not in op.supported_dtypes(HOST):
            continue
        if fails_in_torch(op, "test_compare_cpu", found.device, torch.float32):
            continue
        trains = op.supports_autograd and not chooses_one(op) and "embedding_bag" not in op.name
        for sample in samples_of(op, torch.float32, _SAMPLES, requires_grad=trains):
            for how, change in _ROWS.items():
                changed = _changed(sample, change)
                is_open = (_OPEN_WITH_NAN if "NaN" in how else _OPEN).search(op.name)
                # Equal singular values have no vectors of their own, of which this norm's gradient is made.
                if changed is None or is_open or op.variant_test_name == "nuc":
                    continue
                text = text_of(op, changed, how)
                near = where_finite if "NaN" in how else None
                usual = results_of(op, sample)
                found.compare(name_of(op), text, results_of(op, changed), near=near, usual=usual)
                if trains and "NaN" not in how:
                    run = gradients_of(op, changed, second=False)
                    compare_if_taken(found, op, f"{text}: its gradients", run, near=where_finite)
        if _SOLVES.search(op.name):
            for sample in samples_of(op, torch.float32, 24):
                changed = _changed(sample, _with_a_last_one_of_zeros)
                if changed is not None and sample.value.dim() > 2:
                    _require_refusal(found, op, sample, changed)
        if found.enough:
            return


def _with_equal_ones(t: torch.Tensor) -> torch.Tensor:
    """The first row as it is, the second of equal numbers, the last of zeros; masks hide all or nothing."""
    if t.dtype == torch.bool:
        t[0], t[-1] = True, False
    elif t.is_floating_point():
        t[1] = t[1].reshape(-1)[0].item()
        if len(t) > 2:
            t[-1] = 0
    return t


def _with_large_ones(t: torch.Tensor) -> torch.Tensor:
    """Each row with numbers of another size."""
    if t.is_floating_point():
        t[0] *= 1e-3
        t[-1] *= 30
    return t


def _with_one_nan(t: torch.Tensor) -> torch.Tensor:
    if t.is_floating_point():
        t[-1].reshape(-1)[-1:].fill_(float("nan"))
    return t


def _with_a_last_one_of_zeros(t: torch.Tensor) -> torch.Tensor:
    if t.is_floating_point():
        t.reshape(-1, *t.shape[-2:])[-1] = 0
    return t


_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "with a row of equal numbers and one of zeros": _with_equal_ones,
    "with small numbers in the first row and large ones in the last": _with_large_ones,
    "with NaN in the last row": _with_one_nan,
}
_SOLVES = re.compile(r"^(inverse|cholesky$|linalg\.(inv$|solve$|cholesky$|tensorinv))")
"""Names of operators that refuse a matrix that has no result."""


def _changed(sample: Sample, change: Callable[[torch.Tensor], torch.Tensor]) -> Sample | None:
    """The same with other rows in each tensor that has as many as the first.

    ``None`` if that has one only.
    """
    if not isinstance(sample.value, torch.Tensor) or sample.value.dim() < 2 or len(sample.value) < 2:
        return None
    length = len(sample.value)

    def rows(t: torch.Tensor) -> torch.Tensor:
        if t.layout != torch.strided or t.dim() < 2 or len(t) != length or not t.numel():
            return t
        return change(t.detach().clone(memory_format=torch.contiguous_format)).requires_grad_(t.requires_grad)

    value, args, kwargs = with_tensors([sample.value, sample.args, sample.kwargs], rows)
    return replace(sample, value=value, args=args, kwargs=kwargs)


def _require_refusal(found: Findings, op: Any, sample: Sample, changed: Sample) -> None:
    """Notes that a batch is taken which the host refuses for its last matrix."""
    _, good = attempt(results_of(op, sample), Place(HOST))
    _, bad = attempt(results_of(op, changed), Place(HOST))
    if good is not None or bad is None:
        return
    _, ours = found.called(text_of(op, sample), results_of(op, sample))
    if ours is not None:
        return
    text = text_of(op, changed, "of which the last matrix is zero")
    _, refused = found.called(text, results_of(op, changed))
    found.compared += 1
    if refused is None and not any(told.startswith(f"{name_of(op)}(") for told in found.broken):
        found.broken.append(f"{text} is accepted; the host raises {describe(bad)}")
    elif refused is not None and type(refused) is not type(bad) and not is_refusal(refused):
        found.broken.append(f"{text} raises {describe(refused)}; the host raises {describe(bad)}")


# -- derivatives -----------------------------------------------------------------------------------


def derivatives_forwards(accelerator: Accelerator, found: Findings) -> None:
    for op in operators():
        if not op.supports_autograd or torch.float32 not in op.supported_dtypes(HOST):
            continue
        for sample in with_matrix(op, samples_of(op, torch.float32, 2, requires_grad=True)):
            if op.supports_forward_ad and not _writes_one_place_twice(op, sample):
                text = f"{text_of(op, sample)}: its derivatives forwards"
                found.compare(name_of(op), text, _forwards(op, sample))
            text = f"{text_of(op, sample)}: its gradients added to others"
            found.compare(name_of(op), text, _added(op, sample))
        if found.enough:
            return


def _writes_one_place_twice(op: Any, sample: Sample) -> bool:
    """Whether the derivatives of several numbers are put into one place, of which any may stay."""
    if "max_unpool" not in op.name:
        return False
    dims = int(op.name[-2])
    windows = sample.args[0].flatten(-dims).sort(-1).values
    return bool((windows.diff() == 0).any())


def _forwards(op: Any, sample: Sample) -> Run:
    """The derivatives of the results in one direction of all inputs."""

    def run(place: Place) -> Any:
        with forward_ad.dual_level():

            def dual(t: torch.Tensor) -> torch.Tensor:
                return forward_ad.make_dual(t.detach(), weights_of(t)) if t.requires_grad else t

            value, args, kwargs = with_tensors(
                list(place.put((sample.value, sample.args, sample.kwargs))), dual
            )
            results = promised_part(op, sample.grads_of(op(value, *args, **kwargs)))
            return [
                forward_ad.unpack_dual(t).tangent for t in tensors_in(results) if isinstance(t, torch.Tensor)
            ]

    return run


def _added(op: Any, sample: Sample) -> Run:
    """Gradients that backward() adds to others, which lie in another order, and what a hook is given."""

    def run(place: Place) -> Any:
        given = place.put((sample.value, sample.args, sample.kwargs))
        value, args, kwargs = given
        leaves: list[torch.Tensor] = differentiable(given)
        seen: dict[int, torch.Tensor] = {}
        for number, leaf in enumerate(leaves):
            other = leaf.detach().transpose(0, -1) if leaf.dim() > 1 else leaf.detach()
            ones = torch.ones_like(other, memory_format=torch.contiguous_format)
            leaf.grad = ones.transpose(0, -1) if leaf.dim() > 1 else ones
            leaf.register_hook(lambda g, number=number: seen.update({number: g.clone()}))
        results = differentiable(promised_part(op, sample.grads_of(op(value, *args, **kwargs))))
        if results:
            torch.autograd.backward(results, [weights_of(t) for t in results])
        return [[leaf.grad for leaf in leaves], [seen.get(number) for number in range(len(leaves))]]

    return run
