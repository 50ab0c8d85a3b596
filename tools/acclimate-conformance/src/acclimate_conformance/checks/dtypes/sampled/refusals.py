"""Calls that torch refuses: shapes, dtypes and devices that do not fit, and places beyond the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import device_names, short
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings, Run, attempt
from acclimate_conformance.checks.dtypes.sampled.places import HOST, Place, with_tensors
from acclimate_conformance.checks.dtypes.sampled.samples import Sample, name_of, operators, reset, samples_of
from acclimate_conformance.checks.target import LOST

_BEYOND: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "torch.index_select": lambda x, i: x.index_select(0, i),
    "torch.nn.functional.embedding": lambda x, i: torch.nn.functional.embedding(i, x),
    "torch.Tensor.__getitem__": lambda x, i: x[i],
    "torch.gather": lambda x, i: x.gather(0, i[:, None]),
    "torch.take": lambda x, i: x.take(i * 3),
    "torch.scatter": lambda x, i: x.scatter(0, i[:, None], 1.0),
    "torch.scatter_add": lambda x, i: x.scatter_add(0, i[:, None], torch.ones_like(x)[:2]),
    "torch.index_add": lambda x, i: x.index_add(0, i, torch.ones_like(x)[:2]),
    "torch.index_copy": lambda x, i: x.index_copy(0, i, torch.ones_like(x)[:2]),
    "torch.index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "torch.index_put": lambda x, i: x.index_put((i,), torch.ones_like(x)[:2]),
    "torch.nn.functional.cross_entropy": lambda x, i: torch.nn.functional.cross_entropy(x.t(), i),
    "torch.nn.functional.nll_loss": lambda x, i: torch.nn.functional.nll_loss(x.t(), i),
    "torch.nn.functional.multi_margin_loss": lambda x, i: torch.nn.functional.multi_margin_loss(x.t(), i),
    "torch.nn.functional.max_unpool1d": lambda x, i: torch.nn.functional.max_unpool1d(
        x[None, :1], i[None, None], [1]
    ),
    "torch.nn.functional.one_hot": lambda x, i: torch.nn.functional.one_hot(i, 3),
    "torch.take_along_dim": lambda x, i: x.take_along_dim(i[:, None], 0),
    "torch.put": lambda x, i: x.put(i * 3, torch.ones_like(x)[:2, 0]),
    "torch.Tensor.put_": lambda x, i: x.clone().put_(i * 3, torch.ones_like(x)[:2, 0], accumulate=True),
    "torch.Tensor.index_put_": lambda x, i: x.clone().index_put_(
        (i,), torch.ones_like(x)[:2], accumulate=True
    ),
    "torch.index_reduce": lambda x, i: x.index_reduce(0, i, torch.ones_like(x)[:2], "amax"),
    "torch.scatter_reduce": lambda x, i: x.scatter_reduce(0, i[:, None], torch.ones_like(x)[:2], "sum"),
    "torch.nn.functional.embedding_bag": lambda x, i: torch.nn.functional.embedding_bag(i[None], x),
}
"""Operators that read or write at places, here of a matrix of 3 rows and 2 columns."""

_COUNT_FROM_0 = (
    "torch.gather",
    "torch.scatter",
    "torch.scatter_add",
    "torch.index_copy",
    "torch.scatter_reduce",
    "torch.take_along_dim",
)
"""Of these, those whose places may not be negative on any of torch's devices."""
_Put = Callable[[torch.Tensor], torch.Tensor]
"""Puts a tensor at a place."""
_TRUTHS, _WHOLE, _NUMBERS = torch.tensor([True, False]), torch.tensor([1, 2]), torch.tensor([1.5, 2.5])
_WRONG_KINDS: dict[str, Callable[[_Put], Any]] = {
    "torch.sub of truth values": lambda to: to(_TRUTHS) - to(_TRUTHS),
    "torch.sub of a truth value and True": lambda to: to(_TRUTHS) - True,
    "torch.Tensor.sub_ of truth values": lambda to: to(_TRUTHS).sub_(to(_TRUTHS)),
    "torch.rsub of truth values": lambda to: torch.rsub(to(_TRUTHS), to(_TRUTHS)),
    "torch.neg of truth values": lambda to: -to(_TRUTHS),
    "torch.add of truth values with alpha 1.5": lambda to: torch.add(to(_TRUTHS), to(_TRUTHS), alpha=1.5),
    "torch.add of integers with alpha 1.5": lambda to: torch.add(to(_WHOLE), to(_WHOLE), alpha=1.5),
    "torch.bitwise_and of float32": lambda to: to(_NUMBERS) & to(_NUMBERS),
    "torch.bitwise_not of float32": lambda to: ~to(_NUMBERS),
    "torch.mean of integers": lambda to: to(_WHOLE).mean(),
    "torch.var of integers": lambda to: to(_WHOLE).var(),
    "torch.softmax of integers": lambda to: to(_WHOLE).softmax(0),
    "torch.pow of integers and -1": lambda to: to(_WHOLE) ** -1,
    "torch.argmax of truth values": lambda to: to(_TRUTHS).argmax(),
    "torch.max of complex numbers": lambda to: to(torch.complex(_NUMBERS, _NUMBERS)).max(),
    "torch.lt of complex numbers": lambda to: to(torch.complex(_NUMBERS, _NUMBERS)) < 1,
    "torch.Tensor.add_ of float32 to integers": lambda to: to(_WHOLE).add_(to(_NUMBERS)),
    "torch.Tensor.add_ of 0.5 to integers": lambda to: to(_WHOLE).add_(0.5),
    "torch.Tensor.mul_ of integers to truth values": lambda to: to(_TRUTHS).mul_(to(_WHOLE)),
    "torch.Tensor.div_ of integers": lambda to: to(_WHOLE).div_(to(_WHOLE)),
    "torch.Tensor.exp_ of integers": lambda to: to(_WHOLE).exp_(),
    "torch.add of float32 into integers": lambda to: torch.add(to(_NUMBERS), 1, out=to(_WHOLE)),
    "torch.matmul of float32 and integers": lambda to: to(_NUMBERS) @ to(_WHOLE),
    "torch.mm of float32 and float64": lambda to: to(torch.eye(2)) @ to(torch.eye(2).double()),
    "torch.nn.functional.linear of float32 and float16": lambda to: torch.nn.functional.linear(
        to(torch.eye(2)), to(torch.eye(2).half())
    ),
    "indexing with float32": lambda to: to(_WHOLE)[to(torch.tensor([0.0, 1.0]))],
    "torch.index_select of float32 places": lambda to: to(_WHOLE).index_select(0, to(torch.zeros(1))),
    "torch.gather of int32 places": lambda to: to(_WHOLE).gather(0, to(torch.zeros(1, dtype=torch.int16))),
    "torch.scatter of another dtype": lambda to: to(_WHOLE).scatter(0, to(torch.tensor([0])), to(_NUMBERS)),
    "torch.index_add of another dtype": lambda to: to(_WHOLE).index_add(
        0, to(torch.tensor([0, 1])), to(_NUMBERS)
    ),
    "torch.masked_fill with a mask of integers": lambda to: to(_NUMBERS).masked_fill(to(_WHOLE), 1.0),
    "torch.masked_select with a mask of integers": lambda to: to(_NUMBERS).masked_select(to(_WHOLE)),
    "torch.masked_fill of integers with infinity": lambda to: to(_WHOLE).masked_fill(
        to(_TRUTHS), float("inf")
    ),
    "torch.where with a condition of float32": lambda to: torch.where(
        to(_NUMBERS), to(_NUMBERS), to(_NUMBERS)
    ),
    "torch.nn.functional.embedding of float32 places": lambda to: torch.nn.functional.embedding(
        to(torch.zeros(1)), to(torch.eye(2))
    ),
    "torch.nn.functional.cross_entropy of int32 targets": lambda to: torch.nn.functional.cross_entropy(
        to(torch.eye(2)), to(torch.tensor([0, 1], dtype=torch.int16))
    ),
    "torch.lerp of two dtypes": lambda to: torch.lerp(to(_NUMBERS), to(_NUMBERS.double()), 0.5),
    "torch.bincount of float32": lambda to: to(_NUMBERS).bincount(),
    "torch.Tensor.view in a dtype that does not fit": lambda to: to(torch.zeros(3)).view(torch.float64),
}
"""Calls of which torch refuses at least some by the dtype; the host says which."""
_FIRST_TWO = torch.tensor([True, True, False])
_WRONG_NUMBERS: dict[str, Callable[[_Put], Any]] = {
    "torch.masked_scatter of too few elements": lambda to: to(torch.zeros(3)).masked_scatter(
        to(_FIRST_TWO), to(torch.ones(1))
    ),
    "torch.Tensor.masked_scatter_ of too few elements": lambda to: to(torch.zeros(3)).masked_scatter_(
        to(_FIRST_TWO), to(torch.ones(1))
    ),
    "torch.Tensor.masked_scatter_ of a mask that broadcasts": lambda to: to(
        torch.zeros(2, 3)
    ).masked_scatter_(to(_FIRST_TWO), to(torch.ones(3))),
    "torch.Tensor.masked_scatter_ of nothing": lambda to: to(torch.zeros(3)).masked_scatter_(
        to(_FIRST_TWO), to(torch.ones(0))
    ),
    "torch.repeat_interleave of a negative count": lambda to: to(torch.ones(2)).repeat_interleave(
        to(torch.tensor([2, -1]))
    ),
    "torch.repeat_interleave of too few counts": lambda to: to(torch.ones(3)).repeat_interleave(
        to(torch.tensor([2, 1]))
    ),
    "torch.bincount of a negative number": lambda to: to(torch.tensor([1, -1])).bincount(),
    "torch.nn.functional.one_hot of a negative number": lambda to: torch.nn.functional.one_hot(
        to(torch.tensor([1, -1])), 3
    ),
    "torch.multinomial of more places than there are": lambda to: torch.multinomial(to(torch.ones(2)), 3),
    "torch.multinomial of no place": lambda to: torch.multinomial(to(torch.ones(2)), 0),
    "torch.multinomial of a negative weight": lambda to: torch.multinomial(to(torch.tensor([1.0, -1.0])), 1),
    "torch.multinomial of an infinite weight": lambda to: torch.multinomial(
        to(torch.tensor([1.0, float("inf")])), 1
    ),
    "torch.multinomial of weights of zero": lambda to: torch.multinomial(to(torch.zeros(2)), 1),
    "torch.normal of a negative deviation": lambda to: torch.normal(0.0, to(torch.tensor([1.0, -1.0]))),
    "torch.Tensor.normal_ of a negative deviation": lambda to: to(torch.zeros(2)).normal_(0.0, -1.0),
    "torch.Tensor.uniform_ of an empty range": lambda to: to(torch.zeros(2)).uniform_(2.0, 1.0),
    "torch.Tensor.random_ of an empty range": lambda to: to(torch.zeros(2)).random_(3, 3),
    "torch.Tensor.exponential_ of a rate of 0": lambda to: to(torch.zeros(2)).exponential_(0.0),
    "torch.Tensor.geometric_ of a share of 0": lambda to: to(torch.zeros(2)).geometric_(0.0),
    "torch.Tensor.bernoulli_ of a share of 2": lambda to: to(torch.zeros(2)).bernoulli_(2.0),
    "torch.nn.functional.dropout of a share of 2": lambda to: torch.nn.functional.dropout(
        to(torch.ones(2)), 2.0
    ),
    "torch.Tensor.max of no number": lambda to: to(torch.zeros(0)).max(),
    "torch.argmin of no number": lambda to: to(torch.zeros(0)).argmin(),
    "torch.topk of more than there are": lambda to: to(torch.ones(3)).topk(4),
    "torch.kthvalue of a place beyond the end": lambda to: to(torch.ones(3)).kthvalue(4),
    "torch.Tensor.item of two numbers": lambda to: to(torch.ones(2)).item(),
    "torch.arange of a step away from the end": lambda to: torch.arange(
        0, 3, -1, device=to(torch.ones(1)).device
    ),
    "torch.randperm of a negative number": lambda to: torch.randperm(-1, device=to(torch.ones(1)).device),
    "torch.randint of an empty range": lambda to: torch.randint(3, 3, (2,), device=to(torch.ones(1)).device),
    "torch.gather of more places than there are rows": lambda to: to(torch.ones(2, 2)).gather(
        0, to(torch.zeros(1, 3, dtype=torch.int64))
    ),
    "torch.scatter_add of too few sources": lambda to: to(torch.ones(3, 2)).scatter_add(
        0, to(torch.zeros(3, 2, dtype=torch.int64)), to(torch.ones(1, 2))
    ),
    "torch.index_add of too few sources": lambda to: to(torch.ones(3, 2)).index_add(
        0, to(torch.tensor([0, 1])), to(torch.ones(1, 2))
    ),
    "torch.put of too few sources": lambda to: to(torch.ones(3)).put(
        to(torch.tensor([0, 1])), to(torch.ones(1))
    ),
    "torch.full of a number beyond its dtype": lambda to: torch.full(
        (2,), 300, dtype=torch.uint8, device=to(torch.ones(1)).device
    ),
    "torch.Tensor.fill_ of a number beyond its dtype": lambda to: to(torch.zeros(2, dtype=torch.int8)).fill_(
        300
    ),
    "an assignment of a number beyond its dtype": lambda to: to(torch.zeros(2, dtype=torch.int8)).__setitem__(
        0, 300
    ),
    "torch.Tensor.masked_fill_ of a number beyond its dtype": lambda to: to(
        torch.zeros(2, dtype=torch.int16)
    ).masked_fill_(to(_TRUTHS), 70_000),
    "the gradient of leaky_relu in place with a negative slope": lambda to: (
        torch.nn.functional.leaky_relu(to(_NUMBERS).requires_grad_() * -1, -0.2, inplace=True)
        .sum()
        .backward()
    ),
    "the gradient of rrelu in place with a negative slope": lambda to: (
        torch.nn.functional.rrelu(to(_NUMBERS).requires_grad_() * -1, -0.2, -0.1, False, True)
        .sum()
        .backward()
    ),
    "the gradient of elu in place with a negative factor": lambda to: (
        torch.nn.functional.elu(to(_NUMBERS).requires_grad_() * -1, -0.2, inplace=True).sum().backward()
    ),
    "the gradient of celu in place with a negative factor": lambda to: (
        torch.nn.functional.celu(to(_NUMBERS).requires_grad_() * -1, -0.2, inplace=True).sum().backward()
    ),
    "torch.split of sizes that do not add up": lambda to: to(torch.ones(4)).split([1, 2]),
}
"""Calls of which torch refuses some by the numbers or counts that they are given; the host says which."""
_PLACES = torch.tensor([0, 1, 2])
_INTO: dict[str, Callable[[torch.Tensor, _Put], Any]] = {
    "add_": lambda x, to: x.add_(to(torch.ones(3))),
    "add_ of a number": lambda x, to: x.add_(1.0),
    "sub_": lambda x, to: x.sub_(to(torch.ones(3))),
    "mul_": lambda x, to: x.mul_(to(torch.ones(3))),
    "mul_ of one number": lambda x, to: x.mul_(to(torch.tensor(2.0))),
    "mul_ of a number": lambda x, to: x.mul_(2.0),
    "div_": lambda x, to: x.div_(to(torch.ones(3))),
    "pow_": lambda x, to: x.pow_(2),
    "exp_": lambda x, to: x.exp_(),
    "neg_": lambda x, to: x.neg_(),
    "relu_": lambda x, to: x.relu_(),
    "sigmoid_": lambda x, to: x.sigmoid_(),
    "clamp_": lambda x, to: x.clamp_(0, 1),
    "copy_": lambda x, to: x.copy_(to(torch.arange(3.0))),
    "masked_fill_": lambda x, to: x.masked_fill_(to(_PLACES > 0), 1.0),
    "masked_scatter_": lambda x, to: x.masked_scatter_(to(_PLACES > 0), to(torch.ones(3))),
    "index_add_": lambda x, to: x.index_add_(0, to(_PLACES), to(torch.ones(3))),
    "index_copy_": lambda x, to: x.index_copy_(0, to(_PLACES), to(torch.ones(3))),
    "index_fill_": lambda x, to: x.index_fill_(0, to(_PLACES), 1.0),
    "index_put_": lambda x, to: x.index_put_((to(_PLACES),), to(torch.ones(3))),
    "scatter_": lambda x, to: x.scatter_(0, to(_PLACES), to(torch.ones(3))),
    "scatter_add_": lambda x, to: x.scatter_add_(0, to(_PLACES), to(torch.ones(3))),
    "addcmul_": lambda x, to: x.addcmul_(to(torch.ones(3)), to(torch.ones(3))),
    "lerp_": lambda x, to: x.lerp_(to(torch.ones(3)), 0.5),
    "add into out": lambda x, to: torch.add(to(torch.ones(3)), 1, out=x),
    "mul into out": lambda x, to: torch.mul(to(torch.ones(3)), to(torch.ones(3)), out=x),
    "exp into out": lambda x, to: torch.exp(to(torch.ones(3)), out=x),
    "cumsum into out": lambda x, to: torch.cumsum(to(torch.ones(3)), 0, out=x),
    "sort into out": lambda x, to: torch.sort(to(torch.ones(3)), out=(x, to(_PLACES))),
    "normal_": lambda x, to: x.normal_(),
    "bernoulli_": lambda x, to: x.bernoulli_(0.5),
}
"""Calls that write to a tensor of 3 elements, here an expanded one, whose elements share memory."""
_BESIDE: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch.Tensor.copy_": lambda x: x[1:].copy_(x[:-1]),
    "torch.Tensor.add_": lambda x: x[1:].add_(x[:-1]),
    "torch.Tensor.mul_": lambda x: x[1:].mul_(x[:-1]),
    "torch.add": lambda x: torch.add(x[:-1], 1, out=x[1:]),
    "torch.exp": lambda x: torch.exp(x[:-1], out=x[1:]),
    "torch.where": lambda x: torch.where(x[:-1] > 1, x[:-1], x[1:], out=x[1:]),
    "torch.Tensor.masked_fill_": lambda x: x.t().masked_fill_(x > 1, 0.0),
    "torch.Tensor.masked_scatter_": lambda x: x[1:].masked_scatter_(x[1:] > 1, x[:-1]),
}
"""Calls that write to a part of a matrix while they read another part, which overlaps it."""


def _rows_of(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.arange(float(torch.Size(shape).numel())).reshape(shape) for shape in shapes]


_INTO_ROWS = [*_rows_of((3,)), _PLACES, *_rows_of((3,))]
_OF_SEVERAL: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "torch.add": (torch.add, _rows_of((3,), (3,))),
    "torch.mul": (torch.mul, _rows_of((3,), (3,))),
    "torch.Tensor.add_": (lambda x, y: x.add_(y), _rows_of((3,), (3,))),
    "torch.maximum": (torch.maximum, _rows_of((3,), (3,))),
    "torch.eq": (torch.eq, _rows_of((3,), (3,))),
    "torch.where": (torch.where, [_PLACES > 1, *_rows_of((3,), (3,))]),
    "torch.addcmul": (torch.addcmul, _rows_of((3,), (3,), (3,))),
    "torch.lerp": (lambda x, y: torch.lerp(x, y, 0.5), _rows_of((3,), (3,))),
    "torch.dot": (torch.dot, _rows_of((3,), (3,))),
    "torch.matmul": (torch.matmul, _rows_of((3, 3), (3, 3))),
    "torch.bmm": (torch.bmm, _rows_of((1, 3, 3), (1, 3, 3))),
    "torch.addmm": (torch.addmm, _rows_of((3, 3), (3, 3), (3, 3))),
    "torch.cat": (lambda x, y: torch.cat([x, y]), _rows_of((3,), (3,))),
    "torch.stack": (lambda x, y: torch.stack([x, y]), _rows_of((3,), (3,))),
    "indexing": (lambda x, i: x[i], [*_rows_of((3, 2)), _PLACES]),
    "torch.index_select": (lambda x, i: x.index_select(0, i), [*_rows_of((3, 2)), _PLACES]),
    "torch.gather": (lambda x, i: x.gather(0, i), [*_rows_of((3,)), _PLACES]),
    "torch.take": (lambda x, i: x.take(i), [*_rows_of((3,)), _PLACES]),
    "torch.scatter": (lambda x, i, y: x.scatter(0, i, y), _INTO_ROWS),
    "torch.scatter_add": (
        lambda x, i, y: x.scatter_add(0, i, y),
        _INTO_ROWS,
    ),
    "torch.index_add": (lambda x, i, y: x.index_add(0, i, y), _INTO_ROWS),
    "torch.index_copy": (lambda x, i, y: x.index_copy(0, i, y), _INTO_ROWS),
    "torch.index_put": (lambda x, i, y: x.index_put((i,), y), _INTO_ROWS),
    "torch.masked_fill": (lambda x, m: x.masked_fill(m, 1.0), [*_rows_of((3,)), _PLACES > 1]),
    "torch.masked_select": (lambda x, m: x.masked_select(m), [*_rows_of((3,)), _PLACES > 1]),
    "torch.nn.functional.embedding": (
        lambda w, i: torch.nn.functional.embedding(i, w),
        [*_rows_of((3, 2)), _PLACES],
    ),
    "torch.nn.functional.linear": (torch.nn.functional.linear, _rows_of((2, 3), (4, 3), (4,))),
    "torch.nn.functional.conv1d": (torch.nn.functional.conv1d, _rows_of((1, 2, 5), (2, 2, 3))),
    "torch.nn.functional.layer_norm": (
        lambda x, w: torch.nn.functional.layer_norm(x, (3,), w),
        _rows_of((2, 3), (3,)),
    ),
    "torch.nn.functional.mse_loss": (torch.nn.functional.mse_loss, _rows_of((3,), (3,))),
    "torch.nn.functional.cross_entropy": (
        torch.nn.functional.cross_entropy,
        [*_rows_of((3, 3)), _PLACES],
    ),
    "torch.nn.functional.scaled_dot_product_attention": (
        torch.nn.functional.scaled_dot_product_attention,
        _rows_of((1, 1, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8)),
    ),
}
"""Operators on several tensors, which must be on one device."""
_PLACES_OF_THE_HOST = ("indexing", "torch.index_put")
"""Operators whose places may be on the host."""


def wrong_arguments_are_refused(accelerator: Accelerator, found: Findings) -> None:
    for what, wrong in _WRONG_KINDS.items():
        _require_refused(found, what, what, lambda place, wrong=wrong: wrong(place.whole))  # type: ignore[misc]
    for what, write in _INTO.items():

        def into(place: Place, write: Any = write) -> Any:
            return write(place.whole(torch.ones(1)).expand(3), place.whole)

        _require_refused(found, what, f"{what} of an expanded tensor", into)
    for what, overlap in _BESIDE.items():

        def overlapped(place: Place, overlap: Any = overlap) -> Any:
            return overlap(place.whole(torch.arange(9.0).view(3, 3)))

        _require_refused(found, what, f"{what} of parts that overlap", overlapped)
    _require_one_device(accelerator, found)
    by_numbers: list[tuple[str, str, Run]] = []
    for op in operators():
        for sample in _wrong(op):
            told = name_of(op), f"{name_of(op)}({sample})", _called(op, sample)
            if _is_refused_for_its_numbers(op, sample):
                by_numbers.append(told)
            else:
                _require_refused(found, *told)
        _require_no_narrower_result(found, op)
        _require_no_growth(found, op)
        if found.enough:
            return
    _require_numbers_refused(found, by_numbers)


def _called(op: Any, sample: Sample) -> Run:
    def run(place: Place) -> Any:
        value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
        return op(value, *args, **kwargs)

    return run


def _is_refused_for_its_numbers(op: Any, sample: Sample) -> bool:
    """Whether the host takes the same call if each integer is 0 and each other number 0.5."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type != HOST:
            return tensor
        copy = Place(HOST).as_it_lies(tensor.detach())
        length = copy.untyped_storage().nbytes() // copy.element_size()
        whole = torch.empty(0, dtype=copy.dtype).set_(copy.untyped_storage(), 0, (length,), (1,))
        whole.fill_(0.5 if copy.is_floating_point() or copy.is_complex() else 0)
        return copy

    value, args, kwargs = with_tensors([sample.value, sample.args, sample.kwargs], other)
    changed = replace(sample, value=value, args=args, kwargs=kwargs)
    return attempt(_called(op, changed), Place(HOST))[1] is None


def _require_numbers_refused(found: Findings, others: list[tuple[str, str, Run]]) -> None:
    """No number is taken that torch refuses.

    A device may tell of one by an error after which it computes nothing more. That is as good as a refusal,
    but ends the observation.
    """
    cases = list(others)
    for what, wrong in _WRONG_NUMBERS.items():

        def counted(place: Place, wrong: Callable[[_Put], Any] = wrong) -> Any:
            return wrong(place.whole)

        cases.append((what, what, counted))
    for name, call in _BEYOND.items():
        for places in ([0, 3], [0, 2**40], *([[0, -1], [0, -4]] if name in _COUNT_FROM_0 else [])):

            def beyond(place: Place, call: Any = call, places: list[int] = places) -> Any:
                matrix = place.whole(torch.arange(6.0).view(3, 2))
                return call(matrix, place.whole(torch.tensor(places))).cpu()

            cases.append((name, f"{name} of the places {places} in a dimension of 3", beyond))
    for number, (name, what, run) in enumerate(cases):
        known = list(found.broken)
        _require_refused(found, name, what, run)
        if not found.usable:
            found.broken = known
            left = len(cases) - number - 1
            found.remark = (
                f"it refuses {what} by an error {LOST}, so {left} other calls with numbers that torch "
                "refuses were not tried"
            )
            return


def _require_one_device(accelerator: Accelerator, found: Findings) -> None:
    """No operator takes tensors of two devices, be the other one the host or a device of the same kind."""
    others = [HOST, *(name for name in device_names(accelerator) if name != found.device)]
    for name, (call, given) in _OF_SEVERAL.items():
        for other in others[:2]:
            for number in range(len(given)):
                if other == HOST and name in _PLACES_OF_THE_HOST and not given[number].is_floating_point():
                    continue

                def run(place: Place, call: Any = call, given: Any = given, number: int = number) -> Any:
                    return call(
                        *(t.to(place.device if k == number else found.device) for k, t in enumerate(given))
                    )

                result, refused = attempt(run, Place(other))
                found.compared += 1
                if refused is None and not any(text.startswith(name) for text in found.broken):
                    found.broken.append(
                        f"{name} takes a tensor of {other} as its input {number + 1} beside others of "
                        f"{found.device}, and gives {_told(result)}; torch refuses it"
                    )
    accelerator.synchronize()


def _require_refused(found: Findings, name: str, what: str, run: Callable[[Place], Any]) -> None:
    if any(text.startswith(name) for text in found.broken) or attempt(run, Place(HOST))[1] is None:
        return
    result, refused = found.called(what, run)
    found.compared += 1
    if refused is None:
        found.broken.append(f"{what} is accepted, and gives {_told(result)}; torch refuses it")


_COUNTS = ("histc",)
"""Operators whose results are whole numbers, which torch's kernels for GPUs also write into integers."""


def _require_no_narrower_result(found: Findings, op: Any) -> None:
    """torch converts a result to the dtype of what is given as out only if no fraction can be lost."""
    if not op.supports_out or torch.float32 not in op.supported_dtypes(HOST) or op.name in _COUNTS:
        return
    for sample in samples_of(op, torch.float32, 1):
        name = f"{name_of(op)} into integers"

        def run(place: Place, sample: Sample = sample) -> Any:
            value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
            out = torch.zeros(0, dtype=torch.int64, device=place.device)
            return op(value, *args, **{**kwargs, "out": out})

        _require_refused(found, name, f"{name_of(op)}({sample}) into integers", run)


def _require_no_growth(found: Findings, op: Any) -> None:
    """What an operator in place writes to keeps its shape, though the other operand has more elements."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo

    if not isinstance(op, BinaryUfuncInfo) or op.inplace_variant is None:
        return
    for dtype in (torch.float32, torch.int64):
        if dtype not in op.supported_dtypes(HOST):
            continue
        for small, large in (((1,), (3,)), ((), (2,)), ((1, 3), (2, 3))):
            what = f"{name_of(op)} in place, of the shapes {small} and {large}"

            def run(place: Place, small: Any = small, large: Any = large, dtype: torch.dtype = dtype) -> Any:
                given = (
                    place.whole(torch.ones(small, dtype=dtype)),
                    place.whole(torch.ones(large, dtype=dtype)),
                )
                return op.inplace_variant(*given)

            _require_refused(found, f"{name_of(op)} in place", f"{what} in {short(dtype)}", run)


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
