"""Attention of one query of each sequence over keys and values in a cache, in Triton.

Programs divide the tokens, and find the largest score, the sum of weights and the weighted sum of values of
their part; a second kernel joins these (Flash-Decoding, Dao et al. 2023). The number of tokens is read from
the device, so that a graph reads as many as there are at each replay, not all for which there is room.
Imported only where Triton works.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from acclimate.llm.kernels.triton_check import gives

LARGEST_HEAD = 256
"""The most elements of a head that a program holds."""
_MOST_ELEMENTS = {torch.bfloat16: 32768, torch.float16: 32768, torch.float32: 8192}
"""The most elements of the query heads of one program: for Hopper these take up to 99 KiB of shared memory,
which is what most GPUs have. Products in other dtypes do not compile."""
_TILE = 16
"""The tokens that a program reads at a time."""
_PROGRAMS = 256
"""About how many programs keep a device busy."""
_MOST_PARTS = 64
"""The most parts of the tokens, of all of which one program of the second kernel holds a head's values."""


@triton.jit  # type: ignore[untyped-decorator]
def _partial_kernel(  # type: ignore[no-untyped-def]
    query, keys, values, place, starts, largest, sums, mixed, scale, softcap, window, key_heads, grouped,
    key_batch, key_head, key_token, value_batch, value_head, value_token, size, value_size,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PARTS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, TILE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Attends to a part of the tokens, for the query heads that share a key head."""
    pair, part = tl.program_id(0), tl.program_id(1)
    batch, head = pair // key_heads, pair % key_heads
    end = tl.load(place) + 1
    begin = tl.maximum(tl.load(starts + batch), 0)
    if HAS_WINDOW:
        begin = tl.maximum(begin, end - window)
    count = (end - begin + PARTS - 1) // PARTS
    begin += part * count
    end = tl.minimum(end, begin + count)
    row, column, value_column = tl.arange(0, GROUP), tl.arange(0, SIZE), tl.arange(0, VALUE_SIZE)
    is_query = (row[:, None] < grouped) & (column[None, :] < size)
    given = tl.load(query + (pair * grouped + row[:, None]) * size + column[None, :], mask=is_query, other=0)
    keys += batch.to(tl.int64) * key_batch + head.to(tl.int64) * key_head
    values += batch.to(tl.int64) * value_batch + head.to(tl.int64) * value_head
    most = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    found = tl.zeros((GROUP, VALUE_SIZE), tl.float32)
    for first in range(begin, end, TILE):
        token = first + tl.arange(0, TILE)
        seen = token < end
        at = keys + token[None, :].to(tl.int64) * key_token + column[:, None]
        key = tl.load(at, mask=seen[None, :] & (column[:, None] < size), other=0)
        scores = tl.dot(given, key, input_precision="ieee") * scale
        if HAS_CAP:
            scores = (1 - 2 / (tl.exp(2 * scores / softcap) + 1)) * softcap  # the hyperbolic tangent
        scores = tl.where(seen[None, :], scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp(scores - now[:, None])
        before = tl.exp(most - now)
        total = total * before + tl.sum(weights, 1)
        at = values + token[:, None].to(tl.int64) * value_token + value_column[None, :]
        value = tl.load(at, mask=seen[:, None] & (value_column[None, :] < value_size), other=0)
        found = found * before[:, None] + tl.dot(weights, value.to(tl.float32), input_precision="ieee")
        most = now
    at = (pair * PARTS + part) * GROUP + row
    tl.store(largest + at, most)
    tl.store(sums + at, total)
    tl.store(mixed + at[:, None] * VALUE_SIZE + value_column[None, :], found)


@triton.jit  # type: ignore[untyped-decorator]
def _join_kernel(  # type: ignore[no-untyped-def]
    largest, sums, mixed, sinks, result, heads, grouped, value_size,
    HAS_SINKS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, VALUE_SIZE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Joins what a query head has of all parts."""
    number = tl.program_id(0)
    part, column = tl.arange(0, PARTS), tl.arange(0, VALUE_SIZE)
    at = (number // grouped * PARTS + part) * GROUP + number % grouped
    most = tl.load(largest + at)
    top = tl.max(most, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + number % heads).to(tl.float32)
        top = tl.maximum(top, sink)
    factor = tl.exp(most - top)
    total = tl.sum(tl.load(sums + at) * factor, 0)
    if HAS_SINKS:
        total += tl.exp(sink - top)
    parts = tl.load(mixed + at[:, None] * VALUE_SIZE + column[None, :])
    found = tl.sum(parts * factor[:, None], 0) / total
    where = result + number * value_size + column
    tl.store(where, found.to(result.dtype.element_ty), mask=column < value_size)


def _padded(grouped: int, size: int, value_size: int) -> tuple[int, int, int]:
    """Returns the rows and columns of a program's matrices: a product takes at least 16 of them."""
    group, columns, value_columns = (max(16, triton.next_power_of_2(n)) for n in (grouped, size, value_size))
    return group, columns, value_columns


def can_mix(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether a device has room for :func:`mixed_values`, and the dtypes and strides are those it takes."""
    if not query.dtype == keys.dtype == values.dtype or keys.stride(-1) != 1 or values.stride(-1) != 1:
        return False
    size, value_size = keys.shape[3], values.shape[3]
    group, columns, value_columns = _padded(query.shape[1] // keys.shape[1], size, value_size)
    most = _MOST_ELEMENTS.get(query.dtype, 0)
    return max(size, value_size) <= LARGEST_HEAD and group * max(columns, value_columns) <= most


def mixed_values(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    starts: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns each head's mixture of values, batch x all elements, in the query's dtype; see ``can_mix``.

    Args:
        query: batch x heads x size.
        keys: batch x key heads x room x size, in the query's dtype; elements of a token are contiguous.
        values: batch x key heads x room x value size, likewise.
        place: the place of the last token that queries see, one integer.
        starts: the first place that each sequence sees; below zero: the first one there is.
        scale: what products of queries and keys are multiplied by.
        softcap: a bound of scores; ``None``: none.
        window: the most tokens that a query sees; ``None``: all.
        sinks: a score of each head that counts in the sum of weights only.
    """
    batch, heads, size = query.shape
    key_heads, room, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    grouped = heads // key_heads
    pairs = batch * key_heads
    wanted = min(_MOST_PARTS, max(1, _PROGRAMS // pairs), -(-room // _TILE))
    parts = triton.next_power_of_2(wanted)
    group, columns, value_columns = _padded(grouped, size, value_size)
    query = query.contiguous()
    largest, sums = query.new_empty((2, pairs, parts, group), dtype=torch.float32)
    mixed = query.new_empty((pairs, parts, group, value_columns), dtype=torch.float32)
    _partial_kernel[(pairs, parts)](
        query, keys, values, place, starts, largest, sums, mixed, scale, softcap or 0.0, window or 0,
        key_heads, grouped, *keys.stride()[:3], *values.stride()[:3], size, value_size,
        HAS_CAP=softcap is not None, HAS_WINDOW=window is not None, PARTS=parts, GROUP=group, SIZE=columns,
        VALUE_SIZE=value_columns, TILE=_TILE,
    )  # fmt: skip
    result = query.new_empty(batch, heads * value_size)
    _join_kernel[(batch * heads,)](
        largest, sums, mixed, query if sinks is None else sinks, result, heads, grouped, value_size,
        HAS_SINKS=sinks is not None, PARTS=parts, GROUP=group, VALUE_SIZE=value_columns,
    )  # fmt: skip
    return result


@functools.cache
def is_right(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the kernels give what torch computes, on a device and in a dtype."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 32, generator=random).to(dtype)
    keys, values = torch.randn(2, 2, 2, 100, 32, generator=random).to(dtype)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None].float(), keys[:, :, 1:71].float(), values[:, :, 1:71].float(), scale=0.5,
        enable_gqa=True,
    ).flatten(1).to(dtype)  # fmt: skip
    place, starts = torch.tensor(70), torch.ones(2, dtype=torch.long)

    def compute() -> Tensor:
        on_device = [tensor.to(device_type) for tensor in (query, keys, values, place, starts)]
        return mixed_values(*on_device, scale=0.5)

    return gives(expected, compute, f"attention in {dtype} on {device_type}")
