"""Keys and values of tokens that were read: a later text with the same beginning reads only the rest."""

from __future__ import annotations

import threading
from typing import Any

_LEAST_TOKENS = 32
"""A shorter beginning is read again: that takes no longer than one more step."""

_KNOWN_ARGUMENTS = {"input_ids", "attention_mask", "generation_config", "streamer", "tokenizer"}
_MOST_TEXTS = 16
_MOST_BYTES = 1 << 30


class ReadTokens:
    """The tokens of one text that have been read.

    Attributes:
        tokens: the tokens.
        cache: transformers' cache with their keys and values; ``None`` if the model keeps more than these, so
            that its cache cannot be cropped.
    """

    def __init__(self, module: Any) -> None:
        self.tokens: list[int] = []
        self.cache = _new_cache(module)

    def common(self, tokens: list[int]) -> int:
        """Returns how many of the tokens need not be read again; the last is always read, for its logits."""
        most = min(len(tokens) - 1, len(self.tokens))
        return next((place for place in range(most) if tokens[place] != self.tokens[place]), max(most, 0))

    def crop(self, length: int) -> None:
        """Keeps the first ``length`` tokens, at least one."""
        if length < len(self.tokens):
            self.cache.crop(length - len(self.tokens))
            del self.tokens[length:]

    def note(self, text: list[int]) -> None:
        """Notes that the cache holds the first tokens of a text, and no others. The last may not be read."""
        held = 0 if self.cache is None else int(self.cache.get_seq_length())
        if held > len(text):
            self.cache.crop(len(text) - held)
        self.tokens = text[:held]

    @property
    def bytes(self) -> int:
        """The size of the keys and values."""
        layers = () if self.cache is None else self.cache.layers
        return sum(held.nbytes for layer in layers for held in (layer.keys, layer.values) if held is not None)

    def copy_of_first(self, length: int, module: Any) -> ReadTokens:
        """Returns a copy of the first ``length`` tokens, which a text can continue."""
        made = ReadTokens(module)
        for index, layer in enumerate(self.cache.layers):
            made.cache.update(layer.keys[..., :length, :], layer.values[..., :length, :], index)
        made.tokens = self.tokens[:length]
        return made


def _new_cache(module: Any) -> Any:
    """Returns an empty cache that can be cropped; ``None`` if the model keeps more than keys and values."""
    from transformers import DynamicCache

    kinds = {type(layer).__name__ for layer in DynamicCache(config=module.config).layers}
    # Without a configuration, the layers with a window keep all tokens, so the cache can be cropped anywhere.
    return DynamicCache() if kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"} else None


class RemembersTexts:
    """A model whose ``generate`` reads only what is new after the beginning of an earlier text.

    It keeps the keys and values of the last 16 texts, or of fewer that take 1 GiB. What is kept is never
    changed, so several threads may generate at once. A text replaces those that it continues.

    Args:
        module: the model, on one rank.
        cancels: the type of the error with which a streamer ends a text between two steps. The prompt is kept
            then; after any other error, nothing of the text is.
    """

    def __init__(self, module: Any, cancels: type[Exception]) -> None:
        self._module, self._cancels = module, cancels
        self._kept: list[ReadTokens] = []  # the last used one comes last
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def generate(self, **arguments: Any) -> Any:
        """Generates like the model's own ``generate``."""
        prompt = _prompt_of(arguments)
        read = ReadTokens(self._module) if prompt is None else self._begun(prompt)
        if prompt is None or read.cache is None:
            return self._module.generate(**arguments)
        try:
            made = self._module.generate(**arguments, past_key_values=read.cache)
        except self._cancels:
            self._keep(read, prompt)
            raise
        self._keep(read, made[0].tolist())
        return made

    def _begun(self, prompt: list[int]) -> ReadTokens:
        """Returns what is kept of a prompt's beginning, for this text alone."""
        with self._lock:
            found = max(self._kept, key=lambda kept: kept.common(prompt), default=None)
            length = 0 if found is None else found.common(prompt)
            if found is None or length < _LEAST_TOKENS:
                return ReadTokens(self._module)
            self._kept.remove(found)
            self._kept.append(found)
        return found.copy_of_first(length, self._module)

    def _keep(self, read: ReadTokens, text: list[int]) -> None:
        """Keeps what was read of a text, and drops what was used longest ago."""
        read.note(text)
        if len(read.tokens) < _LEAST_TOKENS:
            return
        with self._lock:
            self._kept = [kept for kept in self._kept if kept.tokens != read.tokens[: len(kept.tokens)]]
            self._kept.append(read)
            while len(self._kept) > _MOST_TEXTS or sum(kept.bytes for kept in self._kept) > _MOST_BYTES:
                del self._kept[0]


def _prompt_of(arguments: dict[str, Any]) -> list[int] | None:
    """Returns the tokens of a call's prompt; ``None`` if their keys and values cannot be kept."""
    settings, ids = arguments["generation_config"], arguments["input_ids"]
    is_plain = (
        arguments.keys() <= _KNOWN_ARGUMENTS
        and len(ids) == 1
        and bool(arguments["attention_mask"].all())
        and settings.get_generation_mode() in ("greedy_search", "sample")
        and settings.num_return_sequences in (None, 1)
        and settings.cache_implementation is None
        and settings.use_cache is not False
        and not settings.return_dict_in_generate
    )
    return ids[0].tolist() if is_plain else None
