"""``acclimate chat`` on several ranks: the user's process talks to rank 0 in lines of JSON.

The user's process keeps the terminal. The launcher of the ranks runs in a session of its own, so that Ctrl-C
reaches the user's process only; its stdin and stdout are pipes, of which rank 0 gets stdin.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from acclimate.errors import PromptError, RankFailedError
from acclimate.launch.supervise.processes import own_python
from acclimate.llm.commands.request import (
    MOST_RANKS,
    STILL_HERE_S,
    count,
    messages,
    rank_arguments,
    read_request,
    set_threads,
)
from acclimate.llm.progress import progress_on_terminal

if TYPE_CHECKING:
    from acclimate.llm.conversation import Conversation
    from acclimate.llm.generation import Generation
    from acclimate.llm.text.tokenizers import Message

_LAUNCHER_ENDS_S = 30.0


# -- the user's process ------------------------------------------------------------------------------


class RanksPartner:
    """A model on several ranks."""

    def __init__(self, args: argparse.Namespace, columns: int) -> None:
        told = ["--as_launcher", str(columns), "--num_accelerators", args.num_accelerators]
        cores = [] if args.bind_core_list is None else ["--bind_core_list", args.bind_core_list]
        arguments = rank_arguments(args, "model", *told, *cores)
        self._process = subprocess.Popen(
            own_python("acclimate.__main__", "chat", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self._stdin: Any = self._process.stdin
        self._stdout: Any = self._process.stdout
        self.messages: list[Message] = []
        self.name = self.description = ""

    def __enter__(self) -> RanksPartner:
        try:
            ready = self._receive()
        except BaseException:
            self.__exit__()
            raise
        self.name, self.description, self.messages = ready["name"], ready["description"], ready["messages"]
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the ranks, which end when their input does."""
        with contextlib.suppress(OSError):  # they have ended
            self._stdin.close()
        try:
            self._process.wait(0 if not self.name else _LAUNCHER_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()

    def reset(self) -> None:
        """Forgets all messages but the instructions."""
        self._send({"reset": True})
        self.messages = self._receive()["messages"]

    def answer(
        self, message: str, on_text: Callable[[str], None], is_stopped: Callable[[], bool]
    ) -> Generation:
        """Answers a message."""
        from acclimate.llm.generation import Generation

        self._send({"message": message})
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.02):
                if is_stopped():
                    self._send({"stop": True})
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            while True:
                told = self._receive()
                if "text" in told:
                    on_text(told["text"])
                elif "error" in told:
                    raise PromptError(told["error"])
                else:
                    self.messages = told["messages"]
                    return Generation(**told["answer"] | {"tokens": tuple(told["answer"]["tokens"])})
        finally:
            done.set()
            watcher.join()

    def _send(self, order: dict[str, Any]) -> None:
        try:
            self._stdin.write(json.dumps(order) + "\n")
            self._stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def _receive(self) -> dict[str, Any]:
        line = self._stdout.readline()
        if not line:
            raise self._ended()
        told: dict[str, Any] = json.loads(line)
        return told

    def _ended(self) -> RankFailedError:
        code = self._process.wait()
        return RankFailedError(f"the ranks have ended with exit code {code}; the lines above say why")


# -- the launcher and the ranks ----------------------------------------------------------------------


def run_part(args: argparse.Namespace) -> int:
    """Runs the launcher or a rank; returns the exit code."""
    from acclimate.llm.commands.on_ranks import run_as_rank, start_ranks

    if args.as_rank is not None:
        return run_as_rank("chat", partial(_run_rank, args), lambda interruption: None)
    ranks = count("num_accelerators", args.num_accelerators, MOST_RANKS)
    told = ["--as_rank", str(args.as_launcher)]
    args.as_launcher = None
    return start_ranks("chat", rank_arguments(args, "model", *told), ranks, args.bind_core_list)


class _Orders:
    """What the user's process asks for, read by a thread so that an answer can be stopped."""

    def __init__(self) -> None:
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._stops = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            order = json.loads(line)
            if "stop" in order:
                self._stops.set()
            else:
                self._stops.clear()
                self._queue.put(order)
        self._stops.set()
        self._queue.put({"end": True})

    def is_stopped(self) -> bool:
        """Whether the current answer must end."""
        return self._stops.is_set()

    def next(self) -> dict[str, Any]:
        """Returns the next order; an empty one if there is none for some time."""
        try:
            return self._queue.get(timeout=STILL_HERE_S)
        except queue.Empty:
            return {}


def _run_rank(args: argparse.Namespace, rank: int) -> None:
    with messages(logging.INFO if rank == 0 else logging.ERROR), progress_on_terminal(args.as_rank):
        from acclimate.llm.conversation import Conversation
        from acclimate.llm.loading.load import load_split_model

        request = read_request(args)
        set_threads(args.threads)
        loaded = load_split_model(**request.model)
        ranks = loaded.ranks
        with ranks.all_or_none():
            talk = Conversation(loaded, request.text, request.system, request.template)
        orders = _Orders() if rank == 0 else None
        if rank == 0:
            _tell(name=loaded.name, description=loaded.description, messages=talk.messages)
        while True:
            order = ranks.from_first(None if orders is None else orders.next())
            if "end" in order:
                return
            told = _obeyed(talk, order, orders)
            if told and rank == 0:
                _tell(**told)


def _obeyed(talk: Conversation, order: dict[str, Any], orders: _Orders | None) -> dict[str, Any]:
    """Does what the user's process asks for; returns what to tell it. Rank 0 may get further orders."""
    if "reset" in order:
        talk.reset()
        return {"messages": talk.messages}
    if "message" not in order:
        return {}
    try:
        if orders is None:
            made = talk.answer(order["message"])
        else:
            made = talk.answer(order["message"], lambda piece: _tell(text=piece), orders.is_stopped)
    except PromptError as error:  # which all ranks raise alike, before they read anything
        return {"error": str(error)}
    return {"answer": dataclasses.asdict(made), "messages": talk.messages}


def _tell(**told: Any) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
