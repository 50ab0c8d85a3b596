"""The kernel's information about a process or thread, and a description of how a process ended."""

from __future__ import annotations

import signal


def stat_fields(process: str) -> tuple[bytes, list[bytes]]:
    """Returns the name of a process or thread, and the fields of proc(5)'s ``stat`` from the state on.

    Args:
        process: the path below ``/proc``, such as ``"12"`` or ``"self/task/34"``.

    Raises:
        OSError: it does not exist, or this system has no ``/proc``.
        IndexError: it ended while it was read.
    """
    with open(f"/proc/{process}/stat", "rb", buffering=0) as file:
        # "pid (name) state parent …", where the name may hold anything, parentheses included.
        start, _, rest = file.read(4096).rpartition(b")")
    fields = rest.split()
    if not fields:
        raise IndexError(f"/proc/{process}/stat is empty")
    return start.partition(b"(")[2], fields


def how_it_ended(code: int) -> str:
    """Returns the predicate of a sentence about a process, given its return code as in :mod:`subprocess`."""
    if code >= 0:
        return f"ended with exit code {code}"
    number, name = f"signal {-code}", signal_name(-code)
    return f"was killed by {number}" if name == number else f"was killed by {name} ({number})"


def signal_name(number: int) -> str:
    """Returns ``SIGKILL`` for 9, and the number for a signal without a name, such as realtime signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
