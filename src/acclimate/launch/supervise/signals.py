"""The signals that the launcher handles, and the relay that decides what each means for the ranks.

Each process above a guard has one :class:`SignalRelay`: ``supervisor.py`` commands this host's guards,
``remote/coordinator.py`` sends messages to agents, which signal themselves and thus their supervisor, and
``elastic/torch_agent.py`` signals its worker, a supervisor too. A guard (``guard_process.py``) obeys
commands. The only signals it handles itself are those of a terminal's keys, which its rank gets without the
launcher.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol

TERMINATING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a program that does not handle them; the launcher forwards them and the job ends."""
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Schedulers send these as a warning; the launcher forwards them and the job goes on."""
KEYBOARD = (signal.SIGINT, signal.SIGQUIT)
"""A terminal's keys send these to its whole foreground process group."""
STOPPING = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""Signals that stop a process; unlike SIGSTOP they can be ignored."""
RELAYED = (*TERMINATING, *USER_SIGNALS, signal.SIGTSTP)
"""The signals that a launcher relays if it shares no terminal with its rank."""
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these at its start; a program that it runs must not inherit that."""


class Signalled(Protocol):
    """The ranks below this process, whichever way signals reach them."""

    def notify(self, number: int) -> None:
        """Forwards a notice; the job goes on."""

    def end_by(self, number: int) -> None:
        """Forwards a signal that ends the job."""

    def pause(self) -> None:
        """Prepares the ranks for SIGTSTP, with which this process then stops."""

    def resume(self) -> None:
        """Undoes :meth:`pause`, once this process has been continued."""


class SignalRelay:
    """While entered, keeps signals for :meth:`relay` instead of letting them end this process.

    Works only in the main thread. Signals that this process ignored, as under nohup or in a background job of
    a shell, stay ignored; they are in ``ignored``. The others are unblocked: a program that blocks signals
    passes that on to what it starts, and then neither Ctrl-C nor SIGTERM would end the job.
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

    def __enter__(self) -> SignalRelay:
        self.ignored = frozenset(
            number for number in self._numbers if signal.getsignal(number) == signal.SIG_IGN
        )
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in self._numbers:
            if number not in self.ignored:
                self._before[number] = signal.signal(number, _keep)
        self._mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.descriptor)
        os.close(self._writing)

    def relay(self, ranks: Signalled, *, stop_with: int = signal.SIGTSTP) -> bool:
        """Relays the signals since the last call to the ranks, in order; returns whether there were any.

        After SIGTSTP, this process stops itself with ``stop_with``: SIGTSTP or SIGSTOP.
        """
        numbers = self._read()
        for number in numbers:
            if number in USER_SIGNALS:
                ranks.notify(number)
            elif number == signal.SIGTSTP:
                ranks.pause()
                if stop_with == signal.SIGSTOP:
                    os.kill(os.getpid(), stop_with)
                else:
                    self._take_default(stop_with)
                ranks.resume()
            else:
                ranks.end_by(number)
        return bool(numbers)

    def _read(self) -> list[int]:
        with suppress(BlockingIOError):
            # Other signals with a handler, such as SIGCHLD, are written to the descriptor too.
            return [number for number in os.read(self.descriptor, 512) if number in self._before]
        return []

    def _take_default(self, number: int) -> None:
        """Lets a signal have its default effect on this process: SIGTSTP stops it until it is continued."""
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, _keep)


def restore_defaults(ignored: Iterable[int]) -> None:
    """Before ``exec``: undoes the launcher's handlers; signals in ``ignored`` stay ignored."""
    signal.set_wakeup_fd(-1)
    kept = frozenset(ignored)
    for number in (*TERMINATING, *USER_SIGNALS, *STOPPING, *_IGNORED_BY_PYTHON):
        signal.signal(number, signal.SIG_IGN if number in kept else signal.SIG_DFL)


def _keep(number: int, frame: FrameType | None) -> None:
    """Does nothing: Python has already written the number to the wake-up descriptor."""
