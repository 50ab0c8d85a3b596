"""The numbers of a quantised matrix as its file has them: codes, and which scale and zero belong to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from acclimate.errors import CorruptModelError
from acclimate.llm.files.deferred_tensors import Region, Source
from acclimate.llm.kernels.words import Words

Range = tuple[int, int]
"""The first row or column, and the one after the last."""


@dataclass(frozen=True)
class Scales:
    """The scales and zeros of some rows and columns of a matrix."""

    scale: Tensor
    """[rows, groups], in the file's dtype."""
    zero: Tensor | None
    """[rows, groups], int16: the code of the value zero; ``None``: codes are numbers themselves."""
    group: Tensor
    """[columns], int64: the group of each column."""

    def joined(self, others: Sequence[Scales], dim: int) -> Scales:
        """Returns the scales of matrices below one another (``dim`` 0), or beside one another."""
        whole = [self, *others]
        if dim == 0:
            zero = (
                None
                if self.zero is None
                else torch.cat([part.zero for part in whole if part.zero is not None])
            )
            return replace(self, scale=torch.cat([part.scale for part in whole]), zero=zero)
        starts = torch.tensor([0, *(part.scale.shape[1] for part in whole)]).cumsum(0)
        group = torch.cat([part.group + int(start) for part, start in zip(whole, starts, strict=False)])
        zero = (
            None
            if self.zero is None
            else torch.cat([part.zero for part in whole if part.zero is not None], 1)
        )
        return Scales(torch.cat([part.scale for part in whole], 1), zero, group)

    def values(self, codes: Words | Tensor) -> Tensor:
        """Returns the values of codes in float32."""
        values = (codes.codes() if isinstance(codes, Words) else codes).float()
        if self.zero is not None:
            values -= self.zero.float()[:, self.group]
        return values.mul_(self.scale.float()[:, self.group])


class Reader(Protocol):
    """Reads parts of one matrix from its file."""

    shape: tuple[int, int]
    """Rows and columns: the outputs and inputs of the layer."""
    bits: int
    """The bits of a code in the file."""

    def scales(self, rows: Range, columns: Range) -> Scales:
        """Returns the scales of a part."""

    def codes(self, rows: Range, columns: Range) -> Words | Tensor:
        """Returns the codes of a part, or floating-point numbers without their scales."""


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """A matrix of a file as a tensor whose values are unpacked when they are read."""

    name: str
    """The name of the parameter, ``….weight``."""
    reader: Reader
    kind: str
    """How it is quantised, for messages: "4 bits of GPTQ"."""
    dtype: torch.dtype = torch.float32
    """The dtype in which values are computed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.reader.shape

    @property
    def stored_bits(self) -> float:
        """The bits of each value in the file, without those of scales."""
        return self.reader.bits

    def read_into(self, region: Region, out: Tensor) -> None:
        """Unpacks a region."""
        rows, columns = region
        out.copy_(self.reader.scales(rows, columns).values(self.reader.codes(rows, columns)))


def read(source: Source, region: Region | None = None) -> Tensor:
    """Returns a region of a file's tensor, or all of it."""
    region = tuple((0, size) for size in source.shape) if region is None else region
    out = torch.empty([stop - start for start, stop in region], dtype=source.dtype)
    source.read_into(region, out)
    return out


def require_shape(source: Source, shape: tuple[int, ...], because: str) -> None:
    """Raises :class:`CorruptModelError` unless a tensor has a shape."""
    if tuple(source.shape) != shape:
        raise CorruptModelError(
            f"the tensor {source.name} is of shape {list(source.shape)}; {because}, which needs {list(shape)}"
        )


def require_dtype(source: Source, is_right: Callable[[torch.dtype], bool], wanted: str) -> None:
    """Raises :class:`CorruptModelError` unless a tensor has a dtype of a kind."""
    if not is_right(source.dtype):
        raise CorruptModelError(f"the tensor {source.name} has the dtype {source.dtype}, not {wanted}")
