"""``acclimate generate``: generates text with a language model.

The text goes to stdout. Figures, progress and warnings go to stderr, so that
``acclimate generate … > story.txt`` stores only the text.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from acclimate.errors import GenerationOptionError
from acclimate.host.exit_codes import INTERRUPTED
from acclimate.llm.commands.request import (
    Display,
    Request,
    add_chat_options,
    add_loading_options,
    add_process_options,
    add_text_options,
    begin_alone,
    check_process_options,
    messages,
    rank_arguments,
    read_prompt,
    read_request,
    set_threads,
)
from acclimate.llm.progress import progress_on_terminal, terminal_columns
from acclimate.llm.text_options import DEFAULT_MAX_NEW_TOKENS

if TYPE_CHECKING:
    from acclimate.llm.generation import Generation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``acclimate generate``."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue; - reads stdin")
    parser.add_argument(
        "--prompt_file", metavar="FILE", help="a file with the prompt; PROMPT comes before it"
    )
    parser.add_argument(
        "-m", "--model", metavar="MODEL", help="a folder, a .gguf file or a hub id; default: the demo model"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer the prompt, in the model's chat template; else continue it",
    )
    add_chat_options(parser)
    add_text_options(
        parser,
        max_new_tokens=DEFAULT_MAX_NEW_TOKENS,
        temperature="0, or the model's own with --top_p, --top_k or --min_p",
    )
    add_loading_options(parser)
    add_process_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of streamed text")
    # Passed to the ranks that this command starts: the width of the terminal on stderr, or 0, and whether
    # stdout is a terminal.
    parser.add_argument("--as_rank", type=int, metavar="COLUMNS", help=argparse.SUPPRESS)
    parser.add_argument("--on_terminal", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code: 0, or 130 after Ctrl-C."""
    if args.as_rank is not None:
        from acclimate.llm.commands.on_ranks import run_as_rank

        display = Display(args.json, args.on_terminal)
        return run_as_rank("generate", partial(_run_rank, args, display), display.interrupt)
    ranks = check_process_options(args)
    if ranks > 1:
        return _start_ranks(args, ranks)
    with messages():
        return _run_alone(args)


def _run_alone(args: argparse.Namespace) -> int:
    display = Display(args.json, sys.stdout.isatty())
    _check_chat(args)
    try:
        request = read_request(args)
        prompt = read_prompt(args.prompt, args.prompt_file)
        begin_alone("generate", args)
        display.begin(None if args.chat else prompt)
        display.finish(_written(args, request, prompt, display.show, **request.model))
    except KeyboardInterrupt as interruption:
        display.interrupt(interruption)
        return INTERRUPTED
    return 0


def _check_chat(args: argparse.Namespace) -> None:
    for name in ("system", "chat_template"):
        if getattr(args, name) is not None and not args.chat:
            raise GenerationOptionError(f"--{name} needs --chat: without it, the model gets only the prompt")


def _written(
    args: argparse.Namespace,
    request: Request,
    prompt: str,
    on_text: Callable[[str], None] | None,
    **model: Any,
) -> Generation:
    from acclimate.llm.generation import generate

    return generate(
        prompt,
        chat=args.chat,
        system=request.system,
        chat_template=request.template,
        on_text=on_text,
        **model,
        **vars(request.text),
    )


# -- on several ranks --------------------------------------------------------------------------------


def _start_ranks(args: argparse.Namespace, ranks: int) -> int:
    from acclimate.llm.commands.on_ranks import start_ranks

    _check_chat(args)
    read_request(args)  # its errors need no ranks
    told = ["--as_rank", str(terminal_columns()), *(["--on_terminal"] if sys.stdout.isatty() else [])]
    return start_ranks("generate", rank_arguments(args, "prompt", *told), ranks, args.bind_core_list)


def _run_rank(args: argparse.Namespace, display: Display, rank: int) -> None:
    with messages(logging.INFO if rank == 0 else logging.ERROR), progress_on_terminal(args.as_rank):
        # Here, so that Ctrl-C is handled from the start.
        from acclimate.llm.loading.load import load_split_model

        request = read_request(args)
        set_threads(args.threads)
        loaded = load_split_model(**request.model)
        ranks = loaded.ranks
        with ranks.all_or_none():
            prompt = read_prompt(args.prompt, args.prompt_file) if ranks.is_first else None
        prompt = ranks.from_first(prompt)
        display.begin(None if args.chat else prompt)
        with ranks.all_or_none():
            result = _written(args, request, prompt, display.show if rank == 0 else None, model=loaded)
        peak = max(ranks.exchange(result.peak_memory_bytes))
        if rank == 0:
            display.finish(dataclasses.replace(result, peak_memory_bytes=peak))
