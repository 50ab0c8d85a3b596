"""Handles Ctrl-C while ranks that share a model generate: all ranks stop at the same token.

If one rank stopped earlier, the others would wait for it in a collective, where they cannot handle Ctrl-C.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from acclimate.accelerator import Accelerator
from acclimate.inference.ranks import ModelRanks


@contextlib.contextmanager
def shared_interrupt(ranks: ModelRanks, accelerator: Accelerator) -> Iterator[Callable[[], None]]:
    """Defers SIGINT in the ``with`` block; yields a function that all ranks call to raise it together.

    SIGINT is then handled by the program's own handler; if that raises nothing, the ranks continue. A second
    SIGINT is handled immediately. Nothing is deferred with one rank, or if SIGINT has no handler in Python.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if ranks.size == 1 or not is_main or not callable(before):
        yield lambda: None
        return
    handle: Callable[[int, FrameType | None], Any] = before
    import torch
    import torch.distributed as dist

    received: list[FrameType | None] = []
    told = torch.zeros(1, device=accelerator.current_device_name())

    def receive(number: int, frame: FrameType | None) -> Any:
        if received:
            return handle(number, frame)
        received.append(frame)
        return None

    def check() -> None:
        raised: BaseException | None = None
        if received:
            try:
                handle(signal.SIGINT, received.pop())
            except BaseException as error:  # noqa: BLE001 - raised below, once the other ranks know
                raised = error
        told.fill_(raised is not None)
        dist.all_reduce(told, group=ranks.group)
        if raised is not None:
            raise raised
        if told.item():
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, receive)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, handle)
        if received:  # after the last check
            handle(signal.SIGINT, received.pop())
