"""Operators in other settings of torch: default dtypes, threads, autocast, after other calls.

Each of these is looked at alone elsewhere. Here every operator of torch's own tests is called in them, since
a device's kernel may read a setting, or keep what it made for a call before.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import device_names, short
from acclimate_conformance.checks.dtypes.sampled.comparing import (
    OF_PRODUCTS,
    Findings,
    Run,
    attempt,
    difference,
    draws,
)
from acclimate_conformance.checks.dtypes.sampled.places import HOST, LAYOUTS, Place, tensors_in, with_tensors
from acclimate_conformance.checks.dtypes.sampled.samples import (
    PLACES_ARE_FREE,
    Sample,
    fails_in_torch,
    is_private,
    name_of,
    operators,
    promised_part,
    samples_of,
)
from acclimate_conformance.checks.dtypes.sampled.topics import (
    differentiable,
    results_of,
    text_of,
    weights_of,
    with_matrix,
)

_FEW, _IN_TURN = 2, 3


# -- settings ------------------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _within(block: Callable[[], AbstractContextManager[Any]], run: Run) -> Run:
    def called(place: Place) -> Any:
        with block():
            return run(place)

    return called


def operators_in_any_setting(accelerator: Accelerator, found: Findings) -> None:
    several = len(device_names(accelerator)) > 1
    with ThreadPoolExecutor(1) as other:

        def elsewhere(run: Run) -> Run:
            """In another thread, whose current device is the first one, wherever the tensors are."""

            def called(place: Place) -> Any:
                if place.device == HOST:
                    return run(place)
                return other.submit(attempt_in_thread, run, place).result()

            return called

        def attempt_in_thread(run: Run, place: Place) -> Any:
            if several:
                accelerator.set_device(0)
            with torch.inference_mode():
                result = run(place)
                accelerator.synchronize(torch.device(place.device))
                return result

        for op in operators():
            offered = op.supported_dtypes(HOST)
            first = next((d for d in (torch.float32, torch.int64) if d in offered), None)
            if first is None or fails_in_torch(op, "test_compare_cpu", found.device, first):
                continue
            samples = list(samples_of(op, first, _FEW))
            for sample in samples[:1]:
                if draws(results_of(op, sample), Place(found.device)):  # which shows in this thread only
                    continue
                where = ", on a device that is not current" if several else ""
                text = f"{text_of(op, sample)} in another thread, in inference_mode(){where}"
                usual = results_of(op, sample)
                found.compare(name_of(op), text, elsewhere(usual), usual=usual)
            whole = list(samples_of(op, torch.int64, 1)) if torch.int64 in offered else []
            for dtype in (torch.float64, torch.bfloat16):
                given = whole if dtype == torch.bfloat16 else [*samples[:1], *whole]
                for sample in given if dtype in accelerator.supported_dtypes() else ():
                    text = f"{text_of(op, sample)} while torch's default dtype is {short(dtype)}"
                    run = _within(lambda dtype=dtype: default_dtype(dtype), results_of(op, sample))  # type: ignore[misc]
                    found.compare(name_of(op), text, run, usual=results_of(op, sample))
            for sample in samples[:1]:
                run = _within(_deterministic, results_of(op, sample))
                text = f"{text_of(op, sample)} with deterministic algorithms"
                found.compare(name_of(op), text, run, may_be_refused=True)  # it may have no such algorithm
            if found.enough:
                return


# -- calls one after the other ---------------------------------------------------------------------


def operators_after_other_calls(accelerator: Accelerator, found: Findings) -> None:
    reduced = [d for d in accelerator.supported_dtypes() if d in (torch.bfloat16, torch.float16)][:1]
    for op in operators():
        offered = op.supported_dtypes(HOST)
        first = next((d for d in (torch.float32, torch.int64) if d in offered), None)
        if first is None or fails_in_torch(op, "test_compare_cpu", found.device, first):
            continue
        samples = with_matrix(op, samples_of(op, first, _IN_TURN))
        if not samples:
            continue
        others = [samples_of(op, dtype, 1) for dtype in (*reduced, torch.int64) if dtype in offered]
        found.compare(
            name_of(op), f"{text_of(op, samples[0])}, called after others", _in_turn(op, samples, others=[
                sample for given in others for sample in given
            ])
        )  # fmt: skip
        if op.supports_autograd and first == torch.float32:
            trained = with_matrix(op, samples_of(op, first, _IN_TURN, requires_grad=True))
            trained += [replace(sample, value=_halved(sample.value)) for sample in trained[:1]]
            text = f"{text_of(op, samples[0])}: its gradients, after other calls"
            found.compare(name_of(op), text, _gradients_in_turn(op, trained))
        if found.enough:
            return


def _in_turn(op: Any, samples: list[Sample], others: list[Sample]) -> Run:
    """The results of calls of one operator, of which each differs from the one before in one thing.

    Other options and shapes; the same shape in another layout, in another dtype, and with other numbers in
    the same memory.
    """
    # Public functions prepare tensors for the private ones.
    layout = None if is_private(op) else LAYOUTS["that are transposed"]

    def run(place: Place) -> Any:
        found = [results_of(op, sample)(place) for sample in (*samples, *others)]
        again = Place(place.device, layout, exact=place.exact)
        found += [results_of(op, sample)(again) for sample in samples[::-1]]
        value, args, kwargs = place.put((samples[0].value, samples[0].args, samples[0].kwargs))
        found.append(promised_part(op, op(value, *args, **kwargs)))
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout == torch.strided:
            with torch.no_grad():
                has_form = not value.dim() or UNSTABLE.search(op.name)  # such as that of a covariance
                value.copy_(value * 0.5 if has_form else value.flip(0).clone())
            found.append(promised_part(op, op(value, *args, **kwargs)))
        return found

    return run


def _halved(value: Any) -> Any:
    return with_tensors(value, lambda t: (t.detach() * 0.5).requires_grad_(t.requires_grad))


def _gradients_in_turn(op: Any, samples: list[Sample]) -> Run:
    """The gradients of several calls that are all made before the first backward pass."""

    def run(place: Place) -> Any:
        calls = []
        for sample in samples:
            given = place.put((sample.value, sample.args, sample.kwargs))
            value, args, kwargs = given
            results = promised_part(op, sample.grads_of(op(value, *args, **kwargs)))
            calls.append((differentiable(results), differentiable(given)))
        return [
            gradient
            for results, leaves in calls
            if results and leaves
            for gradient in torch.autograd.grad(
                results, leaves, [weights_of(t) for t in results], allow_unused=True
            )
        ]

    return run


# -- autocast --------------------------------------------------------------------------------------

_CAST = re.compile(
    r"^(nn\.functional\.)?(conv\d|linear$|matmul|__rmatmul__|mm$|bmm|baddbmm|addmm|addmv|addr$|addbmm|mv$|einsum|prelu"
    r"|scaled_dot_product|softmax|log_softmax|softmin|layer_norm|group_norm|cosine|poisson_nll|nll_loss"
    r"|cross_entropy|kl_div|l1_loss|smooth_l1|mse_loss|margin_ranking|hinge_emb|soft_margin|triplet|multi_margin"
    r"|addcdiv|addcmul|atan2|bilinear|cross$|dot$|grid_sample$|index_put|scatter_add|tensordot|cat$|stack)"
)
"""Names of operators that autocast casts, whatever the floating-point dtype of each of their inputs is."""
_LEFT_OUT = re.compile(
    r"binary_cross_entropy$"  # is refused
    r"|pinv_singular"  # multiplies matrices outside of the operator
)
UNSTABLE = re.compile(
    r"linalg|cholesky|^lu|solve|inverse|det$|lowrank|ormqr|matrix_exp|cdist|cov|corr|renorm"
)
"""Names of operators that make large differences of small ones, as 16 bits give."""
_LEFT_OUT_INTO_OTHERS = (*PLACES_ARE_FREE, "tensordot", "inner")
"""Names of operators that write what others give, which autocast casts, or places of equal numbers."""
_FAR = 0.1
"""How far a result of 16 bits may be from the host's in float32, as a share of the largest."""
_IN_AUTOCAST = 4


def operators_within_autocast(accelerator: Accelerator, found: Findings) -> None:
    reduced = [d for d in accelerator.supported_dtypes() if d in (torch.bfloat16, torch.float16)]
    for op in operators() if reduced else ():
        if _LEFT_OUT.search(f"{op.name}_{op.variant_test_name}".rstrip("_")) or is_private(op):
            continue
        offered = op.supported_dtypes(HOST)
        if torch.float32 in offered and not fails_in_torch(
            op, "test_compare_cpu", found.device, torch.float32
        ):
            for number, sample in enumerate(samples_of(op, torch.float32, _IN_AUTOCAST)):
                dtype = reduced[number % len(reduced)]
                for text, run in _called_in_autocast(op, sample, dtype):
                    _compare_in_autocast(accelerator, found, op, text, dtype, run, sample.kwargs.get("dtype"))
            for text, run in writing(op):
                whole = f"within amp.autocast, {text}"
                found.compare(name_of(op), whole, _autocast(accelerator, reduced[0], run))
        for dtype in (torch.float64, torch.int64, torch.bool):
            is_claimed = not dtype.is_floating_point or dtype in accelerator.supported_dtypes()
            if dtype not in offered or not is_claimed:
                continue
            alone = Findings(accelerator)  # what is lacking in one dtype may be there in another
            for sample in samples_of(op, dtype, 1):
                text, run = text_of(op, sample), results_of(op, sample)
                if dtype in (torch.int64, torch.bool):  # which an operator may convert before it multiplies
                    _compare_in_autocast(accelerator, alone, op, text, reduced[0], run, None)
                else:
                    text = f"within amp.autocast, {text}"
                    alone.compare(name_of(op), text, _autocast(accelerator, reduced[0], run))
            found.broken += alone.broken
            found.compared += alone.compared
        if found.enough:
            return


def _autocast(accelerator: Accelerator, dtype: torch.dtype, run: Run) -> Run:
    def called(place: Place) -> Any:
        if place.device == HOST:
            return run(place)
        with accelerator.amp.autocast(dtype=dtype):
            return run(place)

    return called


def _called_in_autocast(op: Any, sample: Sample, dtype: torch.dtype) -> Iterator[tuple[str, Run]]:
    """A call, and the same with every second tensor in 16 bits, if autocast takes these together."""
    yield text_of(op, sample), results_of(op, sample)
    for turn in (0, 1) if _CAST.search(op.name) else ():

        def mixed(place: Place, turn: int = turn) -> Any:
            given = place.put([sample.value, list(sample.args), sample.kwargs])
            turns = itertools.count()

            def cast(t: torch.Tensor) -> torch.Tensor:
                is_in_turn = t.dtype == torch.float32 and next(turns) % 2 == turn
                return t.to(dtype) if is_in_turn and place.device != HOST else t

            value, args, kwargs = with_tensors(given, cast)
            return promised_part(op, op(value, *args, **kwargs))

        yield f"{text_of(op, sample)} with every second tensor in {short(dtype)}", mixed


def _compare_in_autocast(
    accelerator: Accelerator, found: Findings, op: Any, text: str, dtype: torch.dtype, run: Run,
    asked: torch.dtype | None,
) -> None:  # fmt: skip
    """Compares a call within autocast, whose results may have 16 bits where no dtype was asked for."""

    def near(ours: Any, theirs: Any) -> str:
        results = list(tensors_in(ours))
        wanted = list(tensors_in(theirs))
        if asked is None and len(results) == len(wanted):
            results = [
                a.float() if _dtype(b) == torch.float32 and _dtype(a) == dtype else a
                for a, b in zip(results, wanted, strict=True)
            ]
        if UNSTABLE.search(op.name):
            results, wanted = ([torch.ones_like(t) for t in tensors_in(x)] for x in (results, wanted))
        return difference(results, wanted, dict.fromkeys(OF_PRODUCTS, _FAR))

    what = f"within amp.autocast in {short(dtype)}, {text}"
    found.compare(name_of(op), what, _autocast(accelerator, dtype, run), near=near)


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def writing(op: Any) -> Iterator[tuple[str, Run]]:
    """Calls in place and into tensors given as out, which autocast leaves as they are."""
    for sample in samples_of(op, torch.float32, 1):
        if op.inplace_variant is not None and not sample.broadcasts:

            def in_place(place: Place, sample: Sample = sample) -> Any:
                value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
                return op.inplace_variant(value, *args, **kwargs)

            yield f"{text_of(op, sample)} in place", in_place
        if op.supports_out and op.name not in _LEFT_OUT_INTO_OTHERS:

            def into(place: Place, sample: Sample = sample) -> Any:
                value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
                with torch.no_grad():
                    result, _ = attempt(results_of(op, sample), Place(HOST))
                out = with_tensors(result, lambda t: place.whole(torch.full_like(t, 7)))
                op(value, *args, **{**kwargs, "out": out})
                return out

            yield f"{text_of(op, sample)} into tensors given as out", into
