"""``acclimate chat``: a conversation with a language model, on a terminal or through pipes.

Answers go to stdout. All else goes to stderr, so that ``acclimate chat < questions > answers`` works too:
each line of stdin is a message then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from acclimate.errors import PromptError
from acclimate.host.exit_codes import INTERRUPTED
from acclimate.host.replace_file import replace_file
from acclimate.llm.commands.request import (
    Request,
    add_chat_options,
    add_loading_options,
    add_model_argument,
    add_process_options,
    add_text_options,
    begin_alone,
    check_process_options,
    messages,
    read_request,
)
from acclimate.llm.progress import figures_line, terminal_columns

if TYPE_CHECKING:
    from acclimate.llm.commands.chat_ranks import RanksPartner
    from acclimate.llm.conversation import Conversation
    from acclimate.llm.generation import Generation

_MOST_NEW_TOKENS = 1024
_QUOTES = '"""'
_HELP = f"""\
/reset        forget the conversation
/save [FILE]  save the conversation as JSON
/help         show this list
/exit         end (also Ctrl-D)
{_QUOTES}           begins and ends a message of several lines
Ctrl-C        stop the answer
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``acclimate chat``."""
    add_model_argument(parser, required=False)
    add_chat_options(parser)
    add_text_options(
        parser, max_new_tokens=_MOST_NEW_TOKENS, temperature="the model's own, or 0.8 if it has none"
    )
    add_loading_options(parser)
    add_process_options(parser)
    # Passed to the processes that this command starts: the width of the terminal on stderr, or 0.
    parser.add_argument("--as_launcher", type=int, metavar="COLUMNS", help=argparse.SUPPRESS)
    parser.add_argument("--as_rank", type=int, metavar="COLUMNS", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code: 0, or 130 after Ctrl-C without an answer to stop."""
    if args.as_rank is not None or args.as_launcher is not None:
        from acclimate.llm.commands.chat_ranks import run_part

        return run_part(args)
    try:
        ranks = check_process_options(args)
        request = read_request(args)
        with _partner(args, request, ranks) as partner:
            return _Chat(partner).run()
    except KeyboardInterrupt:
        sys.stderr.write("\nacclimate chat: interrupted\n")
        return INTERRUPTED


@contextlib.contextmanager
def _partner(args: argparse.Namespace, request: Request, ranks: int) -> Iterator[Conversation | RanksPartner]:
    """Yields who answers: a model in this process, or one on several ranks."""
    if ranks > 1:
        from acclimate.llm.commands.chat_ranks import RanksPartner

        with RanksPartner(args, terminal_columns()) as partner:
            yield partner
        return
    with messages():
        begin_alone("chat", args)
        from acclimate.llm.conversation import Conversation
        from acclimate.llm.loading.load import load_model

        loaded = load_model(**request.model)
        yield Conversation(loaded, request.text, request.system, request.template)


class _Chat:
    """Reads messages, shows answers, and obeys commands such as ``/reset``."""

    def __init__(self, partner: Conversation | RanksPartner) -> None:
        self._partner = partner
        self._is_on_terminal = sys.stdin.isatty()
        self._stops = 0
        self._is_answering = False
        self._last_stop_was_at_the_prompt = False

    def run(self) -> int:
        """Talks until the user ends it; returns the exit code."""
        if self._is_on_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() history and editing
            self._say(f"{self._partner.name} ({self._partner.description}). /help lists the commands.")
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._stop)
        try:
            while True:
                self._turn()
        except EOFError:  # the end of stdin, or /exit
            if self._is_on_terminal:
                self._say("")
            return 0
        finally:
            signal.signal(signal.SIGINT, before)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handles Ctrl-C: the first one during an answer stops it at its next token."""
        self._stops += 1
        if not self._is_answering or self._stops > 1:
            raise KeyboardInterrupt

    def _turn(self) -> None:
        try:
            message = self._read()
        except KeyboardInterrupt:
            if not self._is_on_terminal or self._last_stop_was_at_the_prompt:
                raise
            self._last_stop_was_at_the_prompt = True
            self._say("\n(Ctrl-C again, Ctrl-D or /exit ends)")
            return
        self._last_stop_was_at_the_prompt = False
        if not message.strip():
            return
        word, _, rest = message.strip().partition(" ")
        if word.startswith("/") and "/" not in word[1:] and "\n" not in word:
            self._obey(word, rest.strip())
            return
        try:
            self._answer(message)
        except PromptError as error:
            if not self._is_on_terminal:
                raise
            self._say(f"error: {error}. /reset forgets the conversation")

    def _answer(self, message: str) -> None:
        self._stops, self._is_answering = 0, True
        try:
            made = self._partner.answer(message, _show, lambda: self._stops > 0)
        finally:
            self._is_answering = False
        _show("\n")
        self._say(_figures(made))

    # -- input -----------------------------------------------------------------------------------------

    def _read(self) -> str:
        """Returns the next message; raises EOFError at the end of stdin."""
        line = self._line("> ")
        if not line.lstrip().startswith(_QUOTES):
            return line
        lines = [line.lstrip().removeprefix(_QUOTES)]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(self._line(". "))
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        if self._is_on_terminal:
            if sys.stdout.isatty():
                return input(prompt)
            sys.stderr.write(prompt)
            sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise PromptError("a message on stdin is not valid UTF-8") from error
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")

    # -- commands --------------------------------------------------------------------------------------

    def _obey(self, word: str, rest: str) -> None:
        if word in ("/exit", "/quit", "/bye"):
            raise EOFError
        if word in ("/reset", "/clear"):
            self._partner.reset()
            self._say("(the conversation is forgotten)")
        elif word == "/save":
            self._save(rest or time.strftime("chat_%Y-%m-%d_%H-%M-%S.json"))
        elif word in ("/help", "/?"):
            self._say(_HELP.rstrip())
        else:
            self._say(f"there is no command {word}; /help lists them")

    def _save(self, name: str) -> None:
        content = {"model": self._partner.name, "messages": self._partner.messages}
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        try:
            path = Path(name).expanduser()
            replace_file(path, text.encode("utf-8", "surrogateescape"))
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such user
            reason = error.strerror if isinstance(error, OSError) else error
            self._say(f"error: {name} cannot be written: {reason}")
            return
        self._say(f"(saved to {path})")

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _figures(made: Generation) -> str:
    """Formats the figures of an answer as one line, or several on a narrow terminal."""
    speed, read = made.tokens_per_second, made.prompt_tokens - made.cached_tokens
    first = made.time_to_first_token_seconds
    ends = {"length": "cut at --max_new_tokens", "context": "the context is full", "interrupted": "stopped"}
    parts = [
        f"{read} tokens read" + (f", {made.cached_tokens} known" if made.cached_tokens else ""),
        "no token" if first is None else f"first token after {first:.2f} s",
        f"{made.generated_tokens} tokens" + ("" if speed is None else f" at {speed:.1f} tokens/s"),
        *([ends[made.finish_reason]] if made.finish_reason in ends else []),
    ]
    return figures_line(parts)
