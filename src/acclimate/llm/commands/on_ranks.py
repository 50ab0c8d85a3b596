"""Commands with ``--num_accelerators N``: starts the ranks, and runs each rank's part to its end.

Rank 0 shows the output and reports errors that all ranks have; the others report only their own errors.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from acclimate.errors import AcclimateError
from acclimate.host.exit_codes import INTERRUPTED, USER_ERROR, shell_code
from acclimate.launch.command import run_own_module
from acclimate.launch.plan.outcome import Outcome
from acclimate.llm.ranks import is_lost_rank

_LAUNCHER_NOTICES_S = 10.0
"""How long a rank that lost another waits for the launcher, which reports the loss and stops all ranks."""


# -- the launcher ------------------------------------------------------------------------------------


def start_ranks(command: str, arguments: Sequence[str], ranks: int, core_list: str | None = None) -> int:
    """Runs ``acclimate COMMAND ARGUMENTS`` as ranks on this host; returns the exit code.

    Raises:
        BindingError: there are fewer cores than ranks.
    """
    name = f"acclimate {command}"
    outcome = run_own_module(
        "acclimate.__main__",
        [command, *arguments],
        num_accelerators=ranks,
        core_list=core_list,
        name=name,
    )
    sys.stderr.write(_report(name, outcome))
    return shell_code(outcome.code)


def _report(name: str, outcome: Outcome) -> str:
    """Returns a message about how the ranks ended; empty if a rank has written one."""
    if outcome.code == -signal.SIGINT:  # rank 0 wrote nothing: it was still starting, or was killed
        return f"{name}: interrupted\n"
    failed = outcome.failed
    if failed is None or failed.code == USER_ERROR:
        return ""
    return f"{name}: {failed.describe()}\n"


# -- a rank ------------------------------------------------------------------------------------------


def run_as_rank(
    command: str, work: Callable[[int], None], interrupted: Callable[[BaseException], None]
) -> int:
    """Runs this process's part, ``work(rank)``; returns its exit code.

    After an error of all ranks, only rank 0 exits with an error code, so that the launcher lets it report the
    error. After Ctrl-C, only rank 0 writes a message, and calls ``interrupted`` with the exception that ended
    the work.
    """
    # torch would warn, with a C++ stack trace, of each interrupted attempt to connect.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    code: list[int] = []
    atexit.register(_exit_at_once, code)  # first, and so called last
    ended = _run(f"acclimate {command}", int(os.environ.get("RANK", "0")), work, interrupted)
    sys.stdout.flush()  # if this fails, the exit code is another
    code.append(ended)
    return ended


def _exit_at_once(code: Sequence[int]) -> None:
    """Exits at once, without Python's normal exit, if there is an exit code.

    A thread of Gloo may be about to free a tensor, for which it needs the GIL. Python's normal exit would end
    that thread, and C++ would abort the process.
    """
    if code:
        sys.stderr.flush()
        os._exit(code[0])


def _run(
    name: str, rank: int, work: Callable[[int], None], interrupted: Callable[[BaseException], None]
) -> int:
    with _noted_interrupts() as interrupts:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see run_own_module
            work(rank)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - _failed raises what it cannot report
            if not interrupts:
                return _failed(name, error, rank)
            # Any error may follow a Ctrl-C: the other ranks end too, and a library may convert the exception.
            if rank == 0:
                interrupted(error)
                return INTERRUPTED
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)  # so that the launcher knows that this rank has said nothing
    return 0


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Yields a list to which each Ctrl-C adds an entry before it raises KeyboardInterrupt as usual."""
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


def _failed(name: str, error: BaseException, rank: int) -> int:
    """Reports an error of this rank and returns the exit code; raises an error that is a bug."""
    if not isinstance(error, AcclimateError):
        if isinstance(error, Exception) and is_lost_rank(error):
            time.sleep(_LAUNCHER_NOTICES_S)
        raise error
    if error.is_of_all_ranks and rank > 0:
        return 0
    sys.stderr.write(f"{name}: error: {'' if error.is_of_all_ranks else f'rank {rank}: '}{error}\n")
    return USER_ERROR
