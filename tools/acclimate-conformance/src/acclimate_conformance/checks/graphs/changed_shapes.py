"""Checks of graphs and shapes: those that the program changes, and results of other shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator, RecordedGraph
from acclimate.errors import GraphCaptureError
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import equal, note_of_lacks, refused, require, short
from acclimate_conformance.checks.capturing import new_graph, replay, warm_up
from acclimate_conformance.checks.check import check

_Change = Callable[[torch.Tensor, torch.Tensor], object]
_OF_ANY_SHAPE: dict[str, _Change] = {
    "unsqueeze_()": lambda x, other: x.unsqueeze_(0),
    "set_()": lambda x, other: x.set_(other.untyped_storage(), 0, (4,), (1,)),
    "data = other": lambda x, other: setattr(x, "data", other),
}
_CHANGES: dict[str, _Change] = {
    "t_()": lambda x, other: x.t_(),
    "swapaxes_()": lambda x, other: x.swapaxes_(0, 1),
    "as_strided_()": lambda x, other: x.as_strided_((2,), (3,)),
    "resize_()": lambda x, other: x.resize_(1, 2),
    **_OF_ANY_SHAPE,
}
"""What changes the shape or the memory of a tensor's object, and no number: it is no work of the device."""
_DTYPES = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)
_MOMENTS = ("in the capture", "after the capture")


@check(
    "capture_to_graph", "replay_graph",
    promise="A replay works on the shapes and the memory of the capture, whatever the program does in it and "
    "after it with the shapes of its tensors.",
    once=True,
)  # fmt: skip
def shapes_of_the_capture_stay(accelerator: Accelerator) -> None:
    for dtype in _DTYPES:
        for when in _MOMENTS:
            for changed, change in _CHANGES.items():
                _require_stays(accelerator, _numbers(dtype), changed, change, when)
            for changed, change in _OF_ANY_SHAPE.items():
                _require_stays(accelerator, _numbers(dtype)[1, 2], changed, change, when)


def _numbers(dtype: torch.dtype, turn: int = 0) -> torch.Tensor:
    counted = torch.arange(6).reshape(2, 3) + turn
    return (counted % 3 > 1 if dtype == torch.bool else counted).to(dtype)


def _used(x: torch.Tensor) -> torch.Tensor:
    return x.logical_not() if x.dtype == torch.bool else x + x


def _require_stays(
    accelerator: Accelerator, start: torch.Tensor, changed: str, change: _Change, when: str
) -> None:
    """Changes an input, a parameter and a result of one graph, whose memory is what a replay works on."""
    held, weight = (start.to(accelerator.current_device_name(), copy=True) for _ in range(2))
    given, parameter = held.detach(), torch.nn.Parameter(weight, requires_grad=False)
    target, other = torch.zeros_like(held), torch.zeros(4, dtype=held.dtype, device=held.device)
    warm_up(accelerator, lambda: target.copy_(_used(_used(held))))
    graph = new_graph(accelerator)
    with accelerator.capture_to_graph(graph):
        result, product = _used(given), _used(parameter)
        target.copy_(given)
        memory = result.detach()
        if when == _MOMENTS[0]:
            for tensor in (given, parameter, result):
                change(tensor, other)
        last = _used(memory)
    if when == _MOMENTS[1]:
        for tensor in (given, parameter, result):
            change(tensor, other)
    told = f"capture_to_graph(), with {changed} of {short(held.dtype)} {when}: a replay"
    for turn in (1, 2):
        new = _numbers(held.dtype, turn)[(slice(None), slice(None)) if start.dim() else (1, 2)]
        held.copy_(new)
        weight.copy_(new)
        try:
            replay(accelerator, graph)
        except RuntimeError as error:
            require(False, f"{told} raises {describe(error, whole=True)}")
        for what, found, wanted in (
            ("a result of an input", memory, _used(new)), ("a copy of an input", target, new),
            ("a result of a parameter", product, _used(new)),
            ("a result of a result", last, _used(_used(new))),
        ):  # fmt: skip
            require(
                equal(found, wanted),
                f"{told} makes {what} {found.flatten().tolist()}, not {wanted.flatten().tolist()}",
            )


_BY_DATA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nonzero": lambda x: x.nonzero(),
    "argwhere": torch.argwhere,
    "where": lambda x: torch.where(x > 0)[0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "indexing by truth values": lambda x: x[x > 0],
    "indexing of integers by truth values": lambda x: x.to(torch.int64)[x > 0] + 1,
    "indexing of rows by truth values": lambda x: x.view(2, 4)[x.view(2, 4)[:, 0] > 0],
    "unique": torch.unique,
    "unique_consecutive": torch.unique_consecutive,
    "repeat_interleave": lambda x: torch.repeat_interleave(x.to(torch.int64)),
}
"""Operators whose results have as many elements as the data says."""
_CAPTURED = (2, 3, 0, 0, 1, 0, 0, 0)
_AT_REPLAYS = {
    "fewer": (2, 0, 0, 0, 0, 0, 0, 0), "none": (0,) * 8, "more": (2, 3, 1, 0, 1, 4, 0, 1), "all": (1,) * 8,
    "as many elsewhere": (1, 0, 0, 3, 0, 0, 2, 0), "one less": (0, 3, 0, 0, 1, 0, 0, 0),
}  # fmt: skip


@check(
    "replay_graph", "capture_to_graph",
    promise="A replay that would give a result of another shape, larger, smaller or empty, raises "
    "GraphCaptureError; one of the same shape is right, also afterwards.",
    once=True,
)  # fmt: skip
def other_shapes_are_refused(accelerator: Accelerator) -> str | None:
    captured = torch.tensor(_CAPTURED, dtype=torch.float32)
    given = captured.to(accelerator.current_device_name())
    lacks: set[str] = set()
    for what, work in _BY_DATA.items():
        graph = new_graph(accelerator)
        try:
            given.copy_(captured)
            warm_up(accelerator, lambda work=work: work(given))
            with accelerator.capture_to_graph(graph):
                result = work(given)
        except (RuntimeError, NotImplementedError):  # that is refusing it, or the device lacks it
            lacks.add(what)
            accelerator.synchronize()
            continue
        for how, values in _AT_REPLAYS.items():
            new = torch.tensor(values, dtype=torch.float32)
            told = f"replay_graph() of {what}, of {how} than in the capture,"
            for numbers in (new, captured):
                wanted = work(numbers)
                given.copy_(numbers)
                if wanted.shape != result.shape:
                    with refused(told, GraphCaptureError):
                        replay(accelerator, graph)
                    continue
                replay(accelerator, graph)
                require(
                    equal(result, wanted),
                    f"{told} or after it, gives {result.flatten()[:8].tolist()}, not "
                    f"{wanted.flatten()[:8].tolist()}",
                )
    if isinstance(new_graph(accelerator), RecordedGraph):
        return note_of_lacks(lacks)
    return f"a capture refuses {', '.join(sorted(lacks))}" if lacks else None
