"""The operators of a device that torch's functions and gradients call, each called by itself.

A function of torch calls other operators, and a gradient those for its backward pass. Here each of them is
called with the inputs that it got on the host, but into tensors given as out, in place, with many elements,
in other layouts and dtypes: a device has a kernel for each of these, which few programs use.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import short
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings, attempt, difference, twice_as_far
from acclimate_conformance.checks.dtypes.sampled.places import (
    EXPANDED,
    HOST,
    OF_IMAGES,
    Layout,
    Place,
    layouts_for,
    tensors_in,
    with_tensors,
)
from acclimate_conformance.checks.dtypes.sampled.samples import Sample, operators, samples_of

_LARGE = (5003, 70_001)
"""Numbers of elements: no multiple of a block, and more than fits in 16 bits."""
_IMAGES = (2, 3, 4, 5)
"""The shape in which inputs are images."""
_SAMPLES, _WAYS = 8, 4
"""How many inputs of each function are tried, and how many ways to call each operator are kept."""
_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
_OF_TORCH = re.compile(
    # Their results depend on the device: what is kept for gradients, signs, places of equal numbers.
    r"_(?!softmax|log_softmax)|native_|batch_norm|cudnn|mkldnn|miopen|log_sigmoid|linalg_(?!vector|cross|mat)"
    r"|geqrf|ormqr|orgqr|cholesky|lu_|triangular|unique|hist|sort|topk|median|nanmedian|kthvalue|mode|cummax"
    r"|cummin|rand|normal|empty|new_|multilabel|ctc|embedding_bag|rrelu|dropout|bernoulli|fractional|resize"
    r"|set_|lift|clone|copy|contiguous|to_|convolution|put|index_put|renorm|sparse|conj|igamma|polygamma"
)
"""How the names begin of operators that are left out."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Watched(TorchDispatchMode):
    """Keeps some usual calls of each operator that code on the host makes, in each dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[tuple[Any, torch.dtype], dict[str, Call]] = {}
        """By operator and the dtype of its first tensor, and then by which options are given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        first = next((t.dtype for t in tensors_in([args, given]) if isinstance(t, torch.Tensor)), None)
        if first is not None and _is_usual(func, args, given):
            known, options = self.calls.setdefault((func, first), {}), _options(args, given)
            if options not in known and len(known) < _WAYS:
                host = Place(HOST)
                known[options] = host.put(args), host.put(given)
        return func(*args, **given)


def _is_usual(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator only computes new tensors from others that have elements."""
    name = func._schema.name
    if not name.startswith("aten::") or _OF_TORCH.match(name.removeprefix("aten::")):
        return False
    if func._schema.is_mutable or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    given = [t for t in tensors_in([args, kwargs]) if isinstance(t, torch.Tensor)]
    return bool(given) and all(t.layout == torch.strided and 1 < t.numel() < 1 << 13 for t in given)


def _options(args: Any, kwargs: Any) -> str:
    """Which arguments are given, and which truth values and words they have."""
    values = [*enumerate(args), *kwargs.items()]
    return str([(key, v if isinstance(v, (bool, str)) else type(v).__name__) for key, v in values])


def _calls() -> dict[tuple[Any, torch.dtype], dict[str, Call]]:
    """Calls of each operator, as the inputs of torch's own tests lead to them, also in a backward pass."""
    watched = _Watched()
    for op, dtype in itertools.product(operators(), _DTYPES):
        if dtype not in op.supported_dtypes(HOST):
            continue
        trains = op.supports_autograd and dtype == torch.float32
        for sample in samples_of(op, dtype, _SAMPLES if dtype == torch.float32 else 2, requires_grad=trains):
            attempt(lambda place, op=op, sample=sample: _watch(watched, op, sample), Place(HOST))  # type: ignore[misc]
    return watched.calls


def _watch(watched: _Watched, op: Any, sample: Sample) -> None:
    with watched:
        results = sample.grads_of(op(sample.value, *sample.args, **sample.kwargs))
        for result in tensors_in(results):
            if isinstance(result, torch.Tensor) and result.requires_grad:
                weights = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape)
                result.backward(weights, retain_graph=True)


def _of_numbers(layout: Layout) -> Layout:
    """A layout of floating-point numbers; the places that a forward pass found are always contiguous."""
    return lambda place, tensor: layout(place, tensor) if tensor.is_floating_point() else place.whole(tensor)


def _first_is_expanded(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """The gradient of a sum is one number, which is expanded."""
    if place.made > 1:
        return place.whole(tensor)
    return place.whole(tensor.reshape(-1)[:1]).expand(tensor.shape)


def kernels_as_on_the_host(accelerator: Accelerator, found: Findings) -> None:
    floating = [dtype for dtype in accelerator.supported_dtypes() if dtype != torch.float32]
    for (func, dtype), ways in _calls().items():
        name = f"torch.ops.{func}".removesuffix(".default")
        for call in ways.values():
            for what, run in _into_others(func, call):
                found.compare(name, f"{name}({_text(call)}) {what}", run)
        _compare_one(found, name, func, next(iter(ways.values())), floating if dtype == torch.float32 else [])
        if found.enough:
            return


def _compare_one(found: Findings, name: str, func: Any, call: Call, dtypes: list[torch.dtype]) -> None:
    """Compares one call with many elements, in other layouts and in other dtypes."""
    repeats = _repeated(func, call)
    if repeats is not None:
        for length in _LARGE:
            for what, run in _called(func, repeats(length)):
                found.compare(name, f"{name}({_text(call)}) repeated to {length} elements{what}", run)
        images = with_tensors(repeats(math.prod(_IMAGES)), lambda t: t.reshape(_IMAGES))
        for how, layout in {**OF_IMAGES, **EXPANDED}.items():
            for what, run in _called(func, images):
                if what and how in EXPANDED:
                    continue  # several elements of a result would be one
                places = Place(HOST, layout), Place(found.device, layout)
                found.compare(name, f"{name}({_text(call)}) as images {how}{what}", run, *places)
        for dtype in (one for one in dtypes if one.itemsize == 2):
            for what, run in _called(func, _in_dtype(repeats(_LARGE[0]), dtype)):
                text = f"{name}({_text(call)}) in {short(dtype)} repeated to {_LARGE[0]} elements{what}"
                _compare_if_taken(found, name, text, run, dtype)
    if "backward" in name:
        layouts = {**layouts_for(call), "of which the first is expanded": _first_is_expanded}
        for how, layout in layouts.items():
            text = f"{name}({_text(call)}) of tensors {how}"
            places = Place(HOST, _of_numbers(layout)), Place(found.device, _of_numbers(layout))
            found.compare(name, text, _plain(func, call), *places)
        for dtype in dtypes:
            text = f"{name}({_text(call)}) in {short(dtype)}"
            _compare_if_taken(found, name, text, _plain(func, _in_dtype(call, dtype)), dtype)
    smaller = _with_int32(call)
    if smaller is not None:
        text = f"{name}({_text(call)}) with places in int32"
        _compare_if_taken(found, name, text, _plain(func, smaller), torch.float32)


def _compare_if_taken(
    found: Findings, name: str, text: str, run: Callable[[Place], Any], dtype: torch.dtype
) -> None:
    """Compares a call that a device may refuse, unlike the host."""
    found.compare(name, text, run, near=twice_as_far if dtype.itemsize == 2 else None, may_be_refused=True)


def _text(call: Call) -> str:
    return str(Sample(call[0][0], call[0][1:], call[1], lambda result: result, broadcasts=False))


def _plain(func: Any, call: Call) -> Callable[[Place], Any]:
    def run(place: Place) -> Any:
        args, kwargs = place.put(call)
        return func(*args, **kwargs)

    return run


def _into_others(func: Any, call: Call) -> Iterator[tuple[str, Callable[[Place], Any]]]:
    """The same call into tensors that are given, if the operator has such a form."""
    form = _form(func, is_out=True)
    result, refused = attempt(_plain(func, call), Place(HOST))
    parts = list(tensors_in(result))
    if form is None or refused is not None or not all(isinstance(t, torch.Tensor) for t in parts):
        return
    names = [argument.name for argument in form._schema.arguments if argument.is_out]
    if len(names) != len(parts):
        return
    for kind in ("", " of another size"):

        def run(place: Place, kind: str = kind) -> Any:
            args, kwargs = place.put(call)
            wrong = [torch.full(t.shape if not kind else (0,), 7, dtype=place.dtype(t.dtype)) for t in parts]
            out = place.put(wrong)
            form(*args, **kwargs, **dict(zip(names, out, strict=True)))
            return out

        yield f"into tensors given as out{kind}", run


def _form(func: Any, is_out: bool) -> Any:
    """The operator of the same name that writes into tensors given as out, or into its first argument."""
    packet = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::") + ("" if is_out else "_"), None)
    own = [(a.name, str(a.type)) for a in func._schema.arguments]
    for overload in packet.overloads() if packet is not None else ():
        form = getattr(packet, overload)
        theirs = [(a.name, str(a.type)) for a in form._schema.arguments if not a.is_out]
        writes = any(a.is_out for a in form._schema.arguments) == is_out
        if theirs == own and writes and form._schema.is_mutable:
            return form
    return None


def _repeated(func: Any, call: Call) -> Callable[[int], Call] | None:
    """Makes the same call with any number of elements, if the operator computes each element by itself.

    The last element is the one of the largest result: a tail that is left out shows best there.
    """
    args, kwargs = call
    given = [t for t in tensors_in([args, kwargs]) if isinstance(t, torch.Tensor)]
    shape = given[0].shape
    if any(t.shape != shape for t in given):
        return None

    alone, refused = attempt(_plain(func, call), Place(HOST))
    first = next((t for t in tensors_in(alone) if isinstance(t, torch.Tensor) and t.shape == shape), given[0])
    largest = int(first.detach().abs().nan_to_num(0, 0).argmax()) if first.dtype != torch.bool else 0

    def tiled(value: Any, length: int) -> Any:
        def repeated(tensor: torch.Tensor) -> torch.Tensor:
            flat = tensor.detach().reshape(-1).roll(length - 1 - largest)
            return flat.repeat(length // len(flat) + 1)[:length]

        return with_tensors(value, repeated)

    def larger(length: int) -> Call:
        return tiled(args, length), tiled(kwargs, length)

    many, refused_many = attempt(_plain(func, larger(_LARGE[0])), Place(HOST))
    if refused is not None or refused_many is not None:
        return None
    if any(not isinstance(t, torch.Tensor) or t.shape != shape for t in tensors_in(alone)):
        return None
    if difference(many, tiled(alone, _LARGE[0])):
        return None  # it computes with several elements
    return larger


def _called(func: Any, call: Call) -> Iterator[tuple[str, Callable[[Place], Any]]]:
    """A call, and the same in place, if the operator has such a form."""
    yield "", _plain(func, call)
    in_place = _form(func, is_out=False)
    if in_place is not None:

        def run(place: Place) -> Any:
            args, kwargs = place.put(call)
            in_place(*args, **kwargs)
            return args[0]

        yield ", in place", run


def _in_dtype(call: Call, dtype: torch.dtype) -> Call:
    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.dtype == torch.float32 else value
        if isinstance(value, (list, tuple)):
            return type(value)(map(cast, value))
        return dtype if value is torch.float32 else value

    return cast(call[0]), {key: cast(value) for key, value in call[1].items()}


def _with_int32(call: Call) -> Call | None:
    """The same call with places in int32, if it has places beside other numbers."""
    args, kwargs = call
    given = [t for t in tensors_in([args, kwargs]) if isinstance(t, torch.Tensor)]
    if not {torch.int64, torch.float32} <= {t.dtype for t in given}:
        return None

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.int64:
            return value.int()
        return type(value)(map(cast, value)) if isinstance(value, (list, tuple)) else value

    return cast(args), {key: cast(value) for key, value in kwargs.items()}
