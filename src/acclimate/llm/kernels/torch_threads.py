"""torch's threads. OpenMP gives each thread of a program a team of its own for torch's operators.

Ends a thread's team before the thread forks, since libgomp's teams do not survive in the child; limits a team
for a while without changing a setting of the process; and counts the threads that native code should use.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from acclimate.host.topology import cpu_quota, processor_limit

_PAUSE_SOFT = 1  # libgomp ends the team; LLVM's runtime, which survives forks, only lets it sleep


class _Given(threading.local):
    """What torch's threads were in this thread before they were limited here; ``None``: they are not."""

    threads: int | None = None


_given = _Given()


def kernel_threads() -> int:
    """Returns how many threads the native step should use: torch's, or fewer if the process may use fewer
    processors or less of their time."""
    given = _given.threads or torch.get_num_threads()
    return max(1, min(given, processor_limit(claims_work=True)))


def limit_torch_threads() -> None:
    """Limits torch's threads to the processors that the process can keep busy: for a command in its own
    process."""
    if processor_limit() < torch.get_num_threads():
        _given.threads = torch.get_num_threads()
        torch.set_num_threads(processor_limit())


@functools.cache
def _function(name: str) -> Any:
    """Returns a function of the libraries that torch itself uses; ``None`` if they lack it.

    A process can hold several OpenMP runtimes. A look-up through torch's own library finds torch's.
    """
    try:
        return getattr(ctypes.CDLL(torch._C.__file__), name)
    except (OSError, AttributeError):
        return None


@contextlib.contextmanager
def at_most_threads(most: int) -> Iterator[None]:
    """Makes torch's operators in the ``with`` block use at most so many threads.

    Other threads of the program, old and new, keep the threads that ``torch.set_num_threads`` gave them.
    """
    before = torch.get_num_threads()  # also torch's own setting of this thread, which it makes once
    set_openmp, set_mkl = _function("omp_set_num_threads"), _function("MKL_Set_Num_Threads_Local")
    if set_openmp is None or before <= most:
        yield
        return
    given, _given.threads = _given.threads, _given.threads or before
    set_openmp(most)
    before_mkl = None if set_mkl is None else set_mkl(most)
    try:
        yield
    finally:
        _given.threads = given
        set_openmp(before)
        if set_mkl is not None:
            set_mkl(before_mkl)


def within_quota() -> contextlib.AbstractContextManager[None]:
    """Makes torch's operators in the ``with`` block use no more threads than a control group gives time for.

    The kernel would stop all of them in the middle of their work.
    """
    quota = cpu_quota()
    return contextlib.nullcontext() if quota is None else at_most_threads(max(1, int(quota)))


def one_thread() -> contextlib.AbstractContextManager[None]:
    """Makes torch's operators in the ``with`` block run in the calling thread alone.

    OpenMP's threads spin for milliseconds after each operator, on cores that other threads may need.
    """
    return at_most_threads(1)


@functools.cache
def end_team_before_forks() -> None:
    """Makes every thread that forks end its team first; the next operator starts it again.

    Without this, the next operator of the child would wait for ever for threads that only the parent has.
    """
    pause = _function("omp_pause_resource_all")
    if pause is not None and hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=lambda: pause(_PAUSE_SOFT))
