"""Calls that torch refuses: shapes and dtypes that do not fit, and places beyond the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings, attempt
from acclimate_conformance.checks.dtypes.sampled.places import HOST, Place
from acclimate_conformance.checks.dtypes.sampled.samples import Sample, name_of, operators, reset

_BEYOND: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "torch.index_select": lambda x, i: x.index_select(0, i),
    "torch.nn.functional.embedding": lambda x, i: torch.nn.functional.embedding(i, x),
    "torch.Tensor.__getitem__": lambda x, i: x[i],
    "torch.gather": lambda x, i: x.gather(0, i[:, None]),
    "torch.take": lambda x, i: x.take(i + 8),
    "torch.scatter": lambda x, i: x.scatter(0, i[:, None], 1.0),
    "torch.scatter_add": lambda x, i: x.scatter_add(0, i[:, None], torch.ones_like(x)[:2]),
    "torch.index_add": lambda x, i: x.index_add(0, i, torch.ones_like(x)[:2]),
    "torch.index_copy": lambda x, i: x.index_copy(0, i, torch.ones_like(x)[:2]),
    "torch.index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "torch.index_put": lambda x, i: x.index_put((i,), torch.ones_like(x)[:2]),
    "torch.nn.functional.cross_entropy": lambda x, i: torch.nn.functional.cross_entropy(x.t(), i),
    "torch.nn.functional.nll_loss": lambda x, i: torch.nn.functional.nll_loss(x.t(), i),
    "torch.nn.functional.one_hot": lambda x, i: torch.nn.functional.one_hot(i, 3),
    "torch.take_along_dim": lambda x, i: x.take_along_dim(i[:, None], 0),
}
"""Operators that read or write at places, here of a matrix of 3 rows and 2 columns."""


def wrong_arguments_are_refused(accelerator: Accelerator, found: Findings) -> None:
    for op in operators():
        for sample in _wrong(op):
            text = f"{name_of(op)}({sample})"

            def run(place: Place, op: Any = op, sample: Sample = sample) -> Any:
                value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
                result = op(value, *args, **kwargs)
                accelerator.synchronize()
                return result

            _require_refused(found, name_of(op), text, run)
        if found.enough:
            return
    for name, call in _BEYOND.items():
        for places in ([0, 3], [0, 2**40]):

            def beyond(place: Place, call: Any = call, places: list[int] = places) -> Any:
                matrix = place.whole(torch.arange(6.0).view(3, 2))
                result = call(matrix, place.whole(torch.tensor(places)))
                accelerator.synchronize()
                return result.cpu()

            _require_refused(found, name, f"{name} of the places {places} in a dimension of 3", beyond)


def _require_refused(found: Findings, name: str, what: str, run: Callable[[Place], Any]) -> None:
    if any(text.startswith(name) for text in found.broken) or attempt(run, Place(HOST))[1] is None:
        return
    result, refused = attempt(run, Place(found.device))
    found.compared += 1
    if refused is None:
        found.broken.append(f"{what} is accepted, and gives {_told(result)}; torch refuses it")


def _told(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    return f"a {type(result).__name__}"


def _wrong(op: Any) -> list[Sample]:
    if op.error_inputs_func is None:
        return []
    try:
        reset()
        wrong = [e.sample_input for e in op.error_inputs_func(op, HOST)]
    except Exception:  # noqa: BLE001 - torch's own lists fail on some builds
        return []
    return [Sample(s.input, s.args, s.kwargs, lambda x: x, False) for s in wrong]
