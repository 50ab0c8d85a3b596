"""Checks of pinned memory: it keeps values, is_pinned is right, and devices copy to and from it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import torch

from acclimate.accelerator import Accelerator
from acclimate.errors import InvalidDeviceError
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    Work,
    device_names,
    equal,
    exactly,
    in_thread,
    is_host,
    refused,
    require,
    short,
)
from acclimate_conformance.checks.check import check


@check(
    "pin_memory", "pin_empty", "pin_empty_like", "unpin_memory",
    promise="Pinning keeps values, dtype and shape, on the host; templates give tensors of the "
    "requested shape.",
)  # fmt: skip
def contents(accelerator: Accelerator) -> None:
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.bool):
        original = (torch.arange(24) % 5).to(dtype).reshape(4, 6)
        pinned = accelerator.pin_memory(original)
        require(pinned.device.type == "cpu", f"pin_memory() gives a tensor on {pinned.device}")
        require(pinned.dtype == dtype, f"pin_memory() of {short(dtype)} gives {short(pinned.dtype)}")
        require(equal(pinned, original), f"pin_memory() of {short(dtype)} changes its values")
        made = {
            "pin_memory(make_copy=False)": (accelerator.pin_memory(original, make_copy=False), (4, 6)),
            "pin_memory(match_shape=False)": (
                accelerator.pin_memory(original, False, match_shape=False),
                (24,),
            ),
            "pin_empty(4, 6)": (accelerator.pin_empty(4, 6, dtype=dtype), (4, 6)),
            "pin_empty([4, 6])": (accelerator.pin_empty([4, 6], dtype=dtype), (4, 6)),
            "pin_empty_like": (accelerator.pin_empty_like(original), (4, 6)),
        }
        for what, (tensor, shape) in made.items():
            require(tuple(tensor.shape) == shape, f"{what} has the shape {tuple(tensor.shape)}, not {shape}")
            require(tensor.dtype == dtype, f"{what} is {short(tensor.dtype)}, not {short(dtype)}")
            require(tensor.device.type == "cpu", f"{what} is on {tensor.device}")
        accelerator.unpin_memory(pinned)
        require(equal(pinned, original), "unpin_memory() changes values")
    other = accelerator.pin_empty_like(torch.zeros(3), dtype=torch.int32)
    require(other.dtype == torch.int32, f"pin_empty_like(dtype=int32) is {short(other.dtype)}")


@check(
    "is_pinned", "pin_memory", "pin_empty",
    promise="is_pinned distinguishes pinned from ordinary memory, and pin_memory returns pinned memory.",
)  # fmt: skip
def told_truly(accelerator: Accelerator) -> None:
    ordinary = torch.ones(1024)
    pinned = {
        "pin_memory()": accelerator.pin_memory(ordinary),
        "pin_empty()": accelerator.pin_empty(8, dtype=torch.int32),
        # A DataLoader pins its batches in a thread of its own.
        "pin_memory() in another thread": in_thread(lambda: accelerator.pin_memory(ordinary)),
    }
    name = accelerator.current_device_name()
    surroundings: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "inference_mode()": torch.inference_mode, "no_grad()": torch.no_grad,
        f"torch.device({name!r})": lambda: torch.device(name),
        "stream(s)": lambda: accelerator.stream(accelerator.Stream()),
    }  # fmt: skip
    for where, enter in surroundings.items():
        with enter():
            pinned[f"pin_memory() within {where}"] = accelerator.pin_memory(ordinary)
            pinned[f"pin_empty() within {where}"] = accelerator.pin_empty(8, dtype=torch.int32)
            pinned[f"pin_empty_like() within {where}"] = accelerator.pin_empty_like(ordinary)
    told = exactly(accelerator.is_pinned(ordinary), bool, "is_pinned()")
    require(not told, "is_pinned() is True for an ordinary tensor")
    for what, tensor in pinned.items():
        claimed, true = accelerator.is_pinned(tensor), tensor.is_pinned()
        require(claimed == true, f"is_pinned() is {claimed} for the result of {what}; torch says {true}")
    real = {what: tensor.is_pinned() for what, tensor in pinned.items()}
    for what, is_pinned in real.items():
        works = [other for other, also in real.items() if also and not is_pinned]
        require(not works, f"{what} pins nothing, as torch says, unlike {' and '.join(works)}")
    if not real["pin_memory()"]:
        raise NotOfferedError("it does not pin memory, and says so")
    for what, tensor in pinned.items():
        views = {
            "the end": tensor[-3:], "one element": tensor[5], "every second element": tensor[1::2],
            "a reshaped view": tensor.view(2, -1).t(), "a detached view": tensor.detach()[2:4],
        }  # fmt: skip
        for part, view in views.items():
            require(accelerator.is_pinned(view), f"is_pinned() is False for {part} of the result of {what}")


@check(
    "pin_memory", "pin_empty", "synchronize",
    promise="Non-blocking copies to and from pinned memory are complete after synchronize.",
    timeout_s=240,
)  # fmt: skip
def copies(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    work = Work(accelerator, at_least_ms=10)
    for seed in range(3):
        values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(seed))
        source = accelerator.pin_memory(values)
        target = accelerator.pin_empty(len(values), dtype=values.dtype).fill_(-1)
        work.queue()
        there = source.to(device, non_blocking=True)
        target.copy_(there * 2, non_blocking=True)
        accelerator.synchronize()
        require(equal(there, values), "a copy from pin_memory() gives wrong values")
        require(equal(target, values * 2), "after synchronize() a copy to pinned memory has wrong values")


@check(
    "pin_empty", "pin_empty_like",
    promise="pin_empty and pin_empty_like raise InvalidDeviceError for any device but the host.",
)  # fmt: skip
def only_on_the_host(accelerator: Accelerator) -> None:
    elsewhere: list[str | torch.device] = ["meta", torch.device("meta")]
    if not is_host(accelerator):
        for name in (accelerator.device_type, *device_names(accelerator)):
            elsewhere += [name, torch.device(name)]
    for device in elsewhere:
        with refused(f"pin_empty(device={device!r})", InvalidDeviceError):
            accelerator.pin_empty(4, dtype=torch.float32, device=device)
        with refused(f"pin_empty_like(device={device!r})", InvalidDeviceError):
            accelerator.pin_empty_like(torch.zeros(4), device=device)


@check(
    "pin_memory", "pin_empty",
    promise="A blocking copy to or from pinned memory is complete when it returns, whatever is queued "
    "before it.",
)  # fmt: skip
def blocking_copies_wait(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    work = Work(accelerator, at_least_ms=5)
    values = torch.arange(1 << 16, dtype=torch.float32)
    doubled = values * 2
    source = accelerator.pin_memory(values)  # which may be the tensor itself
    target = accelerator.pin_empty(len(values), dtype=values.dtype).fill_(-1)
    accelerator.synchronize()
    work.queue()
    there = source.to(device, copy=True)  # without it, to() on a host returns the source
    source.fill_(0)  # the copy is done with it
    target.copy_(there * 2)
    require(
        equal(target.clone(), doubled),
        "a blocking copy to or from pinned memory returns before it is done",
    )


@check(
    "register_host_memory", "unregister_host_memory", "pin_memory_alignment", "is_pinned",
    promise="register_host_memory pins memory that is already allocated; unregister_host_memory "
    "unpins it.",
)  # fmt: skip
def registration(accelerator: Accelerator) -> None:
    alignment = exactly(accelerator.pin_memory_alignment(), int, "pin_memory_alignment()")
    require(
        alignment >= 1 and alignment & (alignment - 1) == 0,
        f"the alignment is {alignment}, not a power of two",
    )
    page = max(alignment, mmap.PAGESIZE)
    length = 16 * page
    whole = mmap.mmap(-1, 2 * length + 4 * page)

    def part_of(first: int, count: int) -> torch.Tensor:
        """A tensor with a storage of its own, since torch asks whether the start of a storage is pinned."""
        return torch.frombuffer(whole, dtype=torch.uint8, count=count, offset=start + first)

    start = 0
    start = -part_of(0, 1).data_ptr() % page + page
    memory, after = part_of(0, length), part_of(length, length)
    ordinary = part_of(-page, page)
    taken = accelerator.register_host_memory(memory.data_ptr(), length)
    if not exactly(taken, bool, "register_host_memory()"):
        accelerator.unregister_host_memory(memory.data_ptr())
        require(not accelerator.is_pinned(memory), "it returns False, but the memory is pinned")
        raise NotOfferedError("it cannot pin memory that is already allocated")
    device = accelerator.current_device_name()
    parts = {
        "its start": part_of(0, 16), "its second page": part_of(page, page),
        "its middle": part_of(length // 2, length // 2), "its last byte": part_of(length - 1, 1),
        "every third byte": part_of(1, length - 1)[::3],
    }  # fmt: skip
    registered = [memory]
    try:
        for what, part in parts.items():
            require(accelerator.is_pinned(part), f"register_host_memory() does not pin {what}")
            value = 3 + len(what)
            part.copy_(torch.full((len(part),), value, dtype=torch.uint8, device=device))
            accelerator.synchronize()
            require(
                equal(part, torch.full((len(part),), value, dtype=torch.uint8)),
                f"a copy to registered memory, {what}, is wrong",
            )
        for what, part in {"before": ordinary, "after": part_of(length + page, page)}.items():
            require(not accelerator.is_pinned(part), f"register_host_memory() pins what is {what} the region")
        if accelerator.register_host_memory(after.data_ptr(), length):
            registered.append(after)
            accelerator.unregister_host_memory(registered.pop(0).data_ptr())
            require(accelerator.is_pinned(after), "unregister_host_memory() unpins another region")
    finally:
        for tensor in registered:
            accelerator.unregister_host_memory(tensor.data_ptr())
    if accelerator.register_host_memory(memory.data_ptr(), length):
        with suppress(RuntimeError):  # a driver refuses an address at which nothing was registered
            accelerator.unregister_host_memory(memory.data_ptr() + page)
        require(
            accelerator.is_pinned(memory), "unregister_host_memory() of an address within a region unpins it"
        )
        with suppress(RuntimeError):
            accelerator.register_host_memory(memory.data_ptr(), length)
        accelerator.unregister_host_memory(memory.data_ptr())
    for what, part in {**parts, "a second region": after}.items():
        require(not accelerator.is_pinned(part), f"unregister_host_memory() leaves {what} pinned")
    _require_any_length_registered(accelerator, part_of, alignment)
    with suppress(RuntimeError):  # a driver refuses memory that is not registered
        accelerator.unregister_host_memory(memory.data_ptr())
    try:
        torch.ones(3, device=device).mul(2).cpu()
    except RuntimeError as error:
        # CUDA's runtime keeps an error for the next caller that asks, unless it is cleared.
        require(False, f"after a refused unregister_host_memory() an operator raises {describe(error)}")


def _require_any_length_registered(
    accelerator: Accelerator, part_of: Callable[[int, int], torch.Tensor], alignment: int
) -> None:
    """Memory is registered from its first byte to its last, though it is no whole number of pages."""
    device = accelerator.current_device_name()
    page = mmap.PAGESIZE
    for first, length in ((0, 1), (0, 100), (0, page + 1), (64, page), (0, 3 * page + 907), (1, 5000)):
        start, count = (-(-number // alignment) * alignment for number in (first, length))
        memory = part_of(start, count)
        if not accelerator.register_host_memory(memory.data_ptr(), count):
            continue
        told = f"of {count} bytes, {start} after the start of a page,"
        try:
            for place in sorted({0, count // 2, count - 1}):
                pinned = accelerator.is_pinned(part_of(start + place, 1))
                require(pinned, f"register_host_memory() {told} does not pin the byte at {place}")
            memory.copy_(torch.full((count,), 9, dtype=torch.uint8, device=device), non_blocking=True)
            accelerator.synchronize()
            same = equal(memory, torch.full((count,), 9, dtype=torch.uint8))
            require(same, f"a copy to memory of register_host_memory() {told} is wrong")
        finally:
            accelerator.unregister_host_memory(memory.data_ptr())
        left = accelerator.is_pinned(part_of(start, 1)) or accelerator.is_pinned(
            part_of(start + count - 1, 1)
        )
        require(not left, f"unregister_host_memory() of memory {told} leaves it pinned")


@check(
    "on_accelerator",
    promise="on_accelerator is True for tensors on any of the devices, of any kind, and for no others.",
)
def on_accelerator(accelerator: Accelerator) -> None:
    places = dict.fromkeys((accelerator.device_type, accelerator.current_device_name()), True)
    places["meta"] = False
    places["cpu"] = torch.zeros(1).device.type == accelerator.device_type
    for place, expected in places.items():
        told = exactly(accelerator.on_accelerator(torch.zeros(1, device=place)), bool, "on_accelerator()")
        require(told == expected, f"on_accelerator() of a tensor on {place} is {told}")
    for place in {"cpu": None, **dict.fromkeys(device_names(accelerator))}:
        expected = torch.device(place).type == accelerator.device_type
        for kind, make in _KINDS.items():
            try:
                tensor = make(torch.ones(2, 3, device=place))
            except (RuntimeError, TypeError):  # a device may lack it
                continue
            told = exactly(accelerator.on_accelerator(tensor), bool, f"on_accelerator() of {kind}")
            require(told == expected, f"on_accelerator() of {kind} on {place} is {told}")


class _Marked(torch.Tensor):
    """A class of tensors of a program."""


def _of_inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x + 1


def _replaced(x: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(x)
    parameter.data = x[:1]
    return parameter


_KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a parameter": torch.nn.Parameter,
    "a buffer": torch.nn.Buffer,
    "a result with a history": lambda x: x.requires_grad_() * 2,
    "a view": lambda x: x[1:].t(),
    "an expanded tensor": lambda x: x[:1].expand(5, 3),
    "a tensor without elements": lambda x: x[:0],
    "a single number": lambda x: x[0, 0],
    "integers": lambda x: x.to(torch.int32),
    "truth values": lambda x: x > 0,
    "a sparse tensor": lambda x: x.to_sparse(),
    "a tensor of a class": lambda x: x.as_subclass(_Marked),
    "a parameter whose data was replaced": _replaced,
    "a tensor of inference_mode()": _of_inference,
}
"""Tensors that are made of another one, on its device."""
