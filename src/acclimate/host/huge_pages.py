"""Requests huge pages for large host tensors, on systems that give them only on request."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_ADVICE = 14  # Linux's MADV_HUGEPAGE, which some builds of Python's mmap lack
_HUGE_BYTES = 2 << 20
_LEAST_BYTES = 2 * _HUGE_BYTES  # less than two huge pages gains nothing
_SHARED_BYTES = 16 << 20
_LINE = 64  # of a processor's cache


def request(memory: Tensor) -> None:
    """Requests huge pages for the memory of a new contiguous tensor, if it is large and on the host.

    Sequential access to huge pages needs 512 times fewer address translations, and the processor's
    prefetchers do not stop every 4 KiB: a step of Adam was measured to take about a tenth less time.
    """
    size = memory.numel() * memory.element_size()
    if memory.device.type == "cpu" and size >= _LEAST_BYTES:
        advise = _madvise()
        if advise is not None:
            begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (memory.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
            # A system without huge pages refuses, which does no harm.
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _ADVICE)


class SharedPages:
    """Memory on huge pages for host tensors that are too small to have such pages of their own.

    It lasts as long as one of its tensors does.
    """

    def __init__(self) -> None:
        self._left: Tensor | None = None
        """The bytes that are not used yet of the memory that was allocated last."""

    def move(self, data: Tensor) -> Tensor:
        """Returns a copy of a contiguous tensor there; a large tensor, or one of a device, as it is."""
        size = data.numel() * data.element_size()
        if data.device.type != "cpu" or not 0 < size < _LEAST_BYTES:
            return data
        import torch

        taken = -(-size // _LINE) * _LINE
        if self._left is None or len(self._left) < taken:
            # Pages that nothing is written to take no memory.
            whole = data.new_empty(_SHARED_BYTES + _HUGE_BYTES, dtype=torch.uint8)
            self._left = whole[-whole.data_ptr() % _HUGE_BYTES :][:_SHARED_BYTES]
            request(self._left)
        own, self._left = self._left[:size], self._left[taken:]
        return own.view(data.dtype).view(data.shape).copy_(data)


@functools.cache
def _madvise() -> Callable[..., Any] | None:
    if not sys.platform.startswith("linux"):
        return None
    function: Callable[..., Any] | None = getattr(ctypes.CDLL(None), "madvise", None)
    return function
