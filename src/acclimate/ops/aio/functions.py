"""DeepSpeed's functions for asynchronous I/O: what ``AsyncIOBuilder().load()`` returns."""

from __future__ import annotations

import torch

from acclimate.errors import AsyncIOSettingError
from acclimate.ops.aio.handle import AsyncIOHandle, Path

aio_handle = AsyncIOHandle


def aio_read(
    buffer: torch.Tensor,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Reads a whole file, which must be as long as the buffer. Returns 0.

    Arguments and errors as for :class:`AsyncIOHandle` and its ``read``.
    """
    with AsyncIOHandle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Writes a tensor to the beginning of a file. Returns 0.

    Arguments and errors as for :class:`AsyncIOHandle` and its ``write``.
    """
    with AsyncIOHandle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copies a host tensor to another with as many elements, on all of torch's threads. Returns 0.

    Raises:
        AsyncIOSettingError: the numbers of elements differ.
    """
    if dest.numel() != src.numel():
        raise AsyncIOSettingError(f"{src.numel()} elements do not fit a tensor of {dest.numel()}.")
    with torch.no_grad():
        dest.copy_(src.reshape(dest.shape))
    return 0
