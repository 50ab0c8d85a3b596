"""Checks of copies: between any two places, with any dtype, layout and option, and what a copy shares."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    device_names,
    equal,
    is_host,
    require,
    shares_memory,
    short,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.exactness import same_bits

_View = Callable[[torch.Tensor], torch.Tensor]
_VIEWS: dict[str, _View] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "every second row": lambda x: x[::2],
    "a block": lambda x: x[1:4, 2:5],
    "every third element": lambda x: x[..., ::3],
    "every second row and third element": lambda x: x[:, ::2, ::3],
    "one column": lambda x: x[:, 3],
    "permuted": lambda x: x.permute(2, 0, 1),
    "a number": lambda x: x[2, 3, 4],
    "nothing": lambda x: x[3:3],
}
_PAIRS = list(product(_VIEWS.items(), _VIEWS.items()))
_CONVERTED = [(own, own) for own in _VIEWS.items()] + [
    ((f"{name}, made contiguous,", lambda x, view=view: view(x).contiguous()), (name, view))
    for name, view in _VIEWS.items()
]
"""What is copied into what by a copy between dtypes: fewer pairs, as there are many dtypes."""
_LENGTHS = (1, 2, 3, 5, 7, 15, 17, 31, 33, 63, 65, 127, 129, 1003, 65_537)


_LARGE = 2**20 + 1003
"""More elements than a megabyte holds, and no multiple of a page."""


def _numbers(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(6 * 5 * 7).reshape(6, 5, 7) % 97
    return (values % 2 == 0) if dtype is torch.bool else values.to(dtype)


@check(
    "synchronize",
    "device_name",
    "current_device_name",
    promise="copy_() and to() between any places give the source's numbers in the target's layout and dtype, "
    "and change nothing beside it.",
    once=True,
    of="tensors",
)
def copies_of_every_kind(accelerator: Accelerator) -> None:
    places = ["cpu", *device_names(accelerator)[:2]]
    kinds = (torch.float32, torch.int64, torch.uint8, torch.bool, *accelerator.supported_dtypes()[1:3])
    for source, target in product(places, places):
        for from_dtype, to_dtype in product(kinds, kinds):
            for (what, take), (onto, put) in _PAIRS if from_dtype == to_dtype else _CONVERTED:
                given = take(_numbers(from_dtype))
                wanted = torch.full((6, 5, 7), 1, dtype=to_dtype)
                part = put(wanted)
                if part.shape != given.shape:
                    continue
                part.copy_(given)
                there = torch.full((6, 5, 7), 1, dtype=to_dtype).to(target)
                returned = put(there).copy_(take(_numbers(from_dtype).to(source)), non_blocking=what == onto)
                accelerator.synchronize()
                require(
                    equal(there, wanted),
                    f"copy_() of {short(from_dtype)} {what} on {source} to {short(to_dtype)} {onto} on "
                    f"{target} is wrong",
                )
                require(returned.device == there.device, f"copy_() returns a tensor on {returned.device}")
    for source, target in product(places, places):
        for dtype in kinds:
            for length in _LENGTHS:
                values = (torch.arange(length + 4) % 2).bool() if dtype is torch.bool else (
                    torch.arange(length + 4) % 101
                ).to(dtype)  # fmt: skip
                for skip in (0, 1, 3):
                    there = torch.ones(length + 4, dtype=dtype).to(target)
                    there[skip : skip + length].copy_(values.to(source)[skip : skip + length])
                    wanted = torch.ones(length + 4, dtype=dtype)
                    wanted[skip : skip + length] = values[skip : skip + length]
                    require(
                        same_bits(there, wanted),
                        f"copy_() of {length} {short(dtype)} from element {skip} on, from {source} to "
                        f"{target}, is wrong",
                    )
            large = (torch.arange(_LARGE) % 127 % (2 if dtype is torch.bool else 127)).to(dtype)
            for how, there in (
                ("to()", large.to(source).to(target)),
                ("copy_()", torch.empty_like(large, device=target).copy_(large.to(source))),
            ):
                require(
                    same_bits(there, large),
                    f"{how} of {_LARGE} {short(dtype)} from {source} to {target} is wrong",
                )
    device = accelerator.current_device_name()
    rows = torch.zeros(5, 7, device=device)
    ways: dict[str, tuple[_View, torch.Tensor]] = {
        "a row": (lambda x: x, torch.arange(7.0)),
        "a column": (lambda x: x, torch.arange(5.0)[:, None]),
        "a number": (lambda x: x, torch.tensor(4.0)),
        "an integer": (lambda x: x, torch.tensor([3])),
        "a row to every second row": (lambda x: x[::2], torch.arange(7.0)),
        "a row to a transposed matrix": (lambda x: x.t(), torch.arange(5.0)),
        "an expanded row": (lambda x: x, torch.arange(7.0).expand(5, 7)),
        "an expanded column to a transposed matrix": (
            lambda x: x.t(),
            torch.arange(7.0)[:, None].expand(7, 5),
        ),
        "an expanded row to a transposed matrix": (lambda x: x.t(), torch.arange(5.0).expand(7, 5)),
        "windows that overlap": (lambda x: x, torch.arange(11.0).unfold(0, 7, 1)),
        "a row in another dtype": (lambda x: x, torch.arange(7).expand(5, 7)),
    }
    for what, (view, given) in ways.items():
        for place in places:
            found, wanted = rows.clone(), torch.zeros(5, 7)
            # Moved as it lies: what is expanded stays so.
            there = given.as_strided((given.untyped_storage().nbytes() // given.itemsize,), (1,)).to(place)
            view(found).copy_(there.as_strided(given.shape, given.stride()))
            view(wanted).copy_(given)
            require(equal(found, wanted), f"copy_() of {what} on {place} gives {found.tolist()}")
    itself = torch.arange(20.0, device=device)
    itself[5:15].copy_(itself[:10].clone())
    require(equal(itself[5:15], torch.arange(10.0)), "a copy within one tensor is wrong")


@check(
    "device_name",
    "current_device_name",
    promise="to() returns the same tensor if nothing changes, else a copy with torch's layout and gradients.",
    of="tensors",
)
def copies_share_or_not(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    images = _numbers(torch.float32)[None].to(memory_format=torch.channels_last)
    there = images.to(device)
    same: dict[str, Callable[[], torch.Tensor]] = {
        "to(the same device)": lambda: there.to(device),
        "to(the same dtype)": lambda: there.to(torch.float32),
        "float()": there.float,
        "to(a tensor like it)": lambda: there.to(there),
        "contiguous() of a contiguous tensor": lambda: there.contiguous(memory_format=torch.channels_last),
        "type_as": lambda: there.type_as(there),
    }
    for what, convert in same.items():
        found = convert()
        require(found is there or found.data_ptr() == there.data_ptr(), f"{what} makes a copy")
    copies: dict[str, Callable[[], torch.Tensor]] = {
        "to(copy=True)": lambda: there.to(device, copy=True),
        "clone()": there.clone,
        "torch.tensor": lambda: there.detach().clone(),
        "to(float64 or int64)": lambda: there.to(torch.int64),
        "contiguous()": there.contiguous,
        "torch.empty_like and copy_": lambda: torch.empty_like(there).copy_(there),
    }
    for what, convert in copies.items():
        found = convert()
        require(not shares_memory(found, there), f"{what} shares memory with its source")
        before = there.cpu()
        found.zero_()
        require(equal(there, before), f"changing the result of {what} changes its source")
    for count in (1000, 2**18 + 3, _LARGE):
        wanted = torch.arange(count, dtype=torch.int32)
        source = wanted.to(device, copy=True)
        taken_in = {'to("cpu", copy=True)': source.to("cpu", copy=True), "clone()": source.clone()}
        if not is_host(accelerator):
            taken_in["cpu()"] = source.cpu()
        source.fill_(-1)
        for what, taken in taken_in.items():
            require(equal(taken, wanted), f"changing {count} numbers changes what {what} gave before")
    for what, (ours, theirs) in {
        "to(device)": (there, images), "clone()": (there.clone(), images.clone()),
        "to(device) of a transposed matrix": (torch.ones(5, 7).t().to(device), torch.ones(5, 7).t()),
        "contiguous()": (there.contiguous(), images.contiguous()),
        "empty_like": (torch.empty_like(there), images), "zeros_like": (torch.zeros_like(there), images),
        "to(memory_format=contiguous_format)": (
            there.to(memory_format=torch.contiguous_format), images.to(memory_format=torch.contiguous_format)
        ),
        "to(torch.int32)": (there.to(torch.int32), images.to(torch.int32)),
        "to(device, memory_format=channels_last)": (
            images.contiguous().to(device, memory_format=torch.channels_last), images
        ),
        "to(device, dtype, memory_format=channels_last)": (
            images.contiguous().to(device, torch.float16, memory_format=torch.channels_last), images
        ),
        "to(device, dtype, memory_format=contiguous_format)": (
            images.to(device, torch.float16, memory_format=torch.contiguous_format), images.contiguous()
        ),
        "to(the host, dtype, memory_format=channels_last)": (
            there.contiguous().to("cpu", torch.float16, memory_format=torch.channels_last), images
        ),
        "to(dtype, memory_format=channels_last)": (
            there.contiguous().to(torch.float16, memory_format=torch.channels_last), images
        ),
        "cpu()": (there.cpu(), images), "an operator": (there * 2, images * 2),
        "clone(memory_format=contiguous_format)": (
            there.clone(memory_format=torch.contiguous_format), images.contiguous()
        ),
    }.items():  # fmt: skip
        require(
            ours.stride() == theirs.stride(), f"{what} has the strides {ours.stride()}, not {theirs.stride()}"
        )
    if is_host(accelerator):
        return
    for what, values, moved in (
        ("a copy to the device", torch.ones(4, requires_grad=True), lambda t: t.to(device)),
        ("a copy to the host", torch.ones(4, device=device, requires_grad=True), lambda t: t.cpu()),
        (
            "a copy in another dtype",
            torch.ones(4, device=device, requires_grad=True),
            lambda t: t.half().float(),
        ),
        ("copy_()", torch.ones(4, requires_grad=True), lambda t: torch.zeros(4, device=device).copy_(t)),
    ):
        result = moved(values)
        require(result.requires_grad, f"{what} requires no gradient")
        (result * torch.arange(4.0, device=result.device)).sum().backward()
        gradient = values.grad
        require(gradient is not None and gradient.device == values.device, f"{what} brings no gradient back")
        require(
            gradient is not None and equal(gradient, torch.arange(4.0)),
            f"{what} brings a wrong gradient back",
        )
