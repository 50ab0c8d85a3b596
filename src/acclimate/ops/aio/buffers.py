"""The memory of a transfer: a tensor's bytes on the host, and page-locked host memory."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from acclimate.errors import AsyncIOError, AsyncIOSettingError

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

logger = logging.getLogger("acclimate")


@dataclass(frozen=True)
class Buffer:
    """A tensor and the host memory that holds its bytes during a transfer."""

    tensor: torch.Tensor
    memory: torch.Tensor
    """The tensor itself if it is on the host; a page-locked copy if it is on an accelerator."""

    @property
    def length(self) -> int:
        """The size in bytes."""
        return self.tensor.numel() * self.tensor.element_size()

    def deliver(self) -> None:
        """Copies the bytes that were read to the tensor's device, and marks it as changed for autograd."""
        if not _is_on_host(self.tensor):
            with torch.no_grad():
                self.tensor.copy_(self.memory)
        elif not self.tensor.is_inference():
            torch.autograd.graph.increment_version(self.tensor)


def host_buffer(tensor: torch.Tensor, writes: bool) -> Buffer:
    """Returns the host memory of a transfer; for a write it holds the tensor's bytes.

    Raises:
        TypeError: it is not a tensor.
        AsyncIOSettingError: the tensor is not contiguous, or its memory does not hold its values (sparse,
            conjugated, meta).
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"The buffer of an I/O request must be a tensor, not {type(tensor).__name__}.")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else tensor.layout
        raise AsyncIOSettingError(
            f"A {kind} tensor has no plain memory to read or write; give a dense tensor with data."
        )
    if not tensor.is_contiguous():
        raise AsyncIOSettingError(
            f"A tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous, so "
            "its bytes are not in order in memory. Write tensor.contiguous(); read into a new tensor."
        )
    if tensor.is_conj() or tensor.is_neg():
        raise AsyncIOSettingError(
            "This tensor is a conjugate or negative view, whose memory holds other values. "
            "Use tensor.resolve_conj() or tensor.resolve_neg()."
        )
    if _is_on_host(tensor):
        return Buffer(tensor, tensor.detach())
    return Buffer(tensor, _locked_copy(tensor, with_data=writes))


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _locked_copy(tensor: torch.Tensor, with_data: bool) -> torch.Tensor:
    from acclimate.selection import get_accelerator  # not selected by a handle that only sees host tensors

    accelerator = get_accelerator()
    if accelerator.on_accelerator(tensor):
        memory = accelerator.pin_empty(tensor.shape, dtype=tensor.dtype)
    else:
        memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    if with_data:
        memory.copy_(tensor.detach())  # blocks until the data is there
    return memory


class LockedMemory:
    """Allocates page-aligned host tensors, locked in memory, which O_DIRECT transfers without a copy.

    Tensors beyond the process's limit for locked memory (``ulimit -l``) are only page-aligned.
    """

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}  # address: size in bytes
        self._mlock = _system_call("mlock")
        self._munlock = _system_call("munlock")

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised tensor of shape ``(count,)``; its memory is freed with its last view."""
        size = count * dtype.itemsize
        if size == 0:
            return torch.empty(count, dtype=dtype)
        # Private: to the kernel, shared pages belong to a file and are slower to pass to a device.
        try:
            pages = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, flags=_PRIVATE)
        except (OSError, OverflowError) as refusal:
            raise AsyncIOError(errno.ENOMEM, f"Not enough memory for {size} bytes") from refusal
        tensor = torch.frombuffer(pages, dtype=torch.uint8, count=size).view(dtype)
        address = tensor.data_ptr()
        self._regions[address] = size
        weakref.finalize(pages, self._regions.pop, address, None)  # unmapping unlocks
        if error := self._mlock(address, size):
            logger.debug("%d bytes are not locked in memory: %s", size, os.strerror(error))
        return tensor

    def release(self, tensor: torch.Tensor) -> bool:
        """Unlocks a tensor of :meth:`allocate`; returns whether it was one."""
        size = self._regions.pop(tensor.data_ptr(), None)
        if size is None:
            return False
        self._munlock(tensor.data_ptr(), size)
        return True

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies entirely in memory of :meth:`allocate`."""
        if not _is_on_host(tensor):
            return False
        first = tensor.data_ptr()
        end = first + tensor.numel() * tensor.element_size()
        return any(start <= first and end <= start + size for start, size in list(self._regions.items()))


def _system_call(name: str) -> Callable[[int, int], int]:
    """Returns the C library's ``mlock`` or ``munlock``, called with address and size, as 0 or an errno."""
    library = ctypes.CDLL(None, use_errno=True)
    function = getattr(library, name, None)

    def call(address: int, size: int) -> int:
        if function is None:
            return errno.ENOSYS
        return ctypes.get_errno() if function(ctypes.c_void_p(address), ctypes.c_size_t(size)) else 0

    return call
