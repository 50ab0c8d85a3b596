"""Topics of ranks: collectives on the same tensors again, and into tensors with gaps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed

from acclimate_conformance.checks.communication.observer import Observer

_LENGTH, _TURNS = 4, 3
Filled = Callable[[torch.Tensor, torch.Tensor], object]
"""A collective from one tensor into another."""


def _numbers(rank: int, length: int, turn: int = 0) -> torch.Tensor:
    """Whole numbers of a rank in a turn."""
    return torch.arange(float(length)) + 100.0 * rank + 1000.0 * turn


def same_tensors_again(here: Observer) -> None:
    """A buffer that a program keeps has other numbers in each step."""
    count, root = here.count, here.ranks[-1]
    is_root = here.number == root
    long = _LENGTH * count

    def every(length: int, turn: int) -> list[torch.Tensor]:
        return [_numbers(r, length, turn) for r in here.ranks]

    def together(turn: int) -> torch.Tensor:
        return torch.cat(every(_LENGTH, turn))

    def added(length: int, turn: int) -> torch.Tensor:
        return torch.stack(every(length, turn)).sum(0)

    def mine(parts: torch.Tensor) -> torch.Tensor:
        return parts.chunk(count)[here.place]

    def exchanged(turn: int) -> torch.Tensor:
        return torch.cat([mine(numbers) for numbers in every(long, turn)])

    def list_of(into: torch.Tensor) -> list[torch.Tensor]:
        return list(into.chunk(count))

    def in_place(collective: Callable[[torch.Tensor], object]) -> Filled:
        return lambda into, given: collective(into.copy_(given))

    calls: dict[str, tuple[int, int, Filled, Callable[[int], torch.Tensor] | None]] = {
        "all_reduce": (
            _LENGTH, _LENGTH, in_place(distributed.all_reduce), lambda turn: added(_LENGTH, turn),
        ),
        "reduce": (
            _LENGTH, _LENGTH, in_place(lambda t: distributed.reduce(t, root)),
            (lambda turn: added(_LENGTH, turn)) if is_root else None,
        ),
        "broadcast": (
            _LENGTH, _LENGTH, in_place(lambda t: distributed.broadcast(t, root)),
            lambda turn: _numbers(root, _LENGTH, turn),
        ),
        "all_gather": (
            long, _LENGTH, lambda into, given: distributed.all_gather(list_of(into), given), together,
        ),
        "all_gather_into_tensor": (long, _LENGTH, distributed.all_gather_into_tensor, together),
        "gather": (
            long, _LENGTH,
            lambda into, given: distributed.gather(given, list_of(into) if is_root else None, root),
            together if is_root else None,
        ),
        "scatter": (
            _LENGTH, long,
            lambda into, given: distributed.scatter(into, list_of(given) if is_root else None, root),
            lambda turn: mine(_numbers(root, long, turn)),
        ),
        "reduce_scatter": (
            _LENGTH, long, lambda into, given: distributed.reduce_scatter(into, list_of(given)),
            lambda turn: mine(added(long, turn)),
        ),
        "reduce_scatter_tensor": (
            _LENGTH, long, distributed.reduce_scatter_tensor, lambda turn: mine(added(long, turn)),
        ),
        "all_to_all": (
            long, long, lambda into, given: distributed.all_to_all(list_of(into), list_of(given)), exchanged,
        ),
        "all_to_all_single": (long, long, distributed.all_to_all_single, exchanged),
    }  # fmt: skip
    for name, (received, sent, call, wanted) in calls.items():

        def run(
            name: str = name, received: int = received, sent: int = sent, call: Filled = call,
            wanted: Callable[[int], torch.Tensor] | None = wanted,
        ) -> None:  # fmt: skip
            into, given = here.full(received, -1), here.full(sent, -1)
            for turn in range(_TURNS):
                given.copy_(_numbers(here.number, sent, turn))
                call(into, given)
                here.accelerator.synchronize()
                if wanted is not None:
                    here.same(into, wanted(turn), f"call {turn + 1} of {name} on the same tensors")

        here.optional(name, run)


def results_into_columns(here: Observer) -> None:
    """A backend writes to the tensors that it is given, or refuses those with gaps between their elements.

    Only lists of tensors to fill: torch's own backends ignore gaps in a tensor that is worked on in place.
    """
    root = here.ranks[-1]
    is_root = here.number == root
    mine = _numbers(here.number, _LENGTH).to(here.accelerator.current_device_name())
    together = torch.stack([_numbers(r, _LENGTH) for r in here.ranks], 1)

    def columns() -> tuple[torch.Tensor, list[torch.Tensor]]:
        matrix = here.full(_LENGTH * (here.count + 1), -1).view(_LENGTH, here.count + 1)
        return matrix, list(matrix.unbind(1))[:-1]

    def whole(numbers: torch.Tensor) -> torch.Tensor:
        """With the last column, which nothing fills."""
        return torch.cat([numbers, torch.full((_LENGTH, 1), -1.0)], 1)

    def all_gather() -> None:
        matrix, parts = columns()
        distributed.all_gather(parts, mine)
        here.accelerator.synchronize()
        here.same(matrix, whole(together), "all_gather into columns of a matrix")

    def gather() -> None:
        matrix, parts = columns()
        distributed.gather(mine, parts if is_root else None, root)
        here.accelerator.synchronize()
        if is_root:
            here.same(matrix, whole(together), "gather into columns of a matrix")

    def all_to_all() -> None:
        matrix, parts = columns()
        given = _numbers(here.number, _LENGTH * here.count).to(mine.device)
        distributed.all_to_all(parts, list(given.chunk(here.count)))
        here.accelerator.synchronize()
        received = [_numbers(r, _LENGTH * here.count).chunk(here.count)[here.place] for r in here.ranks]
        here.same(matrix, whole(torch.stack(received, 1)), "all_to_all into columns of a matrix")

    for collective in (all_gather, gather, all_to_all):
        here.optional(f"{collective.__name__} into columns of a matrix", collective)
