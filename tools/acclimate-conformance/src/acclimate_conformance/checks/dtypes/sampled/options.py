"""Every option of every operator, by the names and types in torch's own schemas.

torch's tests pass some options of an operator, and others never. Here each is set to each word, truth value
or dtype that it takes, and to a few numbers. What the host refuses is left out.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings, Run, attempt
from acclimate_conformance.checks.dtypes.sampled.places import HOST, LAYOUTS, Place
from acclimate_conformance.checks.dtypes.sampled.samples import (
    PLACES_ARE_FREE,
    Sample,
    elements,
    fails_in_torch,
    is_private,
    name_of,
    operators,
    samples_of,
)
from acclimate_conformance.checks.dtypes.sampled.topics import (
    chooses_one,
    compare_if_taken,
    gradients_of,
    results_of,
    text_of,
    where_finite,
)

_WORDS: dict[str, tuple[str, ...]] = {
    "reduction": ("none", "mean", "sum", "batchmean"),
    "reduce": ("sum", "prod", "mean", "amax", "amin"),
    "mode": (
        *("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear", "area"),
        *("constant", "reflect", "replicate", "circular", "sum", "mean", "max"),
    ),
    "padding_mode": ("zeros", "border", "reflection"),
    "padding": ("same", "valid"),
    "rounding_mode": ("floor", "trunc"),
    "approximate": ("none", "tanh"),
    "interpolation": ("linear", "lower", "higher", "midpoint", "nearest"),
    "norm": ("forward", "backward", "ortho"),
    "indexing": ("ij", "xy"),
    "side": ("left", "right"),
    "UPLO": ("L", "U"),
    "ord": ("fro", "nuc"),
    "p": ("fro", "nuc"),
    "compute_mode": ("use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"),
}
"""By the name of an option, the words that it takes; torch's schemas do not say them."""
_PAIRS = 6
"""How many pairs of options of an operator are tried."""
_TRANSPOSED = LAYOUTS["that are transposed"]
_OF_DIMENSIONS = re.compile(r"^(dim\d?|axis|dims|diagonal|offset|start_dim|end_dim|source|destination)$")
_BY_TYPE: dict[str, tuple[Any, ...]] = {
    "bool": (True, False),
    "number": (0.5, 3.0, -1.5),
    "int": (1, 2),
    "small": (0.5, 1e-3),
    "dtype": (torch.float64, torch.float32, torch.bfloat16, torch.int64),
}
_LEFT_OUT = re.compile(
    r"^(out|generator|device|layout|pin_memory|memory_format|non_blocking|inplace|training|train|dropout_p"
    r"|is_coalesced|max_norm|scale_factor|sparse|sparse_grad|names|implicit|half_to_float|driver|out_dtype"
    r"|sorted|accumulate|hermitian|unitriangular|blank)$"
)
"""Names of options that change where a result is, draw numbers, or leave the order or the result open."""


def every_option_of_an_operator(accelerator: Accelerator, found: Findings) -> None:
    for op in operators():
        dtype = next((d for d in (torch.float32, torch.int64) if d in op.supported_dtypes(HOST)), None)
        if dtype is None or is_private(op) or fails_in_torch(op, "test_compare_cpu", found.device, dtype):
            continue
        trains = op.supports_autograd and dtype == torch.float32 and not chooses_one(op)
        lies_anyhow = not fails_in_torch(op, "test_noncontiguous_samples", found.device, dtype)
        samples = list(samples_of(op, dtype, 6, requires_grad=trains))
        sample = next((one for one in samples if elements(one.value) > 1), None)
        if sample is None:
            continue
        known: set[str] = set()
        for changed in _with_options(op, sample, samples):
            text = text_of(op, changed)
            if text in known or attempt(results_of(op, changed), Place(HOST))[1] is not None:
                continue
            known.add(text)
            found.compare(name_of(op), text, results_of(op, changed))
            if lies_anyhow:
                places = Place(HOST, _TRANSPOSED), Place(found.device, _TRANSPOSED)
                told = text_of(op, changed, "of tensors that are transposed")
                found.compare(name_of(op), told, results_of(op, changed), *places)
            if op.inplace_variant is not None and not changed.broadcasts:
                told = text_of(op, changed, "in place")
                compare_if_taken(found, op, told, _in_place(op, changed))
            # What goes through 16 bits has their few digits, also where the gradient is in float32.
            if trains and changed.kwargs.get("dtype") is not torch.bfloat16:
                run = gradients_of(op, changed, second=False)
                compare_if_taken(found, op, f"{text}: its gradients", run, near=where_finite)
        if found.enough:
            return


def _in_place(op: Any, sample: Sample) -> Run:
    def run(place: Place) -> Any:
        value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
        with torch.no_grad():
            return op.inplace_variant(value, *args, **kwargs)

    return run


def _beside_a_number(op: Any, sample: Sample) -> tuple[Sample, ...]:
    """The same call with one of Python's numbers in place of its second tensor, if it takes one."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo

    if not isinstance(op, BinaryUfuncInfo) or not sample.args:
        return ()
    return (replace(sample, args=(3, *sample.args[1:])),)


def _with_options(op: Any, sample: Sample, samples: list[Sample]) -> Iterator[Sample]:
    """The same call with other values of each of its options, one at a time and in pairs."""
    options = _options_of(op)
    for base in (sample, *_beside_a_number(op, sample)):
        taken: dict[str, Any] = {}
        for name, values in options.items():
            for value in values:
                changed = replace(base, kwargs={**base.kwargs, name: value})
                if attempt(results_of(op, changed), Place(HOST))[1] is None:
                    taken[name] = value
                    yield changed
        for first, second in itertools.islice(itertools.combinations(taken, 2), _PAIRS):
            yield replace(base, kwargs={**base.kwargs, first: taken[first], second: taken[second]})
    # Which of several places is written last is open, as is the order of what is not sorted.
    for one in samples if op.name not in PLACES_ARE_FREE and "put" not in op.name else ():
        for number, given in enumerate(one.args):
            for value in _like(given):
                args = (*one.args[:number], value, *one.args[number + 1 :])
                yield replace(one, args=args)
        for name, given in one.kwargs.items():
            for value in _like(given) if name not in _WORDS and not _LEFT_OUT.match(name) else ():
                yield replace(one, kwargs={**one.kwargs, name: value})


def _like(given: Any) -> tuple[Any, ...]:
    """Other values of the kind of a number or truth value."""
    if isinstance(given, bool):
        return (not given,)
    return (given * 1.5 + 0.25, -given) if isinstance(given, float) else ()


@cache
def _overloads(name: str) -> tuple[Any, ...]:
    packet = getattr(torch.ops.aten, name, None)
    return tuple(getattr(packet, one) for one in packet.overloads()) if packet is not None else ()


def _options_of(op: Any) -> dict[str, tuple[Any, ...]]:
    """The names of the options of an operator, with values that they may take."""
    found: dict[str, tuple[Any, ...]] = {}
    for overload in _overloads(op.aten_name or op.name):
        for argument in overload._schema.arguments:
            values = _values(argument.name, str(argument.type))
            if values and not _LEFT_OUT.match(argument.name):
                found[argument.name] = tuple(dict.fromkeys((*found.get(argument.name, ()), *values)))
    try:
        parameters = inspect.signature(op.op).parameters
    except (TypeError, ValueError):  # it is not written in Python
        parameters = {}  # type: ignore[assignment]
    for name, parameter in parameters.items():
        if _LEFT_OUT.match(name):
            continue
        default = parameter.default
        if isinstance(default, bool):
            found[name] = _BY_TYPE["bool"]
        elif isinstance(default, float):
            found[name] = _BY_TYPE["small" if name == "eps" else "number"]
        elif name in _WORDS:
            found[name] = _WORDS[name]
        elif name == "dtype":
            found[name] = _BY_TYPE["dtype"]
    return found


def _values(name: str, kind: str) -> tuple[Any, ...]:
    kind = kind.removeprefix("Optional[").removesuffix("]")
    if kind == "str":
        return _WORDS.get(name, ())
    if kind == "int" and name == "dtype":
        return _BY_TYPE["dtype"]
    if kind == "bool":
        return _BY_TYPE["bool"]
    if kind in ("float", "number"):
        return _BY_TYPE["small" if name == "eps" else "number"]
    if kind in ("int", "SymInt"):
        return (0, 1, -1) if _OF_DIMENSIONS.match(name) else _BY_TYPE["int"]
    if kind in ("List[int]", "List[SymInt]") and _OF_DIMENSIONS.match(name):
        return ((0,), (-1,), (0, -1))
    return ()
