"""Keys and values of earlier tokens, laid out for one query at a time."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acclimate.llm.decode.description import Attention, Decoder

_FIRST = 256


class StepCache:
    """The keys and values of all layers; grows by doubling.

    Args:
        decoder: the decoder whose keys and values are stored.
        batch: the number of sequences.
        device: the device of the tensors.
        room: the expected number of tokens.
        values_by_column: whether an element of all tokens' values is contiguous, else a token's values.
    """

    def __init__(
        self,
        decoder: Decoder,
        batch: int,
        device: torch.device,
        room: int = _FIRST,
        *,
        values_by_column: bool = False,
    ) -> None:
        self._decoder, self._batch, self._device = decoder, batch, device
        self._by_column = values_by_column
        self.capacity = max(1, room)
        self.length = 0
        self.keys = [self._empty(a.key_heads, a.head_size) for a in self._attentions()]
        self.values = [self._empty(a.key_heads, a.value_size, self._by_column) for a in self._attentions()]

    def _attentions(self) -> list[Attention]:
        return [layer.attention for layer in self._decoder.layers]

    def _empty(self, heads: int, size: int, by_column: bool = False) -> Tensor:
        # Zeros, because a masked value is multiplied by zero, and uninitialised memory may hold NaN.
        shape = (size, self.capacity) if by_column else (self.capacity, size)
        made = _zeros((self._batch, heads, *shape), self._decoder.dtype, self._device)
        return made.transpose(2, 3) if by_column else made

    def take(self, cache: Any, length: int) -> None:
        """Copies transformers' cache of ``length`` tokens; that of a sliding window holds the last tokens."""
        self.reserve(length)
        self.length = length
        if length == 0:  # its layers may have no tensors yet
            return
        for index, (attention, layer) in enumerate(zip(self._attentions(), cache.layers, strict=True)):
            held = _as_keys(attention, layer.keys, layer.values)
            for mine, theirs in zip((self.keys[index], self.values[index]), held, strict=True):
                mine[:, :, length - theirs.shape[2] : length] = theirs

    def give(self, cache: Any) -> None:
        """Adds to transformers' cache the tokens that it lacks."""
        first = cache.get_seq_length()
        if self.length == first:
            return
        for index, attention in enumerate(self._attentions()):
            keys, values = (held[index][:, :, first : self.length] for held in (self.keys, self.values))
            if attention.latent is not None:
                keys, values = values, keys[..., attention.value_size :]
            cache.update(keys.contiguous(), values.contiguous(), index)

    def reserve(self, length: int) -> bool:
        """Makes room for ``length`` tokens; returns whether new tensors were allocated."""
        if length <= self.capacity:
            return False
        while self.capacity < length:
            self.capacity *= 2
        for tensors, by_column in ((self.keys, False), (self.values, self._by_column)):
            for index, old in enumerate(tensors):
                new = self._empty(old.shape[1], old.shape[3], by_column)
                new[:, :, : self.length] = old[:, :, : self.length]
                tensors[index] = new
        return True


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
