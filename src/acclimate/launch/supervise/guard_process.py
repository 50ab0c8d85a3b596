"""The code of a guard and its standby: starts one rank, and ends the processes that the rank leaves behind.

The guard adopts the processes that its rank leaves behind and ends them with the rank. It outlives the
launcher: when the launcher exits, even by SIGKILL, their connection closes and the guard ends its rank.

When the guard is killed, the kernel kills the rank (a parent-death signal) and the rank's process group (a
socket between guard and standby sends SIGKILL when one of them closes it), and the standby kills the rest. If
launcher, guard and standby are killed at once, only processes that left their rank's process group remain.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import NoReturn

from acclimate.launch.binding.cores import apply_binding
from acclimate.launch.event_loop import EventLoop
from acclimate.launch.plan.job import RankPlan
from acclimate.launch.supervise import processes
from acclimate.launch.supervise.signals import KEYBOARD, STOPPING, TERMINATING, USER_SIGNALS, restore_defaults
from acclimate.launch.wire import LineBuffer, decode, encode

KILL_PATIENCE_S = 5.0
"""How long to wait for killed processes; one that hangs in a driver does not exit."""
_DEFER_S = 0.2
"""How much later than the launcher a guard may receive a signal."""
_LAUNCHER_DELAY_S = 10.0
"""How much later than a guard the launcher may receive a signal, on a busy machine."""
_KILL_AGAIN_S = 0.05
_CONTINUE_AFTER_S = 0.5
"""How long a stopped guard stays stopped."""
_PID_BYTES = 8


@dataclass(frozen=True)
class StandardStreams:
    """The descriptors for the rank's standard streams."""

    stdin: int
    stdout: int
    stderr: int

    def close(self) -> None:
        """Closes them in a process that does not use them."""
        for descriptor in {self.stdin, self.stdout, self.stderr} - {0, 1, 2}:
            os.close(descriptor)


@dataclass(frozen=True)
class GuardSettings:
    """How the supervisor wants its ranks to be treated."""

    grace_s: float
    """The time between SIGTERM and SIGKILL."""
    shares_terminal: bool
    """Whether the rank stays in the launcher's process group, which gets the signals of the terminal's keys,
    instead of getting its own session."""
    ignored: Collection[int]
    """Signals that the launcher was started with ignored, as by nohup; the rank ignores them too."""
    blocks_interrupt: bool
    """Whether the rank starts with SIGINT blocked."""


@dataclass(frozen=True)
class Started:
    """The pids of a rank and of its guard."""

    rank: int
    guard: int


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int
    """Its exit code, or minus the number of the signal that killed it."""
    at: float
    """On the monotonic clock."""


FROM_GUARD = {
    "started": Started,
    "warning": str,
    "unstartable": str,  # why the rank was not started
    "ended": Ended,
    "guard_lost": int,  # from the standby: the guard's exit code
    "stuck": tuple[int, ...],  # processes that cannot be killed
}
"""The fields of a guard's and a standby's messages, with their types."""
FROM_SUPERVISOR = {
    "rank": int,  # a signal for the rank alone
    "group": int,  # a signal for the rank's process group
    "end": int,  # the same, after which the grace begins
    "kill": int,  # ends the grace; the number has no meaning
}
"""The fields of the supervisor's commands, with their types."""
LONGEST_FROM_GUARD = 1 << 20
_LONGEST_COMMAND = 1 << 10


class _Channel:
    """The connection to the launcher."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, **message: object) -> None:
        """Sends a message of :data:`FROM_GUARD`, if the launcher is still connected."""
        with suppress(OSError):
            self.connection.sendall(encode(message))

    def send_end(self, code: int) -> None:
        """Reports the rank's end."""
        self.send(ended=asdict(Ended(code, time.monotonic())))

    def refuse(self, error: OSError) -> None:
        """Reports that the system refused a process."""
        self.send(unstartable=f"It was not started: {error.strerror}. {processes.NO_MORE}.")
        self.send_end(126)


def run_standby(
    plan: RankPlan,
    streams: StandardStreams,
    connection: socket.socket,
    settings: GuardSettings,
    mask: Iterable[int],
) -> None:
    """In a fork of the launcher: starts the guard and waits; if the guard is killed, ends its processes.

    All signals are blocked, and stay blocked here. ``connection`` leads to the launcher, which blocks the
    signals in ``mask``.
    """
    gc.disable()  # a collection would copy the pages shared with the launcher
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a guard cannot be waited for where it is ignored
    if not settings.shares_terminal:
        os.setsid()
    processes.adopt_orphans()
    channel = _Channel(connection)
    link = socket.socketpair()
    try:
        guard = os.fork()
    except OSError as error:
        channel.refuse(error)
        return
    if guard == 0:
        code = 1
        try:
            _GuardProcess(plan, streams, channel, link, settings, mask).run()
            code = 0
        except BaseException:  # noqa: BLE001 - nothing above may run twice, in the standby and here
            traceback.print_exc()
        finally:
            os._exit(code)
    # Other names than the launcher's, so that "pkill -f" of its command line finds the launcher alone.
    processes.name_process("rank-standby", f"rank-standby: rank {plan.rank}")
    link[1].close()
    streams.close()
    status = _wait_for(guard)
    if status != 0:
        statuses = processes.kill_descendants(patience_s=KILL_PATIENCE_S)
        channel.send(guard_lost=os.waitstatus_to_exitcode(status))
        rank = _received_pid(link[0])
        if rank in statuses:
            channel.send_end(os.waitstatus_to_exitcode(statuses[rank]))
    link[0].close()  # or Python's development mode would warn


def _wait_for(guard: int) -> int:
    """Waits for the guard's end, continuing it if it is stopped; returns its wait status."""
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if pid != guard:
            continue
        if not os.WIFSTOPPED(status):
            return status
        time.sleep(_CONTINUE_AFTER_S)
        processes.send(guard, signal.SIGCONT)


def _received_pid(link: socket.socket) -> int | None:
    link.setblocking(False)
    try:
        data = link.recv(_PID_BYTES)
    except OSError:
        return None
    return int.from_bytes(data, "big") if data else None


class _GuardProcess:
    """Runs in the guard."""

    def __init__(
        self,
        plan: RankPlan,
        streams: StandardStreams,
        channel: _Channel,
        link: tuple[socket.socket, socket.socket],
        settings: GuardSettings,
        mask: Iterable[int],
    ) -> None:
        self.plan = plan
        self.channel = channel
        self.link = link
        """The standby's end and the guard's end of a socket pair."""
        self.settings = settings
        self.is_killing = False
        self.gives_up = False
        """Whether processes are left that cannot be killed."""
        self.ended = False
        self.from_group: dict[int, float] = {}
        """When a signal last came to the whole process group."""
        self.unclaimed: set[int] = set()
        """Signals to the group that the launcher has not reported yet."""
        self._lines = LineBuffer(_LONGEST_COMMAND)
        processes.name_process("rank-guard", f"rank-guard: rank {plan.rank}")
        processes.adopt_orphans()
        guard = os.getpid()
        try:
            self.wakeup = self._handle_signals()
            self.loop = EventLoop()
            self.loop.watch(self.channel.connection.fileno(), self._obey)
            self.loop.watch(self.wakeup, self._drain_wakeup)
            self.rank = os.fork()
        except OSError as error:
            self.channel.refuse(error)
            os._exit(0)
        if self.rank == 0:
            self._become_rank(guard, streams, mask)
        self._tie_rank_to_standby()
        streams.close()
        # The launcher may have been started with every signal blocked.
        signal.pthread_sigmask(signal.SIG_SETMASK, frozenset(mask) - {signal.SIGCHLD})
        self.channel.send(started=asdict(Started(self.rank, guard)))

    def _tie_rank_to_standby(self) -> None:
        """Has the kernel kill the rank's process group when either the guard or the standby is killed."""
        standby_end, own_end = self.link
        # Only the pid: the standby reads it if the guard is killed, perhaps short of memory, in one call.
        # Before the next step, since data has the effect of a hangup.
        own_end.send(self.rank.to_bytes(_PID_BYTES, "big"))
        if not self.settings.shares_terminal:
            for end in self.link:
                processes.kill_group_at_hangup(end, self.rank)
        standby_end.close()

    def _handle_signals(self) -> int:
        """Ignores signals meant for the launcher; returns a descriptor that is readable after SIGCHLD."""
        for number in (*USER_SIGNALS, *STOPPING):
            signal.signal(number, signal.SIG_IGN)
        for number in TERMINATING:
            counted = self.settings.shares_terminal and number in KEYBOARD
            signal.signal(number, self._count if counted else signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        reading, writing = os.pipe()
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        return reading

    def _count(self, number: int, frame: object) -> None:
        # The terminal's Ctrl-C reaches the whole group: if the guard got it, so did the rank.
        self.from_group[number] = time.monotonic()
        self.unclaimed.add(number)

    def _become_rank(self, guard: int, streams: StandardStreams, mask: Iterable[int]) -> NoReturn:
        program = self.plan.command[0]
        try:
            if not self.settings.shares_terminal:
                os.setsid()
            processes.die_with_parent(guard)
            for number, descriptor in enumerate((streams.stdin, streams.stdout, streams.stderr)):
                os.dup2(descriptor, number)
            restore_defaults(self.settings.ignored)
            if self.plan.binding is not None and (warning := apply_binding(self.plan.binding)):
                self.channel.send(warning=warning)
            blocked = {signal.SIGINT} if self.settings.blocks_interrupt else set()
            signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, *blocked})
            os.execvpe(program, self.plan.command, dict(self.plan.environment))
        except OSError as error:
            self.channel.send(unstartable=f"{program} cannot be run: {error.strerror}.")
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)
        finally:
            os._exit(126)

    def run(self) -> None:
        """Runs until no process is left."""
        while not self._reap() and not self.gives_up:
            self.loop.wait(math.inf)

    def _drain_wakeup(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.wakeup, 512)

    def _reap(self) -> bool:
        """Reaps processes that ended; returns whether none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.rank and not self.ended:  # later, the pid may be that of an orphan
                self.ended = True
                self.channel.send_end(os.waitstatus_to_exitcode(status))
                self._end_leftovers()

    def _end_leftovers(self) -> None:
        """Asks the processes that the rank left behind to end."""
        if not self.settings.shares_terminal:
            self._signal_group(signal.SIGTERM)
        for pid in processes.descendants(os.getpid()):
            if self.settings.shares_terminal or not self._is_in_group(pid):
                processes.send(pid, signal.SIGTERM)
                processes.send(pid, signal.SIGCONT)
        self.loop.after(self.settings.grace_s, self._begin_to_kill)

    def _signal_group(self, number: int) -> None:
        """Signals the rank's process group, like a terminal, mpirun or Slurm."""
        if self.settings.shares_terminal:
            if not self.ended:
                processes.send(self.rank, number)
        elif not self._send_to_group(number) and not self.ended:
            processes.send(self.rank, number)  # between fork and setsid it is in no group of its own
        if number in TERMINATING:
            # A stopped process would not handle the signal.
            self._signal_group(signal.SIGCONT)

    def _send_to_group(self, number: int) -> bool:
        """Signals the rank's process group, if it exists; returns whether that was possible."""
        # The number of a group without processes may become that of a stranger's group. Only Linux lists a
        # group's processes; elsewhere the group is all that can be ended.
        exists = (
            not self.ended
            or sys.platform != "linux"
            or any(map(self._is_in_group, processes.descendants(os.getpid())))
        )
        return exists and processes.send_to_group(self.rank, number)

    def _is_in_group(self, pid: int) -> bool:
        try:
            return os.getpgid(pid) == self.rank
        except OSError:  # it has ended
            return False

    def _end(self, number: int) -> None:
        """Asks the rank to end, and sets the time at which it is killed."""
        self._signal_group(number)
        self.loop.after(self.settings.grace_s, self._begin_to_kill)

    def _end_unless_key(self, number: int, told_at: float) -> None:
        """Forwards a signal that ends the rank, unless a key of the terminal sent it.

        A key's signal has reached the rank already, and the rank decides what to do: an interactive program
        goes on. It may reach the guard later than the launcher, and several may reach it as one.
        """
        delay_s = _LAUNCHER_DELAY_S if number in self.unclaimed else _DEFER_S
        self.unclaimed.discard(number)
        if self.from_group.get(number, -math.inf) < told_at - delay_s:
            self._end(number)

    def _begin_to_kill(self) -> None:
        if not self.is_killing:
            self.is_killing = True
            self._kill(time.monotonic())

    def _kill(self, since: float) -> None:
        """Kills everything, again and again until nothing is left."""
        if not self.settings.shares_terminal:
            self._send_to_group(signal.SIGKILL)
        left = processes.descendants(os.getpid())
        for pid in left:
            processes.send(pid, signal.SIGKILL)
        if time.monotonic() - since > KILL_PATIENCE_S:
            self.channel.send(stuck=left)
            self.gives_up = True
            return
        self.loop.after(_KILL_AGAIN_S, partial(self._kill, since))

    def _obey(self) -> None:
        data = self._read()
        if not data:  # the launcher is gone
            self.loop.forget(self.channel.connection.fileno())
            self._end(signal.SIGTERM)
            return
        for line in self._lines.feed(data):
            for command, number in decode(line, FROM_SUPERVISOR).items():
                self._carry_out(command, number)

    def _read(self) -> bytes:
        try:
            return self.channel.connection.recv(4096)
        except ConnectionError:
            return b""

    def _carry_out(self, command: str, number: int) -> None:
        if command == "kill":
            self._begin_to_kill()
        elif command == "end" and self.settings.shares_terminal and number in KEYBOARD:
            self.loop.after(_DEFER_S, partial(self._end_unless_key, number, time.monotonic()))
        elif command == "end":
            self._end(number)
        elif command == "group":
            self._signal_group(number)
        elif command == "rank" and not self.ended:
            processes.send(self.rank, number)
