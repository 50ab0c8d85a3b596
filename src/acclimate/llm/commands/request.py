"""Converts the options of ``acclimate generate`` to typed values, and shows the result."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import io
import json
import logging
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from acclimate.errors import GenerationOptionError, PromptError, excerpt
from acclimate.imports import import_torch
from acclimate.llm.deferred_sigint import interrupts_deferred
from acclimate.llm.loading.packer import check_cache_dtype, check_format
from acclimate.llm.progress import compile_progress, figures_line
from acclimate.llm.text_options import TextOptions

if TYPE_CHECKING:
    from acclimate.llm.generation import Generation

_DEFAULT_PROMPT = "The most beautiful thing about mathematics is"
MOST_RANKS = 1024
MOST_THREADS = 1024
STILL_HERE_S = 20.0
"""How often rank 0 tells the waiting ranks that nothing has happened; far below a group's time-out."""

_Number = TypeVar("_Number", int, float)


def add_model_argument(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Declares ``MODEL``, which can also be given as ``--model``, as for ``acclimate generate``."""
    either = parser.add_mutually_exclusive_group(required=required)
    told = "a folder, a .gguf file or a hub id" + ("" if required else "; default: the demo model")
    either.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=told)
    either.add_argument("-m", "--model", metavar="MODEL", help="the same")


def add_remote_code_option(parser: argparse.ArgumentParser) -> None:
    """Declares ``--trust_remote_code``."""
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="allow Python code that comes with the model to run",
    )


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    """Declares ``--dtype``."""
    parser.add_argument(
        "--dtype",
        metavar="auto|bfloat16|float16|float32",
        default="auto",
        help="what the model computes in, also bf16, fp16 or fp32; auto: the first that the accelerator "
        "supports",
    )


def add_loading_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of :func:`model_options`, besides the model."""
    add_dtype_option(parser)
    parser.add_argument(
        "--quantize", metavar="int8|int4", help="store the weights in 8 or 4 bits while loading them"
    )
    parser.add_argument(
        "--kv_cache_dtype",
        metavar="auto|int8",
        default="auto",
        help="store keys and values in 8 bits, or, with auto, in the dtype that the model computes in",
    )
    parser.add_argument(
        "--ignore_extra",
        metavar="NAMES",
        help='tensors in the files that the model does not use, such as "v_head.*,score.weight"',
    )
    add_remote_code_option(parser)


def add_text_options(parser: argparse.ArgumentParser, *, max_new_tokens: int, temperature: str) -> None:
    """Declares the options that say how a text is written.

    Values are parsed later, so that a bad one gets the library's one-line message and not argparse's usage.
    ``temperature`` is what the help says of its default.
    """
    parser.add_argument(
        "--max_new_tokens", metavar="N", default=str(max_new_tokens), help="the most tokens to generate"
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        help=f"0 always takes the most probable token; default: {temperature}",
    )
    parser.add_argument(
        "--top_p",
        metavar="P",
        help="sample from the most probable tokens that together have this probability; default: the "
        "model's own",
    )
    parser.add_argument(
        "--top_k", metavar="N", help="sample from the N most probable tokens; default: the model's own, or 50"
    )
    parser.add_argument(
        "--min_p",
        metavar="P",
        help="sample from tokens at least P times as probable as the best; default: the model's own",
    )
    parser.add_argument(
        "--repetition_penalty",
        metavar="P",
        help="above 1, makes repeated tokens less probable; default: the model's own",
    )
    parser.add_argument(
        "--stop", "--stop_strings", metavar="TEXT", action="append", help="end before TEXT; can be repeated"
    )
    parser.add_argument("--seed", metavar="S", help="makes sampling repeatable")


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options about the processes that compute."""
    parser.add_argument(
        "--threads",
        metavar="N",
        help="the threads of each process; default: its cores, or fewer if a quota allows less",
    )
    parser.add_argument(
        "--num_accelerators",
        metavar="N",
        default="1",
        help="split the model over N processes on this host, each with its own cores and memory",
    )
    parser.add_argument(
        "--bind_core_list",
        metavar="CORES",
        help="with --num_accelerators: the cores to use, for example 0-51,56-107",
    )


def check_process_options(args: argparse.Namespace) -> int:
    """Returns the number of processes.

    Raises:
        GenerationOptionError: one of the options is not a number in its range, or lacks another one.
    """
    ranks = count("num_accelerators", args.num_accelerators, MOST_RANKS)
    if ranks == 1 and args.bind_core_list is not None:
        raise GenerationOptionError("--bind_core_list needs --num_accelerators with a value of 2 or more")
    if args.threads is not None:
        count("threads", args.threads, MOST_THREADS)
    return ranks


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options about the messages before the user's."""
    parser.add_argument(
        "--system", metavar="TEXT", help="instructions to the model, which come before the first message"
    )
    parser.add_argument(
        "--chat_template", metavar="FILE", help="a Jinja template in place of the model's own"
    )


def set_threads(text: str | None) -> None:
    """Sets the number of torch's threads, and so of the kernels', to an option's.

    Raises:
        GenerationOptionError: it is not a whole number from 1 to 1,024.
    """
    import torch

    from acclimate.llm.kernels.torch_threads import limit_torch_threads

    if text is not None:
        torch.set_num_threads(count("threads", text, MOST_THREADS))
    limit_torch_threads()


def begin_alone(command: str, args: argparse.Namespace) -> None:
    """Prepares this process for a command that computes in it, whose model is loaded next.

    Here, so that Ctrl-C is handled from the start.
    """
    if args.model is None or os.path.exists(args.model):  # else reports the error without importing
        import_transformers()
    from acclimate.ops.bus_errors import explain_bus_errors

    explain_bus_errors(f"acclimate {command}")
    set_threads(args.threads)


def import_transformers() -> None:
    """Imports torch and what loads a model, in the process of a command.

    Imported objects are never freed, so the garbage collector leaves them out: saves 1.5 s of processor time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        # Python drops a KeyboardInterrupt in a callback of its own, of which imports have many.
        with interrupts_deferred(1):
            import_torch()
            with contextlib.suppress(Exception):  # what needs transformers reports why it cannot be imported
                import transformers.generation.utils
                import transformers.modeling_utils
                import transformers.models.auto.modeling_auto  # noqa: F401
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class Request:
    """The options of ``acclimate generate`` that say what to generate."""

    model: dict[str, Any]
    """The arguments of :func:`acclimate.llm.load_split_model`."""
    text: TextOptions
    """How a text is written."""
    system: str | None
    """Instructions before the first message."""
    template: str | None
    """A chat template in place of the model's own."""


def read_request(args: argparse.Namespace) -> Request:
    """Returns the checked options.

    Raises:
        GenerationOptionError: an option that must be a number is not one, or is out of range.
        PromptError: the file of the chat template cannot be read.
        QuantizationError: weights cannot be quantised as asked.
    """
    options = TextOptions(
        max_new_tokens=number(int, "max_new_tokens", args.max_new_tokens),
        temperature=_optional(float, "temperature", args.temperature),
        top_p=_optional(float, "top_p", args.top_p),
        top_k=_optional(int, "top_k", args.top_k),
        min_p=_optional(float, "min_p", args.min_p),
        repetition_penalty=_optional(float, "repetition_penalty", args.repetition_penalty),
        seed=_optional(int, "seed", args.seed),
        stop=tuple(args.stop or ()),
    )
    options.check()
    check_format(args.quantize)
    check_cache_dtype(args.kv_cache_dtype)
    template = None if args.chat_template is None else read_text("chat_template", args.chat_template)
    return Request(model_options(args), options, args.system, template)


def _optional(kind: type[_Number], name: str, text: str | None) -> _Number | None:
    return None if text is None else number(kind, name, text)


def read_text(option: str, name: str) -> str:
    """Returns the text of a file that an option names.

    Raises:
        PromptError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(name).expanduser().read_bytes().decode("utf-8")
    except OSError as error:
        raise PromptError(f"--{option}: {name} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, ValueError, RuntimeError) as error:  # a null byte; no such user
        raise PromptError(f"--{option}: {name} is not a file of UTF-8 text") from error


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of :func:`acclimate.llm.load_split_model`."""
    names = "model", "dtype", "quantize", "kv_cache_dtype", "trust_remote_code"
    given = {name: getattr(args, name) for name in names}
    return given | {"ignore_extra": tuple((args.ignore_extra or "").split(","))}


def number(kind: type[_Number], name: str, text: str) -> _Number:
    """Returns an option's number.

    Raises:
        GenerationOptionError: the text is not a number of this type.
    """
    try:
        return kind(text)
    except ValueError as error:
        noun = "a whole number" if kind is int else "a number"
        raise GenerationOptionError(f"--{name} must be {noun}; it is '{excerpt(text, 40)}'") from error


def count(name: str, text: str, most: int) -> int:
    """Returns an option's whole number.

    Raises:
        GenerationOptionError: the text is not a whole number from 1 to ``most``.
    """
    value = number(int, name, text)
    if not 1 <= value <= most:
        raise GenerationOptionError(f"--{name} must be from 1 to {most}; it is {value}")
    return value


_NOT_FOR_RANKS = {
    "command", "num_accelerators", "bind_core_list", "as_rank", "as_launcher", "on_terminal",
}  # fmt: skip
"""What the launcher alone uses, and what it tells each rank itself."""


def rank_arguments(args: argparse.Namespace, positional: str, *told: str) -> list[str]:
    """Returns the arguments of a rank: all options of the command, so that a new one reaches the ranks too.

    ``told`` is what the launcher tells the rank.
    """
    options = [
        f"--{name}" + ("" if value is True else f"={value}")
        for name, given in vars(args).items()
        for value in (given if isinstance(given, list) else [given])
        if name not in _NOT_FOR_RANKS and name != positional and value is not None and value is not False
    ]
    last = getattr(args, positional)
    return [*options, *told, *([] if last is None else ["--", last])]


def read_prompt(argument: str | None, file: str | None = None) -> str:
    """Returns the prompt argument, else piped stdin, else a default prompt; with a file, the argument comes
    before the file's text.

    Raises:
        PromptError: the file cannot be read, or stdin is closed or is not UTF-8.
    """
    if file is not None:
        text = _without_last_newline(read_text("prompt_file", file))
        return text if argument is None else f"{argument}\n\n{text}"
    if argument is None and not _is_piped():
        return _DEFAULT_PROMPT
    if argument is not None and argument != "-":
        return argument
    if sys.stdin is None:
        raise PromptError("there is no stdin to read the prompt from")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError("the prompt on stdin is not valid UTF-8") from error
    return _without_last_newline(text)


def _without_last_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")  # added by `echo`; to a model it ends a paragraph


def _is_piped() -> bool:
    """Whether stdin is a pipe, a file or a socket, not a terminal, ``/dev/null`` or closed."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


@contextlib.contextmanager
def messages(level: int = logging.INFO) -> Iterator[None]:
    """Shows the library's messages of a level and above on stderr in the ``with`` block; for INFO also the
    progress of compilers."""
    logger = logging.getLogger("acclimate")
    # These loggers also show INFO, which announces slow steps: a conversion, and compiling the kernels.
    chatty = [logging.getLogger(name) for name in ("acclimate.llm", "acclimate.ops.build")]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("acclimate: %(message)s"))
    before = [other.level for other in chatty]
    handler.setLevel(level)
    logger.addHandler(handler)
    for other in chatty:
        other.setLevel(level)
    try:
        if level > logging.INFO:
            yield
        else:
            from acclimate.ops.build.compile import watch_builds  # imports torch

            with watch_builds(compile_progress):
                yield
    finally:
        logger.removeHandler(handler)
        for other, own in zip(chatty, before, strict=True):
            other.setLevel(own)


class Display:
    """Shows a text as it is generated, and the figures of the run at its end, or one JSON object.

    On a terminal the prompt is shown before the text.
    """

    def __init__(self, as_json: bool, on_terminal: bool) -> None:
        self._as_json = as_json
        self._prompt: str | None = None
        self._on_terminal = on_terminal and not as_json
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # "?" for a character that the locale lacks

    def begin(self, prompt: str | None) -> None:
        """Receives the prompt; ``None``: it is not part of the text."""
        self._prompt = prompt if self._on_terminal else None

    def show(self, piece: str) -> None:
        """Shows a piece of text; nothing with ``as_json``."""
        if self._as_json:
            return
        if self._prompt is not None:
            sys.stdout.write(self._prompt)
            self._prompt = None
        sys.stdout.write(piece)
        sys.stdout.flush()

    def finish(self, result: Generation) -> None:
        """Ends the text, and shows the figures."""
        if self._as_json:
            sys.stdout.write(json.dumps(dataclasses.asdict(result), ensure_ascii=False) + "\n")
            sys.stdout.flush()
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        sys.stderr.write(closing_line(result) + "\n")

    def interrupt(self, interruption: BaseException) -> None:
        """Ends the text after Ctrl-C: with the figures, if there was any."""
        partial = getattr(interruption, "partial", None)  # set by GenerationInterrupted
        if partial is None:
            sys.stderr.write("\nacclimate generate: interrupted before the first token\n")
        else:
            self.finish(partial)


def closing_line(result: Generation) -> str:
    """Formats the figures of a run as one line, or several on a narrow terminal."""
    first, speed = result.time_to_first_token_seconds, result.tokens_per_second
    several = result.ranks > 1
    parts = [
        result.accelerator
        if result.accelerator == result.device
        else f"{result.accelerator} ({result.device})",
        *([f"{result.ranks} ranks"] if several else []),
        result.dtype if result.weights == result.dtype else f"{result.weights} in {result.dtype}",
        f"{result.parameters / 1e6:,.1f} M parameters",
        *([f"compiled in {result.compile_seconds:.1f} s"] if result.compile_seconds else []),
        f"loaded in {result.load_seconds:.2f} s",
        "no token" if first is None else f"first token after {first:.2f} s",
        f"{result.generated_tokens} tokens" + ("" if speed is None else f" at {speed:.1f} tokens/s"),
        f"peak memory {result.peak_memory_bytes / 1e9:.2f} GB" + (" per rank" if several else ""),
    ]
    if result.finish_reason == "interrupted":
        parts.append("interrupted")
    return figures_line(parts)
