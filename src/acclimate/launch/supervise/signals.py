"""The signals that the launcher handles, and a descriptor that is readable after one.

They are forwarded by ``supervisor.py`` to this host's guards, by ``remote/coordinator.py`` to other hosts'
agents, and by ``elastic/agent.py`` to elastic ranks; ``guard_process.py`` sends them to its rank.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

TERMINATING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)
"""End a program that does not handle them; the launcher forwards them and the job ends."""
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Schedulers send these as a warning; the launcher forwards them and the job goes on."""
KEYBOARD = (signal.SIGINT, signal.SIGQUIT)
"""A terminal's keys send these to its whole foreground process group."""
STOPPING = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""Stop a process; unlike SIGSTOP they can be ignored."""
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these at its start; a program that it runs must not inherit that."""


class SignalInbox:
    """While entered, keeps signals for :meth:`read` instead of letting them end this process.

    Only in the main thread. Signals that this process ignored stay ignored, as nohup and a shell's background
    jobs want it: they are in ``ignored``.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = tuple(numbers)
        self._before: dict[int, Any] = {}
        self.ignored: frozenset[int] = frozenset()
        self.descriptor, self._writing = os.pipe()
        """Readable after a signal."""
        for descriptor in (self.descriptor, self._writing):
            os.set_blocking(descriptor, False)

    @property
    def descriptors(self) -> tuple[int, int]:
        """Both ends, so that other processes can close them."""
        return self.descriptor, self._writing

    def __enter__(self) -> SignalInbox:
        self.ignored = frozenset(
            number for number in self._numbers if signal.getsignal(number) == signal.SIG_IGN
        )
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in self._numbers:
            if number not in self.ignored:
                self._before[number] = signal.signal(number, _keep)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.descriptor)
        os.close(self._writing)

    def read(self) -> list[int]:
        """Returns the signals since the last call, in order."""
        with suppress(BlockingIOError):
            # Other signals with a handler, such as SIGCHLD, are written to the descriptor too.
            return [number for number in os.read(self.descriptor, 512) if number in self._before]
        return []

    def take_default(self, number: int) -> None:
        """Lets a signal have its default effect on this process: SIGTSTP stops it until it is continued."""
        if number not in self._before:
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, _keep)


def restore_defaults(ignored: Iterable[int]) -> None:
    """Before ``exec``: undoes the launcher's handlers; signals in ``ignored`` stay ignored."""
    signal.set_wakeup_fd(-1)
    kept = frozenset(ignored)
    for number in (*TERMINATING, *NOTICES, *STOPPING, *_IGNORED_BY_PYTHON):
        signal.signal(number, signal.SIG_IGN if number in kept else signal.SIG_DFL)


def _keep(number: int, frame: FrameType | None) -> None:
    """Does nothing: Python has already written the number to the wake-up descriptor."""
