"""What a decoder's layer computes between its products, for few tokens, in Triton: one kernel for each place.

Plain torch starts two to six kernels for a norm and five for a rotation, which take longer to start than to
run. Numbers are rounded where :mod:`acclimate.llm.decode.description` rounds them.
Imported only where Triton works.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from acclimate.llm.decode.description import ACTIVATIONS, Attention, Norm, Rotary
from acclimate.llm.kernels.triton_check import gives

_LARGEST_ROW = 16384
"""The most elements that a norm's program holds."""
_LARGEST_HEAD = 1024
_WARPS_OF_A_HEAD = 1
_TILE = 1024
"""The elements of a row that a program of an activation computes."""


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(values, inside, size, eps, IS_LAYER: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Returns a row's mean, or zero for RMS norms, and the inverse of its deviation from that."""
    mean = tl.sum(tl.where(inside, values, 0.0), 0) / size if IS_LAYER else 0.0
    gaps = tl.where(inside, values - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(gaps * gaps, 0) / size + eps)


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(  # type: ignore[no-untyped-def]
    values, weight, bias, column, inside, dtype: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS_ONE: tl.constexpr, ROUNDS_FIRST: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Returns normalized values times the weight, plus the bias, as numbers of a dtype in float32."""
    if ROUNDS_FIRST:
        values = values.to(dtype).to(tl.float32)
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
        if ADDS_ONE:
            factor += 1
            if ROUNDS_FIRST:
                factor = factor.to(dtype).to(tl.float32)
        values *= factor
        if ROUNDS_FIRST:
            values = values.to(dtype).to(tl.float32)
    if HAS_BIAS:
        values += tl.load(bias + column, mask=inside, other=0).to(tl.float32)
    return values.to(dtype).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, added, weight, bias, total, result, size, eps, x_row, added_row,
    HAS_ADDED: tl.constexpr, IS_LAYER: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,  # noqa: N803
    ADDS_ONE: tl.constexpr, ROUNDS_FIRST: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Adds two rows, and normalizes the sum."""
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    inside = column < size
    dtype: tl.constexpr = result.dtype.element_ty
    values = tl.load(x + row * x_row + column, mask=inside, other=0).to(tl.float32)
    if HAS_ADDED:
        values += tl.load(added + row * added_row + column, mask=inside, other=0).to(tl.float32)
        values = values.to(dtype).to(tl.float32)
        tl.store(total + row * size + column, values.to(dtype), mask=inside)
    mean, factor = _statistics(values, inside, size, eps, IS_LAYER)
    found = _scaled(
        (values - mean) * factor, weight, bias, column, inside, dtype,
        HAS_WEIGHT, HAS_BIAS, ADDS_ONE, ROUNDS_FIRST,
    )  # fmt: skip
    tl.store(result + row * size + column, found.to(dtype), mask=inside)


def _tensors(norm: Norm | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """The weight and the bias of a norm, for the kernels; ``x`` in the place of one that is absent."""
    if norm is None:
        return x, x
    return x if norm.weight is None else norm.weight, x if norm.bias is None else norm.bias


def _constants(norm: Norm | None) -> dict[str, Any]:
    """The kernels' constants for a norm."""
    return {
        "IS_LAYER": norm is not None and norm.kind == "layer",
        "HAS_WEIGHT": norm is not None and norm.weight is not None,
        "HAS_BIAS": norm is not None and norm.bias is not None,
        "ADDS_ONE": norm is not None and norm.adds_one,
        "ROUNDS_FIRST": norm is not None and norm.rounds_first,
    }


def can_normalize(norm: Norm | None, x: Tensor) -> bool:
    """Whether the kernels compute a norm of rows with this dtype."""
    if norm is None:
        return True
    if x.dtype == torch.float64:  # the kernels compute in float32
        return False
    tensors = [t for t in (norm.weight, norm.bias) if t is not None]
    if any(not t.is_contiguous() or (norm.rounds_first and t.dtype != x.dtype) for t in tensors):
        return False
    return x.stride(-1) == 1 and x.shape[-1] <= _LARGEST_ROW


def normalized(norm: Norm, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns ``x + added`` and its norm; ``x`` itself if nothing is added.

    Args:
        norm: the norm, which ``can_normalize`` allows.
        x: rows x size.
        added: likewise.
    """
    size = x.shape[-1]
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if added is None else torch.empty_like(result)
    columns = triton.next_power_of_2(size)
    given = x if added is None else added
    _norm_kernel[(len(x),)](
        x, given, *_tensors(norm, x), total, result, size, norm.eps, x.stride(0), given.stride(0),
        HAS_ADDED=added is not None, COLUMNS=columns, num_warps=min(16, max(4, columns // 512)),
        **_constants(norm),
    )  # fmt: skip
    return total, result


@triton.jit  # type: ignore[untyped-decorator]
def _head(  # type: ignore[no-untyped-def]
    at, weight, bias, eps, own, other, size, width, dtype: tl.constexpr, SIZE: tl.constexpr,  # noqa: N803
    NORMALIZES: tl.constexpr, IS_LAYER: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,  # noqa: N803
    ADDS_ONE: tl.constexpr, ROUNDS_FIRST: tl.constexpr, ROTATES: tl.constexpr, ROTATES_FIRST: tl.constexpr,  # noqa: N803
    INTERLEAVED: tl.constexpr, ROUNDS_PRODUCTS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Returns a head's elements, normalized and rotated, as numbers of the dtype in float32."""
    column = tl.arange(0, SIZE)
    inside = column < size
    values = tl.load(at + column, mask=inside, other=0).to(tl.float32)
    if ROTATES:
        turned = column < width
        if INTERLEAVED:
            partner = column ^ 1
        else:
            partner = tl.where(column < width // 2, column + width // 2, column - width // 2)
        partner = tl.where(turned, partner, column)
        others = tl.load(at + partner, mask=inside, other=0).to(tl.float32)
    if NORMALIZES and not (ROTATES and ROTATES_FIRST):
        mean, factor = _statistics(values, inside, size, eps, IS_LAYER)
        values = _scaled(
            (values - mean) * factor, weight, bias, column, inside, dtype,
            HAS_WEIGHT, HAS_BIAS, ADDS_ONE, ROUNDS_FIRST,
        )  # fmt: skip
        if ROTATES:
            others = _scaled(
                (others - mean) * factor, weight, bias, partner, inside, dtype,
                HAS_WEIGHT, HAS_BIAS, ADDS_ONE, ROUNDS_FIRST,
            )  # fmt: skip
    if ROTATES:
        first = values * tl.load(own + column, mask=turned, other=0).to(tl.float32)
        second = others * tl.load(other + column, mask=turned, other=0).to(tl.float32)
        if ROUNDS_PRODUCTS:
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        values = tl.where(turned, (first + second).to(dtype).to(tl.float32), values)
        if NORMALIZES and ROTATES_FIRST:
            mean, factor = _statistics(values, inside, size, eps, IS_LAYER)
            values = _scaled(
                (values - mean) * factor, weight, bias, column, inside, dtype,
                HAS_WEIGHT, HAS_BIAS, ADDS_ONE, ROUNDS_FIRST,
            )  # fmt: skip
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _heads_kernel(  # type: ignore[no-untyped-def]
    query, key, value, query_row, key_row, value_row,
    query_weight, key_weight, query_bias, key_bias, eps, value_eps, own, other, width, factors,
    result, keys, values, place, key_batch, key_head, key_token, value_batch, value_head, value_token,
    heads, key_heads, size, value_size,
    HAS_FACTORS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,  # noqa: N803
    NORMALIZES: tl.constexpr, IS_LAYER: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,  # noqa: N803
    ADDS_ONE: tl.constexpr, ROUNDS_FIRST: tl.constexpr, ROTATES: tl.constexpr, ROTATES_FIRST: tl.constexpr,  # noqa: N803
    INTERLEAVED: tl.constexpr, ROUNDS_PRODUCTS: tl.constexpr, NORMALIZES_VALUES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Prepares one head of one sequence: first come those of queries, then of keys, then of values."""
    batch, head = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = result.dtype.element_ty
    column = tl.arange(0, SIZE)
    own += batch * width
    other += batch * width
    if head < heads:
        found = _head(
            query + batch * query_row + head * size, query_weight, query_bias, eps, own, other, size, width,
            dtype, SIZE, NORMALIZES, IS_LAYER, HAS_WEIGHT, HAS_BIAS, ADDS_ONE, ROUNDS_FIRST,
            ROTATES, ROTATES_FIRST, INTERLEAVED, ROUNDS_PRODUCTS,
        )  # fmt: skip
        if HAS_FACTORS:
            found *= tl.load(factors + batch).to(dtype).to(tl.float32)
        tl.store(result + (batch * heads + head) * size + column, found.to(dtype), mask=column < size)
    elif head < heads + key_heads:
        head -= heads
        found = _head(
            key + batch * key_row + head * size, key_weight, key_bias, eps, own, other, size, width,
            dtype, SIZE, NORMALIZES, IS_LAYER, HAS_WEIGHT, HAS_BIAS, ADDS_ONE, ROUNDS_FIRST,
            ROTATES, ROTATES_FIRST, INTERLEAVED, ROUNDS_PRODUCTS,
        )  # fmt: skip
        at = keys + batch.to(tl.int64) * key_batch + head.to(tl.int64) * key_head + tl.load(place) * key_token
        tl.store(at + column, found.to(dtype), mask=column < size)
    else:
        head -= heads + key_heads
        value_column = tl.arange(0, VALUE_SIZE)
        passed = _head(
            value + batch * value_row + head * value_size, value, value, value_eps, own, other,
            value_size, width, dtype, VALUE_SIZE, NORMALIZES_VALUES, False, False, False, False, False,
            False, False, False, False,
        )  # fmt: skip
        at = values + batch.to(tl.int64) * value_batch + head.to(tl.int64) * value_head
        at += tl.load(place) * value_token
        tl.store(at + value_column, passed.to(dtype), mask=value_column < value_size)


def _kind(norm: Norm | None) -> Any:
    return None if norm is None else (norm.eps, _constants(norm))


def can_prepare(attention: Attention, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> bool:
    """Whether :func:`prepared_heads` computes what comes between the products and the attention of a layer.

    Args:
        attention: the layer's attention.
        x: its input, batch x size.
        rotation: what its rotary embedding's ``factors`` gives for the sequences.
    """
    of_query, of_key, of_value = attention.query_norm, attention.key_norm, attention.value_norm
    if attention.latent is not None or max(attention.head_size, attention.value_size) > _LARGEST_HEAD:
        return False
    if x.dtype == torch.float64:  # the kernel computes in float32
        return False
    if of_query is not None and not attention.norm_is_per_head:
        return False
    if of_value is not None and (of_value.kind, of_value.weight, of_value.bias) != ("rms", None, None):
        return False
    if attention.shares is None and _kind(of_query) != _kind(of_key):
        return False
    rotary = attention.rotary
    if (
        rotary is not None
        and rotation is not None
        and rotary.rounds_products
        and rotation[0].dtype != x.dtype
    ):
        return False
    return can_normalize(of_query, x) and can_normalize(of_key, x)


def prepared_heads(
    attention: Attention,
    query: Tensor,
    key_and_value: tuple[Tensor, Tensor] | None,
    rotation: tuple[Tensor, Tensor] | None,
    factors: Tensor | None,
    cache: tuple[Tensor, Tensor] | None,
    place: Tensor,
) -> Tensor:
    """Normalizes and rotates heads, stores keys and values in a cache, and returns the queries.

    Args:
        attention: the layer's attention, which ``can_prepare`` allows.
        query: its product, batch x (heads x size).
        key_and_value: its other products, batch x (key heads x size each); ``None`` if it shares the keys of
            another layer.
        rotation: what its rotary embedding's ``factors`` gives for the sequences.
        factors: what rotated queries are multiplied by, one number for each sequence.
        cache: the keys and values that are written to, batch x key heads x room x size each.
        place: where, an integer on the device.

    Returns:
        batch x heads x size, in the dtype of ``query``.
    """
    heads, size, value_size = attention.heads, attention.head_size, attention.value_size
    result = torch.empty((len(query), heads, size), dtype=query.dtype, device=query.device)
    key, value = key_and_value or (query, query)
    keys, values = cache or (result, result)
    key_heads = 0 if key_and_value is None else attention.key_heads
    rotary = attention.rotary
    own, other = rotation or (query, query)
    norm, of_key, of_value = attention.query_norm, attention.key_norm, attention.value_norm
    weight, bias = _tensors(norm, query)
    key_weight, key_bias = _tensors(of_key, query)
    _heads_kernel[(len(query), heads + 2 * key_heads)](
        query, key, value, query.stride(0), key.stride(0), value.stride(0),
        weight, key_weight, bias, key_bias, 0.0 if norm is None else norm.eps,
        0.0 if of_value is None else of_value.eps, own, other, 0 if rotary is None else rotary.width,
        query if factors is None else factors, result, keys, values, place,
        *keys.stride()[:3], *values.stride()[:3], heads, key_heads, size, value_size,
        HAS_FACTORS=factors is not None, SIZE=triton.next_power_of_2(size),
        VALUE_SIZE=triton.next_power_of_2(value_size), NORMALIZES=norm is not None,
        ROTATES=rotary is not None, ROTATES_FIRST=attention.rotary_first,
        INTERLEAVED=rotary is not None and rotary.interleaved,
        ROUNDS_PRODUCTS=rotary is not None and rotary.rounds_products,
        NORMALIZES_VALUES=of_value is not None, num_warps=_WARPS_OF_A_HEAD, **_constants(norm),
    )  # fmt: skip
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _gate_kernel(  # type: ignore[no-untyped-def]
    gate, up, result, size, gate_row, up_row,
    ACTIVATION: tl.constexpr, HAS_GATE: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Computes an activation, and multiplies it by another number of the same place."""
    row, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    dtype: tl.constexpr = result.dtype.element_ty
    x = tl.load(gate + row * gate_row + column, mask=inside, other=0).to(tl.float32)
    if ACTIVATION == "silu":
        found = x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        found = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        found = 0.5 * x * (2 - 2 / (tl.exp(2 * inner) + 1))
    else:
        found = tl.where(x < 0, 0.0, x)  # keeps NaN
        if ACTIVATION == "relu2":
            found = found.to(dtype).to(tl.float32)
            found *= found
    if HAS_GATE:
        found = found.to(dtype).to(tl.float32) * tl.load(up + row * up_row + column, mask=inside, other=0)
    tl.store(result + row * size + column, found.to(dtype), mask=inside)


def can_gate(gate: Tensor, up: Tensor | None) -> bool:
    """Whether :func:`gated` takes tensors with these dtypes and strides."""
    given = [gate] if up is None else [gate, up]
    return gate.dtype != torch.float64 and all(t.dtype == gate.dtype and t.stride(-1) == 1 for t in given)


def gated(activation: str, gate: Tensor, up: Tensor | None) -> Tensor:
    """Returns ``activation(gate) * up``, or ``activation(gate)``.

    Args:
        activation: a name in ``ACTIVATIONS``.
        gate: rows x size, which ``can_gate`` allows with ``up``.
        up: likewise.
    """
    size = gate.shape[-1]
    result = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    factor = gate if up is None else up
    _gate_kernel[(len(gate), triton.cdiv(size, _TILE))](
        gate, factor, result, size, gate.stride(0), factor.stride(0),
        ACTIVATION=activation, HAS_GATE=up is not None, COLUMNS=_TILE,
    )  # fmt: skip
    return result


@functools.cache
def is_right(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the kernels give what torch computes, on a device and in a dtype."""
    random = torch.Generator().manual_seed(0)
    x, added = torch.randn(2, 3, 96, generator=random).to(dtype)
    weight = torch.randn(96, generator=random).to(dtype)
    norm = Norm("rms", weight, None, 1e-6, False, True)
    by_head = Norm("rms", weight[:32], None, 1e-6, False, True)
    rotary = Rotary(0, 32, False, True)
    angles = torch.randn(2, 3, 16, generator=random).to(dtype)
    attention: Any = SimpleNamespace(
        latent=None, shares=None, norm_is_per_head=True, value_norm=None, rotary=rotary,
        rotary_first=False, heads=3, key_heads=3, head_size=32, value_size=32,
    )  # fmt: skip
    heads = rotary(by_head(x.view(3, 3, 32)), *rotary.factors(*angles))
    expected = torch.stack((norm(x + added), heads.flatten(1), heads.flatten(1), added))
    expected = torch.cat((expected, (ACTIVATIONS["silu"](x) * added)[None]))

    def compute() -> Tensor:
        a, b, on_device = x.to(device_type), added.to(device_type), weight.to(device_type)
        vars(attention).update(
            dict.fromkeys(("query_norm", "key_norm"), replace(by_head, weight=on_device[:32]))
        )
        cache = a.new_zeros(2, 3, 3, 2, 32)
        rotation = rotary.factors(*angles.to(device_type))
        place = torch.tensor(1).to(device_type)
        queries = prepared_heads(attention, a, (a, b), rotation, None, (cache[0], cache[1]), place)
        total = normalized(replace(norm, weight=on_device), a, b)[1]
        parts = [total, queries.flatten(1), *cache[:, :, :, 1].flatten(2), gated("silu", a, b)]
        return torch.stack(parts)

    return gives(expected, compute, f"norms and rotations in {dtype} on {device_type}")
