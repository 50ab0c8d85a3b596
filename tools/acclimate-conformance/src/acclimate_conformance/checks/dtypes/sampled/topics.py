"""What is observed on the inputs of torch's own tests: one function for each check."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import short
from acclimate_conformance.checks.dtypes.sampled.comparing import (
    Findings,
    attempt,
    difference,
    shared,
    twice_as_far,
)
from acclimate_conformance.checks.dtypes.sampled.places import (
    EXPANDED,
    HOST,
    LAYOUTS,
    OF_COMPLEX,
    OF_IMAGES,
    OF_NUMBERS,
    OVERLAPPING,
    Layout,
    Place,
    layouts_for,
    tensors_in,
    with_tensors,
)
from acclimate_conformance.checks.dtypes.sampled.samples import (
    NOT_FLOATING,
    PLACES_ARE_FREE,
    Sample,
    defined,
    elements,
    fails_in_torch,
    is_private,
    lists_of_tensors,
    name_of,
    operators,
    promised_part,
    reset,
    samples_of,
)

_MOST, _LARGER, _OTHER_DTYPES, _LAID_OUT, _ALONE = 24, 6, 3, 4, 1
"""How many inputs are tried: of torch's list, of its larger one, in other dtypes, in other layouts, and each
input alone."""


def _call(op: Any, sample: Sample) -> Callable[[Place], Any]:
    """A call of an operator: its results, the inputs afterwards, and which share memory."""

    def run(place: Place) -> Any:
        given = place.put((sample.value, sample.args, sample.kwargs))
        value, args, kwargs = given
        result = op(value, *args, **kwargs)
        changed = [t for t in tensors_in(given) if isinstance(t, torch.Tensor)]
        return [promised_part(op, result), changed, shared(promised_part(op, result), given)]

    return run


def text_of(op: Any, sample: Sample, how: str = "") -> str:
    return f"{name_of(op)}({sample}){how and ' '}{how}"


def operators_as_on_the_host(accelerator: Accelerator, found: Findings) -> None:
    for op in operators():
        if torch.float32 not in op.supported_dtypes(HOST):
            continue
        if fails_in_torch(op, "test_compare_cpu", found.device, torch.float32):
            continue
        for more, most in ((False, _MOST), (True, _LARGER)):
            if more and op.reference_inputs_func is None:
                continue
            for sample in samples_of(op, torch.float32, most, more=more):
                found.compare(name_of(op), text_of(op, sample), _call(op, sample))
        if found.enough:
            return


def _other_dtypes(accelerator: Accelerator) -> list[torch.dtype]:
    floating = [dtype for dtype in accelerator.supported_dtypes() if dtype != torch.float32]
    return [*floating, *NOT_FLOATING, torch.complex64, torch.complex128, *_UNSIGNED]


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def operators_in_every_dtype(accelerator: Accelerator, found: Findings) -> None:
    for op in operators():
        offered = op.supported_dtypes(HOST)
        for dtype in _other_dtypes(accelerator):
            if dtype not in offered or fails_in_torch(op, "test_compare_cpu", found.device, dtype):
                continue
            alone = Findings(accelerator)  # what is lacking in one dtype may be there in another
            samples = list(samples_of(op, dtype, _OTHER_DTYPES))
            for sample in samples:
                alone.compare(name_of(op), text_of(op, sample), _call(op, sample))
            for how, layout in OF_COMPLEX.items() if dtype.is_complex else ():
                for sample in samples[:1]:
                    places = Place(HOST, layout), Place(found.device, layout)
                    text = text_of(op, sample, f"of tensors {how}")
                    alone.compare(name_of(op), text, results_of(op, sample), *places)
            _compare_writing(alone, op, dtype, samples)
            found.broken += alone.broken
            found.compared += alone.compared
            found.dtypes |= alone.dtypes
            found.lacking |= {f"{name} in {short(dtype)}": why for name, why in alone.lacking.items()}
        if found.enough:
            return


def _compare_writing(found: Findings, op: Any, dtype: torch.dtype, samples: list[Sample]) -> None:
    """Compares one call in place and one into tensors given as out: others have kernels of their own."""
    inputs = [sample for sample in samples if elements(sample.value) > 1] or samples
    for sample in [one for one in inputs if not one.broadcasts][:1] if op.inplace_variant else ():
        _compare_in_place(found, op, sample, {})
    takes_out = op.supports_out and op.name not in PLACES_ARE_FREE
    if takes_out and not fails_in_torch(op, "test_out", found.device, dtype):
        for sample in inputs[:1]:
            _compare_into_others(found, op, sample, ("",))


def operators_on_any_layout(accelerator: Accelerator, found: Findings) -> None:
    reduced = [d for d in accelerator.supported_dtypes() if d in (torch.bfloat16, torch.float16)][:1]
    for op in operators():
        offered = op.supported_dtypes(HOST)
        first = next((d for d in (torch.float32, torch.int64) if d in offered), None)
        for dtype in dict.fromkeys((first, *reduced, *_OTHERS_LAID_OUT)):
            if dtype is None or dtype not in offered:
                continue
            if fails_in_torch(op, "test_noncontiguous_samples", found.device, dtype):
                continue
            samples = _laid_out(op, dtype, thorough=dtype == first)
            is_attention = "attention" in op.name  # of windows, torch's on the host reads other memory
            for sample in samples:
                layouts = layouts_for((sample.value, sample.args, sample.kwargs))
                if dtype not in (first, *reduced):
                    layouts = {how: layouts[how] for how in _OF_OTHERS}
                elif not EQUAL_ROWS_ARE_OPEN.search(op.name):
                    layouts |= OVERLAPPING if dtype == first and not is_attention else EXPANDED
                if dtype == first and sample is samples[0]:
                    layouts |= OF_NUMBERS
                for how, layout in layouts.items():
                    places = Place(HOST, layout), Place(found.device, layout)
                    text = text_of(op, sample, f"of tensors {how}")
                    found.compare(name_of(op), text, results_of(op, sample), *places)
        if found.enough:
            return


_OTHERS_LAID_OUT = (torch.int64, torch.bool, torch.complex64)
_OF_OTHERS = ("that are transposed", "that are every second element")
"""Further dtypes, of which fewer layouts are tried."""
EQUAL_ROWS_ARE_OPEN = re.compile(
    r"linalg|cholesky|^lu|solve|inverse|det$|lowrank|ormqr|geqrf|matrix_exp"  # of singular matrices
    r"|max_pool|max_unpool"  # which of several equal numbers a window tells
    r"|_norm$|corrcoef|cdist|normalize"  # what is left of a mean that is subtracted is rounding noise
)
"""Names of operators that have no definite result if all rows are equal."""


def _laid_out(op: Any, dtype: torch.dtype, thorough: bool) -> list[Sample]:
    """Inputs of several shapes, or the largest.

    For operators of one number also a matrix, which torch has not; for those of two also two of one shape.
    """
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo

    found = with_matrix(op, samples_of(op, dtype, _LAID_OUT))
    largest = max(found, key=lambda sample: elements(sample.value), default=None)
    chosen = found if thorough else [] if largest is None else [largest]
    if isinstance(op, BinaryUfuncInfo) and largest is not None and largest.args:
        alike = replace(largest, args=(largest.value.flip(0), *largest.args[1:]))
        chosen = [*chosen, alike]
        if thorough and largest.value.dim() == 2:
            image, other = _as_image(largest.value), _as_image(largest.value.flip(0))
            chosen.append(replace(alike, value=image, args=(other, *largest.args[1:])))
    return chosen


def _as_image(matrix: torch.Tensor) -> torch.Tensor:
    """The same numbers with dimensions for images, channels, rows and columns."""
    return matrix.detach()[None, ..., None].requires_grad_(matrix.requires_grad)


def with_matrix(op: Any, samples: Iterable[Sample]) -> list[Sample]:
    """Inputs, and before them the first row as a matrix and as an image.

    torch has these for few operators of one number.
    """
    from torch.testing._internal.opinfo.core import UnaryUfuncInfo

    given = list(samples)
    is_of_one = isinstance(op, UnaryUfuncInfo)
    rows = [s for s in given if is_of_one and s.value.dim() == 1 and s.value.numel() % 4 == 0 and not s.args]
    matrices = [
        replace(s, value=s.value.detach().reshape(4, -1).requires_grad_(s.value.requires_grad))
        for s in rows[:1]
    ]
    images = [replace(s, value=_as_image(s.value)) for s in matrices]
    return [*matrices, *images, *given]


def results_of(op: Any, sample: Sample) -> Callable[[Place], Any]:

    def run(place: Place) -> Any:
        value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
        return promised_part(op, op(value, *args, **kwargs))

    return run


_SPECIAL = (float("nan"), float("inf"), -0.0, -float("inf"), 0.0)
NAN_IS_OPEN = re.compile(
    r"polynomial|attention"  # NaN as a degree is undefined in C; what a mask hides may be left out
    r"|grid_sample|_aa$"  # a neighbour's weight of 0 may be multiplied with it; as a place it is undefined
    r"|fft"  # a factor of a sum may be zero, or that number as far as it was rounded
    r"|^(int|long|short|char|byte)$"  # no integer is NaN
    r"|max_unpool"  # numbers that are put into one place are equal else, and the last one stays
    r"|linalg\.(?!norm|vector_norm|matrix_norm|cross|multi_dot|vecdot|diagonal)"  # it is compared with pivots
    r"|^(lu|cholesky|inverse|pinverse|logdet|triangular_solve|ormqr|matrix_exp)"
)
"""Names of operators whose results are open if an input is NaN."""
_MULTIPLY_PADDING = re.compile(r"^(nn\.functional\.)?conv")
"""Names of operators that may multiply NaN or infinity with the zeros of padding, or leave that out."""
_SUBTRACT = re.compile(rf"norm|softmax_backward|{_MULTIPLY_PADDING.pattern}")
"""Names of operators that subtract infinity from infinity, or not, depending on the order of their steps."""
_DIVIDE = re.compile(r"_norm|normalize")
"""Names of operators that divide by the root of a sum, of which infinity may be a part."""


def operators_on_special_numbers(accelerator: Accelerator, found: Findings) -> None:
    nan = torch.tensor(float("nan"))
    for op in operators():
        if NAN_IS_OPEN.search(op.name) or not defined(op, nan):
            continue
        if torch.float32 not in op.supported_dtypes(HOST):
            continue
        near = None
        if _SUBTRACT.search(op.name):
            near = _open_at_quotients if _DIVIDE.search(op.name) else _open_at_infinity

        def compare(sample: Sample, where: str, op: Any = op, near: Any = near) -> None:
            if not (op.name.endswith("dist") and _has_degree_zero(sample)):
                text = text_of(op, sample, f"with NaN and infinity in the {where}")
                found.compare(name_of(op), text, results_of(op, sample), near=near)

        for sample in samples_of(op, torch.float32, _LAID_OUT):
            compare(replace(sample, value=_with_special_numbers(sample.value)), "first input")
        for sample in samples_of(op, torch.float32, 0 if _MULTIPLY_PADDING.search(op.name) else 2):
            compare(replace(sample, args=_with_special_numbers(sample.args)), "other inputs")
        for dtype in accelerator.supported_dtypes()[1:]:
            for sample in samples_of(op, dtype, 1) if dtype in op.supported_dtypes(HOST) else ():
                compare(replace(sample, value=_with_special_numbers(sample.value)), "first input")
        if found.enough:
            return


def _has_degree_zero(sample: Sample) -> bool:
    """Whether it counts differing elements, of which NaN may be one or none."""
    return any(
        type(value) in (int, float) and value == 0 for value in (*sample.args, *sample.kwargs.values())
    )


def _open_at_infinity(found: Any, wanted: Any) -> str:
    """How results differ, where NaN is as good as infinity, and each of them as one of the other sign.

    An element that is finite on the host must be so on the device too, and be that number.
    """
    return difference_but(found, wanted, lambda ours, theirs: ~ours.isfinite() & ~theirs.isfinite())


def _open_at_quotients(found: Any, wanted: Any) -> str:
    """The same, where NaN is also as good as the zero that a number divided by infinity is.

    A device may multiply with the reciprocal of a sum or subtract an infinite mean, which gives NaN.
    """

    def is_open(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        return ~ours.isfinite() & (~theirs.isfinite() | (ours.isnan() & (theirs == 0)))

    return difference_but(found, wanted, is_open)


def difference_but(
    found: Any, wanted: Any, is_open: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> str:
    """How results differ elsewhere than where they are open."""
    compared = [
        torch.where(is_open(ours.cpu(), theirs.cpu()), theirs.cpu(), ours.cpu())
        if isinstance(theirs, torch.Tensor) and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        else ours
        for ours, theirs in zip(tensors_in(found), tensors_in(wanted), strict=True)
    ]
    return difference(compared, list(tensors_in(wanted)))


def _with_special_numbers(value: Any) -> Any:
    """The same, but each third element of a floating-point tensor is NaN, infinity or a zero."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_with_special_numbers, value))
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    flat = value.detach().clone().reshape(-1)
    for number, place in enumerate(range(0, len(flat), 3)):
        flat[place] = _SPECIAL[number % len(_SPECIAL)]
    return flat.reshape(value.shape)


def operators_in_place_and_into_others(accelerator: Accelerator, found: Findings) -> None:
    for op in operators():
        offered = op.supported_dtypes(HOST)
        for dtype in (torch.float32, torch.int64):
            if dtype not in offered:
                continue
            takes_out = (
                op.supports_out
                and op.name not in PLACES_ARE_FREE
                and not fails_in_torch(op, "test_out", found.device, dtype)
            )
            for sample in with_matrix(op, samples_of(op, dtype, _LAID_OUT)):
                if op.inplace_variant is not None and not sample.broadcasts:
                    _compare_in_place(found, op, sample, layouts_for(sample.value))
                if takes_out:
                    _compare_into_others(
                        found, op, sample,
                        ("", "with gaps", "of another size", "transposed", _AT_THE_START, _WIDER),
                    )  # fmt: skip
        if found.enough:
            return


def _compare_in_place(found: Findings, op: Any, sample: Sample, layouts: Mapping[str, Layout]) -> None:
    def run(place: Place) -> Any:
        value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
        version = value._version
        result = op.inplace_variant(value, *args, **kwargs)
        return [result, value, result is value, value._version > version]

    name = name_of(op)
    for how, layout in {"": None, **layouts, **_marked(sample.value)}.items():
        text = f"{name}({sample}) in place{how and ', of tensors '}{how}"
        found.compare(name, text, run, Place(HOST, layout), Place(found.device, layout))


def _marked(value: Any) -> Mapping[str, Layout]:
    """The layouts of which a tensor has a mark and other numbers in memory."""
    if not isinstance(value, torch.Tensor):
        return {}
    return OF_COMPLEX if value.is_complex() else OF_NUMBERS if value.dtype is torch.float32 else {}


_AT_THE_START = "without elements, at the start of memory that is large enough"
_WIDER = "of a wider dtype"
_IN_WIDER = {
    torch.float32: torch.float64,
    torch.int64: torch.float32,
    torch.bool: torch.int32,
}
"""By the dtype of a result, another that torch converts it to."""


def _computes_by_element(op: Any) -> bool:
    """Whether torch computes an operator in the dtype of its inputs, whatever it is given as out."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

    return isinstance(op, (BinaryUfuncInfo, UnaryUfuncInfo))


def _as_precise_as(result: Any, out: Any) -> list[Any]:
    """What was written into a wider dtype, in the dtype of the result, in which a device may compute it."""
    return [
        [there.dtype, there.to(given.dtype) if given.is_floating_point() else there]
        for given, there in zip(tensors_in(result), tensors_in(out), strict=True)
    ]


def _compare_into_others(found: Findings, op: Any, sample: Sample, kinds: Iterable[str]) -> None:
    with torch.no_grad():
        try:
            result = op(sample.value, *sample.args, **sample.kwargs)
        except Exception:  # noqa: BLE001 - the host refuses it
            return
    if not all(isinstance(t, torch.Tensor) and t.layout == torch.strided for t in tensors_in(result)):
        return

    def made(place: Place, kind: str, like: torch.Tensor) -> torch.Tensor:
        if kind == _AT_THE_START:
            return place.whole(torch.full((like.numel() + 1,), 7, dtype=torch.float32).to(like.dtype))[:0]
        dtype = _IN_WIDER.get(like.dtype, like.dtype) if kind == _WIDER else like.dtype
        wrong = torch.full(like.shape, 7, dtype=torch.float32).to(dtype)
        if kind == "of another size":
            return torch.empty(0, dtype=place.dtype(like.dtype), device=place.device)
        if kind == "transposed" and like.dim() > 1:
            return LAYOUTS["that are transposed"](place, wrong)
        if kind == "with gaps" and like.dim():
            return LAYOUTS["that are every second element"](place, wrong)
        return place.whole(wrong)

    for kind in kinds:
        if kind == _WIDER and not _computes_by_element(op):
            continue  # others may ask for the dtype of their result

        def run(place: Place, kind: str = kind) -> Any:
            value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
            if isinstance(result, torch.Tensor):
                out: Any = made(place, kind, result)
            else:
                out = tuple(made(place, kind, t) for t in tensors_in(result))
            before = [t.untyped_storage().data_ptr() for t in tensors_in(out)]
            returned = op(value, *args, **{**kwargs, "out": out})
            after = [t.untyped_storage().data_ptr() for t in tensors_in(out)]
            seen = _as_precise_as(result, out) if kind == _WIDER else out
            return [seen, shared(returned, [out]), kind == "of another size" or before == after]

        text = f"{name_of(op)}({sample}) into tensors given as out{kind and ' '}{kind}"
        found.compare(name_of(op), text, run)


def operators_on_other_operands(accelerator: Accelerator, found: Findings) -> None:
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

    kinds = [
        *dict.fromkeys((torch.float32, *accelerator.supported_dtypes()[:2])),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64),
    ]
    for op in operators():
        offered = op.supported_dtypes(HOST)
        dtype = next((d for d in (torch.float32, torch.int64) if d in offered), None)
        samples = [] if dtype is None else list(samples_of(op, dtype, _LAID_OUT))
        for sample in samples if not _EMPTY_IS_OPEN.search(op.name) else ():
            for what, smaller in _without_elements(sample):
                text = text_of(op, smaller, f"without elements in {what}")
                compare_if_taken(found, op, text, results_of(op, smaller))
        takes_single = not isinstance(op, BinaryUfuncInfo) and not _SINGLE_IS_OPEN.search(
            op.name
        )  # reads beyond its end
        for sample in samples[:1] if takes_single else ():
            for what, smaller in _without_dimensions(sample):
                text = text_of(op, smaller, f"without dimensions in {what}")
                compare_if_taken(found, op, text, results_of(op, smaller), near=where_finite)
        for sample in () if chooses_one(op) else samples[:_OTHER_DTYPES]:
            whole = _of_whole_numbers(sample)
            text = text_of(op, whole, "of whole numbers")
            compare_if_taken(found, op, text, results_of(op, whole), near=where_finite)
        for sample in samples_of(op, torch.complex64, 1) if torch.complex64 in offered else ():
            whole = _of_whole_numbers(sample)
            text = text_of(op, whole, "of whole numbers")
            compare_if_taken(found, op, text, results_of(op, whole), near=where_finite)
        _compare_after_other_numbers(found, op, samples)
        if isinstance(op, BinaryUfuncInfo) and not op.name.startswith("__r"):  # whose refusal is a result
            _compare_two_dtypes(found, op, [kind for kind in kinds if kind in offered])
        if isinstance(op, (BinaryUfuncInfo, UnaryUfuncInfo)) and op.supports_out:
            for sample in [one for one in samples if elements(one.value) > 1 and not one.broadcasts][:1]:
                _compare_into_itself(found, op, sample)
        if found.enough:
            return


_EMPTY_IS_OPEN = re.compile(
    r"resize"  # what it adds may hold anything
    r"|pdist"  # torch's gradient on the host ends the process
    r"|multi_?margin|multilabel_margin"  # torch leaves the result on the host as it finds it
)
"""Names of operators that are not called without elements."""


_SINGLE_IS_OPEN = re.compile(r"resize|batch_norm")
"""Names of operators that read or keep more than a single number, which may be anything."""


def _without_dimensions(sample: Sample) -> Iterator[tuple[str, Sample]]:
    """The same with one of its tensors, or all, as a single number: its first element."""
    if not isinstance(sample.value, torch.Tensor) or not sample.value.dim() or not sample.value.numel():
        return

    def single(t: torch.Tensor) -> torch.Tensor:
        plain = t.layout == torch.strided and t.dim() and t.numel()
        return t.detach().reshape(-1)[0].clone().requires_grad_(t.requires_grad) if plain else t

    places = [n for n, given in enumerate(sample.args) if isinstance(given, torch.Tensor) and given.dim()]
    for place in places:
        args = [single(given) if n == place else given for n, given in enumerate(sample.args)]
        yield f"operand {place + 2}", replace(sample, args=tuple(args))
    yield "the first operand", replace(sample, value=single(sample.value))
    if places:
        yield (
            "all operands",
            replace(sample, value=single(sample.value), args=with_tensors(sample.args, single)),
        )


def _without_elements(sample: Sample) -> Iterator[tuple[str, Sample]]:
    """The same with no elements along the first or the last dimension of the first input.

    Further inputs that are as long in that dimension have none there, too.
    """
    value = sample.value
    if not isinstance(value, torch.Tensor) or not value.dim() or not value.numel():
        return
    for what, dim in {"the first dimension": 0, "the last dimension": -1}.items():
        length = value.shape[dim]

        def cut(t: torch.Tensor, dim: int = dim, length: int = length) -> torch.Tensor:
            is_as_long = t.dim() and t.shape[dim] == length and t.layout == torch.strided
            return t.detach().narrow(dim, 0, 0).requires_grad_(t.requires_grad) if is_as_long else t

        yield (
            what,
            replace(
                sample,
                value=cut(value),
                args=with_tensors(sample.args, cut),
                kwargs=with_tensors(sample.kwargs, cut),
            ),
        )
        if value.dim() == 1:
            return


def compare_if_taken(
    found: Findings, op: Any, text: str, run: Callable[[Place], Any],
    near: Callable[[Any, Any], str] | None = None,
) -> None:  # fmt: skip
    """Compares a call that a device may refuse, unlike the host."""
    found.compare(name_of(op), text, run, near=near, may_be_refused=True)


def _compare_after_other_numbers(found: Findings, op: Any, samples: list[Sample]) -> None:
    """Compares a call with numbers as options after the same call with others, as a step of training has."""
    for sample in samples:
        others = [
            value * 1.5 if isinstance(value, float) else value
            for value in (*sample.args, *sample.kwargs.values())
        ]
        if others == [*sample.args, *sample.kwargs.values()]:
            continue
        count = len(sample.args)
        changed = replace(
            sample, args=tuple(others[:count]), kwargs=dict(zip(sample.kwargs, others[count:], strict=True))
        )
        compare_if_taken(found, op, text_of(op, sample, "before others"), results_of(op, sample))
        compare_if_taken(found, op, text_of(op, changed, "after others"), results_of(op, changed))
        if op.inplace_variant is not None and not sample.broadcasts:
            for one in (sample, changed):

                def run(place: Place, one: Sample = one) -> Any:
                    value, args, kwargs = place.put((one.value, one.args, one.kwargs))
                    return op.inplace_variant(value, *args, **kwargs)

                compare_if_taken(found, op, text_of(op, one, "in place, beside others"), run)
        return


_OPERANDS: dict[str, Callable[[Place, torch.Tensor, torch.Tensor], tuple[Any, Any]]] = {
    "two tensors": lambda place, x, y: (place.whole(x), place.whole(y)),
    "a tensor and one without dimensions": lambda place, x, y: (place.whole(x), place.whole(y[0])),
    "a tensor without dimensions and another": lambda place, x, y: (place.whole(x[0]), place.whole(y)),
    "two without dimensions": lambda place, x, y: (place.whole(x[0]), place.whole(y[1])),
    "a tensor and a number of the host": lambda place, x, y: (place.whole(x), y[0]),
}
_PYTHONS = (2, 2.5, True)
"""Numbers of Python, of each kind."""


def _compare_two_dtypes(found: Findings, op: Any, dtypes: list[torch.dtype]) -> None:
    """Compares an operator of two operands on those of two dtypes, and beside Python's numbers."""
    for first, second in product(dtypes, dtypes):
        left, right = torch.tensor([3, 1, 2]).to(first), torch.tensor([2, 1, 2]).to(second)
        of = f"{short(first)} and {short(second)}"
        for what, put in _OPERANDS.items():
            if first == second and what == "two tensors":  # as all samples are
                continue

            def run(place: Place, put: Any = put, left: Any = left, right: Any = right) -> Any:
                return op(*put(place, left, right))

            compare_if_taken(found, op, f"{name_of(op)} of {what} in {of}", run)
        if op.inplace_variant is not None:
            for what, other in {"": right, ", which has no dimensions": right[0]}.items():
                if first == second and not what:
                    continue

                def changed(place: Place, left: Any = left, right: Any = other) -> Any:
                    return op.inplace_variant(place.whole(left), place.whole(right))

                compare_if_taken(found, op, f"{name_of(op)} in place, of {of}{what}", changed)
    for dtype, number in product(dtypes, _PYTHONS):
        given = torch.tensor([3, 1, 2]).to(dtype)
        for what, call in {
            f"of {short(dtype)} and {number!r}": op,
            f"of {number!r} and {short(dtype)}": lambda x, n: op(n, x),
            f"of a number in {short(dtype)} and {number!r}": lambda x, n: op(x[0], n),
            f"of {short(dtype)}, in place, and {number!r}": op.inplace_variant,
        }.items():

            def beside(place: Place, call: Any = call, given: Any = given, number: Any = number) -> Any:
                return call(place.whole(given), number)

            compare_if_taken(found, op, f"{name_of(op)} {what}", beside)


def _compare_into_itself(found: Findings, op: Any, sample: Sample) -> None:
    """Compares an operator by element whose first input is also given as out."""

    def run(place: Place) -> Any:
        value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
        op(value, *args, **{**kwargs, "out": value})
        return value

    compare_if_taken(found, op, text_of(op, sample, "into its first input, given as out"), run)


def gradients_as_on_the_host(accelerator: Accelerator, found: Findings) -> None:
    for op in operators():
        if not op.supports_autograd or torch.float32 not in op.supported_dtypes(HOST):
            continue
        samples = list(samples_of(op, torch.float32, 24, requires_grad=True))
        for sample in with_matrix(op, samples)[:1]:
            run = gradients_of(op, sample, second=False)
            # Public functions prepare tensors for the private ones, and are tried themselves.
            for how in () if is_private(op) else _OF_GRADIENTS:
                places = Place(HOST, LAYOUTS[how]), Place(found.device, LAYOUTS[how])
                text = f"{text_of(op, sample, f'of tensors {how}')}: its gradients"
                found.compare(name_of(op), text, run, *places)
        images = [sample for sample in with_matrix(op, samples) if _is_image(sample.value)]
        for sample in () if is_private(op) else images[:_ALONE]:
            run = gradients_of(op, sample, second=False, weigh=_with_channels_last)
            for how, layout in {"": None, **OF_IMAGES}.items():
                places = Place(HOST, layout), Place(found.device, layout)
                text = f"{text_of(op, sample, how)}: its gradients, of results with channels last"
                found.compare(name_of(op), text, run, *places)
        for number, sample in enumerate(samples):
            told = f"{text_of(op, sample)}: its gradients"
            for how, weigh in list(_WEIGHTS.items())[: None if number == 0 else 1]:
                found.compare(
                    name_of(op), f"{told}{how}", gradients_of(op, sample, second=False, weigh=weigh)
                )
            if number < _ALONE and op.inplace_variant is not None and op.supports_inplace_autograd:
                run = gradients_of(op, sample, second=False, in_place=True)
                found.compare(name_of(op), f"{text_of(op, sample, 'in place')}: its gradients", run)
            inputs = differentiable((sample.value, sample.args, sample.kwargs))
            for only in range(len(inputs)) if number < _ALONE and len(inputs) > 1 else ():
                run = gradients_of(op, sample, second=False, only=only)
                found.compare(name_of(op), f"{told} for input {only + 1} alone", run)
        for dtype in accelerator.supported_dtypes()[1:]:
            if dtype not in op.supported_backward_dtypes(HOST):
                continue
            for sample in samples_of(op, dtype, _OTHER_DTYPES, requires_grad=True):
                if op.name in PLACES_ARE_FREE and _has_equal_numbers(sample.value):
                    continue  # any of them may get the gradient
                text = f"{text_of(op, sample)}: its gradients"
                found.compare(name_of(op), text, gradients_of(op, sample, second=False), near=twice_as_far)
        for sample in samples_of(op, torch.float32, 4, requires_grad=True) if op.supports_gradgrad else ():
            text = f"{text_of(op, sample)}: its second gradients"
            found.compare(name_of(op), text, gradients_of(op, sample, second=True))
        if found.enough:
            return


def _has_equal_numbers(values: torch.Tensor) -> bool:
    return len(values.detach().unique()) < values.numel()


def differentiable(value: Any) -> list[torch.Tensor]:
    return [t for t in tensors_in(value) if isinstance(t, torch.Tensor) and t.requires_grad]


def gradients_of(
    op: Any, sample: Sample, second: bool, weigh: Callable[[torch.Tensor], torch.Tensor] | None = None,
    only: int | None = None, in_place: bool = False, of: int | None = None,
) -> Callable[[Place], Any]:  # fmt: skip
    """The gradients of an operator for its inputs.

    Args:
        op: torch's description of it.
        sample: its inputs.
        second: whether for second gradients.
        weigh: makes the gradient of a result; if ``None``, each element has its weight.
        only: the number of the input that requires a gradient; each of them if ``None``.
        in_place: whether it replaces its first input, from which its gradient is then computed otherwise.
        of: the number of the result that has a gradient; each of them if ``None``.
    """
    weigh = weigh or weights_of

    def call(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return op.inplace_variant(value.clone(), *args, **kwargs) if in_place else op(value, *args, **kwargs)

    def run(place: Place) -> Any:
        given = place.put((sample.value, sample.args, sample.kwargs))
        value, args, kwargs = given
        leaves = differentiable(given)
        if only is not None:
            for number, leaf in enumerate(leaves):
                leaf.requires_grad_(number == only)
            leaves = leaves[only : only + 1]
        results = differentiable(promised_part(op, sample.grads_of(call(value, *args, **kwargs))))
        if only is not None and not results:
            return []
        results = results if of is None else results[of : of + 1]
        first = torch.autograd.grad(
            results, leaves, [weigh(t) for t in results], create_graph=second, allow_unused=True
        )
        if not second:
            return list(first)
        again = [t for t in first if t is not None and t.requires_grad]
        if not again:
            return []
        return list(torch.autograd.grad(again, leaves, [weights_of(t) for t in again], allow_unused=True))

    return run


def weights_of(result: torch.Tensor) -> torch.Tensor:
    """A weight for each element, so that a gradient of one cannot stand for that of another."""
    weights = torch.arange(1, result.numel() + 1).reshape(result.shape) % 7 - 2.5
    if result.is_complex():
        weights = torch.complex(weights, weights.flip(0) / 2 if weights.dim() else weights / 2)
    return weights.to(result.dtype).to(result.device)


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() in (4, 5)


def _with_channels_last(result: torch.Tensor) -> torch.Tensor:
    weights = weights_of(result)
    if not _is_image(weights):
        return weights
    return weights.movedim(1, -1).contiguous().movedim(-1, 1)


def _with_gaps(result: torch.Tensor) -> torch.Tensor:
    weights = weights_of(result)
    return torch.stack([weights, torch.zeros_like(weights)], -1)[..., 0]


def _transposed(result: torch.Tensor) -> torch.Tensor:
    weights = weights_of(result)
    return weights.transpose(0, -1).contiguous().transpose(0, -1) if weights.dim() > 1 else weights


_WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": weights_of,
    ", of a sum": lambda result: torch.full((), 1.5, dtype=result.dtype, device=result.device).expand_as(
        result
    ),
    ", of results with gaps": _with_gaps,
    ", of results that are transposed": _transposed,
}
"""How the gradients of results lie in memory; that of a sum is one number in each place."""


_TIES_ARE_OPEN = re.compile(
    rf"{EQUAL_ROWS_ARE_OPEN.pattern}|std|median|quantile|renorm|grid_sample|hardswish|hardsigmoid"
)
"""Names of operators whose gradients are not the same everywhere, or noise, for equal or whole numbers."""


def gradients_in_hard_cases(accelerator: Accelerator, found: Findings) -> None:
    for op in operators():
        if not op.supports_autograd:
            continue
        if torch.float32 in op.supported_dtypes(HOST):
            samples = list(samples_of(op, torch.float32, _OTHER_DTYPES, requires_grad=True))
            for sample in samples[:1]:
                text = f"{text_of(op, sample)}: its gradients, twice through one graph"
                found.compare(name_of(op), text, _gradients_twice(op, sample))
            for sample in samples:
                for what, smaller in () if _EMPTY_IS_OPEN.search(op.name) else _without_elements(sample):
                    text = f"{text_of(op, smaller, f'without elements in {what}')}: its gradients"
                    compare_if_taken(found, op, text, gradients_of(op, smaller, second=False))
                if not chooses_one(op):
                    whole = _of_whole_numbers(sample)
                    text = f"{text_of(op, whole, 'of whole numbers')}: its gradients"
                    run = gradients_of(op, whole, second=False)
                    compare_if_taken(found, op, text, run, near=where_finite)
            for sample in samples[:1]:
                for number in range(_count_results(op, sample)):
                    text = f"{text_of(op, sample)}: its gradients, of result {number + 1} alone"
                    found.compare(name_of(op), text, gradients_of(op, sample, second=False, of=number))
        if torch.complex64 in op.supported_backward_dtypes(HOST):
            _compare_complex_gradients(found, op)
        if found.enough:
            return


def chooses_one(op: Any) -> bool:
    """Whether the gradient of several equal numbers may go to any of them, or is not defined."""
    of_a_dimension = op.name in ("max", "min") and "dim" in op.variant_test_name
    return of_a_dimension or op.name in PLACES_ARE_FREE or _TIES_ARE_OPEN.search(op.name) is not None


def _of_whole_numbers(sample: Sample) -> Sample:
    """The same with numbers of which many are equal or zero."""

    def rounded(t: torch.Tensor) -> torch.Tensor:
        if t.layout != torch.strided or not (t.is_floating_point() or t.is_complex()):
            return t
        parts = torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach()
        whole = (parts / 3).round()
        return (torch.view_as_complex(whole) if t.is_complex() else whole).requires_grad_(t.requires_grad)

    given = with_tensors([sample.value, sample.args, sample.kwargs], rounded)
    return replace(sample, value=given[0], args=given[1], kwargs=given[2])


def where_finite(found: Any, wanted: Any) -> str:
    """How results differ, where those of the host are finite."""
    return difference_but(found, wanted, lambda ours, theirs: ~theirs.isfinite())


def _count_results(op: Any, sample: Sample) -> int:
    """How many results have gradients, if they are several."""
    results, refused = attempt(
        lambda place: op(*place.put((sample.value, *sample.args)), **place.put(sample.kwargs)), Place(HOST)
    )
    found = [] if refused is not None else differentiable(promised_part(op, sample.grads_of(results)))
    return len(found) if len(found) > 1 else 0


def _gradients_twice(op: Any, sample: Sample) -> Callable[[Place], Any]:
    """The gradients of an operator for two gradients of its results, one after the other."""

    def run(place: Place) -> Any:
        given = place.put((sample.value, sample.args, sample.kwargs))
        value, args, kwargs = given
        leaves = differentiable(given)
        results = differentiable(promised_part(op, sample.grads_of(op(value, *args, **kwargs))))
        return [
            gradient
            for factor in (1, -3)
            for gradient in torch.autograd.grad(
                results,
                leaves,
                [weights_of(t) * factor for t in results],
                retain_graph=True,
                allow_unused=True,
            )
        ]

    return run


def _compare_complex_gradients(found: Findings, op: Any) -> None:
    samples = list(samples_of(op, torch.complex64, _OTHER_DTYPES, requires_grad=True))
    for number, sample in enumerate(samples):
        text = f"{text_of(op, sample)}: its gradients"
        run = gradients_of(op, sample, second=False)
        compare_if_taken(found, op, text, run)
        for how in (_TRANSPOSED[0], *OF_COMPLEX) if number == 0 and not is_private(op) else ():
            layout = {**LAYOUTS, **OF_COMPLEX}[how]
            places = Place(HOST, layout), Place(found.device, layout)
            told = f"{text}, of tensors {how}"
            found.compare(name_of(op), told, run, *places, may_be_refused=True)
        if not chooses_one(op):
            whole = _of_whole_numbers(sample)
            text = f"{text_of(op, whole, 'of whole numbers')}: its gradients"
            compare_if_taken(found, op, text, gradients_of(op, whole, second=False), near=where_finite)


def lists_of_tensors_as_on_the_host(accelerator: Accelerator, found: Findings) -> None:
    for op in lists_of_tensors():
        for dtype in accelerator.supported_dtypes():
            samples = _lists(op, dtype) if dtype in _OF_LISTS else []
            first = next(iter(samples), None) if dtype is torch.float32 else None
            for sample in samples:
                for form, function in (("", op.method_variant), (" in place", op.inplace_variant)):
                    if function is None:
                        continue

                    def run(place: Place, function: Any = function, sample: Sample = sample) -> Any:
                        value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
                        return [function(value, *args, **kwargs), value]

                    found.compare(name_of(op), f"{name_of(op)}({sample}){form}", run)
                    if sample is first:
                        for how in _TRANSPOSED:
                            places = Place(HOST, LAYOUTS[how]), Place(found.device, LAYOUTS[how])
                            text = f"{name_of(op)}({sample}){form}, of tensors {how}"
                            found.compare(name_of(op), text, run, *places)
        if found.enough:
            return


_OF_LISTS = {torch.float32: 5, torch.float64: 0, torch.bfloat16: 2, torch.float16: 0}
"""By dtype, how many calls are tried at least."""
_TRANSPOSED = ("that are transposed", "of which every second is transposed")
_OF_GRADIENTS = (
    *_TRANSPOSED,
    "that are every second element",
    "that begin at the third element of their memory",
)
_MANY = 130  # more tensors than one launch of torch takes on CUDA, 110 at most
_LARGE = 40
"""A factor with which squares of torch's inputs overflow float16."""


def _lists(op: Any, dtype: torch.dtype) -> list[Sample]:
    """One call for each combination of options, or more; in float16 of large numbers."""
    try:
        found: list[Sample] = []
        options: dict[Any, Sample] = {}
        reset()
        for given in op.sample_inputs_func(op, HOST, dtype, False):
            sample = Sample(given.input, given.args, given.kwargs, lambda x: x, False)
            if _options(sample) not in options or len(found) < _OF_LISTS[dtype]:
                options.setdefault(_options(sample), sample)
                found.append(sample)
    except Exception:  # noqa: BLE001 - torch's own lists fail for some dtypes
        return []
    found += [replace(sample, kwargs={}) for sample in found[:1] if sample.kwargs]
    if dtype is torch.float32:
        given = found[: _OF_LISTS[dtype]]
        for change in (_of_many, _with_numbers, _with_an_empty_one, _of_two_dtypes, _with_a_long_one):
            found += [change(sample) for sample in given]
    if dtype is torch.float16:
        return [replace(sample, value=[t * _LARGE for t in sample.value]) for sample in found]
    return found


def _of_many(sample: Sample) -> Sample:
    """The same with more tensors than a kernel may take at once, which are small."""

    def many(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        return [t[:1] if isinstance(t, torch.Tensor) and t.dim() else t for t in value[-1:] * _MANY]

    kwargs = {name: many(value) for name, value in sample.kwargs.items()}
    return replace(sample, value=many(sample.value), args=tuple(map(many, sample.args)), kwargs=kwargs)


def _with_numbers(sample: Sample) -> Sample:
    """The same in which every second tensor has no dimensions, as a parameter that is one number."""
    return _with_lists(sample, lambda t, n: t.flatten()[0].clone() if t.numel() and n % 2 else t)


def _with_an_empty_one(sample: Sample) -> Sample:
    """The same in which the second tensor has no elements; what belongs to the others is still theirs."""
    return _with_lists(sample, lambda t, n: t.flatten()[:0] if n == 1 and len(sample.value) > 2 else t)


def _of_two_dtypes(sample: Sample) -> Sample:
    """The same in which every second tensor of the first list has 16 bits."""
    value = [t.bfloat16() if n % 2 else t for n, t in enumerate(sample.value)]
    return replace(sample, value=value)


def _with_a_long_one(sample: Sample) -> Sample:
    """The same in which the first tensor has more elements than a kernel may take at once."""

    def change(tensor: torch.Tensor, number: int) -> torch.Tensor:
        if number or tensor.numel() < 2:
            return tensor
        flat = tensor.flatten()
        # With its largest number at the end.
        return torch.cat([flat.repeat(_LONG // len(flat)), flat.abs().amax()[None] * 1.5])

    return _with_lists(sample, change)


_LONG = 70_000


def _with_lists(sample: Sample, change: Callable[[torch.Tensor, int], torch.Tensor]) -> Sample:
    """The same with lists in which each tensor is changed, by its number."""

    def changed(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        return [change(t, n) if isinstance(t, torch.Tensor) else t for n, t in enumerate(value)]

    kwargs = {name: changed(value) for name, value in sample.kwargs.items()}
    return replace(sample, value=changed(sample.value), args=tuple(map(changed, sample.args)), kwargs=kwargs)


def _options(sample: Sample) -> tuple[Any, ...]:
    """The kinds of its arguments, of which infinity is one."""

    def kind(value: Any) -> str:
        if isinstance(value, float) and math.isinf(value):
            return str(value)
        return str([type(part) for part in value[:1]] if isinstance(value, (list, tuple)) else type(value))

    return (*map(kind, sample.args), *((name, kind(value)) for name, value in sample.kwargs.items()))
