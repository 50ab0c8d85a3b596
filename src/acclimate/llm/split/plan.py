"""A plan: how a model, its parameters and its modules are split over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["columns", "rows", "vocabulary", "experts", "replicated"]
Source = Literal["user", "published", "structure"]
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Plan:
    """How a model is split over ``size`` ranks."""

    size: int
    splits: Mapping[str, Split]
    """Every parameter and persistent buffer of the whole model, by its name."""
    source: Mapping[str, Source]
    """Per split module, who decided the split: user, published plan or structure."""
    modules: Mapping[str, Change]
    """Per changed module, the change."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Per name of a tied parameter, the name of the first parameter that it is tied to."""
    partial: frozenset[str] = frozenset()
    """Parameters whose gradient each rank computes only in part."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Per linear module that stays whole, the reason."""


@dataclass(frozen=True)
class Split:
    """How one parameter or persistent buffer of the whole model is split over ranks.

    ``parts`` has for each rank the ``[start, stop)`` ranges along ``dim``; concatenated in this order
    they are the rank's shard. Ranges of two ranks overlap if the ranks share key/value heads. A rank with
    ``()`` holds nothing.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    dim: int
    parts: tuple[Ranges, ...]

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's shard; its ``dim`` is 0 for a rank that holds nothing."""
        if not self.shape:
            return self.shape
        length = sum(stop - start for start, stop in self.parts[rank])
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


@dataclass(frozen=True)
class Change:
    """The change that ``apply_plan`` makes to one module besides replacing its parameters by shards."""

    role: Literal["columns", "rows", "vocabulary", "head", "norm", "experts", "block", "whole"]
    copies_input: bool = False
    """The gradient of the input is summed over ranks."""
    copies_output: bool = False
    """The gradient of the output is summed over ranks."""
    width: int = 0
    """The unsplit width: of the output for ``columns``, of the input for ``rows``."""
    expands: tuple[bool, ...] = ()
    """Per rank, whether ``columns`` pads its output with zeros to the whole width; ``rows`` then selects."""
    parts: tuple[Ranges, ...] = ()
    """Per rank, its columns of the whole width."""
    attributes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Per attribute of the module (``config.x`` for one of its configuration), each rank's value."""
    arguments: Mapping[str | int, tuple[int, tuple[Ranges, ...]]] = field(default_factory=dict)
    """Per argument of ``forward``, the dimension and each rank's ranges along it."""
    region: str = ""
    """The name of the rows module that columns feed, set on both; between them ranks differ in dropout."""
    norm: Literal["rms", "rms+1", "layer", ""] = ""
    """The formula of a normalization over all columns, whose statistics are summed over ranks."""
    sees_all: bool = False
    """Whether that normalization is in a padded block, where other ranks' columns are zeros."""


def shard(tensor: Tensor, split: Split, rank: int) -> Tensor:
    """Returns a rank's part of a whole tensor: a view if the part is one range, else a copy."""
    if not split.shape:
        return tensor
    pieces = [tensor.narrow(split.dim, start, stop - start) for start, stop in split.parts[rank]]
    if not pieces:
        return tensor.narrow(split.dim, 0, 0)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, split.dim)


def ranges(indices: Sequence[int]) -> Ranges:
    """Returns the ``[start, stop)`` ranges of indices, in the given order."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return tuple(found)
