"""``acclimate generate --num_accelerators N``: starts the ranks, and runs each rank's part.

Rank 0 shows the text and reports errors that all ranks have; the others report only their own errors.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from acclimate.errors import AcclimateError
from acclimate.inference.commands.request import (
    INTERRUPTED,
    Display,
    messages,
    options_given,
    positional_given,
    read_prompt,
    read_request,
)
from acclimate.inference.progress import progress_on_terminal
from acclimate.inference.ranks import is_lost_rank
from acclimate.launch.command import run_own_module
from acclimate.launch.plan.outcome import Outcome, shell_code

_NAME = "acclimate generate"
_USER_ERROR = 2
_OPTIONS = (
    "model", "max_new_tokens", "dtype", "quantize", "temperature", "repetition_penalty", "seed",
    "trust_remote_code", "json",
)  # fmt: skip
"""The options that are passed on to the ranks unchanged."""
_LAUNCHER_NOTICES_S = 10.0
"""How long a rank that lost another waits for the launcher, which reports the loss and stops all ranks."""


# -- the launcher ------------------------------------------------------------------------------------


def start_ranks(args: argparse.Namespace, ranks: int) -> int:
    """Runs the command on ``ranks`` ranks; returns the exit code.

    Raises:
        GenerationOptionError: an option has an invalid value; no rank is started.
        BindingError: there are fewer cores than ranks.
    """
    read_request(args)  # its errors need no ranks
    columns = shutil.get_terminal_size().columns if sys.stderr.isatty() else 0
    place = ["--as-rank", str(columns), *(["--on-terminal"] if sys.stdout.isatty() else [])]
    outcome = run_own_module(
        "acclimate.__main__",
        ["generate", *options_given(args, *_OPTIONS), *place, *positional_given(args.prompt)],
        num_accelerators=ranks,
        core_list=args.bind_core_list,
        name=_NAME,
    )
    sys.stderr.write(_report(outcome))
    return shell_code(outcome.code)


def _report(outcome: Outcome) -> str:
    """Returns a message about how the ranks ended, unless a rank has written it."""
    if outcome.code == -signal.SIGINT:  # rank 0 wrote nothing: it was still starting, or was killed
        return f"{_NAME}: interrupted\n"
    failed = outcome.failed
    if failed is None or failed.code == _USER_ERROR:
        return ""
    return f"{_NAME}: {failed.describe()}\n"


# -- a rank ------------------------------------------------------------------------------------------


def run_as_rank(args: argparse.Namespace) -> int:
    """Runs this process's part; returns its exit code.

    After an error of all ranks, only rank 0 exits with an error code, so that the launcher lets it report the
    error. After Ctrl-C, only rank 0 writes a message.
    """
    # torch would warn, with a C++ stack trace, of each interrupted attempt to connect.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    code: list[int] = []
    atexit.register(_exit_at_once, code)  # first, and so called last
    ended = _run_rank(args)
    sys.stdout.flush()  # if this fails, the exit code is another
    code.append(ended)
    return ended


def _exit_at_once(code: Sequence[int]) -> None:
    """Ends the process, if it has an exit code, while threads of Gloo run.

    One of them may be about to free a tensor, for which it needs Python: Python's normal exit would end the
    thread so that C++ aborts.
    """
    if code:
        sys.stderr.flush()
        os._exit(code[0])


def _run_rank(args: argparse.Namespace) -> int:
    rank = int(os.environ.get("RANK", "0"))
    display = Display(args.json, args.on_terminal)
    with _noted_interrupts() as interrupts:
        try:
            with messages(logging.INFO if rank == 0 else logging.ERROR), progress_on_terminal(args.as_rank):
                _generate(args, display, rank)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - _failed raises what it cannot report
            if not interrupts:
                return _failed(error, rank)
            # Any error may follow a Ctrl-C: the other ranks end too, and a library may convert the exception.
            if rank == 0:
                display.interrupt(error)
                return INTERRUPTED
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)  # so that the launcher knows that this rank has said nothing
    return 0


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Yields a list that grows with each Ctrl-C, which raises KeyboardInterrupt as always."""
    seen: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _failed(error: BaseException, rank: int) -> int:
    """Reports an error of this rank; returns the exit code. Raises an error that is none of the user's."""
    if not isinstance(error, AcclimateError):
        if isinstance(error, Exception) and is_lost_rank(error):
            time.sleep(_LAUNCHER_NOTICES_S)
        raise error
    is_of_all = getattr(error, "is_of_all_ranks", False)
    if is_of_all and rank > 0:
        return 0
    sys.stderr.write(f"{_NAME}: error: {'' if is_of_all else f'rank {rank}: '}{error}\n")
    return _USER_ERROR


def _generate(args: argparse.Namespace, display: Display, rank: int) -> None:
    # Here, so that Ctrl-C is handled from the start.
    from acclimate.inference.generation.generate import generate
    from acclimate.inference.loading.initialize import load_split_model

    request = read_request(args)
    loaded = load_split_model(
        request.model,
        dtype=request.dtype,
        quantize=request.quantize,
        trust_remote_code=request.trust_remote_code,
    )
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
