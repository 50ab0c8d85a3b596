"""Turns tokens into text as they arrive, without splitting characters or losing spaces, up to a stop text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from acclimate.llm.freed_memory import return_freed_memory
from acclimate.llm.text import vocabulary

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoders put it in place of an incomplete or invalid character
CONTEXT = 6
"""The tokens before a text that are decoded with it, because its leading space depends on them."""
LONGEST_CHARACTER = 4
"""A character has at most 4 bytes, and a byte at most one token: after 4 it is complete or invalid."""
_FEW_TEXTS = 16
"""For more texts than this, reading the whole vocabulary is faster."""


Message = Mapping[str, str]
"""A message of a conversation: its ``role`` (``system``, ``user`` or ``assistant``) and its ``content``."""


class NoTemplateError(Exception):
    """The tokenizer has no chat template."""


class HubTokenizer:
    """Any tokenizer that transformers can load."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        self.end_token: int | None = self._tokenizer.eos_token_id

    def encode(self, text: str, *, is_whole: bool = True) -> list[int]:
        """Returns the tokens of a text; of a whole one, after the model's start token, if it has one."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=is_whole)["input_ids"]
        return tokens

    @cached_property
    def added(self) -> frozenset[int]:
        """The tokens that are found whole in a text, such as those around a message."""
        return frozenset(self._tokenizer.added_tokens_decoder)

    def render(self, messages: Sequence[Message], template: str | None = None) -> str:
        """Returns a conversation as text, in the model's template or another, up to where its answer begins.

        Raises:
            NoTemplateError: there is no chat template.
        """
        return _rendered(self._tokenizer, messages, template)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of some tokens, without special tokens."""
        return str(
            self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


class ConvertedTokenizer:
    """The tokenizer of a folder that acclimate converted.

    Its ``tokenizer.json`` is complete, so the tokenizers library gives the same tokens without transformers,
    which reads the file twice: 1 s instead of 3 s for a vocabulary of 262,144. If the folder has a table of
    the vocabulary, the first texts need only a part of it.
    """

    end_token: int | None = None  # the folder's generation_config.json always has it

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"
        table = folder / vocabulary.FILE
        self._table = vocabulary.Vocabulary(table) if table.is_file() else None
        self._left = _FEW_TEXTS
        if self._table is None:
            _ = self._whole

    @cached_property
    def _whole(self) -> Any:
        from tokenizers import Tokenizer as BackendTokenizer

        made = BackendTokenizer.from_file(str(self._file))
        return_freed_memory()
        return made

    def encode(self, text: str, *, is_whole: bool = True) -> list[int]:
        """Returns the tokens of a text; of a whole one, after the model's start token, if it has one."""
        if self._table is not None and self._left > 0:
            self._left -= 1
            with contextlib.suppress(vocabulary.UnsuitableError):
                return self._table.encode(text, is_whole=is_whole)
        tokens: list[int] = self._whole.encode(text, add_special_tokens=is_whole).ids
        return tokens

    @cached_property
    def added(self) -> frozenset[int]:
        """The tokens that are found whole in a text, such as those around a message."""
        if self._table is not None:
            return self._table.added
        return frozenset(self._whole.get_added_tokens_decoder())

    @cached_property
    def _with_template(self) -> Any:
        """A tokenizer of transformers with the folder's template and special tokens, and no vocabulary."""
        from tokenizers import Tokenizer as BackendTokenizer
        from tokenizers import models
        from transformers import PreTrainedTokenizerFast

        file = self._file.with_name("chat_template.jinja")
        settings = json.loads(self._file.with_name("tokenizer_config.json").read_text(encoding="utf-8"))
        named = {
            name: text for name, text in settings.items() if name.endswith("_token") and text is not None
        }
        return PreTrainedTokenizerFast(
            tokenizer_object=BackendTokenizer(models.BPE()),
            chat_template=file.read_text(encoding="utf-8") if file.is_file() else None,
            **named,
        )

    def render(self, messages: Sequence[Message], template: str | None = None) -> str:
        """Returns a conversation as text, as the other class does."""
        return _rendered(self._with_template, messages, template)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of some tokens, without special tokens."""
        if self._table is not None:
            return self._table.decode(tokens)
        return str(self._whole.decode(list(tokens), skip_special_tokens=True))


def _rendered(tokenizer: Any, messages: Sequence[Message], template: str | None) -> str:
    if template is None and tokenizer.chat_template is None:
        raise NoTemplateError
    text: str = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    return text


Tokenizer: TypeAlias = HubTokenizer | ConvertedTokenizer
"""The tokenizer of a model. Its ``end_token`` is the end token, if it knows it."""


class TextStream:
    """Turns a growing list of tokens into pieces of text.

    A piece is passed on once it is final: the bytes of an incomplete character wait for the rest of it.
    The text of a token depends on its neighbours (SentencePiece drops a leading space at the start of a
    text), so each piece is the difference between two decodings of a short window.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], on_text: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._tokens = list(prompt[-CONTEXT:])
        self._known = len(self._tokens)  # tokens whose text has been passed on
        self._window = 0

    def put(self, token: int) -> None:
        """Adds the next token."""
        self._tokens.append(token)
        self._advance(last=False)

    def end(self) -> None:
        """Passes on the rest; drops an incomplete character."""
        self._advance(last=True)

    def _advance(self, *, last: bool) -> None:
        before = self._tokenizer.decode(self._tokens[self._window : self._known])
        now = self._tokenizer.decode(self._tokens[self._window :])
        waiting = len(self._tokens) - self._known
        if now.endswith(_INCOMPLETE) and (last or waiting <= LONGEST_CHARACTER):
            if not last:
                return
            now = now.rstrip(_INCOMPLETE)
        piece = now[len(before) :]
        if piece:
            # The tokens known before stay in the window as the context of the next piece.
            self._window, self._known = self._known, len(self._tokens)
            self._on_text(piece)


class StopTexts:
    """Passes pieces of a text on, up to the first stop text.

    A piece that may begin a stop text waits until it is clear that it does not.
    """

    def __init__(self, stops: Sequence[str], on_text: Callable[[str], None]) -> None:
        self._stops, self._on_text = tuple(stops), on_text
        self._waiting = ""
        self._pieces: list[str] = []
        self.found: str | None = None
        """The stop text that has ended the text."""

    @property
    def text(self) -> str:
        """The text passed on so far."""
        return "".join(self._pieces)

    def put(self, piece: str) -> None:
        """Adds a piece of text; nothing after a stop text."""
        if self.found is not None:
            return
        self._waiting += piece
        places = [(self._waiting.find(stop), stop) for stop in self._stops if stop in self._waiting]
        if places:
            place, self.found = min(places)
            self._pass_on(place)
            self._waiting = ""
            return
        self._pass_on(len(self._waiting) - max(map(self._begun, self._stops), default=0))

    def end(self) -> None:
        """Passes on what waits."""
        self._pass_on(len(self._waiting))

    def _begun(self, stop: str) -> int:
        """Returns how many characters at the end of the waiting text begin a stop text."""
        most = min(len(stop) - 1, len(self._waiting))
        return next((size for size in range(most, 0, -1) if self._waiting.endswith(stop[:size])), 0)

    def _pass_on(self, count: int) -> None:
        piece, self._waiting = self._waiting[:count], self._waiting[count:]
        if piece:
            self._pieces.append(piece)
            self._on_text(piece)
