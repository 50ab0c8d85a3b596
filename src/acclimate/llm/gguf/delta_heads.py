"""The order in which a GGUF file has the heads of a gated delta rule, as in Qwen3-Next and Qwen 3.5.

A key head serves the value heads of its group. transformers numbers the value heads group by group. The files
of Qwen 3.5 have the first value head of all groups, then the second of all, and so on. For Qwen3-Next,
transformers has one matrix with the queries, keys, values and gates of a group next to one another; its files
have all queries, then all keys, then all values, and the gates in a tensor of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

Ranges = tuple[tuple[int, int], ...]

_LEAF = re.compile(r"\.linear_attn\.(\w+?)(?:\.weight)?$")


def delta_leaf(parameter: str) -> str | None:
    """Returns the name of a parameter within its gated delta rule; ``None`` if it is not in one."""
    found = _LEAF.search(parameter)
    return None if found is None else found[1]


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a model's gated delta rules."""

    keys: int
    values: int
    key_size: int
    value_size: int
    is_tiled: bool
    """Whether a file has a value head of each group in turn."""

    @classmethod
    def of(cls, config: Any, *, is_tiled: bool) -> DeltaHeads | None:
        """Returns the heads that a model's config gives; ``None`` if it has no gated delta rules."""
        if getattr(config, "linear_num_key_heads", None) is None:
            return None
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        sizes = config.linear_key_head_dim, config.linear_value_head_dim
        return cls(keys, values, *sizes, is_tiled and values > keys)

    def joined_shapes(self, inputs: int) -> list[tuple[int, int]]:
        """Returns the shapes of the file's two tensors that hold the ``in_proj_qkvz`` of Qwen3-Next."""
        values = self.values * self.value_size
        return [(2 * self.keys * self.key_size + values, inputs), (values, inputs)]

    def joined_rows(self) -> list[tuple[int, int, int]]:
        """Returns these tensors' rows in the order of ``in_proj_qkvz``: tensor, first row, count."""
        size, keys = self.key_size, self.keys * self.key_size
        group = self.values // self.keys * self.value_size
        return [
            rows
            for head in range(self.keys)
            for rows in (
                (0, head * size, size),
                (0, keys + head * size, size),
                (0, 2 * keys + head * group, group),
                (1, head * group, group),
            )
        ]

    def rows(self, leaf: str) -> Ranges:
        """Returns the ranges of the file's rows in a parameter's order; empty if it is the same."""
        if leaf in ("in_proj_qkv", "conv1d"):
            keys = 2 * self.keys * self.key_size
            values = self._by_group(self.value_size, first=keys)
            return ((0, keys), *values) if values else ()
        sizes = {"in_proj_z": self.value_size, "in_proj_a": 1, "in_proj_b": 1}
        return self._by_group(sizes[leaf]) if leaf in sizes else ()

    def columns(self, leaf: str) -> Ranges:
        """Returns the ranges of the file's columns, or a vector's values, in a parameter's order."""
        sizes = {"out_proj": self.value_size, "A_log": 1, "dt_bias": 1}
        return self._by_group(sizes[leaf]) if leaf in sizes else ()

    def _by_group(self, size: int, first: int = 0) -> Ranges:
        """Returns where the file has each value head, group by group; empty if it has them in this order."""
        if not self.is_tiled:
            return ()
        starts = (
            first + (number * self.keys + group) * size
            for group in range(self.keys)
            for number in range(self.values // self.keys)
        )
        return tuple((start, start + size) for start in starts)
