"""Checks of pinned memory that is seen otherwise: as arrays, other storages, views, and by other threads."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import equal, in_thread, require
from acclimate_conformance.checks.check import check

_LENGTH = 4096
_View = Callable[[torch.Tensor], torch.Tensor]


def _array(x: torch.Tensor) -> Any:
    return x.numpy()


def _at_address(x: torch.Tensor) -> torch.Tensor:
    """The last numbers, by their address alone."""
    first = x.data_ptr() + (_LENGTH - 5) * x.element_size()
    return torch.frombuffer((ctypes.c_char * (5 * x.element_size())).from_address(first), dtype=x.dtype)


def _saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x[10:], file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


_SAME_MEMORY: dict[str, _View] = {
    "an array": lambda x: torch.from_numpy(_array(x)),
    "the end of an array": lambda x: torch.from_numpy(_array(x)[10:]),
    "the last number of an array": lambda x: torch.from_numpy(_array(x)[-1:]),
    "every third number of an array": lambda x: torch.from_numpy(_array(x)[5::3]),
    "a column of an array": lambda x: torch.from_numpy(_array(x).reshape(64, 64)[:, 7]),
    "a transposed array": lambda x: torch.from_numpy(_array(x).reshape(64, 64)[8:].T),
    "the bytes of an array": lambda x: torch.from_numpy(_array(x)[100:].view("uint8")),
    "asarray of an array": lambda x: torch.asarray(_array(x)[33:]),
    "DLPack of an array": lambda x: from_dlpack(_array(x)[17:]),
    "DLPack of a part": lambda x: from_dlpack(x[29:]),
    "frombuffer": lambda x: torch.frombuffer(memoryview(_array(x)), dtype=x.dtype, offset=400),
    "its address": _at_address,
    "a view": lambda x: x[9:].view(-1),
    "a part in another dtype": lambda x: x[9:].view(torch.uint8),
    "as_strided": lambda x: x.as_strided((50, 3), (3, 1), x.storage_offset() + 77),
    "a tensor of its storage": lambda x: torch.empty(0, dtype=x.dtype).set_(
        x.untyped_storage(), x.storage_offset() + 50, (9,), (2,)
    ),
    "detach() of a split": lambda x: x.split(1000)[2].detach(),
    "unfolded": lambda x: x.unfold(0, 4, 2)[5:],
    "an expanded number": lambda x: x[3:4].expand(6),
}
_OTHER_MEMORY: dict[str, _View] = {
    "a copied array": lambda x: torch.from_numpy(_array(x)[10:].copy()),
    "torch.tensor(array)": lambda x: torch.tensor(_array(x)[10:]),
    "clone() of the end of an array": lambda x: torch.from_numpy(_array(x)[10:]).clone(),
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x[10:])),
    "torch.save and torch.load": _saved,
    "contiguous() of a strided part": lambda x: x[::2].contiguous(),
    "to(dtype)": lambda x: x.to(torch.float64),
}


@check(
    "is_pinned", "pin_memory", "pin_empty", "synchronize",
    promise="Any part of pinned memory is pinned, however it is seen, through arrays too; copies of it in "
    "other memory are not.",
)  # fmt: skip
def pinned_memory_is_seen_otherwise(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    numbers = torch.arange(float(_LENGTH))
    made = {
        "pin_memory": accelerator.pin_memory(numbers.clone()),  # which may be the tensor itself
        "pin_empty": accelerator.pin_empty(_LENGTH, dtype=torch.float32).copy_(numbers),
        "pin_empty_like": accelerator.pin_empty_like(numbers).copy_(numbers),
        "pin_memory of a part": accelerator.pin_memory(torch.arange(-64.0, _LENGTH)[64:]),
    }
    for how, pinned in made.items():
        locks = accelerator.is_pinned(pinned)
        for what, view in _SAME_MEMORY.items():
            seen, plain = view(pinned), view(numbers)
            told, elsewhere = accelerator.is_pinned(seen), in_thread(lambda t=seen: accelerator.is_pinned(t))  # type: ignore[misc]
            require(
                told == elsewhere == locks,
                f"is_pinned() is {told}, and {elsewhere} in another thread, for memory of {how}() seen as "
                f"{what}",
            )
            there = seen.to(device, non_blocking=True)
            accelerator.synchronize()
            require(equal(there, plain), f"a copy of memory of {how}() seen as {what} has other numbers")
        for what, view in _OTHER_MEMORY.items():
            other = view(pinned)
            require(equal(other, view(numbers)), f"{what} of memory of {how}() has other numbers")
            # A host's allocator of torch may give pinned memory to anyone, and torch says so itself.
            told = accelerator.is_pinned(other)
            require(told == bool(other.is_pinned()), f"is_pinned() is {told} for {what} of memory of {how}()")
            require(not told or not locks, f"is_pinned() is True for {what} of memory of {how}()")
        torch.from_numpy(_array(pinned)[10:]).copy_(torch.ones(_LENGTH - 10, device=device))
        accelerator.synchronize()
        require(
            float(pinned[9]) == 9 and equal(pinned[10:], torch.ones(_LENGTH - 10)),
            f"a copy into the end of memory of {how}(), seen as an array, is wrong",
        )
