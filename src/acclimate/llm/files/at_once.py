"""Reads several parts of a model's files at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from acclimate.llm.kernels.torch_threads import one_thread

_Part = TypeVar("_Part")

_MOST_THREADS = 8
"""More threads would wait for memory."""


def read_at_once(read: Callable[[_Part], None], parts: Sequence[_Part]) -> None:
    """Calls ``read`` with each of the parts, in as many threads as torch has; raises its error.

    Each thread fills memory of its own, which takes longest, and works on it while it is in the cache.
    """
    threads = min(len(parts), torch.get_num_threads(), _MOST_THREADS)
    if threads <= 1:
        for part in parts:
            read(part)
        return
    is_inference = torch.is_inference_mode_enabled()  # a thread does not inherit it

    def run(part: _Part) -> None:
        with torch.inference_mode(is_inference), one_thread():
            read(part)

    with ThreadPoolExecutor(threads, "read") as pool:
        try:
            for _ in pool.map(run, parts):
                pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
