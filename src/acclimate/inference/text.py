"""Tokens to text as they come, without breaking characters or losing spaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decoders show for bytes that are no character (yet)
_CONTEXT = 6  # tokens of the prompt that are decoded along: the first piece's leading space depends on them
# No character has more than 4 bytes, and no tokenizer spends more than a token on one: what is still
# incomplete after these is not going to be a character.
_LONGEST_CHARACTER = 4


class Tokenizer(Protocol):
    """What generation needs of a tokenizer."""

    end_token: int | None
    """The token that ends a text, if the tokenizer knows it."""

    def encode(self, text: str) -> list[int]:
        """The prompt's tokens, with what the model wants before them."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without special ones."""
        ...


class HubTokenizer:
    """Any tokenizer that transformers can load."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        self.end_token: int | None = self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """The prompt's tokens, with what the model wants before them."""
        tokens: list[int] = self._tokenizer(text)["input_ids"]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without special ones."""
        return str(
            self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


class ConvertedTokenizer:
    """The tokenizer of a folder that acclimate itself made.

    There ``tokenizer.json`` says everything, so the tokenizers library alone gives what transformers
    would, in 1 s instead of 3 s for a vocabulary of 262,144: transformers reads the file twice.
    """

    end_token: int | None = None  # the folder's generation_config.json always says it

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as BackendTokenizer

        self._tokenizer: Any = BackendTokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        """The prompt's tokens, with what the model wants before them."""
        tokens: list[int] = self._tokenizer.encode(text).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class TextStream:
    """Turns a growing list of tokens into pieces of text.

    A piece is handed on once it is certain: bytes of an unfinished character wait for the rest of it. The
    text of a token depends on its neighbours (SentencePiece drops a leading space at the start of a text),
    so each piece is the difference between two decodings of a short window.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], on_text: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._tokens = list(prompt[-_CONTEXT:])
        self._known = len(self._tokens)  # tokens whose text has been handed on
        self._window = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All that has been handed on."""
        return "".join(self._pieces)

    def put(self, token: int) -> None:
        """Takes the next token."""
        self._tokens.append(token)
        self._advance(last=False)

    def end(self) -> None:
        """Hands on what waited; an unfinished character is dropped."""
        self._advance(last=True)

    def _advance(self, *, last: bool) -> None:
        before = self._tokenizer.decode(self._tokens[self._window : self._known])
        now = self._tokenizer.decode(self._tokens[self._window :])
        waiting = len(self._tokens) - self._known
        if now.endswith(_INCOMPLETE) and (last or waiting <= _LONGEST_CHARACTER):
            if not last:
                return
            now = now.rstrip(_INCOMPLETE)
        piece = now[len(before) :]
        if piece:
            # What was known stays in the window, as the context of what comes next.
            self._window, self._known = self._known, len(self._tokens)
            self._pieces.append(piece)
            self._on_text(piece)
