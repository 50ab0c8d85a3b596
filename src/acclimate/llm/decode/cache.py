"""Keys and values of earlier tokens, laid out for one query at a time."""

from __future__ import annotations

from collections.abc import Container
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acclimate.llm.decode.description import Attention, Decoder
from acclimate.llm.deferred_sigint import interrupts_deferred
from acclimate.llm.kernels.torch_threads import one_thread

ROOM = 256
"""The number of new tokens for which a cache is allocated."""
_LEAST_SPARE = 64


class StepCache:
    """The keys and values of all layers; grows. A layer with a window drops tokens that no query sees again.

    Args:
        decoder: the decoder whose keys and values are stored.
        batch: the number of sequences.
        device: the device of the tensors.
        room: the expected number of tokens.
        length: the number of tokens whose keys and values are put into it next.
        values_by_column: whether an element of all tokens' values is contiguous, else a token's values.
        kept: the layers that drop no later token, although they have a window.
    """

    def __init__(
        self,
        decoder: Decoder,
        batch: int,
        device: torch.device,
        room: int,
        *,
        length: int = 0,
        values_by_column: bool = False,
        kept: Container[int] = (),
    ) -> None:
        self._decoder, self._batch, self._device = decoder, batch, device
        self._by_column, self._kept = values_by_column, kept
        self.capacity = max(1, room, length)
        """The number of tokens for which layers without a window have room."""
        self.length = length
        self.revision = 0
        """Changes when the capacity, a layer's tensors or a layer's first place do."""
        self.firsts: list[int] = []
        """The place of the first token in each layer's tensors."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for index, attention in enumerate(self._attentions()):
            window = attention.window
            first = 0 if window is None else max(length - (window - 1), 0)
            count = self.capacity - first
            if window is not None and index not in kept:
                count = min(count, window + _spare(window))
            self.firsts.append(first)
            keys, values = self._empty_pair(attention, count)
            self.keys.append(keys)
            self.values.append(values)

    def _attentions(self) -> list[Attention]:
        return [layer.attention for layer in self._decoder.layers]

    def _empty_pair(self, attention: Attention, count: int) -> tuple[Tensor, Tensor]:
        """Returns tensors for the keys and values of so many tokens.

        They are zeros, because a masked value is multiplied by zero, and uninitialised memory may hold NaN.
        """
        heads, size, value_size = attention.key_heads, attention.head_size, attention.value_size
        dtype, device = self._decoder.dtype, self._device
        keys = _zeros((self._batch, heads, count, size), dtype, device)
        if not self._by_column:
            return keys, _zeros((self._batch, heads, count, value_size), dtype, device)
        return keys, _zeros((self._batch, heads, value_size, count), dtype, device).transpose(2, 3)

    def take(self, cache: Any) -> None:
        """Copies transformers' cache of as many tokens; that of a sliding window holds the last ones."""
        if self.length == 0:  # its layers may have no tensors yet
            return
        for index, (attention, layer) in enumerate(zip(self._attentions(), cache.layers, strict=True)):
            held, end = _as_keys(attention, layer.keys, layer.values), self.length - self.firsts[index]
            for mine, theirs in zip((self.keys[index], self.values[index]), held, strict=True):
                count = min(theirs.shape[2], end)
                mine[:, :, end - count : end] = theirs[:, :, theirs.shape[2] - count :]

    def copy_row(self, row: int, other: StepCache, of: int, start: int) -> None:
        """Copies the last tokens of a sequence, which starts at a place of another cache."""
        for to, source in ((self.keys, other.keys), (self.values, other.values)):
            for index, (mine, theirs) in enumerate(zip(to, source, strict=True)):
                end, their_end = self.length - self.firsts[index], other.length - other.firsts[index]
                count = min(end, their_end, other.length - start)
                mine[row, :, end - count : end] = theirs[of, :, their_end - count : their_end]

    def give(self, cache: Any) -> None:
        """Adds to transformers' cache the tokens that it lacks."""
        known = cache.get_seq_length()
        if self.length == known:
            return
        for index, (first, keys, values) in enumerate(zip(self.firsts, self.keys, self.values, strict=True)):
            new = [held[:, :, max(known - first, 0) : self.length - first] for held in (keys, values)]
            if first > known:  # zeros for what a window has passed: its layer only counts those tokens
                new = [torch.cat((e.new_zeros((*e.shape[:2], first - known, e.shape[3])), e), 2) for e in new]
            attention = self._attentions()[index]
            if attention.latent is not None:
                new = [new[1], new[0][..., attention.value_size :]]
            cache.update(new[0].contiguous(), new[1].contiguous(), index)

    def reserve(self, length: int) -> None:
        """Makes room for ``length`` tokens."""
        full = [
            index
            for index, (first, keys) in enumerate(zip(self.firsts, self.keys, strict=True))
            if length - first > keys.shape[2]
        ]
        if length <= self.capacity and not full:
            return
        # A text can go on after Ctrl-C. OpenMP's threads spin after their work, on cores that the kernels'
        # own threads need.
        with interrupts_deferred(), one_thread():
            self.revision += 1
            while self.capacity < length:
                self.capacity *= 2
            for index in full:
                self._make_room(index, length)

    def _make_room(self, index: int, length: int) -> None:
        """Makes room in a layer: drops what its window has passed, and allocates if that is not enough."""
        attention, first, count = self._attentions()[index], self.firsts[index], self.keys[index].shape[2]
        window, end = attention.window, self.length - first
        if window is None or index in self._kept:
            dropped, wanted = 0, self.capacity - first
        else:
            dropped = max(end - (window - 1), 0)
            least, most = length - first - dropped, window + max(length - self.length, _spare(window))
            wanted = max(least, min(2 * count, most))
        kept = [tensors[index][:, :, dropped:end] for tensors in (self.keys, self.values)]
        if wanted == count:
            kept = [part.clone() for part in kept]
        else:
            self.keys[index], self.values[index] = self._empty_pair(attention, wanted)
        for tensors, part in zip((self.keys, self.values), kept, strict=True):
            tensors[index][:, :, : end - dropped] = part
        self.firsts[index] = first + dropped


def _spare(window: int) -> int:
    """Returns for how many tokens more than a window there is room, so that tokens are rarely moved."""
    return max(window // 8, _LEAST_SPARE)


def _as_keys(attention: Attention, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of a layer of transformers' cache, which keeps latents as keys."""
    return (keys, values) if attention.latent is None else (torch.cat((keys, values), -1), keys)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros; on the host as memory that the kernel clears when it is first used.

    ``torch.zeros`` writes all of it, and wakes torch's threads for that, which then fight with the kernels'
    own threads: it took 14 ms for each layer's keys.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
