"""Keys and values of earlier tokens, laid out for one query at a time, inputs of convolutions, and states.

In int8, each 16 elements of a key or value are whole numbers from -127 to 127 times a power of two, the
smallest that suffices: 8.5 bits for an element. Such numbers are exact in every dtype of a model, so that a
cache that is given to transformers and taken back holds the same numbers.
"""

from __future__ import annotations

from collections.abc import Container
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acclimate.llm.decode.description import Attention, Decoder, DeltaRule, Mixer
from acclimate.llm.deferred_sigint import interrupts_deferred
from acclimate.llm.kernels.torch_threads import one_thread

ROOM = 256
"""The number of new tokens for which a cache is allocated."""
_LEAST_SPARE = 64
_BLOCK = 16
"""The elements of a key or value in int8 that one power of two multiplies: int8_columns in linear.h."""


class StepCache:
    """The keys and values of all layers that have their own; grows.

    A layer with a window drops tokens that no query sees again. The inputs of a convolution are kept as keys
    with a window, in the decoder's dtype.

    A recurrent state has two copies: a step reads one, which stays as it is, and writes the other. So a step
    that failed can be taken again, and ``length`` may be set back by the last step, but by no more.

    Args:
        decoder: the decoder whose keys and values are stored.
        batch: the number of sequences.
        device: the device of the tensors.
        room: the expected number of tokens.
        length: the number of tokens whose keys and values are put into it next.
        values_by_column: whether an element of all tokens' values is contiguous, else a token's values.
        kept: the layers that drop no later token, although they have a window.
        dtype: the dtype of keys and values, int8 or the decoder's; ``None``: the decoder's.
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
        dtype: torch.dtype | None = None,
    ) -> None:
        self._decoder, self._batch, self._device = decoder, batch, device
        self._by_column, self._kept = values_by_column, kept
        self.dtype = decoder.dtype if dtype is None else dtype
        self.capacity = max(1, room, length)
        """The number of tokens for which layers without a window have room."""
        self.length = length
        self.revision = 0
        """Changes when the capacity, a layer's tensors or a layer's first place do."""
        self.firsts: list[int] = []
        """The place of the first token in each layer's tensors."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.exponents: tuple[list[Tensor], ...] = ([], []) if self.dtype == torch.int8 else ()
        """Of keys and of values in int8: the powers of two of each token's blocks."""
        self.states: dict[int, Tensor] = {
            index: torch.zeros(
                (2, batch, mixer.heads, mixer.key_size, mixer.value_size), dtype=torch.float32, device=device
            )
            for index, mixer in enumerate(self._mixers())
            if isinstance(mixer, DeltaRule)
        }
        """By layer: both copies of its recurrent state."""
        self._state_lengths: list[int | None] = [length, None]
        """The number of tokens that each copy is of."""
        for index, mixer in enumerate(self._mixers()):
            window = mixer.window
            first = 0 if window is None else max(length - (window - 1), 0)
            count = self.capacity - first
            if window is not None and index not in kept:
                count = min(count, window + _spare(window))
            self.firsts.append(first)
            for tensors, made in zip(self._parts, self._empty(mixer, count), strict=True):
                tensors.append(made)

    @property
    def _parts(self) -> tuple[list[Tensor], ...]:
        """The tensors of all layers, whose third dimension is that of tokens."""
        return self.keys, self.values, *self.exponents

    def _mixers(self) -> list[Mixer]:
        return self._decoder.own_mixers

    def _is_int8(self, mixer: Mixer) -> bool:
        return self.dtype == torch.int8 and isinstance(mixer, Attention)

    def _empty(self, mixer: Mixer, count: int) -> list[Tensor]:
        """Returns a layer's tensors for so many tokens.

        They are zeros, because a masked value is multiplied by zero, and uninitialised memory may hold NaN.
        """

        heads, *sizes = (
            (mixer.key_heads, mixer.head_size, mixer.value_size)
            if isinstance(mixer, Attention)
            else (1, mixer.channels, 0)
        )

        def pair(dtype: torch.dtype, size: int, value_size: int) -> list[Tensor]:
            rows = self._batch, heads
            keys = _zeros((*rows, count, size), dtype, self._device)
            if not self._by_column:
                return [keys, _zeros((*rows, count, value_size), dtype, self._device)]
            return [keys, _zeros((*rows, value_size, count), dtype, self._device).transpose(2, 3)]

        is_int8 = self._is_int8(mixer)
        made = pair(torch.int8 if is_int8 else self._decoder.dtype, *sizes)
        if self.exponents:
            made += pair(torch.uint8, *(-(-size // _BLOCK) if is_int8 else 0 for size in sizes))
        return made

    def _put(self, index: int, keys: Tensor, values: Tensor, end: int) -> None:
        """Stores the last keys and values in a layer, so that the last one comes before ``end``."""
        for tensors, new in zip(self._parts, self._as_parts(index, keys, values), strict=True):
            count = min(new.shape[2], end)
            tensors[index][:, :, end - count : end] = new[:, :, new.shape[2] - count :]

    def _as_parts(self, index: int, keys: Tensor, values: Tensor) -> list[Tensor]:
        if not self.exponents:
            return [keys, values]
        if not self._is_int8(self._mixers()[index]):
            return [keys, values, keys[..., :0], values[..., :0]]
        (keys, of_keys), (values, of_values) = map(_as_int8, (keys, values))
        return [keys, values, of_keys, of_values]

    def put(self, index: int, place: int, key: Tensor, value: Tensor) -> None:
        """Stores the key and value of each sequence's token at a place."""
        self._put(index, key[:, :, None], value[:, :, None], place + 1 - self.firsts[index])

    def put_at(self, index: int, place: Tensor, key: Tensor, value: Tensor) -> None:
        """As :meth:`put`, at a place that is a number on the device: a graph reads it at each replay."""
        at = (place - self.firsts[index] if self.firsts[index] else place)[None]
        parts = self._as_parts(index, key[:, :, None], value[:, :, None])
        for tensors, new in zip(self._parts, parts, strict=True):
            tensors[index].index_copy_(2, at, new)

    def held(self, index: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values, in the decoder's dtype, from one place to before another."""
        first = self.firsts[index]
        keys, values, *exponents = (held[index][:, :, begin - first : end - first] for held in self._parts)
        if exponents and self._is_int8(self._mixers()[index]):
            keys, values = (
                _from_int8(codes, powers, self._decoder.dtype)
                for codes, powers in zip((keys, values), exponents, strict=True)
            )
        return keys, values

    def state(self, index: int) -> Tensor:
        """Returns a layer's recurrent state after the cache's tokens: batch x heads x keys x values."""
        return self.states[index][self._copy]

    @property
    def _copy(self) -> int:
        if self.length not in self._state_lengths:
            raise RuntimeError(f"the cache has no recurrent state after {self.length} tokens")
        return self._state_lengths.index(self.length)

    def begin_step(self) -> int:
        """Returns which copy of each recurrent state a step reads; it writes the other one."""
        if not self.states:
            return 0
        read = self._copy
        self._state_lengths[1 - read] = None
        return read

    def end_step(self, tokens: int) -> None:
        """Counts the tokens of each sequence that a step has added, and whose states it has written."""
        if self.states:
            self._state_lengths[1 - self._copy] = self.length + tokens
        self.length += tokens

    def take(self, cache: Any) -> None:
        """Copies transformers' cache of as many tokens; that of a sliding window holds the last ones."""
        if self.length == 0:  # its layers may have no tensors yet
            return
        for index, (mixer, layer) in enumerate(zip(self._mixers(), cache.layers, strict=False)):
            self._put(index, *_as_keys(mixer, layer), self.length - self.firsts[index])
            if index in self.states:
                self.state(index).copy_(layer.recurrent_states[0])

    def copy_row(self, row: int, other: StepCache, of: int, start: int) -> None:
        """Copies the last tokens of a sequence, which starts at a place of another cache."""
        for index, mixer in enumerate(self._mixers()):
            if index in self.states:
                self.state(index)[row] = other.state(index)[of]
            # Convolutions see padding.
            most = other.length - (start if isinstance(mixer, Attention) else 0)
            end, their_end = self.length - self.firsts[index], other.length - other.firsts[index]
            count = min(end, their_end, most)
            for to, source in zip(self._parts, other._parts, strict=True):
                mine, theirs = to[index], source[index]
                mine[row, :, end - count : end] = theirs[of, :, their_end - count : their_end]

    def give(self, cache: Any) -> None:
        """Adds to transformers' cache the tokens that it lacks."""
        known = cache.get_seq_length()
        if self.length == known:
            return
        for index, (mixer, first) in enumerate(zip(self._mixers(), self.firsts, strict=True)):
            if not isinstance(mixer, Attention):
                self._give_inputs(index, mixer.width, cache)
                if index in self.states:
                    cache.update_recurrent_state(self.state(index), index)
                continue
            new = list(self.held(index, max(known, first), self.length))
            if first > known:  # zeros for what a window has passed: its layer only counts those tokens
                new = [torch.cat((e.new_zeros((*e.shape[:2], first - known, e.shape[3])), e), 2) for e in new]
            if mixer.latent is not None:
                new = [new[1], new[0][..., mixer.value_size :]]
            cache.update(new[0].contiguous(), new[1].contiguous(), index)

    def _give_inputs(self, index: int, width: int, cache: Any) -> None:
        """Gives a layer of transformers' cache as many of the last inputs of a convolution as it keeps."""
        inputs = self.held(index, max(self.length - width, self.firsts[index]), self.length)[0][:, 0]
        inputs = torch.nn.functional.pad(inputs, (0, 0, width - inputs.shape[1], 0))
        cache.update_conv_state(inputs.transpose(1, 2).contiguous(), index, conv_kernel_size=width)

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
        mixer, first, count = self._mixers()[index], self.firsts[index], self.keys[index].shape[2]
        window, end = mixer.window, self.length - first
        if window is None or index in self._kept:
            dropped, wanted = 0, self.capacity - first
        else:
            dropped = max(end - (window - 1), 0)
            least, most = length - first - dropped, window + max(length - self.length, _spare(window))
            wanted = max(least, min(2 * count, most))
        kept = [tensors[index][:, :, dropped:end] for tensors in self._parts]
        if wanted == count:
            made = [tensors[index] for tensors in self._parts]
            kept = [part.clone() for part in kept]
        else:
            made = self._empty(mixer, wanted)
        for tensors, new, part in zip(self._parts, made, kept, strict=True):
            new[:, :, : end - dropped] = part
            tensors[index] = new
        self.firsts[index] = first + dropped


def _spare(window: int) -> int:
    """Returns for how many tokens more than a window there is room, so that tokens are rarely moved."""
    return max(window // 8, _LEAST_SPARE)


def _as_keys(mixer: Mixer, layer: Any) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of a layer of transformers' cache, which keeps latents as keys."""
    if not isinstance(mixer, Attention):
        inputs = layer.conv_states[0].transpose(1, 2)[:, None]
        return inputs, inputs[..., :0]
    keys, values = layer.keys, layer.values
    return (keys, values) if mixer.latent is None else (torch.cat((keys, values), -1), keys)


def _as_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys or values in int8, and the exponents of their powers of two, which are 2^(exponent - 127).

    As ``store_int8`` in ``decode_math.cpp``. A block with an infinity or NaN becomes NaN: infinity times 0.
    """
    size = values.shape[-1]
    blocks = torch.nn.functional.pad(values.float(), (0, -size % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    largest = blocks.abs().amax(-1)
    is_finite = largest.isfinite()
    # The exponent of largest / 127, rounded up.
    exponents = (((largest / 127).view(torch.int32) + 0x7FFFFF) >> 23).where(is_finite, 255)
    inverse = ((254 - exponents.clamp(max=254)) << 23).view(torch.float32)
    codes = (blocks * inverse[..., None]).round().where(is_finite[..., None], 0.0)
    return codes.flatten(-2)[..., :size].to(torch.int8), exponents.to(torch.uint8)


def _from_int8(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the keys or values that are stored in int8."""
    powers = (exponents.int() << 23).view(torch.float32).repeat_interleave(_BLOCK, -1)
    # A block that ends at 65504 is rounded to 65536, which float16 does not have.
    largest = torch.finfo(dtype).max
    return (codes * powers[..., : codes.shape[-1]]).clamp(-largest, largest).to(dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros; on the host as memory that the kernel clears when it is first used.

    ``torch.zeros`` writes all of it, and wakes torch's threads for that, which then fight with the kernels'
    own threads: it took 14 ms for each layer's keys.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
