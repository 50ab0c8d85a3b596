"""Ranks for tests: processes that run functions of a test's module, and tell what each returned or raised."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# Imported once, in the process that all ranks are forked from: torch._dynamo comes with the first optimizer,
# and hypothesis with the modules of tests.
_PRELOADED = ["torch.distributed", "acclimate.comm", "torch._dynamo", "hypothesis", "pytest"]
_CONTEXT.set_forkserver_preload(_PRELOADED)


def preload(*modules: str) -> None:
    """Lets that process import more, if it has not been started yet."""
    _PRELOADED.extend(modules)
    _CONTEXT.set_forkserver_preload(_PRELOADED)


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
    """

    def __init__(
        self,
        count: int,
        backend: str | None = "shm",
        timeout_s: float = 60,
        environment: dict[str, str] | None = None,
        before: Callable[[int], None] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._ends: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(count):
            here, there = _CONTEXT.Pipe()
            setup = (rank, count, backend, timeout_s, store, environment or {}, before)
            process = _CONTEXT.Process(target=_serve, args=(there, *setup), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
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
        os.kill(self.processes[rank].pid, number)
        self.processes[rank].join(30)

    def stop(self) -> None:
        """Ends all ranks."""
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def _all(self, ranks: list[int] | None) -> list[int]:
        return list(range(len(self._ends))) if ranks is None else ranks


def wait_no_longer_than(rank: int, seconds: float) -> None:
    """For a rank: the time limit of its collectives from now on."""
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=seconds))


def _serve(
    end: Connection,
    rank: int,
    count: int,
    backend: str | None,
    timeout_s: float,
    store: str,
    environment: dict[str, str],
    before: Callable[[int], None] | None,
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
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
