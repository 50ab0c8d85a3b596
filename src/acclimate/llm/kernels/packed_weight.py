"""A weight of a linear layer or an embedding, as the native kernels read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from acclimate.errors import WeightError
from acclimate.host import huge_pages
from acclimate.llm.kernels import builder, layout
from acclimate.llm.kernels.formats import (
    DENSE,
    DENSE_DTYPES,
    GGUF_FORMATS,
    GROUP_ROWS,
    OWN_FORMATS,
    WEIGHT_FORMATS,
    WeightFormat,
)
from acclimate.llm.kernels.quantize import quantize_rows
from acclimate.llm.kernels.words import Words, pack_words

_FEW_ROWS = 16  # the most input rows that the native kernels multiply in one pass over a weight
_TILE_VALUES = 4 << 20
_ID_DTYPES = (torch.int64, torch.int32)  # as for torch's embeddings; others cannot hold every row's number
_QUANTIZED_TOGETHER = 1 << 18
"""Values whose intermediate results stay in a cache: with 4 million, quantising took twice as long."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight of shape [n, k], for ``y = x @ weight.T``.

    On the CPU, products with up to 16 input rows run in a native kernel, which reads the weight once at about
    the speed of memory. It rounds inputs of quantised weights to 8 bits in blocks of 32 values. Larger
    products are native too if the weight is quantised and the processor has vector instructions but no AMX.
    torch computes all others, and those on other devices. All accumulate in float32.
    """

    format: str
    """``"dense"``, or a name in ``csrc/formats.def``: one of ours, such as ``"int8"``, or a block type of
    GGUF in lower case, such as ``"q4_k"``."""
    data: Tensor
    """The model's own tensor of a dense weight; else bytes, laid out as
    :mod:`acclimate.llm.kernels.formats` says."""
    shape: tuple[int, int]
    """Rows and columns: the outputs and inputs of the layer."""

    _has_kernel_for_many: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        device_type = self.data.device.type
        builder.load(device_type)
        # Checked here, since compiled code cannot: torch computes dense products of many rows.
        has_kernel = self.format != DENSE and builder.multiplies_many_rows(device_type)
        object.__setattr__(self, "_has_kernel_for_many", has_kernel)

    # -- constructors ----------------------------------------------------------------------------

    @staticmethod
    def dense(weight: Tensor) -> PackedWeight:
        """Uses a float32, bfloat16 or float16 tensor as it is, without a copy if its rows are contiguous.

        Raises:
            WeightError: it is not a matrix of one of these dtypes.
        """
        _check_matrix(weight)
        # The stride of a dimension of size 1 or 0 has no meaning; a kernel computes it from the shape.
        return PackedWeight(DENSE, weight.detach().contiguous(), (weight.shape[0], weight.shape[1]))

    @staticmethod
    def quantize(weight: Tensor, weight_format: str) -> PackedWeight:
        """Quantises a float32, bfloat16 or float16 tensor, some rows at a time.

        Args:
            weight: the weight, [n, k].
            weight_format: ``"int8"``: 8 bits with one scale for each row. ``"int4"``: 4 bits; each block of
                32 columns has a scale and a minimum of 8 bits each, which makes 4.5 bits for each value.
                ``"int5"``: the same with 5 bits. ``"uint4"``, ``"uint8"``: 4 or 8 bits; each block has a
                scale in float16 and the code of zero.

        Raises:
            WeightError: the format or the tensor is unsuitable, or the tensor has infinite or NaN values.
        """
        if weight_format not in OWN_FORMATS:
            *others, last = (f'"{name}"' for name in OWN_FORMATS)
            raise WeightError(
                f'A weight can be quantised to {", ".join(others)} or {last}, not to "{weight_format}".'
            )
        _check_matrix(weight)
        kind = WEIGHT_FORMATS[weight_format]
        n, k = weight.shape
        data = new_data(kind, n, k, weight.device)
        groups = max(_QUANTIZED_TOGETHER // max(k, 1) // GROUP_ROWS, 1)
        for first, rows in enumerate(weight.detach().split(groups * GROUP_ROWS)):
            if not rows.isfinite().all():
                raise WeightError(
                    f"A weight of shape [{n}, {k}] has infinite or NaN values, which {weight_format} lacks."
                )
            packed = layout.pack(quantize_rows(rows, kind), kind)
            data[first * groups : first * groups + len(packed)] = packed
        return PackedWeight(weight_format, data, (n, k))

    @staticmethod
    def from_words(
        pieces: Iterable[tuple[Words, Mapping[str, Tensor]]], weight_format: str, shape: tuple[int, int]
    ) -> PackedWeight:
        """Packs codes and scales that are already in a format, such as those of a published file.

        Args:
            pieces: rows, one part after the other, each with its scales by name, [rows, parts] for whole
                blocks of columns. All but the last are whole groups of 16 rows.
            weight_format: a name in ``csrc/formats.def``.
            shape: [n, k].
        """
        kind = WEIGHT_FORMATS[weight_format]
        n, k = shape
        builder.load("cpu")
        groups, done = -(-n // GROUP_ROWS), 0
        data = torch.empty(0, dtype=torch.uint8)
        for words, fields in pieces:
            packed = pack_words(words, fields, kind)
            if len(packed) == groups:
                return PackedWeight(weight_format, packed, shape)
            data = data if done else new_data(kind, n, k, torch.device("cpu"))
            data[done : done + len(packed)] = packed
            done += len(packed)
        return PackedWeight(weight_format, data, shape)

    @staticmethod
    def from_gguf(blocks: Tensor, block_type: str, shape: tuple[int, int]) -> PackedWeight:
        """Packs a quantised tensor of a GGUF file, without loss.

        Args:
            blocks: its bytes: a uint8 tensor of any shape.
            block_type: the type of its blocks, such as ``"Q4_K"`` or ``"q4_k"``.
            shape: [n, k], the reverse of the order in the file.

        Raises:
            WeightError: there is no kernel for such blocks, or the number of bytes does not match.
        """
        name = block_type.lower()
        if name not in GGUF_FORMATS:
            known = ", ".join(kind.upper() for kind in GGUF_FORMATS)
            raise WeightError(f"There is no kernel for GGUF blocks of type {block_type}, only for {known}.")
        kind = WEIGHT_FORMATS[name]
        n, k = shape
        if k % kind.columns:
            raise WeightError(f"{block_type} needs rows of a multiple of {kind.columns} values, not {k}.")
        row_bytes = k // kind.columns * kind.gguf_bytes
        if blocks.dtype != torch.uint8 or blocks.numel() != n * row_bytes:
            raise WeightError(
                f"A {block_type} tensor of shape [{n}, {k}] has {n * row_bytes} bytes of dtype torch.uint8, "
                f"not {blocks.numel()} of {blocks.dtype}."
            )
        builder.load(blocks.device.type)
        rows = blocks.reshape(n, row_bytes)
        return PackedWeight(name, torch.ops.acclimate.packed_from_gguf(rows, kind.number, n, k), (n, k))

    # -- properties ------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """The bytes of memory that a product reads."""
        return self.data.numel() * self.data.element_size()

    @property
    def device(self) -> torch.device:
        """The device that holds it."""
        return self.data.device

    @property
    def _kind(self) -> WeightFormat | None:
        return WEIGHT_FORMATS.get(self.format)

    @property
    def number(self) -> int:
        """The format's number in native code; 0: dense."""
        kind = self._kind
        return kind.number if kind else 0

    # -- products --------------------------------------------------------------------------------

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns ``x @ weight.T + bias`` in the dtype of ``x``.

        Args:
            x: float32, bfloat16 or float16, of shape [..., k] and any strides.
            bias: [n], or ``None``.

        Raises:
            WeightError: a shape, dtype or device does not match.
        """
        n, k = self.shape
        self._check(x, bias)
        if self._has_kernel_for_many or k == 0 or n == 0 or x.numel() // k <= _FEW_ROWS:
            return torch.ops.acclimate.packed_linear(x, self.data, bias, self.number, n, k)  # type: ignore[no-any-return]
        return self._linear_of_many(x, bias)

    def _linear_of_many(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            bias = bias.to(x.dtype)
        if self._kind is None:
            # Neither is rounded to the other's dtype.
            dtype = torch.promote_types(x.dtype, self.data.dtype)
            bias = bias.to(dtype) if bias is not None else None
            return functional.linear(x.to(dtype), self.data.to(dtype), bias).to(x.dtype)
        n, k = self.shape
        groups = max(_TILE_VALUES // max(k, 1) // GROUP_ROWS, 1)
        pieces = []
        for start in range(0, n, groups * GROUP_ROWS):
            stop = min(start + groups * GROUP_ROWS, n)
            part = self.data[start // GROUP_ROWS : -(-stop // GROUP_ROWS)]
            values = torch.ops.acclimate.packed_values(part, self.number, stop - start, k, x.dtype)
            pieces.append(functional.linear(x, values, bias[start:stop] if bias is not None else None))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    def top(self, x: Tensor, count: int = 1) -> tuple[Tensor, Tensor]:
        """Returns the ``count`` largest results of each row of ``x``, largest first, and their positions,
        without all results in memory: for an output head over a large vocabulary.

        Returns:
            float32 values and int64 positions, both [..., count].
        """
        n, k = self.shape
        self._check(x, None)
        if not 0 < count <= n:
            raise WeightError(f"The number of largest results must be from 1 to {n}, the rows, not {count}.")
        found = torch.ops.acclimate.packed_top(x, self.data, self.number, n, k, count)
        return found[0], found[1]

    def dequantize(self, rows: slice | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the values of all rows, or of a slice of them, which are computed in float32."""
        start, stop, step = (rows or slice(None)).indices(self.shape[0])
        if self._kind is None:
            return self.data[start:stop:step].to(dtype)
        stop = max(start, stop)
        first = start // GROUP_ROWS
        part = self.data[first : -(-stop // GROUP_ROWS)]
        count = min(len(part) * GROUP_ROWS, self.shape[0] - first * GROUP_ROWS)
        values = torch.ops.acclimate.packed_values(part, self.number, count, self.shape[1], dtype)
        return values[start - first * GROUP_ROWS : stop - first * GROUP_ROWS : step]  # type: ignore[no-any-return]

    def rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the rows with these numbers, [..., k]: a lookup in an embedding.

        Raises:
            IndexError: there is no such row.
        """
        if self._kind is None:
            return functional.embedding(ids, self.data).to(dtype)
        try:
            return torch.ops.acclimate.packed_rows(self.data, ids, self.number, *self.shape, dtype)  # type: ignore[no-any-return]
        except RuntimeError as error:  # native code can raise no other kind of error
            if ids.dtype in _ID_DTYPES and bool(((ids < 0) | (ids >= self.shape[0])).any()):
                raise IndexError("index out of range in self") from error  # torch's message for an embedding
            raise

    def to(self, device: torch.device | str) -> PackedWeight:
        """Returns the weight on another device."""
        return PackedWeight(self.format, self.data.to(device), self.shape)

    def _check(self, x: Tensor, bias: Tensor | None) -> None:
        n, k = self.shape
        if x.dim() == 0 or x.shape[-1] != k:
            raise WeightError(f"A weight of shape [{n}, {k}] takes inputs [..., {k}], not {list(x.shape)}.")
        if x.dtype not in DENSE_DTYPES:
            raise WeightError(f"Inputs must be float32, bfloat16 or float16, not {x.dtype}.")
        if x.device != self.device:
            raise WeightError(f"The input is on {x.device} and the weight on {self.device}.")
        if bias is not None and (bias.shape != (n,) or bias.device != self.device):
            raise WeightError(
                f"A weight of shape [{n}, {k}] on {self.device} takes a bias [{n}] there, not "
                f"{list(bias.shape)} on {bias.device}."
            )


def _check_matrix(weight: Tensor) -> None:
    if weight.dim() != 2 or weight.dtype not in DENSE_DTYPES:
        raise WeightError(
            "A weight must be a float32, bfloat16 or float16 matrix, not of shape "
            f"{list(weight.shape)} and dtype {weight.dtype}."
        )


def new_data(kind: WeightFormat, n: int, k: int, device: torch.device) -> Tensor:
    """Returns memory for the packed rows of a weight of shape [n, k]."""
    data = torch.empty(-(-n // GROUP_ROWS), kind.group_bytes(k), dtype=torch.uint8, device=device)
    huge_pages.request(data)
    return data
