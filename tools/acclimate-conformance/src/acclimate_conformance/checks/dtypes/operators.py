"""Checks of operators with options and at their edges: the device gives what torch gives on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    TOLERANCE,
    BrokenPromiseError,
    device_names,
    is_on,
    note_of_lacks,
    require,
    short,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.device_arguments import has_indices
from acclimate_conformance.checks.dtypes.arithmetic import supported
from acclimate_conformance.checks.dtypes.operations import (
    DRAWN,
    INTEGERS,
    LARGE_INTEGERS,
    LAYERS,
    MADE,
    MADE_ANYWHERE,
    NUMBERS_OF_THE_HOST,
    PAIRS,
    PLACES,
    POINTWISE,
    REDUCTIONS,
    SPECIAL,
    WITH_NUMBERS,
    Operation,
    Place,
)
from acclimate_conformance.checks.dtypes.references import nearest
from acclimate_conformance.checks.dtypes.sampled.comparing import is_refusal
from acclimate_conformance.checks.target import blamed

_OF_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _exactly(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _to(accelerator: Accelerator) -> Place:
    device = accelerator.current_device_name()
    return lambda tensor: tensor.to(device)


def _flat(result: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result, in order."""
    if isinstance(result, torch.Tensor):
        yield result
    else:
        for part in result:
            yield from _flat(part)


def _compare(
    run: Callable[[Place], Any], place: Place, what: str, by_element: bool, lacking: set[str]
) -> None:
    """Fails the check unless an operator gives the same on the device and on the host."""
    try:
        wanted = list(_flat(run(_on_host)))
    except (RuntimeError, NotImplementedError, IndexError):  # the host lacks it in this dtype
        return
    try:
        found = list(_flat(run(place)))
    except NotImplementedError:
        lacking.add(what.partition(" in ")[0])
        return
    require(len(found) == len(wanted), f"{what} gives {len(found)} tensors, not {len(wanted)}")
    here = place(torch.empty(0)).device
    elsewhere = {str(made.device) for made in found} - {str(here), "cpu"}
    require(not elsewhere, f"{what} of tensors on {here} gives tensors on {' and '.join(sorted(elsewhere))}")
    wanted = _reference(run, found, wanted, by_element)
    for number, (actual, expected) in enumerate(zip(found, wanted, strict=True)):
        with naming(partial(run, place), number):
            require_alike(actual, expected, what, by_element)


class _Makers(TorchFunctionMode):
    """Notes which of torch's functions made each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = resolve_name(func)
        for made in result if isinstance(result, (list, tuple)) else (result,):
            # An attribute, such as grad, tells what something else made.
            if isinstance(made, torch.Tensor) and name and not name.endswith(".__get__"):
                self.names[id(made)] = name
        return result


@contextmanager
def naming(call: Callable[[], Any], number: int) -> Iterator[None]:
    """Adds to a failure of one of several results which function of torch made it.

    Args:
        call: makes the results once more.
        number: that of the result.
    """
    try:
        yield
    except BrokenPromiseError as failure:
        makers, results = _Makers(), list[torch.Tensor]()
        with suppress(Exception), makers:  # what was seen the first time is what counts
            results = list(_flat(call()))
        name = makers.names.get(id(results[number])) if len(results) > max(1, number) else None
        if name is None:
            raise
        raise BrokenPromiseError(f"{name}, in {failure}") from failure


def _reference(
    run: Callable[[Place], Any], found: list[torch.Tensor], on_host: list[torch.Tensor], by_element: bool
) -> list[torch.Tensor]:
    """What the results of a device are compared with: the host's, or where these differ, also float64's."""
    pairs = list(zip(found, on_host, strict=True))
    if all(
        a.shape == e.shape and bool(_near(a.detach().cpu(), e.detach(), by_element).all()) for a, e in pairs
    ):
        return on_host
    with suppress(RuntimeError):  # the host may lack it in float64
        exact = list(_flat(run(_exactly)))
        if len(exact) == len(on_host):
            return [nearest(a, e, x, by_element) for (a, e), x in zip(pairs, exact, strict=True)]
    return on_host


def require_alike(actual: torch.Tensor, expected: torch.Tensor, what: str, by_element: bool) -> None:
    """Fails the check unless two tensors have the same shape, dtype and, within its precision, numbers.

    Args:
        actual: of the device.
        expected: of the host.
        what: what was computed.
        by_element: whether the precision is relative to each number, or to the largest.
    """
    require(
        actual.shape == expected.shape and actual.dtype == expected.dtype,
        f"{what} gives {short(actual.dtype)} of shape {tuple(actual.shape)}, not {short(expected.dtype)} of "
        f"shape {tuple(expected.shape)}",
    )
    found, wanted = actual.detach().cpu(), expected.detach()
    wrong = ~_near(found, wanted, by_element)
    if bool(wrong.any()):
        place = int(wrong.flatten().nonzero()[0])
        many = f"element {place} of " if wanted.numel() > 1 else ""
        require(
            False,
            f"{what}: {many}the result is {found.flatten()[place].item()}, not "
            f"{wanted.flatten()[place].item()}",
        )
    require(True, "")


def _near(found: torch.Tensor, wanted: torch.Tensor, by_element: bool) -> torch.Tensor:
    """Where two tensors of one shape and dtype hold the same numbers, within the dtype's precision."""
    if not wanted.dtype.is_floating_point or not wanted.numel():
        return found == wanted
    allowed = TOLERANCE[wanted.dtype]
    exact, close = wanted.double(), found.double()
    finite = exact.isfinite()
    largest = float(exact[finite].abs().max()) if not by_element and bool(finite.any()) else 1.0
    slack = allowed * (exact.abs() + max(largest, 1.0))
    near = torch.where(finite, (close - exact).abs() <= slack, close == exact)
    return near | (close.isnan() & exact.isnan())


def _compare_all(
    accelerator: Accelerator, tables: tuple[Mapping[str, Operation], ...], by_element: bool
) -> str | None:
    place = _to(accelerator)
    lacking: set[str] = set()
    # The second time the tensors are on the last device, which is then not the current one.
    with accelerator.device(0):
        for dtype in supported(accelerator):
            for table in tables:
                for name, operation in table.items():
                    what = f"{name} in {short(dtype)}"

                    def run(to: Place, operation: Operation = operation, dtype: torch.dtype = dtype) -> Any:
                        return operation(to, dtype)

                    with blamed(accelerator, what):
                        _compare(run, place, what, by_element, lacking)
    return note_of_lacks(lacking)


def _beside_numbers(accelerator: Accelerator) -> dict[str, Operation]:
    """Operators on a tensor and a number of the host, of the dtypes that the device has."""
    there = supported(accelerator)
    tables = [t for dtype, t in NUMBERS_OF_THE_HOST.items() if not dtype.is_floating_point or dtype in there]
    return {name: operation for table in tables for name, operation in table.items()}


@check(
    "supported_dtypes",
    promise="Operators give torch's results at zero, infinity, NaN and undefined points, with any option.",
    timeout_s=240,
)  # fmt: skip
def operators_at_edges(accelerator: Accelerator) -> str | None:
    return _compare_all(
        accelerator, (POINTWISE, PAIRS, WITH_NUMBERS, _beside_numbers(accelerator)), by_element=True
    )


@check(
    "supported_dtypes",
    promise="Reductions and products take every dimension, keepdim, dtype and factor, and empty tensors.",
    timeout_s=240,
)  # fmt: skip
def reductions_with_options(accelerator: Accelerator) -> str | None:
    _require_wider(accelerator)
    return _compare_all(accelerator, (REDUCTIONS, SPECIAL), by_element=False)


_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_Told = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
"""A reduction that is told a dtype."""
_SUMS: dict[str, _Told] = {
    "torch.sum": lambda x, dtype: x.sum(dtype=dtype),
    "torch.sum of a dimension": lambda x, dtype: x.sum(0, dtype=dtype),
    "torch.mean": lambda x, dtype: x.mean(0, dtype=dtype) * len(x),
    "torch.nansum": lambda x, dtype: x.nansum(dtype=dtype),
    "torch.cumsum": lambda x, dtype: x.cumsum(0, dtype=dtype)[-1],
    "torch.linalg.vector_norm": lambda x, dtype: torch.linalg.vector_norm(x, 1, dtype=dtype),
    "torch.norm": lambda x, dtype: torch.norm(x, 1, dim=0, dtype=dtype),
}
_PRODUCTS: dict[str, _Told] = {
    "torch.prod": lambda x, dtype: x.prod(dtype=dtype),
    "torch.prod of a dimension": lambda x, dtype: x.prod(0, dtype=dtype),
    "torch.cumprod": lambda x, dtype: x.cumprod(0, dtype=dtype)[-1],
}
_SHARES: dict[str, _Told] = {
    "torch.softmax": lambda x, dtype: x.softmax(0, dtype=dtype)[0],
    "torch.log_softmax": lambda x, dtype: x.log_softmax(0, dtype=dtype)[0].exp(),
}


_OF_SQUARES: dict[str, _Told] = {
    "torch.linalg.vector_norm": lambda x, dtype: torch.linalg.vector_norm(x, 2, dtype=dtype),
    "torch.linalg.vector_norm of a dimension": lambda x, dtype: torch.linalg.vector_norm(
        x, 2, 0, dtype=dtype
    ),
    "torch.norm": lambda x, dtype: torch.norm(x, 2, dim=0, dtype=dtype),
    "torch.linalg.norm": lambda x, dtype: torch.linalg.norm(x, dtype=dtype),
}


def _require_wider(accelerator: Accelerator) -> None:
    """Fails the check unless reductions that are told a dtype compute in it, as torch documents."""
    device, there = accelerator.current_device_name(), supported(accelerator)
    for dtype, wider in _WIDER.items():
        if not {dtype, wider} <= set(there):
            continue
        eps = torch.finfo(dtype).eps
        exactly = min(eps**2 / 4, 1e-5)
        # The dtype holds these numbers, but neither their sum nor their product.
        for table, given, wanted, allowed in (
            (_SUMS, [2 / eps, 1, 1, 1], 2 / eps + 3, exactly),
            (_PRODUCTS, [1 + eps, 1 + eps], (1 + eps) ** 2, exactly),
            (_SHARES, [0.0, 0.0, 0.0], 1 / 3, eps / 16),
            # Of numbers whose squares or their sum the dtype does not hold.
            (
                _OF_SQUARES,
                [2.0**15 if dtype is torch.float16 else 1.0] * 3,
                math.sqrt(3) * (2.0**15 if dtype is torch.float16 else 1),
                eps / 16,
            ),
        ):
            for name, reduce in table.items():
                try:
                    found = float(reduce(torch.tensor(given, dtype=dtype).to(device), wider))
                except Exception as error:
                    if is_refusal(error):
                        continue
                    raise
                require(
                    abs(found - wanted) <= abs(wanted) * allowed,
                    f"{name}, of {short(dtype)} with dtype={short(wider)}, gives {found!r}, not {wanted!r}",
                )


@check(
    "supported_dtypes",
    promise="Operators that read or write at places, sort, join or pad treat every element as torch does.",
    timeout_s=240,
)  # fmt: skip
def places_and_order(accelerator: Accelerator) -> str | None:
    return _compare_all(accelerator, (PLACES,), by_element=False)


@check(
    "supported_dtypes",
    promise="Layers and losses give torch's results with options that are not the default.",
    timeout_s=240, once=True,
)  # fmt: skip
def layers_with_options(accelerator: Accelerator) -> str | None:
    return _compare_all(accelerator, (LAYERS,), by_element=False)


@check(
    "supported_dtypes", "LongTensor", "IntTensor", "ByteTensor",
    promise="Operators on integers and truth values, alone and mixed, give torch's results and dtypes.",
    timeout_s=240,
)  # fmt: skip
def integers_with_options(accelerator: Accelerator) -> str | None:
    place = _to(accelerator)
    lacking: set[str] = set()
    tables = {dtype: {**INTEGERS, **LARGE_INTEGERS.get(dtype, {})} for dtype in _OF_INTEGERS}
    for dtype in (*_OF_INTEGERS, torch.bool):
        for name, operation in {**tables.get(dtype, {}), **_beside_numbers(accelerator)}.items():
            what = f"{name} in {short(dtype)}"
            _compare(lambda to, op=operation, d=dtype: op(to, d), place, what, True, lacking)  # type: ignore[misc]
    return note_of_lacks(lacking)


@check(
    "current_device_name", "device_name",
    promise="Functions that make tensors on a device give the numbers, shape and dtype that torch states, on "
    "the device that is named, or else on the current one.",
    of="operators",
)  # fmt: skip
def tensors_are_made(accelerator: Accelerator) -> str | None:
    lacking: set[str] = set()
    has_index = has_indices(accelerator)
    names = device_names(accelerator) if has_index else [accelerator.device_type]
    others = {name: index for index, name in enumerate(names)}
    for current, name in enumerate(names):
        with accelerator.device(current):
            for device, index in {accelerator.device_type: current, **others}.items():
                wanted = torch.device(accelerator.device_type, index) if has_index else torch.device(device)
                _require_made(device, wanted, f"while {name} is current", lacking)
            blocks: dict[str, Callable[[], AbstractContextManager[Any]]] = {
                "within torch.device({!r})": partial(torch.device, accelerator.device_type),
                "after torch.set_default_device({!r})": partial(_by_default, accelerator.device_type),
            }
            for how, block in blocks.items():
                for what, make in MADE_ANYWHERE.items():
                    with block():
                        made = make()
                    told = how.format(accelerator.device_type)
                    require(is_on(made, name), f"{what} {told} is on {made.device} while {name} is current")
    return note_of_lacks(lacking)


@contextmanager
def _by_default(device: str) -> Iterator[None]:
    """A block in which tensors are made on a device unless another is asked for."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def _require_made(device: str, wanted: torch.device, when: str, lacking: set[str]) -> None:
    for name, make in {**MADE, **DRAWN}.items():
        if name in lacking:
            continue
        try:
            found = list(_flat(make(device)))
        except NotImplementedError:
            lacking.add(name)
            continue
        for actual, expected in zip(found, _flat(make("cpu")), strict=True):
            told = f"{name} made on {device!r}"
            require(actual.device == wanted, f"{told} is on {actual.device} {when}")
            if name in DRAWN:
                alike = (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
                require(alike, f"{told} is {short(actual.dtype)} of shape {tuple(actual.shape)}")
            else:
                require_alike(actual, expected, told, True)
        if name not in DRAWN:
            for actual in found:
                actual.logical_not_() if actual.dtype == torch.bool else actual.sub_(7)
            for actual, expected in zip(_flat(make(device)), _flat(make("cpu")), strict=True):
                told = f"{name} made on {device!r} again, after a change of what it gave before"
                require_alike(actual, expected, told, True)


_CHOOSE = ("topk", "topk of the first dimension", "sort", "kthvalue")
"""Operators that give the gradient to one of several equal numbers, and may choose any of them. What they do
with numbers that are all different is an operation of its own."""


@check(
    "supported_dtypes",
    promise="Gradients of operators with options are those of the host, wherever these are finite.",
    timeout_s=300, once=True,
)  # fmt: skip
def gradients_of_operators(accelerator: Accelerator) -> str | None:
    place = _to(accelerator)
    lacking: set[str] = set()
    for table in (POINTWISE, PAIRS, REDUCTIONS, PLACES, LAYERS):
        for name, operation in table.items():
            if name in _CHOOSE:
                continue
            try:
                wanted = _gradients(operation, _on_host)
            except (RuntimeError, NotImplementedError):  # it has none
                continue
            try:
                found = _gradients(operation, place)
            except NotImplementedError:
                lacking.add(name)
                continue
            wanted = _reference(lambda to, op=operation: _gradients(op, to), found, wanted, by_element=False)  # type: ignore[misc]
            for actual, expected in zip(found, wanted, strict=True):
                defined = expected.isfinite()
                given = torch.where(defined, actual.cpu(), 0.0)
                require_alike(given, torch.where(defined, expected, 0.0), f"a gradient of {name}", False)
    return f"it has no gradients of {', '.join(sorted(lacking))}" if lacking else None


def _gradients(operation: Operation, place: Place) -> list[torch.Tensor]:
    """The gradients for all inputs of a sum of the results, each element with a weight of its own."""
    leaves: list[torch.Tensor] = []

    def to(tensor: torch.Tensor) -> torch.Tensor:
        moved = place(tensor).detach().clone()
        if moved.is_floating_point():
            leaves.append(moved.requires_grad_())
        return moved

    results = [result for result in _flat(operation(to, torch.float32)) if result.requires_grad]
    total = torch.zeros((), device=results[0].device) if results else torch.zeros(())
    for result in results:
        weights = torch.arange(1, result.numel() + 1, device=result.device).reshape(result.shape) % 7 - 2.5
        total = total + torch.where(result.isfinite(), result * weights, 0.0).sum()
    if not results:
        return []
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]
