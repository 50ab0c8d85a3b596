"""Checks of pinned memory of any shape: strided, empty and large tensors, and templates."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    device_names,
    equal,
    exactly,
    is_host,
    require,
    short,
)
from acclimate_conformance.checks.check import check

_SHAPED: dict[str, Callable[[], torch.Tensor]] = {
    "an empty tensor": lambda: torch.empty(0),
    "an empty matrix": lambda: torch.empty(0, 5, dtype=torch.int64),
    "a single number": lambda: torch.tensor(7.5),
    "a transposed matrix": lambda: torch.arange(30.0).view(5, 6).t(),
    "every second column": lambda: torch.arange(60).view(5, 12)[:, ::2],
    "a row of a matrix": lambda: torch.arange(60.0).view(5, 12)[3],
    "a column of a matrix": lambda: torch.arange(60.0).view(5, 12)[:, 4],
    "a batch of images with channels last": lambda: (
        torch.arange(96.0).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    ),
    "a tensor with a gradient": lambda: torch.arange(8.0).requires_grad_(),
    "a parameter": lambda: torch.nn.Parameter(torch.arange(8.0)),
    "complex numbers": lambda: torch.complex(torch.arange(5.0), torch.ones(5)),
    "the end of bytes": lambda: torch.arange(40, dtype=torch.uint8)[5:],
    "the end of truth values": lambda: (torch.arange(40) % 3 > 0)[7:],
    "the end of numbers": lambda: torch.arange(40.0)[5:],
    "rows from the second": lambda: torch.arange(40, dtype=torch.int8).view(5, 8)[1:],
    "three megabytes": lambda: torch.arange(3 << 18, dtype=torch.int32),
}

_MANY = 100
_SIZES, _FREED = (64, 9000, 1 << 18), 8
"""Bytes of tensors that are pinned and freed, and how many at a time."""


def _locks(accelerator: Accelerator) -> bool:
    """Whether the accelerator pins memory at all, according to torch."""
    return bool(accelerator.pin_empty(64, dtype=torch.float32).is_pinned())


def _require_pinned(accelerator: Accelerator, tensor: torch.Tensor, locks: bool, how: str) -> None:
    """A result is pinned if other memory is; if torch says that too, it is not is_pinned() that is wrong."""
    told, true = accelerator.is_pinned(tensor), bool(tensor.is_pinned())
    require(told == true, f"is_pinned() is {told} for {how}; torch says {true}")
    require(
        true == locks,
        f"{how} is{'' if true else ' not'} pinned, and other memory is{'' if locks else ' not'}",
    )


@check(
    "pin_memory", "is_pinned", "unpin_memory",
    promise="pin_memory pins strided, empty, large and scalar tensors alike, and keeps values and shape.",
)  # fmt: skip
def any_tensor_is_pinned(accelerator: Accelerator) -> None:
    locks = _locks(accelerator)
    for what, make in _SHAPED.items():
        original = make()
        kept = original.detach().clone()
        pinned = accelerator.pin_memory(original)
        require(isinstance(pinned, torch.Tensor), f"pin_memory() of {what} gives a {type(pinned).__name__}")
        require(pinned.shape == kept.shape, f"pin_memory() of {what} gives the shape {tuple(pinned.shape)}")
        require(pinned.dtype == kept.dtype, f"pin_memory() of {what} gives {short(pinned.dtype)}")
        require(equal(pinned, kept), f"pin_memory() of {what} changes its values")
        require(equal(original, kept), f"pin_memory() of {what} changes the values of the original")
        exactly(accelerator.is_pinned(pinned), bool, "is_pinned()")
        if pinned.numel():
            _require_pinned(accelerator, pinned, locks, f"pin_memory() of {what}")
            again = accelerator.pin_memory(pinned)
            require(equal(again, kept), f"pin_memory() of {what}, twice, changes its values")
            _require_pinned(accelerator, again, locks, f"the second pin_memory() of {what}")
        accelerator.unpin_memory(pinned.view(-1)[:1] if pinned.is_contiguous() and pinned.numel() else pinned)
        accelerator.unpin_memory(pinned)
        require(equal(pinned, kept), f"unpin_memory() changes the values of {what}")
        if pinned.numel():  # it is unlocked when it is freed
            still = accelerator.is_pinned(pinned)
            require(still == locks, f"is_pinned() of {what} is {still} after unpin_memory(), and it is held")


@check(
    "pin_memory", "pin_empty", "pin_empty_like",
    promise="Without a copy the result is new memory of the requested shape, pinned like other memory.",
)  # fmt: skip
def templates(accelerator: Accelerator) -> None:
    locks = _locks(accelerator)
    for what, make in _SHAPED.items():
        template = make().detach()
        kept = template.clone()
        made = {
            "pin_memory(make_copy=False)": (
                accelerator.pin_memory(template, make_copy=False),
                template.shape,
            ),
            "pin_memory(match_shape=False)": (
                accelerator.pin_memory(template, make_copy=False, match_shape=False),
                (template.numel(),),
            ),
            "pin_empty_like": (accelerator.pin_empty_like(template), template.shape),
            "pin_empty_like of a tensor of the device": (
                accelerator.pin_empty_like(template.to(accelerator.current_device_name())),
                template.shape,
            ),
            "pin_empty(size)": (accelerator.pin_empty(template.shape, dtype=template.dtype), template.shape),
            "pin_empty(tuple)": (
                accelerator.pin_empty(tuple(template.shape), dtype=template.dtype),
                template.shape,
            ),
        }
        if template.dim():
            made["pin_empty(lengths)"] = (
                accelerator.pin_empty(*template.shape, dtype=template.dtype),
                template.shape,
            )
        for how, (tensor, shape) in made.items():
            require(
                tuple(tensor.shape) == tuple(shape), f"{how} of {what} has the shape {tuple(tensor.shape)}"
            )
            require(tensor.dtype == template.dtype, f"{how} of {what} is {short(tensor.dtype)}")
            require(tensor.device.type == "cpu", f"{how} of {what} is on {tensor.device}")
            if tensor.numel():
                _require_pinned(accelerator, tensor, locks, f"{how} of {what}")
            tensor.fill_(3)
            require(equal(tensor, torch.full_like(tensor, 3)), f"{how} of {what} cannot be written")
            require(equal(template, kept), f"writing to the result of {how} of {what} changes the template")
    for host in ("cpu", torch.device("cpu")):
        for tensor in (
            accelerator.pin_empty(4, dtype=torch.float32, device=host),
            accelerator.pin_empty_like(torch.ones(4), host),
            accelerator.pin_empty_like(torch.ones(4, device=accelerator.current_device_name()), host),
        ):
            require(tensor.device.type == "cpu", f"pinned memory asked for on {host!r} is on {tensor.device}")
            require(accelerator.is_pinned(tensor) == locks, f"memory asked for on {host!r} is not pinned")


@check(
    "pin_memory", "synchronize",
    promise="Copies between pinned memory and every device are right for strided, empty and large tensors.",
    timeout_s=240,
)  # fmt: skip
def copies_of_any_shape(accelerator: Accelerator) -> None:
    for index, name in enumerate(device_names(accelerator)):
        for what, make in _SHAPED.items():
            values = make().detach()
            source = accelerator.pin_memory(values)
            with accelerator.device(index):
                there = source.to(name, non_blocking=True)
                back = accelerator.pin_empty_like(values)
                back.copy_(there, non_blocking=True)
                accelerator.synchronize()
            require(equal(back, values), f"{what} changes between pinned memory and {name}")


@check(
    "is_pinned", "on_accelerator",
    promise="on_accelerator and is_pinned distinguish device, pinned and ordinary memory.",
)  # fmt: skip
def places_are_told(accelerator: Accelerator) -> None:
    on_host = is_host(accelerator)
    for name in device_names(accelerator):
        base = torch.ones(6, 4, device=name)
        kinds = {
            "a tensor": base, "a view": base[1:, ::2], "a parameter": torch.nn.Parameter(base),
            "an empty tensor": base[:0], "integers": base.long(),
            "a result": (base.requires_grad_() * 2).sum(),
        }  # fmt: skip
        for what, tensor in kinds.items():
            told = exactly(accelerator.on_accelerator(tensor), bool, "on_accelerator()")
            require(told, f"on_accelerator() is False for {what} on {name}")
            if not on_host:
                told = exactly(accelerator.is_pinned(tensor.detach()), bool, "is_pinned()")
                require(not told, f"is_pinned() is True for {what} on {name}")
    pinned = accelerator.pin_memory(torch.ones(16))
    for what, tensor in {"pinned memory": pinned, "ordinary memory": torch.ones(16)}.items():
        told = accelerator.on_accelerator(tensor)
        require(told == on_host, f"on_accelerator() of {what} is {told}")
    for ordinary in (torch.ones(16), torch.ones(4, 4).t(), torch.empty(0)):
        require(not accelerator.is_pinned(ordinary), "is_pinned() is True for an ordinary tensor")


@check(
    "pin_memory", "pin_empty", "pin_empty_like", "is_pinned", "synchronize",
    promise="Memory of any length is pinned and copied as a whole, with any argument that is allowed.",
)  # fmt: skip
def any_length_is_pinned(accelerator: Accelerator) -> None:
    locks = _locks(accelerator)
    device = accelerator.current_device_name()
    for length in (1, 3, 5, 7, 1003, 4095, 4097, 65_537):
        values = torch.arange(length, dtype=torch.int32)
        made = {
            "pin_memory(t)": accelerator.pin_memory(values),
            "pin_memory(t, True, match_shape=False)": accelerator.pin_memory(values, True, match_shape=False),
            # A number is an alignment, as older releases of DeepSpeed pass it.
            "pin_memory(t, 0)": accelerator.pin_memory(values, 0),
            "pin_memory(t, 1)": accelerator.pin_memory(values, 1),
            "pin_memory(t, 4096)": accelerator.pin_memory(values, 4096),
            "pin_memory(t, align_bytes=0)": accelerator.pin_memory(values, align_bytes=0),
            "pin_empty(n)": accelerator.pin_empty(length, dtype=torch.int32).copy_(values),
            "pin_empty_like(t, dtype=…)": accelerator.pin_empty_like(values.float(), dtype=torch.int32).copy_(
                values
            ),
        }
        for how, tensor in made.items():
            require(equal(tensor, values), f"{how} of {length} elements has other values")
            for part in (tensor[-1:], tensor[length // 2 :]):
                _require_pinned(accelerator, part, locks, f"the end of {how} of {length} elements")
            there = tensor.to(device, non_blocking=True)
            back = accelerator.pin_empty(length + 2, dtype=torch.int32).fill_(-1)
            back[1:-1].copy_(there, non_blocking=True)
            accelerator.synchronize()
            wanted = torch.nn.functional.pad(values, (1, 1), value=-1)
            require(
                equal(back, wanted), f"{how} of {length} elements changes on the way to {device} and back"
            )


@check(
    "pin_memory", "pin_empty", "is_pinned", "synchronize",
    promise="Each of many tensors in a row is pinned, and copied as it is; ordinary memory in their place is "
    "not pinned.",
    once=True,
)  # fmt: skip
def memory_is_pinned_each_time(accelerator: Accelerator) -> None:
    locks = _locks(accelerator)
    device = accelerator.current_device_name()
    for turn in range(_MANY):
        values = torch.arange(turn, turn + 33.0)
        pinned, empty = accelerator.pin_memory(values), accelerator.pin_empty(33, dtype=torch.float32)
        for how, tensor in (("pin_memory", pinned), ("pin_empty", empty)):
            told = accelerator.is_pinned(tensor)
            require(told == locks, f"is_pinned() is {told} for the result of call {turn + 1} of {how}()")
        require(equal(pinned, values), f"call {turn + 1} of pin_memory() changes values")
        there = pinned.to(device, non_blocking=True)
        empty.fill_(-1).copy_(there + 1, non_blocking=True)
        accelerator.synchronize()
        require(equal(empty, values + 1), f"copy {turn + 1} to and from pinned memory is wrong")
    del pinned, empty, tensor
    _require_freed(accelerator)


def _require_freed(accelerator: Accelerator) -> None:
    """Fails if memory counts as pinned that lies where pinned memory was freed."""
    for size in _SIZES:
        ways: dict[str, Callable[[int], torch.Tensor]] = {
            "pin_memory": lambda n: accelerator.pin_memory(torch.empty(n, dtype=torch.uint8)),
            "pin_empty": lambda n: accelerator.pin_empty(n, dtype=torch.uint8),
        }
        for how, pin in ways.items():
            freed = [pin(size) for _ in range(_FREED)]
            del freed
            # The host's allocator gives freed memory to the next that ask for as much.
            ordinary = [torch.empty(size, dtype=torch.uint8) for _ in range(5 * _FREED)]
            count = sum(map(accelerator.is_pinned, ordinary))
            require(
                not count,
                f"is_pinned() is True for {count} of {len(ordinary)} ordinary tensors, made after "
                f"{_FREED} of {how}() were freed",
            )


@check(
    "pin_memory", "is_pinned", "current_device",
    promise="A DataLoader with pin_memory=True pins its batches, where torch pins for the device.",
    of="tensors",
)  # fmt: skip
def loaded_batches_are_pinned(accelerator: Accelerator) -> None:
    known = torch.accelerator.current_accelerator()
    if known is None or known.type != accelerator.device_type:
        raise NotOfferedError("torch does not take it for the machine's accelerator")
    if not accelerator.pin_memory(torch.ones(8)).is_pinned():
        raise NotOfferedError("it does not pin memory, and says so")
    values = torch.arange(30.0).reshape(10, 3)
    before = accelerator.current_device()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        batches = list(DataLoader(TensorDataset(values, values.long()), batch_size=4, pin_memory=True))
    if any("pin_memory" in str(warning.message) for warning in told):
        raise NotOfferedError("torch's DataLoader says that it pins nothing for this device")
    for number, batch in enumerate(batches):
        for tensor, wanted in zip(batch, (values, values.long()), strict=True):
            part = wanted[4 * number : 4 * number + 4]
            require(equal(tensor, part), "a DataLoader with pin_memory=True changes its batches")
            require(
                accelerator.is_pinned(tensor), "a batch of a DataLoader with pin_memory=True is not pinned"
            )
    _require_all_kinds_pinned(accelerator)
    require(accelerator.current_device() == before, "a DataLoader with pin_memory=True changes the device")


class _Batch:
    """A batch of a program's own kind, which says how it is pinned."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def pin_memory(self) -> _Batch:
        return _Batch(self.numbers.pin_memory())


class _Pair(NamedTuple):
    first: torch.Tensor
    second: dict[str, torch.Tensor]


def _require_all_kinds_pinned(accelerator: Accelerator) -> None:
    """Batches of each kind that torch pins, in each layout and dtype, while each device is current."""
    ramp = torch.arange(12.0).reshape(3, 4)
    numbers = {
        "numbers": ramp, "transposed numbers": ramp.t(), "a part": ramp[1:, ::2], "halves": ramp.bfloat16(),
        "integers": ramp.to(torch.int64), "truth values": ramp > 5, "no numbers": ramp[:0],
        "one number": ramp[1, 1], "complex numbers": torch.complex(ramp, -ramp),
        "bytes": ramp.to(torch.uint8),
    }  # fmt: skip
    batches: list[Any] = [
        numbers, list(numbers.values()), tuple(numbers.values()), _Pair(ramp, numbers), [ramp, [numbers]],
        _Batch(ramp), {"text": "a", "number": 3, "nothing": None, "deep": {"er": (ramp,)}},
    ]  # fmt: skip

    def given(batch: Any) -> list[Any]:
        if isinstance(batch, _Batch):
            return [batch.numbers]
        values = list(batch.values()) if isinstance(batch, dict) else batch
        return [x for v in values for x in (given(v) if isinstance(v, (list, tuple, dict)) else [v])]

    for index in {0, accelerator.device_count() - 1}:
        with accelerator.device(index):
            loaded = list(DataLoader(batches, batch_size=None, collate_fn=lambda b: b, pin_memory=True))  # type: ignore[arg-type]
            now = accelerator.current_device()
        require(now == index, f"a DataLoader with pin_memory=True makes {now} the current device")
        for found, wanted in zip(loaded, batches, strict=True):
            kind = type(wanted).__name__
            require(
                type(found) is type(wanted),
                f"a DataLoader with pin_memory=True makes a {type(found).__name__} of a {kind}",
            )
            for ours, theirs in zip(given(found), given(wanted), strict=True):
                told = (
                    f"{short(theirs.dtype)} of shape {tuple(theirs.shape)}" if torch.is_tensor(theirs) else ""
                )
                same = equal(ours, theirs) if told else ours == theirs
                require(same, f"a DataLoader with pin_memory=True changes {told or theirs} in a {kind}")
                require(
                    not told or not theirs.numel() or accelerator.is_pinned(ours),
                    f"a DataLoader with pin_memory=True does not pin {told} in a {kind}",
                )
