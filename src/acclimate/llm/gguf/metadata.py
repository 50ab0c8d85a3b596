"""Reads the keys of a GGUF file's architecture, checks their types, and refuses keys that were not read."""

from __future__ import annotations

import math

from acclimate.errors import CorruptModelError, UnsupportedModelError, some_of
from acclimate.llm.gguf.header import GGUFHeader, Scalar, TensorEntry

_LARGEST_SIZE = 1 << 31
# Keys that describe the file or its training, or that llama.cpp reads only for architectures handled here.
_WITHOUT_EFFECT = frozenset(
    {
        "attention.sliding_window",
        "context_length",
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "vocab_size",
    }
)


class Metadata:
    """The keys of a file's architecture; remembers which have been read."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.tensors: dict[str, TensorEntry] = {tensor.name: tensor for tensor in header.tensors}
        self._prefix = f"{header.architecture}."
        self._asked: set[str] = set()

    def size(self, key: str, default: int | None = None) -> int:
        """Returns a count or a width, from 1 to 2^31."""
        value = self._scalar(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST_SIZE:
            raise self._wrong(key, value, "a whole number above 0")
        return value

    def size_or_none(self, key: str) -> int | None:
        """Like :meth:`size`, but ``None`` if the key is missing or 0, which switches a feature off."""
        return None if self._scalar(key) in (None, 0) else self.size(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a finite number above 0."""
        value = self._scalar(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """Like :meth:`number`, but ``None`` if the key is missing or 0, which switches a feature off."""
        return None if self._scalar(key) in (None, 0) else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """Returns a boolean."""
        value = self._scalar(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """Returns a string."""
        value = self._scalar(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def window_pattern(self, default: int) -> int | tuple[bool, ...]:
        """Returns which layers use the window: all but each n-th (0: all), or a flag for each layer."""
        key = "attention.sliding_window_pattern"
        numbers = self.header.numbers(self._prefix + key)
        if numbers is None:
            return self.size(key, default) if self._scalar(key) != 0 else 0
        self._asked.add(key)
        return tuple(bool(number) for number in numbers)

    def counts_by_layer(self, key: str) -> tuple[int, ...]:
        """Returns whole numbers from 0 to 2^31, one for each block; the file may have one for all."""
        numbers, blocks = self.header.numbers(self._prefix + key), self.size("block_count")
        if numbers is None:
            return (self.size(key),) * blocks
        self._asked.add(key)
        if len(numbers) != blocks or not _are_counts(numbers):
            raise CorruptModelError(
                f"{self.header.path} is corrupt: {self._prefix}{key} must be a whole number for each of "
                f"{blocks:,} blocks; it has {len(numbers):,} entries: {some_of(map(str, set(numbers)))}"
            )
        return tuple(int(number) for number in numbers)

    def flags_by_layer(self, key: str) -> tuple[bool, ...] | None:
        """Returns a flag for each block, of which the file may have one for all; ``None`` if it has none."""
        if self.header.numbers(self._prefix + key) is None:
            flag = self._scalar(key)
            return None if flag is None else (self.flag(key, False),) * self.size("block_count")
        return tuple(count > 0 for count in self.counts_by_layer(key))

    def counts(self, key: str) -> tuple[int, ...]:
        """Returns a list of whole numbers from 0 to 2^31, which the file must have."""
        numbers = self.header.numbers(self._prefix + key)
        self._asked.add(key)
        if numbers is None or not _are_counts(numbers):
            raise self._wrong(key, None if numbers is None else str(list(numbers)), "a list of whole numbers")
        return tuple(int(number) for number in numbers)

    def token(self, name: str) -> int | None:
        """Returns the number of a special token, such as ``eos``; ``None`` if missing or out of range."""
        value = self.header.value(f"tokenizer.ggml.{name}_token_id")
        whole = isinstance(value, int) and not isinstance(value, bool)
        return value if whole and 0 <= value < self.shape("token_embd.weight", 2)[0] else None  # type: ignore[operator, return-value]

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        """Returns the shape of a tensor that the model needs."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CorruptModelError(f"{self.header.path} lacks {name}, which its model needs")
        if len(tensor.shape) != dimensions:
            raise CorruptModelError(
                f"{self.header.path}: tensor {name!r} has the shape {tensor.shape}, "
                f"its model needs one of {dimensions} dimensions"
            )
        return tensor.shape

    def refuse_unless(self, key: str, *accepted: Scalar) -> None:
        """Raises :class:`UnsupportedModelError` if a key is there with a value that is not accepted."""
        value = self._scalar(key)
        if value is not None and value not in accepted:
            raise self._unsupported(self._prefix + key, repr(value))

    def refuse_unread(self) -> None:
        """Raises :class:`UnsupportedModelError` if a key that changes the model has not been read."""
        from gguf.constants import Keys

        known = {
            template.removeprefix("{arch}.")
            for group in vars(Keys).values()
            if isinstance(group, type)
            for template in vars(group).values()
            if isinstance(template, str) and template.startswith("{arch}.")
        }
        for full, entry in self.header.metadata.items():
            key = full.removeprefix(self._prefix)
            # llama.cpp itself ignores keys that it does not know.
            if key == full or key in self._asked or key in _WITHOUT_EFFECT or key not in known:
                continue
            if entry.array_length is not None or entry.value not in (0, "", "none"):
                shown = "a list" if entry.array_length is not None else repr(entry.value)
                raise self._unsupported(full, shown)

    def _scalar(self, key: str) -> Scalar | None:
        self._asked.add(key)
        entry = self.header.metadata.get(self._prefix + key)
        if entry is not None and entry.array_length is not None:
            raise UnsupportedModelError(
                f"{self.header.path} gives {self._prefix}{key} for each layer; only one value for all layers "
                "can be converted"
            )
        return None if entry is None else entry.value

    def _unsupported(self, full: str, shown: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.header.path} sets {full} to {shown}, but a {self.header.architecture} model in "
            "transformers has no setting for that"
        )

    def _wrong(self, key: str, value: Scalar | None, wanted: str) -> CorruptModelError:
        if value is None:
            return CorruptModelError(f"{self.header.path} lacks the key {self._prefix}{key}")
        return CorruptModelError(
            f"{self.header.path} is corrupt: {self._prefix}{key} must be {wanted}; it is {value!r}"
        )


def _are_counts(numbers: tuple[int | float | bool, ...]) -> bool:
    return all(0 <= number <= _LARGEST_SIZE and number == int(number) for number in numbers)
