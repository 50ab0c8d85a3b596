"""Checks of tensors that a capture makes: each replay starts from what they were made as."""

from __future__ import annotations

from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator, RecordedGraph
from acclimate_conformance.checks.assertions import require
from acclimate_conformance.checks.capturing import new_graph, replay, warm_up
from acclimate_conformance.checks.check import check

_Made = Callable[[torch.Tensor], torch.Tensor]
_DATA = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
_OF_DATA: dict[str, _Made] = {
    "torch.tensor(data)": lambda x: torch.tensor(_DATA, device=x.device),
    "torch.tensor(integers)": lambda x: torch.tensor([[1, 2], [3, 4]], device=x.device),
    "torch.tensor(truth values)": lambda x: torch.tensor([[True, False], [True, True]], device=x.device),
    "torch.tensor(data) of float64": lambda x: torch.tensor(_DATA, dtype=torch.float64).to(x.device),
    "torch.as_tensor(data)": lambda x: torch.as_tensor(_DATA, device=x.device),
    "torch.asarray(data)": lambda x: torch.asarray(_DATA, device=x.device),
    "new_tensor(data)": lambda x: x.new_tensor(_DATA),
    "torch.tensor(data) on the host, moved": lambda x: torch.tensor(_DATA).to(x.device),
    "torch.tensor(data) on the host": lambda x: torch.tensor(_DATA),
    "torch.tensor(integers) on the host": lambda x: torch.tensor([[1, 2], [3, 4]]),
    "torch.tensor(one row) on the host": lambda x: torch.tensor([[7.0]]),
    "torch.zeros on the host": lambda x: torch.zeros(2, 3),
    "a list of numbers, stacked": lambda x: torch.stack([torch.tensor([n, n]) for n in (1.0, 2.0)]),
    "an indexed row of torch.tensor(data)": lambda x: torch.tensor(_DATA, device=x.device)[1:],
}
"""Made of Python's data, which a driver may refuse to read within a capture."""
_ON_THE_DEVICE: dict[str, _Made] = {
    "torch.zeros": lambda x: torch.zeros(2, 3, device=x.device),
    "torch.full": lambda x: torch.full((2, 3), 4.0, device=x.device),
    "torch.arange": lambda x: torch.arange(6, device=x.device).view(2, 3),
    "torch.linspace": lambda x: torch.linspace(0, 1, 6, device=x.device).view(2, 3),
    "torch.eye": lambda x: torch.eye(2, 3, device=x.device),
    "torch.ones_like": torch.ones_like,
    "new_full": lambda x: x.new_full((2, 3), 3),
    "torch.empty().fill_()": lambda x: torch.empty(2, 3, device=x.device).fill_(5),
    "torch.empty_like().zero_()": lambda x: torch.empty_like(x).zero_(),
    "clone()": lambda x: x.clone(),
    "contiguous()": lambda x: x.t().contiguous(),
    "repeat()": lambda x: x.repeat(2, 1),
    "a sum": lambda x: x.sum(0, keepdim=True),
    "to(dtype)": lambda x: x.to(torch.float16),
    "cat": lambda x: torch.cat([x, x]),
    "a product": lambda x: x @ x.t(),
}
_CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_": lambda t: t.mul_(2) if t.dtype != torch.bool else t.logical_not_(),
    "a change of its first row": lambda t: t[0].fill_(1),
    "a change of a transposed view": lambda t: t.t()[:1].zero_(),
    "out": lambda t: torch.sub(t, t, out=t) if t.dtype != torch.bool else torch.logical_or(t, t, out=t),
    "an addition to a list": lambda t: torch._foreach_add_([t], 1) if t.dtype != torch.bool else t.fill_(1),
    "an indexed assignment": lambda t: t.__setitem__((slice(None), 0), 1),
    "a change of all of its storage": lambda t: t.view(-1)[:2].zero_() if t.is_contiguous() else t.zero_(),
}
_REPLAYS = 3


@check(
    "replay_graph", "capture_to_graph",
    promise="What a capture makes and changes in place is made anew by each replay, of data or numbers, on "
    "the device or on the host.",
    once=True,
)  # fmt: skip
def what_a_capture_makes_is_made_anew(accelerator: Accelerator) -> str | None:
    is_recorded = isinstance(new_graph(accelerator), RecordedGraph)
    given = torch.arange(6.0).view(2, 3).to(accelerator.current_device_name())
    changes = list(_CHANGES.items())
    refused = []
    for number, (what, make) in enumerate({**_OF_DATA, **_ON_THE_DEVICE}.items()):
        is_of_the_host = "on the host" in what or "stacked" in what
        if is_of_the_host and not is_recorded:
            continue  # a driver's graph holds no work of the host
        # All changes are met, by a step that does not divide their number.
        few = [changes[(number * 2 + k * 3) % len(changes)] for k in range(2)]
        try:
            _require_repeats(accelerator, given, what, make, few)
        except RuntimeError as error:
            if is_recorded or what not in _OF_DATA:
                raise
            refused.append(f"{what} ({error})"[:80])
    return f"a capture refuses {', '.join(refused)}" if refused else None


def _require_repeats(
    accelerator: Accelerator,
    given: torch.Tensor,
    what: str,
    make: _Made,
    changes: list[tuple[str, Callable[[torch.Tensor], object]]],
) -> None:
    """Fails unless each replay gives what the same work gives without a graph."""

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        made = make(given)
        for _, change in changes:
            change(made)
        return made, made.to(given.device, torch.float32) + given.sum()

    warm_up(accelerator, work)
    wanted = [t.clone() for t in work()]
    graph = new_graph(accelerator)
    with accelerator.capture_to_graph(graph):
        found = work()
    accelerator.synchronize()
    for turn in range(1, _REPLAYS + 1):
        replay(accelerator, graph)
        for ours, theirs, kind in zip(found, wanted, ("it", "what is made of it"), strict=True):
            require(
                torch.equal(ours, theirs),
                f"after call {turn} of replay_graph(), of {what} changed by "
                f"{' and '.join(name for name, _ in changes)}, {kind} is "
                f"{ours.flatten()[:6].tolist()}, not {theirs.flatten()[:6].tolist()}",
            )
        found[0].zero_()  # what the program does with a result is no part of the graph
