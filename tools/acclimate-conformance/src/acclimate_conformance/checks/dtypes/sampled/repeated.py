"""Operators on more rows, columns or channels than a device starts blocks in one dimension of a grid.

The inputs are those of torch's own tests, repeated: each period of the result is then the result of the
inputs as they are.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings, attempt
from acclimate_conformance.checks.dtypes.sampled.places import HOST, Place, tensors_in, with_tensors
from acclimate_conformance.checks.dtypes.sampled.samples import (
    Sample,
    fails_in_torch,
    name_of,
    operators,
    promised_part,
    samples_of,
)
from acclimate_conformance.checks.dtypes.sampled.topics import text_of

_BEYOND = 65_537
"""One more than 16 bits count, and two more than the blocks of a grid."""
_IN_A_ROW = 32
"""The most elements beside the dimension that is long, so that all operators take seconds."""
_BY_ROWS = re.compile(
    r"^(nn\.functional\.)?(softm|log_softmax|logsumexp|cum(sum|max)|logcumsumexp|sort|topk|kthvalue|median|mode"
    r"|arg(max|min|sort)|a(max|min)$|max$|min$|sum$|mean|prod|var$|std$|any|count_nonzero|gather|scatter|"
    r"index_(select|add)|bmm|baddbmm|layer_norm|rms_norm|group_norm|normalize|glu|embedding"
    r"|cross_entropy|nll_loss|cosine_similarity|conv1d|conv2d|avg_pool)"
    r"|linalg\.vector_norm"
)
"""Operators that devices compute by a block a row or a channel; those by element have one dimension only."""
_SAMPLES = 5
_FEW = 7
"""How often rows are repeated to see whether an operator takes each by itself; windows then do not fit."""
_DIMENSIONS = {"rows": 0, "places in the second dimension": 1, "columns": -1}


def operators_beyond_the_grid(accelerator: Accelerator, found: Findings) -> None:
    for op in operators():
        if torch.float32 not in op.supported_dtypes(HOST):
            continue
        if not _BY_ROWS.search(op.name):
            continue
        if fails_in_torch(op, "test_compare_cpu", found.device, torch.float32):
            continue
        samples = [
            one
            for one in samples_of(op, torch.float32, _SAMPLES)
            if isinstance(one.value, torch.Tensor) and one.value.layout == torch.strided
        ]
        samples.sort(key=lambda one: one.value.numel())
        fitting = (
            (what, dim, sample)
            for what, dim in _DIMENSIONS.items()
            for sample in samples
            if _is_repeated(op, sample, dim)
        )
        for what, dim, sample in itertools.islice(fitting, 1):  # one dimension of each, as all take long
            times = _BEYOND // sample.value.shape[dim] + 1
            text = text_of(op, sample, f"repeated {times} times along its {what}")
            found.compare(name_of(op), text, _result(op, sample, dim, times))
        if found.enough:
            return
    _compare_matrices(found)


_ROWS, _COLUMNS = 65_600, 3
_OF_ONE_DIMENSION: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "torch.cumsum": lambda x, dim: x.cumsum(dim),
    "torch.cumprod": lambda x, dim: x.cumprod(dim),
    "torch.cummax": lambda x, dim: x.cummax(dim),
    "torch.logcumsumexp": lambda x, dim: x.logcumsumexp(dim),
    "torch.softmax": lambda x, dim: x.softmax(dim),
    "torch.log_softmax": lambda x, dim: x.log_softmax(dim),
    "torch.logsumexp": lambda x, dim: x.logsumexp(dim),
    "torch.sum": lambda x, dim: x.sum(dim),
    "torch.mean": lambda x, dim: x.mean(dim),
    "torch.prod": lambda x, dim: x.prod(dim),
    "torch.var": lambda x, dim: x.var(dim),
    "torch.norm": lambda x, dim: torch.linalg.vector_norm(x, 2, dim),
    "torch.amax": lambda x, dim: x.amax(dim),
    "torch.max": lambda x, dim: x.max(dim),
    "torch.argmin": lambda x, dim: x.argmin(dim),
    "torch.sort": lambda x, dim: x.sort(dim, descending=True),
    "torch.topk": lambda x, dim: x.topk(2, dim),
    "torch.median": lambda x, dim: x.median(dim),
    "torch.any": lambda x, dim: (x > 2).any(dim),
    "torch.all": lambda x, dim: (x > 2).all(dim),
    "torch.flip": lambda x, dim: x.flip(dim),
    "torch.roll": lambda x, dim: x.roll(1, dim),
    "torch.diff": lambda x, dim: x.diff(dim=dim),
    "torch.index_select": lambda x, dim: x.index_select(dim, torch.tensor([2, 0], device=x.device)),
    "torch.gather": lambda x, dim: x.gather(dim, x.argsort(dim)),
    "torch.scatter": lambda x, dim: torch.zeros_like(x).scatter(dim, x.argsort(dim), x),
    "torch.index_add": lambda x, dim: x.index_add(dim, torch.tensor([1, 1, 0], device=x.device), x),
    "torch.nn.functional.normalize": lambda x, dim: torch.nn.functional.normalize(x, dim=dim),
}
"""Operators along one dimension, whose inputs in torch's own tests are seldom matrices."""


def _compare_matrices(found: Findings) -> None:
    """Matrices of many rows, and in turn of many columns, and the first transposed."""
    base = torch.arange(_ROWS)[:, None].remainder(89) / 8 + torch.tensor([0.5, 0.0, 1.0])
    matrices = {"rows": (base, 1), "columns": (base.t().contiguous(), 0), "transposed rows": (base.t(), 0)}
    others = list(matrices)[1:]
    for number, (name, call) in enumerate(_OF_ONE_DIMENSION.items()):
        for what in ("rows", *others[number % 3 : number % 3 + 1]):
            matrix, dim = matrices[what]
            text = f"{name}(a matrix of {_ROWS} {what} of {_COLUMNS} numbers, {dim})"

            def run(place: Place, call: Any = call, matrix: torch.Tensor = matrix, dim: int = dim) -> Any:
                return list(tensors_in(call(place.put(matrix), dim)))

            found.compare(name, text, run)
        if found.enough:
            return


def _is_repeated(op: Any, sample: Sample, dim: int) -> bool:
    """Whether the host's result of some times the rows is that of the rows so many times, and small."""
    value = sample.value
    if value.dim() < 2 or not value.numel() or value.numel() // value.shape[dim] > _IN_A_ROW:
        return False
    if dim == 1 and value.dim() == 2:  # which are its columns
        return False
    call = _call_of(op)
    once, refused = attempt(lambda place: call(place, sample), Place(HOST))
    more, refused_more = attempt(lambda place: call(place, _repeated(sample, dim, _FEW)), Place(HOST))
    if refused is not None or refused_more is not None:
        return False
    first, second = list(tensors_in(once)), list(tensors_in(more))
    return bool(first) and len(first) == len(second) and all(
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and a.layout == torch.strided
        and -a.dim() <= dim < a.dim()
        and 0 < a.numel() <= 4 * _IN_A_ROW * value.shape[dim]
        and a.dim() > 0
        and _same(_along(a, dim, _FEW), b)
        for a, b in zip(first, second, strict=True)
    )  # fmt: skip


def _same(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    return torch.allclose(expected, actual, rtol=1e-5, atol=1e-6, equal_nan=True)


def _along(t: torch.Tensor, dim: int, times: int) -> torch.Tensor:
    return torch.cat([t] * times, dim)


def _repeated(sample: Sample, dim: int, times: int) -> Sample:
    """The same with each tensor repeated that is as long as the first in this dimension."""
    value = sample.value
    length, rank = value.shape[dim], value.dim()

    def longer(t: torch.Tensor) -> torch.Tensor:
        if t.layout != torch.strided or t.dim() != rank or t.shape[dim] != length:
            return t
        return _along(t.detach(), dim, times)

    value, args, kwargs = with_tensors([value, sample.args, sample.kwargs], longer)
    return replace(sample, value=value, args=args, kwargs=kwargs)


def _call_of(op: Any) -> Callable[[Place, Sample], Any]:
    def call(place: Place, sample: Sample) -> Any:
        value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
        with torch.no_grad():
            return promised_part(op, op(value, *args, **kwargs))

    return call


def _result(op: Any, sample: Sample, dim: int, times: int) -> Callable[[Place], Any]:
    """On the device the result of many rows; on the host that of a few, repeated."""

    def run(place: Place) -> Any:
        if place.device == HOST:
            results = list(tensors_in(_call_of(op)(place, sample)))
            return [_along(t, dim, times) for t in results]
        return list(tensors_in(_call_of(op)(place, _repeated(sample, dim, times))))

    return run
