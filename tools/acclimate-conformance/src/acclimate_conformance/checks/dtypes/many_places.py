"""Checks of operators that tell places, or count, in tensors of more elements than 15, 16 and 24 bits count.

Kernels keep places in 16 bits, or in a floating-point number, which holds 24. What is right is known: the
tensors are zero but for a few elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import all_told
from acclimate_conformance.checks.check import check

_BITS = (15, 16, 24)
_Told = tuple[torch.Tensor, list[int]]
"""What an operator gives, and what is right."""


class _Marked:
    """A long tensor of zeros on a device, with ones at two places of which the last bits alone say little."""

    def __init__(self, device: str, bits: int) -> None:
        self.device = device
        self.length = (1 << bits) + 9
        self.first, self.last = (1 << bits) + 3, (1 << bits) + 6
        self.bytes = torch.zeros(self.length, dtype=torch.uint8, device=device)
        self.bytes[self.first :: 3] = 1
        self.is_long = bits > 20

    def floats(self) -> torch.Tensor:
        return self.bytes.float()

    def places(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def ramp(self) -> torch.Tensor:
        return torch.arange(self.length, dtype=torch.int32, device=self.device)


def _told(m: _Marked) -> Iterator[tuple[str, Callable[[], _Told]]]:
    n, first, last = m.length, m.first, m.last
    yield "argmax", lambda: (m.bytes.argmax(), [first])
    yield "argmax of a row", lambda: (m.bytes[None].argmax(-1), [first])
    yield "argmin", lambda: ((1 - m.bytes.int()).argmin(), [first])
    yield "max with its place", lambda: (m.floats()[:last].max(0).indices, [first])
    yield "min with its place", lambda: ((-m.floats())[:last].min(0).indices, [first])
    yield "nonzero", lambda: (m.bytes.nonzero()[:, 0], [first, last])
    yield "nonzero of a row", lambda: (m.bytes[None].nonzero().flatten(), [0, first, 0, last])
    yield "nonzero of a column", lambda: (m.bytes[:, None].nonzero().flatten(), [first, 0, last, 0])
    yield "where with one argument", lambda: (torch.where(m.bytes > 0)[0], [first, last])
    yield "a mask as index", lambda: (m.ramp()[m.bytes > 0], [first, last])
    yield "masked_select", lambda: (m.ramp().masked_select(m.bytes > 0), [first, last])
    yield "searchsorted", lambda: (torch.searchsorted(m.ramp(), m.places(first, last).int()), [first, last])
    yield (
        "searchsorted on the right",
        lambda: (
            torch.searchsorted(m.ramp(), m.places(first, last).int(), right=True),
            [first + 1, last + 1],
        ),
    )
    yield "bucketize", lambda: (torch.bucketize(m.places(first).int(), m.ramp(), out_int32=True), [first])
    yield "bincount", lambda: (m.bytes.bincount(), [n - 2, 2])
    yield "bincount of a far bin", lambda: (m.places(first, last, last).bincount()[[first, last]], [1, 2])
    yield "histc", lambda: (m.floats().histc(2, 0, 1).long(), [n - 2, 2])
    yield "count_nonzero", lambda: ((m.bytes < 1).count_nonzero(), [n - 2])
    yield "sum of truth values", lambda: ((m.bytes < 1).sum(), [n - 2])
    yield "sum of bytes", lambda: ((1 - m.bytes).sum(), [n - 2])
    yield "cumsum of truth values", lambda: ((m.bytes < 1).cumsum(0)[[first, -1]], [first, n - 2])
    yield (
        "cumsum of int32",
        lambda: (
            torch.ones(n, dtype=torch.int32, device=m.device).cumsum(0)[[first, last, -1]],
            [first + 1, last + 1, n],
        ),
    )
    yield "cummax with its place", lambda: (m.bytes.cummax(0).indices[[last - 1, -1]], [first, last])
    yield "one_hot", lambda: (functional.one_hot(m.places(first), n)[0, first - 2 : first + 2], [0, 0, 1, 0])
    yield "unique with counts", lambda: (m.bytes.unique(return_counts=True)[1], [n - 2, 2])
    yield (
        "unique_consecutive with counts",
        lambda: (m.bytes.unique_consecutive(return_counts=True)[1], [first, 1, 2, 1, n - last - 1]),
    )
    yield (
        "unique with the places of large numbers",
        lambda: (m.places(last, first, last, first + 1).unique(return_inverse=True)[1], [2, 0, 2, 1]),
    )
    yield (
        "scatter to no place",
        lambda: (m.bytes.scatter(0, m.places(), m.bytes[:0]).nonzero()[:, 0], [first, last]),
    )
    yield (
        "index_put of no place, added up",
        lambda: (m.bytes.index_put((m.places(),), m.bytes[:0], True).nonzero()[:, 0], [first, last]),
    )
    yield (
        "index_put by a mask, added up",
        lambda: (
            m.ramp().index_put((m.bytes > 0,), m.places(2, 5).int(), accumulate=True)[[first, last]],
            [first + 2, last + 5],
        ),
    )
    yield (
        "index_put of whole columns before a place",
        lambda: (
            torch.ops.aten.index_put(m.bytes[None], [None, m.places(first - 1)], m.bytes[first : first + 1])
            .nonzero()
            .flatten(),
            [0, first - 1, 0, first, 0, last],
        ),
    )
    yield "arange", lambda: (torch.arange(n, device=m.device)[[first, last]], [first, last])
    yield "arange of an end", lambda: (torch.arange(first, n, 3, device=m.device), [*range(first, n, 3)])
    yield "index_select", lambda: (m.ramp().index_select(0, m.places(last, first)), [last, first])
    yield "gather", lambda: (m.ramp().gather(0, m.places(last, first)), [last, first])
    yield "take", lambda: (m.ramp().take(m.places(last, first)), [last, first])
    yield (
        "index_put",
        lambda: (
            m.bytes.index_put((m.places(first - 1),), m.bytes[first]).nonzero()[:, 0],
            [first - 1, first, last],
        ),
    )
    yield (
        "index_add",
        lambda: (
            m.bytes.index_add(0, m.places(first - 1), m.bytes[first : first + 1]).nonzero()[:, 0],
            [first - 1, first, last],
        ),
    )
    yield (
        "scatter",
        lambda: (m.bytes.scatter(0, m.places(first - 1), 7).nonzero()[:, 0], [first - 1, first, last]),
    )
    yield "repeat_interleave by counts", lambda: (torch.repeat_interleave(m.bytes.long()), [first, last])
    yield (
        "repeat_interleave",
        lambda: (m.places(5, 7).repeat_interleave(m.places(first, 2))[[first - 1, first]], [5, 7]),
    )
    yield "roll", lambda: (m.bytes.roll(-1).argmax(), [first - 1])
    yield "flip", lambda: (m.bytes.flip(0).nonzero()[:, 0], [n - 1 - last, n - 1 - first])
    yield (
        "embedding",
        lambda: (functional.embedding(m.places(first, last), m.ramp()[:, None])[:, 0], [first, last]),
    )
    yield (
        "embedding_bag by offsets",
        lambda: (
            functional.embedding_bag(
                m.bytes.int(),
                torch.tensor([[0.0], [1.0]], device=m.device),
                m.places(0, first, last).int(),
                mode="sum",
            )[:, 0].long(),
            [0, 1, 1],
        ),
    )
    yield "sort", lambda: (m.bytes.sort(descending=True, stable=True).indices[:2], [first, last])
    yield "argsort", lambda: (m.bytes.argsort(stable=True)[-2:], [first, last])
    yield "topk", lambda: (m.floats().topk(2).indices.sort().values, [first, last])
    yield "kthvalue", lambda: (m.floats()[:last].kthvalue(last).indices, [first])
    yield "isin", lambda: (torch.isin(m.ramp(), m.places(first, last).int()).nonzero()[:, 0], [first, last])
    yield "diff", lambda: (m.bytes.int().diff().nonzero()[:, 0], [first - 1, first, last - 1, last])
    yield (
        "tril_indices",
        lambda: (torch.tril_indices(first + 1, 1, first - n, device=m.device)[0][-1:], [first]),
    )
    for kind in ("1d", "2d"):
        yield f"max_pool{kind} with its places", lambda kind=kind: _pooled(m, kind)  # type: ignore[misc]
        yield f"adaptive_max_pool{kind} with its places", lambda kind=kind: _pooled_to_one(m, kind)  # type: ignore[misc]
    yield "max_pool3d with its places", lambda: _pooled(m, "3d")


def _image(m: _Marked, kind: str) -> torch.Tensor:
    """The marked tensor as an image whose last rows have the marks."""
    dims = int(kind[0])
    numbers = m.floats()
    if dims == 1:
        return numbers.view(1, 1, -1)
    return functional.pad(numbers, (0, -m.length % 64)).view(1, 1, *[1] * (dims - 2), -1, 64)


def _pooled(m: _Marked, kind: str) -> _Told:
    """The places that a pool of the last element's window tells."""
    image = _image(m, kind)[..., :, :] if kind != "1d" else _image(m, kind)
    window = (*[1] * (int(kind[0]) - 1), 3) if kind != "1d" else (3,)
    pool = getattr(functional, f"max_pool{kind}")
    values, places = pool(image, window, 1, return_indices=True)
    found = places.flatten()[values.flatten() > 0].unique()
    return found, [m.first, m.last]


def _pooled_to_one(m: _Marked, kind: str) -> _Told:
    pool = getattr(functional, f"adaptive_max_pool{kind}")
    return pool(_image(m, kind), 1, return_indices=True)[1].flatten(), [m.first]


_OF_16_BITS = (
    "histc", "sort", "argsort", "topk", "kthvalue", "one_hot", "tril_indices", "max_pool3d with its places",
)  # fmt: skip
"""What takes seconds or gigabytes of so many elements, or counts in numbers of 24 bits."""


@check(
    "supported_dtypes",
    promise="Operators tell places, and count, in tensors of any number of elements.",
    once=True,
)  # fmt: skip
def places_and_counts_of_many_elements(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    lacks: dict[str, None] = {}
    with all_told() as noted:
        for bits in _BITS:
            marked = _Marked(device, bits)
            for what, call in _told(marked):
                if marked.is_long and what in _OF_16_BITS:
                    continue
                try:
                    found, wanted = call()
                except NotImplementedError:
                    lacks[what] = None
                    continue
                seen = found.flatten().tolist()
                text = f"{seen[:6]}{', …' * (len(seen) > 6)}"
                noted(
                    seen == wanted,
                    f"{what} of {marked.length} elements, ones at {marked.first} and {marked.last}, gives "
                    f"{text}, not {wanted}",
                )
    return f"it lacks {', '.join(lacks)}" if lacks else None
