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

    A second SIGINT is raised immediately. With one rank, SIGINT is not deferred.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if ranks.size == 1 or not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    import torch
    import torch.distributed as dist

    received: list[int] = []
    told = torch.zeros(1, device=accelerator.current_device_name())

    def receive(number: int, frame: FrameType | None) -> Any:
        if received:
            return signal.default_int_handler(number, frame)
        received.append(number)
        return None

    def check() -> None:
        told.fill_(len(received))
        dist.all_reduce(told, group=ranks.group)
        if told.item():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, receive)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
