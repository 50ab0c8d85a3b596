"""Handles Ctrl-C while ranks that share a model generate: all ranks stop at the same token.

If one rank stopped earlier, the others would wait for it in a collective, where they cannot handle Ctrl-C.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from acclimate.accelerator import Accelerator
from acclimate.llm.deferred_sigint import interrupts_deferred
from acclimate.llm.ranks import ModelRanks


@contextlib.contextmanager
def shared_interrupt(ranks: ModelRanks, accelerator: Accelerator) -> Iterator[Callable[[], None]]:
    """Defers SIGINT in the ``with`` block; yields a function that all ranks call to raise it together.

    SIGINT is then handled by the program's own handler; if that raises nothing, the ranks continue. A second
    SIGINT is handled immediately. Nothing is deferred with one rank, or if SIGINT has no handler in Python.
    """
    if ranks.size == 1:
        yield lambda: None
        return
    with interrupts_deferred(most=1) as handle_received:
        if handle_received is None:
            yield lambda: None
            return
        import torch
        import torch.distributed as dist

        told = torch.zeros(1, device=accelerator.current_device_name())

        def check() -> None:
            raised: BaseException | None = None
            try:
                handle_received()
            except BaseException as error:  # noqa: BLE001 - raised below, once the other ranks know
                raised = error
            told.fill_(raised is not None)
            dist.all_reduce(told, group=ranks.group)
            if raised is not None:
                raise raised
            if told.item():
                raise KeyboardInterrupt

        yield check
