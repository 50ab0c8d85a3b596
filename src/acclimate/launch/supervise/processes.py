"""Processes: commands for our own modules, parent-death signals, adoption of orphans, names."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Container
from contextlib import suppress

from acclimate.host.exit_codes import shell_code
from acclimate.host.process_status import stat_fields

NO_MORE = (
    "The limits on processes and open files (ulimit -u, ulimit -n, a control group's pids.max) allow no more"
)
"""What an error says after the kernel's reason for refusing a process or a pipe."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

# Loaded at import: a guard must not have to allocate much on a machine that is out of memory.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def adopt_orphans(adopt: bool = True) -> bool:
    """Makes this process the parent of descendants whose own parent dies; returns whether it was before.

    Works only on Linux. On other systems init adopts orphans, so only a rank's process group can be ended.
    """
    if _libc is None:
        return False
    before = ctypes.c_int(0)
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
    return bool(before.value)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when ``parent``, which forked it, ends; Linux only."""
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(shell_code(-signal.SIGKILL))


def kill_group_at_hangup(end: socket.socket, group: int) -> None:
    """Has the kernel kill a process group when the other end of a socket pair closes; Linux only.

    Received data has the same effect, so the other end must not send any.
    """
    if _libc is None:
        return
    with suppress(OSError):  # the group's first process has ended already
        fcntl.fcntl(end, fcntl.F_SETOWN, -group)
        fcntl.fcntl(end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_ASYNC)


def name_process(name: str, title: str) -> None:
    """Renames this process; Linux only.

    Args:
        name: the name that ``top`` shows and ``pkill`` matches; at most 15 letters.
        title: the text that ``ps`` shows and ``pkill -f`` matches instead of the command line; cut to the
            command line's length.
    """
    if _libc is None:
        return
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    try:
        _, fields = stat_fields("self")
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    except (OSError, IndexError, ValueError):
        return
    if 0 < start < end:
        shown = title.encode()[: end - start - 1]
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def children(parent: int) -> list[int]:
    """Returns the pids of a process's children, including zombies; empty without ``/proc``."""
    try:
        tasks = os.listdir(f"/proc/{parent}/task")
        found = []
        for task in tasks:
            with open(f"/proc/{parent}/task/{task}/children", "rb", buffering=0) as file:
                found += [int(pid) for pid in file.read().split()]
    except OSError:  # kernels built without CONFIG_PROC_CHILDREN
        return [pid for pid, its_parent in _parents() if its_parent == parent]
    return found


def descendants(ancestor: int, without: Container[int] = ()) -> list[int]:
    """Returns the pids of all descendants of a process, children first; empty without ``/proc``.

    Leaves out those in ``without``, and their descendants.
    """
    by_parent: dict[int, list[int]] = {}
    for pid, parent in _parents():
        if pid not in without:
            by_parent.setdefault(parent, []).append(pid)
    found = list(by_parent.get(ancestor, ()))
    for pid in found:  # grows while it is walked
        found += by_parent.get(pid, ())
    return found


def _parents() -> list[tuple[int, int]]:
    """Returns every process with its parent, including zombies."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    found = []
    for name in names:
        if not name.isdigit():
            continue
        with suppress(OSError, IndexError):  # it ended meanwhile
            found.append((int(name), int(stat_fields(name)[1][1])))
    return found


def kill_descendants(without: Container[int] = (), *, patience_s: float) -> dict[int, int]:
    """Kills this process's descendants and reaps those that it adopts; returns their wait statuses by pid.

    Args:
        without: processes to leave alone, with their own descendants.
        patience_s: how long to wait for them; one that hangs in a driver does not die.
    """
    statuses: dict[int, int] = {}
    give_up = time.monotonic() + patience_s
    while time.monotonic() < give_up:
        left = [pid for pid in children(os.getpid()) if pid not in without]
        for pid in left:
            with suppress(ChildProcessError):
                reaped, status = os.waitpid(pid, os.WNOHANG)
                if reaped:
                    statuses.setdefault(pid, status)  # a later process may get the same pid
        if not left:
            break
        for pid in descendants(os.getpid(), without):
            send(pid, signal.SIGKILL)
        time.sleep(0.005)
    return statuses


def send(pid: int, number: int) -> bool:
    """Sends a signal to a process; returns whether that was possible."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def send_to_group(group: int, number: int) -> bool:
    """Sends a signal to a process group; returns whether that was possible."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def own_python(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs the ``main`` of one of our modules.

    Not ``python -m``, which looks for modules in the working directory first: a user's file ``re.py`` there
    would replace Python's. (``python -P`` does not, but needs Python 3.11.)
    """
    code = f"import sys; sys.path[:] = filter(None, sys.path); from {module} import main; sys.exit(main())"
    return [sys.executable, "-c", code, *arguments]
