"""Checks of places in tensors of more elements than 31 bits count, and of more bytes than 32 bits count.

Only a few elements are written and read, so that this takes memory and hardly any time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import NotOfferedError, all_told
from acclimate_conformance.checks.check import check

_GIB = 1 << 30
_ROW = 32
_Read = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_READS: dict[str, _Read] = {
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "take": lambda x, i: x.take(i),
    "gather": lambda x, i: x.gather(0, i),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x.view(-1, 1).to(x.dtype))[:, 0],
    "rows of a matrix": lambda x, i: x.view(-1, _ROW)[i // _ROW, i % _ROW],
    "as_strided": lambda x, i: torch.cat([x.as_strided((1,), (1,), int(n)) for n in i.tolist()]),
    "slices": lambda x, i: torch.cat([x[n : n + 1] for n in i.tolist()]),
    "narrow": lambda x, i: torch.cat([x.narrow(0, n, 1) for n in i.tolist()]),
    "item": lambda x, i: x.new_tensor([x[n].item() for n in i.tolist()]),
    "a copy to the host": lambda x, i: torch.cat([x[n : n + 1].cpu() for n in i.tolist()]),
    "another storage": lambda x, i: torch.cat([
        torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), n, (1,), (1,))
        for n in i.tolist()
    ]),
}  # fmt: skip


def _pairs(places: torch.Tensor, values: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return list(zip(places.tolist(), values, strict=True))


def _assign(x: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    for place, value in _pairs(places, values):
        x[place] = value


_WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "index_put_": lambda x, i, v: x.index_put_((i,), v),
    "index_put_(accumulate=True)": lambda x, i, v: x.index_fill_(0, i, 0).index_put_(
        (i,), v, accumulate=True
    ),
    "index_copy_": lambda x, i, v: x.index_copy_(0, i, v),
    "index_add_": lambda x, i, v: x.index_fill_(0, i, 0).index_add_(0, i, v),
    "scatter_": lambda x, i, v: x.scatter_(0, i, v),
    "scatter_add_": lambda x, i, v: x.index_fill_(0, i, 0).scatter_add_(0, i, v),
    "put_": lambda x, i, v: x.put_(i, v),
    "copy_ from the host": lambda x, i, v: [x[n : n + 1].copy_(w.cpu()) for n, w in _pairs(i, v)],
    "a slice in place": lambda x, i, v: [x[n : n + 1].fill_(1).mul_(w) for n, w in _pairs(i, v)],
    "a number that is assigned": _assign,
    "out": lambda x, i, v: [torch.mul(w, 1, out=x[n]) for n, w in _pairs(i, v)],
}


@check(
    "current_device_name", "available_memory",
    promise="Operators reach every place of tensors of more than 2**31 elements and more than 2**32 bytes.",
    of="operators", once=True,
)  # fmt: skip
def places_beyond_31_bits(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    if accelerator.available_memory() < 6 * _GIB:
        raise NotOfferedError("less than 6 GiB are available")
    with all_told() as noted:
        for dtype, length in ((torch.int8, 2 * _GIB + 2 * _ROW), (torch.float32, _GIB + 2 * _ROW)):
            x = torch.empty(length, dtype=dtype, device=device)
            half = length // 2
            places = [3, half - 1, half, length - 2 * _ROW - 1, length - 2 * _ROW, length - 9, length - 1]
            there = torch.tensor(places, device=device)
            # What an index of too few bits means instead.
            others = [n % (1 << bits) for n in places for bits in (30, 31)]
            others = sorted({n for n in others if n not in places})
            for number, (what, write) in enumerate(_WRITES.items()):
                for n in others:
                    x[n] = 99
                values = (torch.arange(len(places)) + number + 1).to(dtype)
                write(x, there, values.to(device))
                found = torch.stack([x[n].cpu() for n in places])
                told = f"{what} into {length} elements of {str(dtype).removeprefix('torch.')}"
                noted(torch.equal(found, values), f"{told} writes {found.tolist()}, not {values.tolist()}")
                spoilt = [n for n in others if x[n].item() != 99]
                noted(not spoilt, f"{told} writes to {spoilt[:4]} too")
            for what, read in _READS.items():
                found = read(x, there).cpu()
                told = f"{what} of {length} elements of {str(dtype).removeprefix('torch.')}"
                noted(torch.equal(found, values), f"{told} gives {found.tolist()}, not {values.tolist()}")
            steps = x[length - 1 - half :: half].cpu()
            noted(
                len(steps) == 2 and bool(steps[1] == values[-1]),
                f"a slice with a step of {half} gives {steps}",
            )
            del x
