"""Checks that a graph reads small tensors again at each replay, however it uses them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import require_close
from acclimate_conformance.checks.capturing import captured, replay
from acclimate_conformance.checks.check import check

_SHAPE = (4, 3)


@check(
    "capture_to_graph", "replay_graph",
    promise="A replay reads single numbers and other small tensors again, also those that a graph only "
    "reads.",
)  # fmt: skip
def small_tensors_are_read_again(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    # Each use has tensors of its own: one that is read again because of another use hides nothing.
    given = {(kind, use): made().to(device) for kind, made in _KINDS.items() for use in _USES}
    seen = {key: _as_used(key[0], tensor) for key, tensor in given.items()}
    rows = torch.arange(1.0, 13.0).reshape(_SHAPE)
    rows_there = rows.to(device)

    def work(x: torch.Tensor, tensors: dict[tuple[str, str], torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [_USES[use](x, tensor) for (_, use), tensor in tensors.items()]

    graph, results = captured(accelerator, lambda: work(rows_there, seen))
    for turn in (1, 2):
        for number, tensor in enumerate(given.values()):
            with torch.no_grad():
                tensor.copy_(torch.full(tensor.shape, float(turn + 2 + number % 3)))
        replay(accelerator, graph)
        wanted = work(rows, {key: tensor.detach().cpu() for key, tensor in seen.items()})
        for (kind, use), result, expected in zip(seen, results, wanted, strict=True):
            require_close(
                result, expected, torch.float32, f"after call {turn} of replay_graph(), {kind} {use}"
            )


_KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "a single number": lambda: torch.tensor(1.0),
    "a single integer": lambda: torch.tensor(1),
    "a parameter of one number": lambda: torch.ones(()),
    "one element": lambda: torch.ones(1),
    "a view of one element": lambda: torch.ones(5),
    "a vector": lambda: torch.ones(3),
    "a column": lambda: torch.ones(3, 5),
}


def _as_used(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values that a graph reads from a tensor made before the capture."""
    if kind == "a view of one element":
        return tensor[3]
    if kind == "a column":
        return tensor[:, 1]
    return torch.nn.Parameter(tensor) if kind.startswith("a parameter") else tensor


_USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "as the right factor": lambda x, number: x * number,
    "as the left factor": lambda x, number: number * x,
    "subtracted": lambda x, number: x - number,
    "added twice": lambda x, number: torch.add(x, number, alpha=2),
    "as a divisor": lambda x, number: x / number,
    "compared": lambda x, number: x < number,
    "as the larger": lambda x, number: torch.maximum(x, number.to(x.dtype)),
    "as a choice": lambda x, number: torch.where(x > 4, x, number.to(x.dtype)),
    "in an update": lambda x, number: x.clone().mul_(number),
    "in a result of the caller's": lambda x, number: torch.mul(x, number, out=torch.empty_like(x)),
    "copied": lambda x, number: torch.empty_like(x).copy_(number),
    "cloned": lambda x, number: number.clone(),
    "in a list": lambda x, number: torch.stack([number, number]),
    "expanded": lambda x, number: number.expand(_SHAPE) + 1,
    "converted": lambda x, number: number.to(torch.int32) * 2,
    "by itself": lambda x, number: number + 1,
}
"""Ways to read a small tensor."""
