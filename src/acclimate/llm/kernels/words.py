"""Codes of published weights in 32-bit words, and the operator that packs them for the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from acclimate.llm.kernels import layout
from acclimate.llm.kernels.formats import GROUP_ROWS, WeightFormat, format_of_number

BY_ROW, BY_WORD, AWQ = 0, 1, 2
"""How words are ordered: [rows, words] and [words, rows], of successive columns; [columns, words], of
successive rows, in AWQ's order. csrc/gguf_pack.h has the same numbers."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The row whose code each 4 bits of a word of AWQ hold."""


@dataclass(frozen=True)
class Words:
    """Codes of some rows of a matrix."""

    words: Tensor
    """int32, contiguous; the first code of each is in the lowest bits."""
    shape: tuple[int, int]
    """Rows and columns."""
    bits: int
    """The bits of a code: 2, 4 or 8."""
    order: int = BY_ROW
    skip: int = 0
    """The codes of the first word that do not belong to the matrix."""
    flip: int = 0
    """The bits of each code that are inverted: 128 for signed bytes."""

    @classmethod
    def of_bytes(cls, codes: Tensor, flip: int = 0) -> Words:
        """Returns codes of one byte each, [rows, columns]."""
        shape = (codes.shape[0], codes.shape[1])
        octets = codes.contiguous().view(torch.uint8)
        octets = torch.nn.functional.pad(octets, (0, -shape[1] % 4)) if shape[1] % 4 else octets
        return cls(octets.view(torch.int32), shape, 8, flip=flip)

    def codes(self) -> Tensor:
        """Returns the codes: uint8, [rows, columns]."""
        n, k = self.shape
        if self.order == AWQ:
            codes = unpacked(self.words, self.bits)[..., [_AWQ_ORDER.index(row) for row in range(8)]]
            return codes.flatten(1)[:, self.skip : self.skip + n].T.contiguous() ^ self.flip
        words = self.words.T if self.order == BY_WORD else self.words
        return unpacked(words, self.bits).flatten(1)[:, self.skip : self.skip + k] ^ self.flip


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the codes in 32-bit words, lowest bits first: [..., 32 / bits] of uint8."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 8:
        return octets
    mask = (1 << bits) - 1
    return torch.stack([octets >> shift & mask for shift in range(0, 8, bits)], -1).flatten(-2)


def pack_words(words: Words, fields: Mapping[str, Tensor], kind: WeightFormat) -> Tensor:
    """Returns the bytes of rows: [groups, bytes of a group].

    Args:
        words: the codes.
        fields: scales, lows and zeros by name: [rows, parts], for whole blocks of columns.
        kind: the format.
    """
    n, k = words.shape
    header = layout.pack_fields(fields, kind, -(-n // GROUP_ROWS), kind.padded(k))
    made: Tensor = torch.ops.acclimate.packed_from_words(
        words.words, header, kind.number, n, k, words.bits, words.order, words.skip, words.flip
    )
    return made


# csrc/operators.cpp reads the arguments in this order.
SCHEMA = (
    "packed_from_words(Tensor words, Tensor header, int format_number, int n, int k, int bits, int order, "
    "int skip, int flip) -> Tensor"
)


def from_words(
    words: Tensor,
    header: Tensor,
    format_number: int,
    n: int,
    k: int,
    bits: int,
    order: int,
    skip: int,
    flip: int,
) -> Tensor:
    """Packs codes, in plain torch."""
    kind = format_of_number(format_number)
    codes = Words(words, (n, k), bits, order, skip, flip).codes()
    codes = torch.nn.functional.pad(codes, (0, kind.padded(k) - k))
    return torch.cat([header, layout.pack_codes(codes, kind)], dim=1)


def fake_from_words(words: Tensor, header: Tensor, format_number: int, n: int, k: int, *_: int) -> Tensor:
    """Returns an empty result."""
    return header.new_empty(header.shape[0], format_of_number(format_number).group_bytes(k))
