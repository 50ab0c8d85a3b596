"""A conversation with a model: each turn reads only what the model has not read yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from acclimate.errors import PromptError
from acclimate.llm.generation import (
    Generation,
    GenerationInterrupted,
    check_text,
    encoded,
    rendered,
    write_text,
)
from acclimate.llm.loading.loaded_model import LoadedModel
from acclimate.llm.read_tokens import ReadTokens
from acclimate.llm.text.tokenizers import CONTEXT, LONGEST_CHARACTER, Message
from acclimate.llm.text_options import TextOptions


class Conversation:
    """Messages, and the keys and values of their tokens.

    Args:
        loaded: the model.
        options: how its answers are written; checked here.
        system: instructions to the model, which come before the first message.
        template: a chat template in place of the model's own.

    Raises:
        PromptError: the model has no chat template, or its template has no place for instructions.
        GenerationOptionError: an option is out of range.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        options: TextOptions,
        system: str | None = None,
        template: str | None = None,
    ) -> None:
        options.check()
        self._loaded, self._options, self._system, self._template = loaded, options, system, template
        self.messages: list[Message] = []
        """All messages so far: those of the user and the model's answers."""
        self._text = ""  # of the messages, without what ends the last answer
        self._tokens: list[int] = []
        self._read: ReadTokens
        self.reset()
        rendered(loaded, [*self.messages, {"role": "user", "content": "…"}], template)

    @property
    def name(self) -> str:
        """The model's name."""
        return self._loaded.name

    @property
    def description(self) -> str:
        """What the model computes in and where."""
        return self._loaded.description

    def reset(self) -> None:
        """Forgets all messages but the instructions."""
        self.messages[:] = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._text, self._tokens = "", []
        self._forget()

    def answer(
        self,
        message: str,
        on_text: Callable[[str], None] | None = None,
        is_stopped: Callable[[], bool] | None = None,
    ) -> Generation:
        """Returns the model's answer to a message.

        If the answer is stopped, what there is of it stays in the conversation. After any other error, the
        message is not part of the conversation.

        Args:
            message: the user's message.
            on_text: called with each piece of text.
            is_stopped: asked after each token whether the answer must end here.

        Raises:
            GenerationInterrupted: Ctrl-C was pressed; holds the text so far.
            PromptError: the message is empty, or the conversation does not fit into the model's context.
            AcclimateError: the other errors of :func:`acclimate.llm.generate`.
        """
        check_text(message)
        messages = [*self.messages, {"role": "user", "content": message}]
        text, tokens = self._prompt(messages)
        known = self._read.common(tokens)
        if known == 0:
            self._forget()
        self._read.crop(known)
        try:
            made = write_text(self._loaded, tokens, self._options, on_text, self._read.cache, is_stopped)
        except GenerationInterrupted as interruption:
            if interruption.partial.tokens:
                self._keep(messages, text, tokens, interruption.partial)
            else:
                self._forget()  # some layers may have read more than others
            raise
        except PromptError:  # nothing has been read
            raise
        except BaseException:
            self._forget()
            raise
        self._keep(messages, text, tokens, made)
        self._options = dataclasses.replace(self._options, seed=None)  # else each answer draws the same
        return made

    def _prompt(self, messages: list[Message]) -> tuple[str, list[int]]:
        """Returns the text and the tokens of a conversation.

        The tokens of an answer stay those that the model has written, if they are this text. Another
        tokenization of it would have to be read again.
        """
        text = rendered(self._loaded, messages, self._template)
        if self._text and text.startswith(self._text):
            rest = encoded(self._loaded, text[len(self._text) :], is_whole=False)
            # Otherwise the last token before could take in the first characters of the rest.
            if rest and rest[0] in self._loaded.tokenizer.added:
                return text, self._tokens + rest
        return text, encoded(self._loaded, text, is_whole=False)

    def _keep(self, messages: list[Message], text: str, tokens: list[int], made: Generation) -> None:
        self.messages.append(messages[-1])
        self.messages.append({"role": "assistant", "content": made.text})
        written = list(made.tokens)
        self._read.note([*tokens, *written])
        if made.finish_reason == "end":
            written.pop()  # the template writes the end
        self._text, self._tokens = "", []
        decode, before = self._loaded.tokenizer.decode, tokens[-CONTEXT:]
        shown = decode(before) + made.text
        # An incomplete character at the end is not part of the text.
        for count in range(len(written), max(len(written) - LONGEST_CHARACTER, 0), -1):
            own = written[:count]
            if decode(before + own) == shown and self._loaded.tokenizer.added.isdisjoint(own):
                self._text, self._tokens = text + made.text, tokens + own
                return

    def _forget(self) -> None:
        self._read = ReadTokens(self._loaded.module)
