"""A guard process per rank: starts it, and sees to it that nothing which the rank started outlives the job.

A guard adopts whatever its rank leaves behind, daemons included, and outlives the launcher: when the launcher
is gone, even by SIGKILL, their connection ends and the guard ends its rank. When the guard itself is killed,
the kernel kills the rank, and the launcher adopts and kills the rest.
"""

from __future__ import annotations

import gc
import json
import math
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from acclimate.launch.binding.affinity import apply_binding
from acclimate.launch.plan.rank_plan import RankPlan
from acclimate.launch.supervise import processes

ENDING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)
"""Signals that end a program which does not handle them; the launcher passes them on."""
PLAIN = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers send as a notice; passed on, and the job goes on."""
STOPPING = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_KEYS = (signal.SIGINT, signal.SIGQUIT)
"""Signals that a terminal's keys send to the whole group in front."""
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)

_DOUBT_S = 0.2
"""How far apart the launcher and a guard may hear of one signal."""
_KILL_AGAIN_S = 0.05
_KILL_PATIENCE_S = 5.0
"""How long to wait for killed processes: one that hangs in a driver does not die."""


@dataclass(frozen=True)
class Streams:
    """Descriptors that become the rank's standard streams."""

    stdin: int
    stdout: int
    stderr: int


@dataclass
class Guard:
    """The launcher's end."""

    plan: RankPlan
    pid: int
    channel: socket.socket
    _received: bytes = field(default=b"", repr=False)

    def tell(self, command: str, number: int = 0) -> None:
        """Sends a command; a guard that is gone needs none."""
        with suppress(OSError):
            self.channel.sendall(f"{command} {number}\n".encode())

    def receive(self) -> list[list[Any]] | None:
        """What the guard told since: lists of a word and its values; ``None`` once it has ended."""
        try:
            data = self.channel.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]


def start_guard(
    plan: RankPlan,
    streams: Streams,
    *,
    grace_s: float,
    shares_terminal: bool,
    ignored: Collection[int],
    private: Iterable[int],
) -> Guard:
    """Forks the guard of a rank, which starts the rank.

    Args:
        plan: the rank.
        streams: what it reads and writes.
        grace_s: between asking and killing.
        shares_terminal: whether the rank stays in the launcher's process group, where the terminal's keys
            reach it, instead of a session of its own.
        ignored: signals that the launcher's own parent had it ignore, as nohup does; so will the rank.
        private: descriptors of the launcher that guards must not keep open.

    Raises:
        OSError: the system refuses a process.
    """
    ours, theirs = socket.socketpair()
    # A signal between fork and the guard's own handlers would be told to the launcher as well.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for descriptor in (*private, ours.fileno()):
                    os.close(descriptor)
                _GuardProcess(plan, streams, theirs, grace_s, shares_terminal, ignored, before).run()
                code = 0
            except BaseException:  # noqa: BLE001 - nothing above may run twice, in the launcher and here
                traceback.print_exc()
            finally:
                os._exit(code)
    except OSError:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return Guard(plan, pid, ours)


class _GuardProcess:
    """What happens in the guard."""

    def __init__(
        self,
        plan: RankPlan,
        streams: Streams,
        channel: socket.socket,
        grace_s: float,
        shares_terminal: bool,
        ignored: Collection[int],
        mask: Iterable[int],
    ) -> None:
        gc.disable()  # a collection would copy the pages shared with the launcher
        self.plan = plan
        self.channel = channel
        self.grace_s = grace_s
        self.shares_terminal = shares_terminal
        self.deadline: float | None = None
        self.killing_since: float | None = None
        self.ended = False
        self.from_group: dict[int, float] = {}
        """When a signal last came to the whole process group."""
        self.doubtful: list[tuple[int, float]] = []
        """Signals that the launcher got, and when it said so, while it is not clear yet who sent them."""
        self._received = b""
        if not shares_terminal:
            os.setsid()
        processes.name_process("acclimate-guard")
        processes.adopt_orphans()
        guard = os.getpid()
        try:
            self.wakeup = self._handle_signals()
            self.selector = selectors.DefaultSelector()
            self.selector.register(self.channel, selectors.EVENT_READ)
            self.selector.register(self.wakeup, selectors.EVENT_READ)
            self.rank = os.fork()
        except OSError as error:
            self.tell(
                "unstartable",
                f"It was not started: {error.strerror}. The limits on processes and open files (ulimit -u, "
                "ulimit -n, a control group's pids.max) say how many there may be.",
            )
            self.tell("ended", 126, time.monotonic())
            os._exit(0)
        if self.rank == 0:
            self._become_rank(guard, streams, ignored, mask)
        for descriptor in {streams.stdin, streams.stdout, streams.stderr} - {0, 1, 2}:
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.tell("started", self.rank)

    def _handle_signals(self) -> int:
        """Ignores what is meant for the launcher; returns a descriptor that is readable after SIGCHLD."""
        for number in (*PLAIN, *STOPPING):
            signal.signal(number, signal.SIG_IGN)
        for number in ENDING:
            counted = self.shares_terminal and number in _KEYS
            signal.signal(number, self._count if counted else signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        reading, writing = os.pipe()
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        return reading

    def _count(self, number: int, frame: object) -> None:
        # The terminal's Ctrl-C reaches the whole group: if the guard had it, so had the rank.
        self.from_group[number] = time.monotonic()

    def _become_rank(
        self, guard: int, streams: Streams, ignored: Collection[int], mask: Iterable[int]
    ) -> NoReturn:
        program = self.plan.command[0]
        try:
            if not self.shares_terminal:
                os.setsid()
            processes.die_with_parent(guard)
            for number, descriptor in enumerate((streams.stdin, streams.stdout, streams.stderr)):
                os.dup2(descriptor, number)
            signal.set_wakeup_fd(-1)
            for signal_number in (*ENDING, *PLAIN, *STOPPING, *_IGNORED_BY_PYTHON):
                kept = signal_number in ignored
                signal.signal(signal_number, signal.SIG_IGN if kept else signal.SIG_DFL)
            if self.plan.binding is not None and (warning := apply_binding(self.plan.binding)):
                self.tell("warning", warning)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvpe(program, self.plan.command, dict(self.plan.environment))
        except OSError as error:
            self.tell("unstartable", f"{program} cannot be run: {error.strerror}.")
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)
        finally:
            os._exit(126)

    def run(self) -> None:
        """Until no process is left."""
        while not self._reap():
            delays = [delay for delay in (self._resolve_doubts(), self._kill_when_due()) if delay is not None]
            if any(delay < 0 for delay in delays):
                return
            for key, _ in self.selector.select(min(delays, default=None)):
                if key.fileobj == self.wakeup:
                    with suppress(BlockingIOError):
                        os.read(self.wakeup, 512)
                else:
                    self._obey()

    def tell(self, *words: Any) -> None:
        """To the launcher, if it is still there."""
        with suppress(OSError):
            self.channel.sendall(json.dumps(words).encode() + b"\n")

    def _reap(self) -> bool:
        """Takes leave of processes that ended; whether none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.rank:
                self.ended = True
                self.tell("ended", os.waitstatus_to_exitcode(status), time.monotonic())
                self._dismiss_leftovers()

    def _dismiss_leftovers(self) -> None:
        """Asks what the rank left running to end."""
        if not self.shares_terminal:
            self._signal_group(signal.SIGTERM)
        for pid in processes.descendants(os.getpid()):
            with suppress(OSError):
                if self.shares_terminal or os.getpgid(pid) != self.rank:
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)
        self._set_deadline(time.monotonic() + self.grace_s)

    def _set_deadline(self, deadline: float) -> None:
        self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)

    def _signal_group(self, number: int) -> None:
        """To the rank and what runs in its process group, as a terminal, mpirun or Slurm would."""
        if self.shares_terminal:
            if not self.ended:
                processes.send(self.rank, number)
        elif not processes.send_to_group(self.rank, number) and not self.ended:
            processes.send(self.rank, number)  # between fork and setsid it is in no group of its own
        if number in ENDING:
            # A stopped process would not hear of it.
            self._signal_group(signal.SIGCONT)

    def _end(self, number: int) -> None:
        """Asks the rank to end, and sets the time at which it is killed."""
        self._signal_group(number)
        self._set_deadline(time.monotonic() + self.grace_s)

    def _resolve_doubts(self) -> float | None:
        """Passes on what did not come from the terminal's keys; in how many seconds to call again.

        What did has reached the rank already, and what becomes of it is up to the rank: an interactive
        program goes on. It may reach the guard later than the launcher, and several may reach it as one.
        """
        now = time.monotonic()
        while self.doubtful:
            number, told_at = self.doubtful[0]
            if now < told_at + _DOUBT_S:
                return told_at + _DOUBT_S - now
            del self.doubtful[0]
            if self.from_group.get(number, -math.inf) < told_at - _DOUBT_S:
                self._end(number)
        return None

    def _kill_when_due(self) -> float | None:
        """Kills everything once the deadline is over; in how many seconds to call again, negative: never."""
        now = time.monotonic()
        if self.deadline is None:
            return None
        if now < self.deadline:
            return self.deadline - now
        if self.killing_since is None:
            self.killing_since = now
        if not self.shares_terminal:
            processes.send_to_group(self.rank, signal.SIGKILL)
        left = processes.descendants(os.getpid())
        for pid in left:
            processes.send(pid, signal.SIGKILL)
        if now - self.killing_since > _KILL_PATIENCE_S:
            self.tell("stuck", left)
            return -1.0
        return _KILL_AGAIN_S

    def _obey(self) -> None:
        data = self._read()
        if not data:  # the launcher is gone
            self.selector.unregister(self.channel)
            self._end(signal.SIGTERM)
            return
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            command, number = line.split()
            self._carry_out(command.decode(), int(number))

    def _read(self) -> bytes:
        try:
            return self.channel.recv(4096)
        except ConnectionError:
            return b""

    def _carry_out(self, command: str, number: int) -> None:
        if command == "kill":
            self._set_deadline(time.monotonic())
        elif command == "end" and self.shares_terminal and number in _KEYS:
            self.doubtful.append((number, time.monotonic()))
        elif command == "end":
            self._end(number)
        elif command == "group":
            self._signal_group(number)
        elif command == "rank" and not self.ended:
            processes.send(self.rank, number)
