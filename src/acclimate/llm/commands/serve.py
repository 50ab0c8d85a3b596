"""``acclimate serve``: a model behind an OpenAI-compatible address, through transformers' own server."""

from __future__ import annotations

import argparse
import contextlib
import logging
import socket
import sys
import threading
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from acclimate.errors import GenerationOptionError, MissingExtraError
from acclimate.host.exit_codes import INTERRUPTED
from acclimate.host.install_hints import install_extra
from acclimate.llm.commands.request import (
    STILL_HERE_S,
    add_loading_options,
    add_model_argument,
    add_process_options,
    begin_alone,
    check_process_options,
    messages,
    model_options,
    number,
    rank_arguments,
    read_text,
    set_threads,
)
from acclimate.llm.deferred_sigint import interrupts_deferred
from acclimate.llm.progress import progress_on_terminal, terminal_columns

if TYPE_CHECKING:
    from acclimate.llm.loading.loaded_model import LoadedModel

_MOST_PORTS = 65535
_END_S = 2
"""How long answers may go on after Ctrl-C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``acclimate serve``."""
    add_model_argument(parser, required=False)
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="where to listen; 0.0.0.0: on every network"
    )
    parser.add_argument("--port", metavar="N", default="8000", help="the port; 0: any free one")
    parser.add_argument(
        "--chat_template", metavar="FILE", help="a Jinja template in place of the model's own"
    )
    add_loading_options(parser)
    add_process_options(parser)
    # Passed to the ranks that this command starts: the width of the terminal on stderr, or 0.
    parser.add_argument("--as_rank", type=int, metavar="COLUMNS", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the command until Ctrl-C; returns the exit code."""
    if args.as_rank is not None:
        from acclimate.llm.commands.on_ranks import run_as_rank

        return run_as_rank("serve", partial(_run_rank, args), lambda interruption: None)
    try:
        ranks = check_process_options(args)
        _check(args)
        if ranks > 1:
            from acclimate.llm.commands.on_ranks import start_ranks

            told = ["--as_rank", str(terminal_columns())]
            return start_ranks("serve", rank_arguments(args, "model", *told), ranks, args.bind_core_list)
        with messages():
            begin_alone("serve", args)
            from acclimate.llm.loading.load import load_model

            listener = _listen(args)  # before the model is loaded
            loaded = load_model(**model_options(args))
            _serve(args, loaded, loaded.module, listener)
    except KeyboardInterrupt:
        pass
    return INTERRUPTED


def _check(args: argparse.Namespace) -> None:
    """Raises the errors of options, before a model is loaded."""
    number(int, "port", args.port)
    if not 0 <= int(args.port) <= _MOST_PORTS:
        raise GenerationOptionError(f"--port must be from 0 to {_MOST_PORTS}; it is {args.port}")
    if args.chat_template is not None:
        read_text("chat_template", args.chat_template)
    for package in ("fastapi", "openai", "uvicorn"):
        try:
            with interrupts_deferred(1):  # see import_transformers
                import_module(package)
        except ImportError as error:
            raise MissingExtraError(f"a server needs {package}: {install_extra('serve')}") from error
    with contextlib.suppress(ImportError):  # the model reports that transformers is missing
        import transformers  # noqa: F401

        try:
            import_module("transformers.cli.serving.model_manager")
        except ImportError as error:
            raise MissingExtraError(
                f"this transformers has no server for other models ({error}): {install_extra('serve')}"
            ) from error


def _listen(args: argparse.Namespace) -> socket.socket:
    """Takes the address.

    Raises:
        GenerationOptionError: it is used, or not this machine's.
    """
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        return socket.create_server((args.host, int(args.port)), family=family)
    except OSError as error:
        raise GenerationOptionError(
            f"{args.host} port {args.port} cannot be listened on: {error.strerror or error}; choose another "
            "with --host and --port"
        ) from error


def _serve(args: argparse.Namespace, loaded: LoadedModel, model: Any, listener: socket.socket) -> None:
    """Answers the requests that arrive at the listener, with the model or its leader, until Ctrl-C."""
    with interrupts_deferred(1):  # see import_transformers
        import uvicorn
        from transformers.utils import logging as transformers_logging

        from acclimate.llm.serving import build_app, requests_at_once, server_tokenizer

    transformers_logging.set_verbosity_error()
    template = None if args.chat_template is None else read_text("chat_template", args.chat_template)
    tokenizer = server_tokenizer(loaded, template, trust_remote_code=args.trust_remote_code)
    at_once = requests_at_once(loaded.module)
    app = build_app(model, tokenizer, loaded.name, loaded.context_length, at_once)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    sys.stderr.write(f"serving {loaded.name} ({loaded.description}) at {address}; Ctrl-C ends\n")
    if tokenizer.chat_template is None:
        sys.stderr.write(
            f"{loaded.name} has no chat template: chat completions are refused, completions work; "
            "--chat_template FILE gives it one\n"
        )
    sys.stderr.flush()
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_END_S)
    uvicorn.Server(config).run(sockets=[listener])


# -- on several ranks --------------------------------------------------------------------------------


class _Leader:
    """Rank 0's model: has the other ranks make the same calls of ``generate``."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model, self._ranks = loaded.module, loaded.ranks
        self._one_at_a_time = threading.Lock()
        threading.Thread(target=self._stay_in_touch, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **arguments: Any) -> Any:
        told = {name: arguments[name] for name in arguments.keys() - {"streamer", "tokenizer"}}
        with self._one_at_a_time:
            self._ranks.from_first(told)
            return self._model.generate(**arguments)

    def end(self) -> None:
        with self._one_at_a_time:
            self._ranks.from_first("end")

    def _stay_in_touch(self) -> None:
        while True:
            threading.Event().wait(STILL_HERE_S)
            if self._one_at_a_time.acquire(blocking=False):
                try:
                    self._ranks.from_first(None)
                finally:
                    self._one_at_a_time.release()


def _run_rank(args: argparse.Namespace, rank: int) -> None:
    with messages(logging.INFO if rank == 0 else logging.ERROR), progress_on_terminal(args.as_rank):
        from acclimate.llm.loading.load import load_split_model

        set_threads(args.threads)
        loaded = load_split_model(**model_options(args))
        with loaded.ranks.all_or_none():
            listener = _listen(args) if rank == 0 else None
        if listener is None:
            _follow(args, loaded)
            return
        leader = _Leader(loaded)
        try:
            _serve(args, loaded, leader, listener)
        finally:
            leader.end()


def _follow(args: argparse.Namespace, loaded: LoadedModel) -> None:
    """Makes the calls of ``generate`` that rank 0 makes, until it ends."""
    from acclimate.llm.ranks import is_lost_rank
    from acclimate.llm.serving import server_tokenizer

    tokenizer = server_tokenizer(loaded, None, trust_remote_code=args.trust_remote_code)
    while (told := loaded.ranks.from_first(None)) != "end":
        if told is None:
            continue
        try:
            loaded.module.generate(**told, tokenizer=tokenizer)
        except Exception as error:  # the request's: all ranks raise it, and rank 0 answers with it
            if is_lost_rank(error):
                raise
