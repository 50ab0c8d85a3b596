"""Requests huge pages for large host tensors, on systems that give them only on request."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from acclimate.ops.optimizers.shards import local

_ADVICE = 14  # Linux's MADV_HUGEPAGE, which some builds of Python's mmap lack
_LEAST_BYTES = 4 << 20  # less than two huge pages gains nothing


def empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocates an uninitialised tensor of the same shape and layout, on huge pages if it is large.

    Sequential access to huge pages needs 512 times fewer address translations, and the processor's
    prefetchers do not stop every 4 KiB: a step of Adam was measured to take about a tenth less time.
    """
    result = torch.empty_like(tensor, dtype=dtype, memory_format=torch.preserve_format)
    memory = local(result)
    size = memory.numel() * memory.element_size()
    if memory.device.type == "cpu" and size >= _LEAST_BYTES:
        advise = _madvise()
        if advise is not None:
            begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (memory.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
            # A system without huge pages refuses, which does no harm.
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _ADVICE)
    return result


@functools.cache
def _madvise() -> Callable[..., Any] | None:
    if not sys.platform.startswith("linux"):
        return None
    function: Callable[..., Any] | None = getattr(ctypes.CDLL(None), "madvise", None)
    return function
