"""``acclimate generate``: generates text with a language model.

The text goes to stdout. Figures, progress and warnings go to stderr, so that
``acclimate generate … > story.txt`` stores only the text.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shutil
import sys
from functools import partial

from acclimate.errors import AcclimateError, GenerationOptionError
from acclimate.host.exit_codes import INTERRUPTED, TEXT_READER_LEFT, USER_ERROR
from acclimate.llm.commands.request import (
    MOST_RANKS,
    Display,
    add_dtype_option,
    add_ignore_extra_option,
    add_quantize_option,
    add_remote_code_option,
    count,
    import_transformers,
    messages,
    rank_arguments,
    read_prompt,
    read_request,
)
from acclimate.llm.progress import progress_on_terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``acclimate generate``."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue; - reads stdin")
    parser.add_argument(
        "--model", metavar="MODEL", help="a folder, a .gguf file or a hub id; default: the demo model"
    )
    # Values are parsed later, so that a bad one gets the library's one-line message and not argparse's usage.
    parser.add_argument("--max_new_tokens", metavar="N", default="100", help="the most tokens to generate")
    add_dtype_option(parser)
    add_quantize_option(parser)
    parser.add_argument(
        "--temperature", metavar="T", default="0", help="0 always takes the most probable token"
    )
    parser.add_argument(
        "--repetition_penalty", metavar="P", help="above 1, makes repeated tokens less probable"
    )
    parser.add_argument("--seed", metavar="S", help="makes sampling repeatable")
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
    add_ignore_extra_option(parser)
    add_remote_code_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of streamed text")
    # Passed to the ranks that this command starts: the width of the terminal on stderr, or 0, and whether
    # stdout is a terminal.
    parser.add_argument("--as_rank", type=int, metavar="COLUMNS", help=argparse.SUPPRESS)
    parser.add_argument("--on_terminal", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        The exit code: 0, 2 after a user's error, 130 after Ctrl-C, 141 after the reader of stdout has exited.
    """
    if args.as_rank is not None:
        from acclimate.llm.commands.on_ranks import run_as_rank

        display = Display(args.json, args.on_terminal)
        return run_as_rank("generate", partial(_run_rank, args, display), display.interrupt)
    try:
        ranks = count("num_accelerators", args.num_accelerators, MOST_RANKS)
        if ranks > 1:
            return _start_ranks(args, ranks)
        if args.bind_core_list is not None:
            raise GenerationOptionError("--bind_core_list needs --num_accelerators with a value of 2 or more")
        with messages():
            return _run_alone(args)
    except AcclimateError as error:
        sys.stderr.write(f"acclimate generate: error: {error}\n")
        return USER_ERROR
    except BrokenPipeError:
        # Python flushes stdout at exit, which would fail once more on the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return TEXT_READER_LEFT


def _run_alone(args: argparse.Namespace) -> int:
    display = Display(args.json, sys.stdout.isatty())
    try:
        request = read_request(args)
        prompt = read_prompt(args.prompt)
        # Here, so that Ctrl-C is handled from the start.
        if args.model is None or os.path.exists(args.model):  # else reports the error without importing
            import_transformers()
        from acclimate.llm.generation import generate
        from acclimate.llm.kernels.torch_threads import limit_torch_threads
        from acclimate.ops.bus_errors import explain_bus_errors

        explain_bus_errors("acclimate generate")
        limit_torch_threads()
        display.begin(prompt)
        result = generate(
            prompt,
            on_text=None if args.json else display.show,
            **request.model,
            **request.options,
        )
        display.finish(result)
    except KeyboardInterrupt as interruption:
        display.interrupt(interruption)
        return INTERRUPTED
    return 0


# -- on several ranks --------------------------------------------------------------------------------


def _start_ranks(args: argparse.Namespace, ranks: int) -> int:
    from acclimate.llm.commands.on_ranks import start_ranks

    read_request(args)  # its errors need no ranks
    columns = shutil.get_terminal_size().columns if sys.stderr.isatty() else 0
    told = ["--as_rank", str(columns), *(["--on_terminal"] if sys.stdout.isatty() else [])]
    return start_ranks("generate", rank_arguments(args, "prompt", *told), ranks, args.bind_core_list)


def _run_rank(args: argparse.Namespace, display: Display, rank: int) -> None:
    with messages(logging.INFO if rank == 0 else logging.ERROR), progress_on_terminal(args.as_rank):
        # Here, so that Ctrl-C is handled from the start.
        from acclimate.llm.generation import generate
        from acclimate.llm.loading.initialize import load_split_model

        request = read_request(args)
        loaded = load_split_model(**request.model)
        ranks = loaded.ranks
        with ranks.all_or_none():
            prompt = read_prompt(args.prompt) if ranks.is_first else None
        prompt = ranks.from_first(prompt)
        display.begin(prompt)
        with ranks.all_or_none():
            result = generate(
                prompt,
                model=loaded,
                on_text=display.show if rank == 0 and not args.json else None,
                **request.options,
            )
        peak = max(ranks.exchange(result.peak_memory_bytes))
        if rank == 0:
            display.finish(dataclasses.replace(result, peak_memory_bytes=peak))
