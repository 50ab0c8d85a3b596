"""What tests of asynchronous I/O share: each engine that this machine allows, and random bytes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from acclimate.errors import InvalidEnvironmentError
from acclimate.ops import AsyncIOHandle

ENGINES = ("io_uring", "aio", "threads", "python")


@contextmanager
def chosen(engine: str) -> Iterator[None]:
    before = os.environ.get("ACCLIMATE_AIO")
    os.environ["ACCLIMATE_AIO"] = engine
    try:
        yield
    finally:
        if before is None:
            del os.environ["ACCLIMATE_AIO"]
        else:
            os.environ["ACCLIMATE_AIO"] = before


@cache
def refusal(engine: str) -> str | None:
    """Why an engine cannot run here; None when it can."""
    try:
        with chosen(engine):
            AsyncIOHandle(queue_depth=1).close()
    except InvalidEnvironmentError as error:
        return str(error)
    return None


def make_handle(engine: str, **settings: Any) -> AsyncIOHandle:
    """A handle that runs on an engine; skips the test where the machine refuses it."""
    if reason := refusal(engine):
        pytest.skip(reason)
    with chosen(engine):
        handle = AsyncIOHandle(**settings)
    assert handle.engine == engine
    return handle


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def content_of(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in order."""
    dense = tensor.detach().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size())
