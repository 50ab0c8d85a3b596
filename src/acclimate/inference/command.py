"""``acclimate generate``: generates text with a language model.

The text goes to stdout. Figures, progress and warnings go to stderr, so that
``acclimate generate … > story.txt`` stores only the text.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import logging
import os
import stat
import sys
from typing import TYPE_CHECKING, TypeVar

from acclimate.errors import AcclimateError, GenerationOptionError, PromptError, excerpt

if TYPE_CHECKING:
    from acclimate.inference.generation import Generation

DEFAULT_PROMPT = "The most beautiful thing about mathematics is"

_Number = TypeVar("_Number", int, float)

# The exit codes a shell reports after SIGINT and SIGPIPE: 128 + the signal's number.
_INTERRUPTED, _PIPE_CLOSED = 130, 141


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``acclimate generate``."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue; - reads stdin")
    parser.add_argument(
        "--model", metavar="MODEL", help="a folder, a .gguf file or a hub id; default: the demo model"
    )
    # Values are parsed later, so that a bad one gets the library's one-line message and not argparse's usage.
    parser.add_argument("--max-new-tokens", metavar="N", default="100")
    parser.add_argument("--dtype", metavar="auto|bfloat16|float16|float32", default="auto")
    parser.add_argument(
        "--temperature", metavar="T", default="0", help="0 always takes the likeliest token; default 0"
    )
    parser.add_argument(
        "--repetition-penalty", metavar="P", help="above 1, makes tokens that already occurred less likely"
    )
    parser.add_argument("--seed", metavar="S", help="makes sampling repeatable")
    parser.add_argument(
        "--trust_remote_code",
        "--trust-remote-code",
        action="store_true",
        help="let Python code that comes with the model run",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of streamed text")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        The exit code: 0, 2 after a user's error, 130 after Ctrl-C, 141 when the reader of stdout has gone.
    """
    logger, chatty = logging.getLogger("acclimate"), logging.getLogger("acclimate.inference")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("acclimate: %(message)s"))
    level = chatty.level
    logger.addHandler(handler)
    chatty.setLevel(logging.INFO)  # announces a conversion, which takes a while
    try:
        return _run(args)
    except AcclimateError as error:
        sys.stderr.write(f"acclimate generate: error: {error}\n")
        return 2
    except KeyboardInterrupt as interruption:
        partial = getattr(interruption, "partial", None)  # set by GenerationInterrupted
        if partial is None:
            sys.stderr.write("\nacclimate generate: interrupted before the first token\n")
        else:
            _finish(args, partial)
        return _INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout at exit, which would fail once more on the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    finally:
        logger.removeHandler(handler)
        chatty.setLevel(level)


def _run(args: argparse.Namespace) -> int:
    from acclimate.inference.generation import generate  # here, so that Ctrl-C is handled from the start

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "?" for a character that the locale lacks
    prompt = _prompt(args.prompt)
    max_new_tokens = _number(int, "max-new-tokens", args.max_new_tokens)
    temperature = _number(float, "temperature", args.temperature)
    seed = None if args.seed is None else _number(int, "seed", args.seed)
    penalty = args.repetition_penalty
    repetition_penalty = None if penalty is None else _number(float, "repetition-penalty", penalty)
    shown = [not args.json and sys.stdout.isatty()]

    def show(piece: str) -> None:
        if shown[0]:  # a terminal shows the prompt in front of the first piece
            shown[0] = False
            sys.stdout.write(prompt)
        sys.stdout.write(piece)
        sys.stdout.flush()

    result = generate(
        prompt,
        model=args.model,
        max_new_tokens=max_new_tokens,
        dtype=args.dtype,
        temperature=temperature,
        seed=seed,
        repetition_penalty=repetition_penalty,
        trust_remote_code=args.trust_remote_code,
        on_text=None if args.json else show,
    )
    _finish(args, result)
    return 0


def _finish(args: argparse.Namespace, result: Generation) -> None:
    if args.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(result), ensure_ascii=False) + "\n")
        sys.stdout.flush()
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    sys.stderr.write(closing_line(result) + "\n")


def closing_line(result: Generation) -> str:
    """Formats the figures of a run as one line."""
    first, speed = result.time_to_first_token_seconds, result.tokens_per_second
    parts = [
        result.accelerator
        if result.accelerator == result.device
        else f"{result.accelerator} ({result.device})",
        result.dtype,
        f"{result.parameters / 1e6:,.1f} M parameters",
        f"loaded in {result.load_seconds:.2f} s",
        "no token" if first is None else f"first token after {first:.2f} s",
        f"{result.generated_tokens} tokens" + ("" if speed is None else f" at {speed:.1f} tokens/s"),
        f"peak memory {result.peak_memory_bytes / 1e9:.2f} GB",
    ]
    if result.finish_reason == "interrupted":
        parts.append("interrupted")
    return "[" + " | ".join(parts) + "]"


def _prompt(argument: str | None) -> str:
    """Returns the prompt argument, else piped stdin, else a default prompt."""
    if argument is None and not _is_piped():
        return DEFAULT_PROMPT
    if argument is not None and argument != "-":
        return argument
    if sys.stdin is None:
        raise PromptError("there is no stdin to read the prompt from")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError("the prompt on stdin is not valid UTF-8") from error
    return text.removesuffix("\n").removesuffix("\r")  # added by `echo`; to a model it ends a paragraph


def _is_piped() -> bool:
    """Whether stdin is a pipe, a file or a socket, not a terminal, ``/dev/null`` or closed."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _number(kind: type[_Number], name: str, text: str) -> _Number:
    try:
        return kind(text)
    except ValueError as error:
        noun = "a whole number" if kind is int else "a number"
        raise GenerationOptionError(f"--{name} must be {noun}; it is '{excerpt(text, 40)}'") from error
