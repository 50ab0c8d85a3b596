"""Ranks for tests: processes that run functions of a test's module, and tell what each returned or raised."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from warm_starts import warm_python_of_this_run

# Imported once, in the process that ranks are forked from: torch._dynamo comes with the first optimizer,
# and hypothesis with the modules of tests.
_PRELOADED = ["torch.distributed", "acclimate.comm", "torch._dynamo", "hypothesis", "pytest"]
_MODELS = [
    "acclimate.llm.decode.loop", "acclimate.llm.loading.deferred_model",
    "acclimate.llm.split.planning.make_plan", "transformers.models.auto.modeling_auto",
    "transformers.models.gpt_oss.modeling_gpt_oss", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]  # fmt: skip
"""What ranks of tests of models import too."""
_PROGRAM = """
import os, sys
from multiprocessing.connection import Connection
parent = Connection(os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.path[:] = parent.recv()
import rank_processes
rank_processes.fork_ranks(parent)
"""


@dataclass(frozen=True)
class Told:
    """What a rank's function did."""

    value: Any = None
    error: str = ""
    """The type and message of what it raised; empty where it returned."""
    seconds: float = 0.0


class RankProcesses:
    """So many ranks with a default group, which each has joined.

    Args:
        count: of the ranks.
        backend: of the default group; ``None`` for none.
        timeout_s: of its collectives.
        environment: variables that differ from this process's, set before the group is made.
        models: whether they have transformers imported already.
    """

    def __init__(
        self,
        count: int,
        backend: str | None = "shm",
        timeout_s: float = 60,
        environment: dict[str, str] | None = None,
        before: Callable[[int], None] | None = None,
        models: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._ends: list[Connection] = []
        self.processes: list[psutil.Process] = []
        variables = {**os.environ, **(environment or {})}
        for rank in range(count):
            end, process = _fork_rank(models)
            end.send((rank, count, backend, timeout_s, store, variables, before))
            self._ends.append(end)
            self.processes.append(process)

    def joined(self) -> list[Told]:
        """How joining the default group went."""
        return [self.hear(rank) for rank in range(len(self._ends))]

    def __enter__(self) -> RankProcesses:
        for rank, told in enumerate(self.joined()):
            assert not told.error, f"rank {rank} did not join: {told.error}"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(
        self, function: Callable[..., Any], *arguments: Any, ranks: list[int] | None = None, **options: Any
    ) -> None:
        """Lets ranks run ``function(rank, *arguments, **options)``."""
        for rank in self._all(ranks):
            self._ends[rank].send((partial(function, **options), arguments))

    def hear(self, rank: int, timeout_s: float = 600) -> Told:
        """What a rank's function did."""
        if not self._ends[rank].poll(timeout_s):
            raise AssertionError(f"rank {rank} did not end within {timeout_s} s")
        told: Told = self._ends[rank].recv()
        return told

    def run(
        self, function: Callable[..., Any], *arguments: Any, ranks: list[int] | None = None, **options: Any
    ) -> list[Told]:
        """Runs a function on all ranks, or some."""
        self.start(function, *arguments, ranks=ranks, **options)
        return [self.hear(rank) for rank in self._all(ranks)]

    def values(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """What a function returned on all ranks; fails where one raised."""
        told = self.run(function, *arguments, **options)
        assert not any(one.error for one in told), [one.error for one in told]
        return [one.value for one in told]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a rank a signal and waits for its end."""
        self.processes[rank].send_signal(number)
        self.processes[rank].wait(30)

    def stop(self) -> None:
        """Ends all ranks."""
        for end in self._ends:
            end.close()
        for process in self.processes:
            try:
                process.wait(5)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def _all(self, ranks: list[int] | None) -> list[int]:
        return list(range(len(self._ends))) if ranks is None else ranks


def wait_no_longer_than(rank: int, seconds: float) -> None:
    """For a rank: the time limit of its collectives from now on."""
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=seconds))


# -- the process that ranks are forked from ----------------------------------------------------------


@cache
def _server(models: bool) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Starts it, once for all tests of this process; it ends when this process does."""
    here, there = socket.socketpair()
    with there, warm_python_of_this_run(models=models).in_place():
        process = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdin=there)
    server = Connection(here.detach())
    server.send(sys.path)
    modules = _PRELOADED + _MODELS if models else _PRELOADED
    server.send((modules, bytes(multiprocessing.current_process().authkey)))
    return server, process


def _fork_rank(models: bool) -> tuple[Connection, psutil.Process]:
    """Lets it fork a rank; returns this process's end of the connection to the rank."""
    here, there = socket.socketpair()
    server, _ = _server(models)
    with there, socket.socket(fileno=os.dup(server.fileno())) as channel:
        socket.send_fds(channel, [b"r"], [there.fileno()])
    return Connection(here.detach()), psutil.Process(server.recv())


def fork_ranks(parent: Connection) -> None:
    """In that process: forks ranks until the process that asks for them has ended."""
    modules, key = parent.recv()
    multiprocessing.current_process().authkey = key  # with which ranks send tensors
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # else every rank would copy the pages that its garbage collector marks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(parent.fileno()))
    while True:
        asked, ends, _, _ = socket.recv_fds(channel, 1, 1)
        if not asked:
            return
        (end,) = ends
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            parent.close()
            _serve(Connection(end))
            return
        os.close(end)
        parent.send(child)


# -- a rank ------------------------------------------------------------------------------------------


def _serve(end: Connection) -> None:
    """Joins the default group, and runs the functions that the test asks for."""
    import torch
    import torch.distributed as dist

    rank, count, backend, timeout_s, store, variables, before = end.recv()
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)

    def join(_: int) -> None:
        if before is not None:
            before(rank)
        if backend is not None:
            dist.init_process_group(
                backend,
                store=dist.FileStore(store, count),
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=timeout_s),
            )

    end.send(_tell(join, rank))
    while True:
        try:
            function, arguments = end.recv()
        except (EOFError, OSError):
            break
        end.send(_tell(function, rank, *arguments))
    if dist.is_initialized():
        dist.destroy_process_group()


def _tell(function: Callable[..., Any], *arguments: Any) -> Told:
    start = time.monotonic()
    try:
        value = function(*arguments)
    except Exception as error:
        if os.environ.get("SHOW_TRACEBACKS"):
            traceback.print_exc()
        return Told(error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - start)
    return Told(value=value, seconds=time.monotonic() - start)


def named_memory(pids: Iterable[int]) -> list[str]:
    """What there is in ``/dev/shm`` of acclimate or of these processes; other programs use it too."""
    numbers = set(map(str, pids))
    return [
        name
        for name in os.listdir("/dev/shm")
        if "acclimate" in name or not numbers.isdisjoint(re.findall(r"\d+", name))
    ]
