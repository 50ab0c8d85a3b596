"""Checks of parts of pinned memory: copies from and to them, in a row, and how torch itself pins."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    Work,
    device_names,
    equal,
    in_thread,
    is_host,
    require,
    shares_memory,
    short,
)
from acclimate_conformance.checks.check import check

_PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all of it": lambda x: x,
    "the end": lambda x: x[3:],
    "a block": lambda x: x[1:4, 2:5],
    "every second column": lambda x: x[:, ::2],
    "a transposed matrix": lambda x: x.t(),
    "a column": lambda x: x[:, 4],
    "the end of a row": lambda x: x[2, 5:],
}
_LENGTH, _MANY = 1 << 16, 12


def _require_pins(accelerator: Accelerator) -> None:
    if not accelerator.pin_memory(torch.ones(8)).is_pinned():
        raise NotOfferedError("it does not pin memory, and says so")


@check(
    "pin_memory", "pin_empty", "synchronize",
    promise="Copies from and to any part of pinned memory, also in another dtype, take and give that part "
    "alone.",
)  # fmt: skip
def copies_of_parts(accelerator: Accelerator) -> None:
    dtypes = (torch.float32, torch.int64, *accelerator.supported_dtypes()[1:3])
    numbers = torch.arange(48.0).reshape(6, 8)
    for name in device_names(accelerator):
        for (what, part), dtype, non_blocking in product(_PARTS.items(), dtypes, (False, True)):
            source = part(accelerator.pin_memory(numbers))
            there = source.to(name, dtype, non_blocking=non_blocking)
            into = torch.zeros(source.shape, dtype=dtype, device=name)
            into.copy_(source, non_blocking=non_blocking)
            target = accelerator.pin_empty(6, 8, dtype=torch.float32).fill_(-1)
            part(target).copy_(there * 2, non_blocking=non_blocking)
            # The same part of a tensor of the device, from and to whole pinned memory.
            whole = accelerator.pin_empty(*source.shape, dtype=dtype).fill_(0)
            whole.copy_(part(numbers.to(name, dtype)), non_blocking=non_blocking)
            own = torch.zeros(6, 8, dtype=dtype, device=name)
            part(own).copy_(
                accelerator.pin_memory(part(numbers).to(dtype).contiguous()), non_blocking=non_blocking
            )
            accelerator.synchronize(name)
            told = f"{what} of pinned memory in {short(dtype)} with non_blocking={non_blocking}"
            for how, found in (("to()", there), ("copy_()", into)):
                require(
                    equal(found, part(numbers).to(dtype)), f"{how} of {told} gives other numbers on {name}"
                )
            for how, found in (("from", whole), ("to", part(own))):
                require(
                    equal(found, part(numbers).to(dtype)),
                    f"copy_() {how} {what} of a tensor on {name} in {short(dtype)} with "
                    f"non_blocking={non_blocking}, between it and pinned memory, gives other numbers",
                )
            wanted = torch.full((6, 8), -1.0)
            part(wanted).copy_(part(numbers) * 2)
            require(equal(target, wanted), f"copy_() from {name} to {told} gives other numbers, or beside it")


@check(
    "pin_memory", "pin_empty", "synchronize",
    promise="Many copies in a row each keep their numbers, though their pinned memory is freed or changed to "
    "another dtype meanwhile.",
    once=True,
)  # fmt: skip
def copies_in_a_row(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    work = Work(accelerator, at_least_ms=5)
    makers: dict[str, Callable[[int], torch.Tensor]] = {
        "pin_memory()": lambda turn: accelerator.pin_memory(torch.full((_LENGTH,), float(turn))),
        "pin_empty()": lambda turn: accelerator.pin_empty(_LENGTH, dtype=torch.float32).fill_(turn),
        "ordinary memory": lambda turn: torch.full((_LENGTH,), float(turn)),
    }
    if accelerator.pin_memory(torch.ones(8)).is_pinned():
        makers["Tensor.pin_memory()"] = lambda turn: _pinned_by_torch(accelerator, float(turn))
    for (how, make), dtype in product(makers.items(), (torch.float32, torch.int32)):
        accelerator.synchronize()
        work.queue()
        found = [make(turn).to(device, dtype, non_blocking=True) for turn in range(_MANY)]
        accelerator.synchronize()
        for turn, tensor in enumerate(found):
            require(
                equal(tensor, torch.full((_LENGTH,), turn).to(dtype)),
                f"copy {turn + 1} of {_MANY} in a row from {how} to {short(dtype)}, whose source was "
                f"dropped, "
                f"is {tensor.flatten()[0].item()}",
            )


def _pinned_by_torch(accelerator: Accelerator, value: float) -> torch.Tensor:
    tensor = torch.full((_LENGTH,), value)
    try:
        return tensor.pin_memory()
    except (RuntimeError, NotImplementedError):  # torch pins for the machine's accelerator only
        return accelerator.pin_memory(tensor)


class _Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class _Nested(Dataset[dict[str, object]]):
    """Samples of a DataLoader of every structure that it pins."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, object]:
        values = torch.arange(3.0) + index
        return {
            "a": values,
            "list": [values.long(), values > 1],
            "pair": _Pair(values * 2, -values),
            "text": "t",
        }


@check(
    "pin_memory", "is_pinned",
    promise="torch's own ways to pin memory give pinned memory, a tensor that is pinned already stays "
    "itself, "
    "and memory outlives the thread that pinned it.",
    of="tensors",
)  # fmt: skip
def torch_pins(accelerator: Accelerator) -> None:
    known = torch.accelerator.current_accelerator()
    if known is None or known.type != accelerator.device_type or is_host(accelerator):
        raise NotOfferedError("torch does not take it for the machine's accelerator")
    _require_pins(accelerator)
    numbers = torch.arange(24.0).reshape(4, 6)
    pinned = numbers.pin_memory()
    made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "Tensor.pin_memory()": (pinned, numbers),
        "Tensor.pin_memory() of a transposed matrix": (numbers.t().pin_memory(), numbers.t()),
        "Tensor.pin_memory() of a part": (numbers[1:, 2:].pin_memory(), numbers[1:, 2:]),
        "torch.tensor(pin_memory=True)": (
            torch.tensor([1.0, 2.0], pin_memory=True),
            torch.tensor([1.0, 2.0]),
        ),
        "torch.zeros(pin_memory=True)": (torch.zeros(5, pin_memory=True), torch.zeros(5)),
        "torch.full(pin_memory=True)": (torch.full((5,), 3, pin_memory=True), torch.full((5,), 3)),
        "torch.arange(pin_memory=True)": (torch.arange(5, pin_memory=True), torch.arange(5)),
        "torch.ones_like(pin_memory=True)": (torch.ones_like(numbers, pin_memory=True), torch.ones(4, 6)),
        "new_ones(pin_memory=True)": (numbers.new_ones(3, pin_memory=True), torch.ones(3)),
        "Tensor.pin_memory() in a thread": (in_thread(numbers.pin_memory), numbers),
        "Tensor.to(device).cpu() of a pinned tensor": (
            pinned.to(accelerator.device_type).cpu().pin_memory(),
            numbers,
        ),
    }
    later = [torch.full((4, 6), -1.0).pin_memory() for _ in range(4)]
    for what, (tensor, wanted) in made.items():
        require(
            tensor.is_pinned() and accelerator.is_pinned(tensor), f"{what} gives memory that is not pinned"
        )
        require(
            equal(tensor, wanted) and tensor.dtype == wanted.dtype,
            f"{what} gives other numbers than {wanted.shape}",
        )
        require(
            equal(tensor.to(accelerator.device_type, non_blocking=True), wanted), f"{what} is copied wrong"
        )
    require(
        len(later) == 4 and all(equal(tensor, torch.full((4, 6), -1.0)) for tensor in later),
        "pinned memory changes",
    )
    for what, tensor in {"a pinned tensor": pinned, "a part of a pinned tensor": pinned[1:, 2:]}.items():
        again = tensor.pin_memory()
        require(shares_memory(again, pinned), f"Tensor.pin_memory() of {what} makes a copy")
    loader = DataLoader(_Nested(), batch_size=3, pin_memory=True)
    if torch.accelerator.is_available() and not getattr(iter(loader), "_pin_memory", True):
        return  # torch's DataLoader does not pin for some devices
    # Batches of workers are pinned by a thread, which is another one in each epoch.
    threaded = DataLoader(_Nested(), batch_size=3, pin_memory=True, num_workers=1, timeout=60)
    for batch in (*loader, *threaded, *threaded):
        parts = {
            "a dict": batch["a"], "a list": batch["list"][0], "truth values": batch["list"][1],
            "a named tuple": batch["pair"].second,
        }  # fmt: skip
        for what, part in parts.items():
            require(part.is_pinned(), f"{what} in a batch of a DataLoader with pin_memory=True is not pinned")
        require(batch["text"] == ["t"] * 3, "a DataLoader with pin_memory=True changes text in its batches")
