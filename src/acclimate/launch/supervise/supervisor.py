"""Supervises the ranks of this host: shows their output, forwards signals, ends all when one fails."""

from __future__ import annotations

import logging
import math
import os
import signal
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from acclimate.host.exit_codes import shell_code
from acclimate.host.process_status import signal_name
from acclimate.launch.event_loop import EventLoop
from acclimate.launch.output.pump import OutputPump, missing_output, own_streams, stream_failure
from acclimate.launch.output.views import Plain, Source, TaggedLines, TaggedTerminal, View
from acclimate.launch.output.writer import Writer
from acclimate.launch.plan.job import RankPlan
from acclimate.launch.plan.outcome import Outcome, RankFailure
from acclimate.launch.supervise import processes
from acclimate.launch.supervise.guard_process import KILL_PATIENCE_S, GuardSettings
from acclimate.launch.supervise.rank_process import Guard, RankProcess, count_kills
from acclimate.launch.supervise.signals import KEYBOARD, RELAYED, SignalRelay
from acclimate.launch.wire import Message

_GUARD_PATIENCE_S = 2 * KILL_PATIENCE_S
"""How long after the grace period a guard may take to kill its rank and exit."""
_CHUNK = 1 << 16

_logger = logging.getLogger("acclimate")


@dataclass(frozen=True)
class StopRequest:
    """A connection over which another process, such as the launcher on another host, can end the ranks."""

    descriptor: int
    """Readable, or closed, when ``read`` should be called."""
    read: Callable[[], str | None]
    """Called when ``descriptor`` is readable, and when ``due_at`` says; returns why the ranks must end, or
    ``None``."""
    failing: Callable[[RankFailure], None] = lambda failure: None
    """Called at once with the first rank that failed. While the others still have their grace, ranks on other
    hosts may fail because this one is missing."""
    due_at: Callable[[], float | None] = lambda: None
    """Returns when to call ``read`` without a message, on the monotonic clock; ``None``: never."""
    is_open: Callable[[], bool] = lambda: False
    """Returns whether messages may come after a reason, such as those that make room for output."""
    takes_stdin: bool = True
    """Whether the ranks do not get the standard input of this process, which belongs to the connection."""


def supervise(
    ranks: Sequence[RankPlan],
    *,
    grace_s: float,
    quiet: bool = False,
    tagged: bool | None = None,
    stop: StopRequest | None = None,
    name: str = "acclimate run",
    blocks_interrupt: bool = False,
    writers: Mapping[int, Writer] | None = None,
) -> Outcome:
    """Starts the ranks and waits until the last of their processes is gone.

    Must be called in the main thread. SIGINT, SIGTERM, SIGHUP and SIGQUIT are forwarded to the ranks, which
    then have ``grace_s`` to end. SIGUSR1 and SIGUSR2 are forwarded and end nothing. Processes that a rank
    leaves behind are ended too.

    Args:
        ranks: the plans of this host's ranks.
        grace_s: the time between SIGTERM and SIGKILL when ranks must end.
        quiet: shows only errors and the ranks' output.
        tagged: whether each line begins with ``[rank N]``; ``None``: if there are several ranks. A single
            rank without tags uses the launcher's terminal.
        stop: lets another process end the job.
        name: the name of the command, with which notes begin.
        blocks_interrupt: whether the ranks start with SIGINT blocked, and unblock it once they can handle it.
        writers: show the ranks' streams 1 and 2; ``None``: this process's standard streams do.

    Raises:
        RankStartError: the system refuses a process, a pipe or a log file; no rank is left running.
    """
    _open_standard_streams()
    tagged = len(ranks) > 1 if tagged is None else tagged
    # Only the foreground process group can read from a terminal and gets its keys' signals, so a rank that
    # uses the terminal must be in the launcher's group.
    shares_terminal = writers is None and len(ranks) == 1 and not tagged and any(map(os.isatty, range(3)))
    # The keys of a terminal that they share stop the rank too.
    numbers = [number for number in RELAYED if not (shares_terminal and number == signal.SIGTSTP)]
    adopted_before = processes.adopt_orphans()
    try:
        with SignalRelay(numbers) as signals, _terminal_settings_kept(shares_terminal):
            settings = GuardSettings(grace_s, shares_terminal, signals.ignored, blocks_interrupt)
            return _Supervisor(ranks, settings, quiet, tagged, stop, signals, name, writers).run()
    finally:
        processes.adopt_orphans(adopted_before)


@dataclass(eq=False)
class _Supervisor:
    """One run of the ranks."""

    plans: Sequence[RankPlan]
    settings: GuardSettings
    quiet: bool
    tagged: bool
    stop: StopRequest | None
    signals: SignalRelay
    name: str
    writers: Mapping[int, Writer] | None
    pipes: dict[int, tuple[RankProcess, int]] = field(default_factory=dict)
    """The rank and stream (1 or 2) of each pipe, by descriptor."""
    failed: RankProcess | None = None
    """The first rank that failed by itself."""
    ended_by: int | None = None
    """The signal that was forwarded to end the job."""
    reason: str | None = None
    asked_to_stop: bool = False
    ending: bool = False
    abandons_output: bool = False
    awaits_output: bool = False
    """Whether an interrupted job waits for the reader of its output, for the grace period."""
    said: set[str] = field(default_factory=set)
    missing: tuple[str, ...] = ()
    """Of the launcher's own streams."""

    def __post_init__(self) -> None:
        self.ranks = [RankProcess(plan) for plan in self.plans]
        self.loop = EventLoop()
        view = partial(_view, self.tagged)
        views = own_streams(view) if self.writers is None else {n: view(w) for n, w in self.writers.items()}
        self.pump = OutputPump(self.loop, views, self._stream_failed)
        self.kills_before = count_kills()
        self.children_before = frozenset(processes.children(os.getpid()))

    # -- from start to end -----------------------------------------------------------------------

    def run(self) -> Outcome:
        try:
            self._start()
            while self._is_unfinished():
                self._wait()
        finally:
            self._leave_nothing()
        logs = [rank.log for rank in self.ranks if rank.log is not None and rank.log.error is not None]
        ends = (f"the log {log.path} ends early ({log.error and log.error.strerror})" for log in logs)
        return replace(self._outcome(), missing=(*self.missing, *ends))

    def _start(self) -> None:
        for rank in self.ranks:
            rank.open_log()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            for rank in self.ranks:
                stdin, private = self._stdin_of(rank, nothing), self._private_descriptors()
                pipes = rank.start(stdin, self._captured(), self.settings, private)
                for stream, pipe in pipes.items():
                    self.pipes[pipe] = rank, stream
                    self.pump.read_from(pipe, stream, partial(self._read, pipe))
                if rank.guard is not None:
                    self.loop.watch(rank.guard.channel.fileno(), partial(self._listen, rank))
        finally:
            os.close(nothing)
        self.loop.watch(self.signals.descriptor, self._take_signals)
        if self.stop is not None:
            self.loop.watch(self.stop.descriptor, self._take_request)

    def _captured(self) -> list[int]:
        """Returns the streams that the launcher reads; a rank writes directly to terminals."""
        if not self.settings.shares_terminal:
            return [1, 2]
        return [stream for stream in (1, 2) if not os.isatty(stream) or self.ranks[0].log is not None]

    def _stdin_of(self, rank: RankProcess, nothing: int) -> int:
        """Returns the launcher's stdin for a single rank, or for rank 0 unless it is a terminal."""
        if (self.stop is not None and self.stop.takes_stdin) or rank is not self.ranks[0]:
            return nothing
        return 0 if len(self.ranks) == 1 or not os.isatty(0) else nothing

    def _private_descriptors(self) -> list[int]:
        guards = (rank.guard for rank in self.ranks if rank.guard is not None)
        logs = (rank.log for rank in self.ranks if rank.log is not None)
        return [
            *self.signals.descriptors,
            *self.pipes,
            *(guard.channel.fileno() for guard in guards),
            *(log.descriptor for log in logs),
        ]

    def _is_unfinished(self) -> bool:
        if any(rank.guard is not None for rank in self.ranks):
            return True
        if self.ended_by is not None and not self.awaits_output:
            self.awaits_output = True
            self.loop.after(self.settings.grace_s, self._abandon_output)
        if self.abandons_output:
            return False
        # All processes have ended, so the pipes get no more output, even if another process has an end open.
        for pipe in list(self.pipes):
            os.set_blocking(pipe, False)
            self._read(pipe)
        return bool(self.pipes) or self.pump.waiting

    def _wait(self) -> None:
        """Waits for the next event and handles it."""
        flush_s = self.pump.flush()  # once a turn, so that a terminal is drawn once for all its events
        flush_at = math.inf if flush_s is None else time.monotonic() + flush_s
        self.loop.wait(min(flush_at, self._request_due_at()))
        if self._request_due_at() <= time.monotonic():
            self._take_request()
        self._end_with_first_failure()

    def _abandon_output(self) -> None:
        self.abandons_output = True

    def _leave_nothing(self) -> None:
        for rank in self.ranks:  # only where something above failed
            if rank.guard is not None:
                rank.guard.kill()
                rank.reap_guard()
        self._kill_orphans()
        for pipe in list(self.pipes):
            self._close(pipe)
        self.pump.flush()
        for rank in self.ranks:
            if rank.log is not None:
                rank.log.close()
        self.loop.close()

    # -- output ----------------------------------------------------------------------------------

    def _read(self, pipe: int) -> None:
        rank, stream = self.pipes[pipe]
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            data = b""
        source = Source(rank.tag if self.tagged else "", stream)
        if not data:
            self.pump.end(stream, source)
            self._close(pipe)
            return
        rank.tail.feed(stream, data)
        if rank.log is not None and rank.log.error is None:
            rank.log.write(data)
            if rank.log.error is not None:
                why = f"{rank.log.path}: {rank.log.error.strerror}"
                self._note(logging.WARNING, f"the log of rank {rank.plan.rank} ends here: {why}.")
        self.pump.feed(stream, source, data)

    def _close(self, pipe: int) -> None:
        del self.pipes[pipe]
        self.pump.forget(pipe)
        os.close(pipe)

    def _stream_failed(self, stream: int, error: OSError) -> None:
        """Handles a failure of one of the launcher's own streams."""
        if not isinstance(error, BrokenPipeError):
            self.missing += missing_output(stream, error)
            self._note(logging.WARNING, stream_failure(stream, error))
        elif not self.ending:
            self.reason = stream_failure(stream, error)
            self.ended_by = signal.SIGPIPE
            self._end(signal.SIGTERM)

    def _note(self, level: int, sentence: str) -> None:
        """Writes a note of the launcher to standard error, once."""
        wanted = _logger.isEnabledFor(level) and not (self.quiet and level < logging.ERROR)
        if wanted and sentence not in self.said:
            self.said.add(sentence)
            self.pump.feed(2, Source("", 0), f"{self.name}: {sentence}\n".encode())

    # -- events ----------------------------------------------------------------------------------

    def _listen(self, rank: RankProcess) -> None:
        guard = rank.guard
        if guard is None:
            return
        messages = guard.receive()
        if messages is None:
            self._reap_guard(rank)
            return
        for message in messages:
            self._act_on(rank, guard, message)

    def _act_on(self, rank: RankProcess, guard: Guard, message: Message) -> None:
        if "started" in message:
            rank.pid, guard.pid = message["started"].rank, message["started"].guard
            bound = rank.plan.binding
            where = f", on {bound.describe()}" if bound is not None else ""
            self._note(logging.INFO, f"rank {rank.plan.rank} is pid {rank.pid}{where}.")
        elif "warning" in message:
            self._note(logging.WARNING, message["warning"])
        elif "unstartable" in message:
            rank.trouble = message["unstartable"]
        elif "ended" in message:
            # The standby reports a rank too, by its pid, which another process may have got meanwhile.
            if rank.code is None:
                rank.code, rank.ended_at = message["ended"].code, message["ended"].at
        elif "guard_lost" in message:
            rank.guard_was_lost(message["guard_lost"])
        elif "stuck" in message:
            self._note(
                logging.ERROR,
                f"rank {rank.plan.rank} left processes that cannot be killed; they may be waiting for a "
                f"device or a file server: {', '.join(map(str, message['stuck']))}.",
            )

    def _reap_guard(self, rank: RankProcess) -> None:
        if rank.guard is not None:
            self.loop.forget(rank.guard.channel.fileno())
        statuses = {} if rank.reap_guard() else self._kill_orphans()
        if rank.code is None:
            status = statuses.get(rank.pid or 0)
            rank.code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
            rank.ended_at = time.monotonic()

    def _kill_unresponsive_guards(self) -> None:
        """Kills guards that are long past the grace period, such as repeatedly stopped or frozen ones."""
        for rank in self.ranks:
            if rank.guard is not None:
                sentence = f"the guard of rank {rank.plan.rank} (pid {rank.guard.pid}) does not respond."
                self._note(logging.ERROR, f"{sentence} It was killed, and the rank with it.")
                rank.guard.kill()
                self._reap_guard(rank)

    def _end_with_first_failure(self) -> None:
        """Ends the job once a rank has failed by itself."""
        failed = [rank for rank in self.ranks if rank.code]
        if failed and not self.ending:
            self.failed = min(failed, key=lambda rank: rank.ended_at)
            self._end(signal.SIGTERM)
            if self.stop is not None:
                self.stop.failing(self.failed.failure(self.kills_before))

    def _end(self, number: int) -> None:
        self.ending = True
        self._tell_all("end", number)
        self._expect_guards_to_end(self.settings.grace_s)

    def _expect_guards_to_end(self, within_s: float) -> None:
        self.loop.after(within_s + _GUARD_PATIENCE_S, self._kill_unresponsive_guards)

    def _tell_all(self, command: str, number: int = 0) -> None:
        for rank in self.ranks:
            if rank.guard is not None:
                rank.guard.send(command, number)

    def _take_signals(self) -> None:
        # The kernel ignores SIGTSTP in a session without a shell that could continue the process. Ranks have
        # such a session, and so has a supervisor below another process, which later continues the supervisor.
        stop_with = signal.SIGTSTP if self.stop is None else signal.SIGSTOP
        if self.signals.relay(self, stop_with=stop_with) and all(rank.guard is None for rank in self.ranks):
            self.abandons_output = True  # only the output to a stuck reader is left

    def notify(self, number: int) -> None:
        self._tell_all("rank", number)

    def end_by(self, number: int) -> None:
        if self.settings.shares_terminal:
            self.ended_by = number
            self._tell_all("end", number)
            if number not in KEYBOARD:  # the program on the terminal decides what they do
                self._expect_guards_to_end(self.settings.grace_s)
        elif self.ending and number in KEYBOARD:
            self._tell_all("kill")
            self._expect_guards_to_end(0.0)
            self.abandons_output = True
        else:
            self.ended_by = self.ended_by or number
            self._end(number)

    def pause(self) -> None:
        self._tell_all("group", signal.SIGSTOP)

    def resume(self) -> None:
        self._tell_all("group", signal.SIGCONT)

    def _request_due_at(self) -> float:
        """Returns when to call ``read`` without a message. Each message changes it, so it is no timer."""
        due_at = None if self.stop is None or self.asked_to_stop else self.stop.due_at()
        return math.inf if due_at is None else due_at

    def _take_request(self) -> None:
        if self.stop is None:
            return
        reason = self.stop.read()
        if reason is None:
            return
        if not self.stop.is_open():
            self.loop.forget(self.stop.descriptor)
        if not self.asked_to_stop:
            self.asked_to_stop = True
            self.reason = self.reason or reason
            self.ended_by = self.ended_by or signal.SIGTERM
            self._end(signal.SIGTERM)

    def _kill_orphans(self) -> dict[int, int]:
        """Kills processes adopted after a guard and its standby died; returns their wait statuses."""
        guards = {rank.guard.standby_pid for rank in self.ranks if rank.guard is not None}
        return processes.kill_descendants(guards | self.children_before, patience_s=KILL_PATIENCE_S)

    # -- the outcome -----------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        # A reason says what ended the ranks, such as a reader that has exited. Without one it was a signal.
        if self.settings.shares_terminal and self.ended_by is not None and self.reason is None:
            self.failed = self._failed_despite(self.ended_by)
        if self.failed is not None:
            failure = self.failed.failure(self.kills_before)
            return Outcome(failure.code, failure)
        ended = sorted(self.ranks, key=lambda rank: rank.ended_at)
        codes = [rank.code for rank in ended if rank.code is not None]
        code = code_of_ended_job(codes, self.ended_by, forced=self.reason is not None)
        if (
            code != 0
            and self.reason is None
            and self.ended_by is not None
            and not self.settings.shares_terminal
        ):
            self.reason = f"{signal_name(self.ended_by)} was forwarded, and the ranks have ended."
        return Outcome(code, None, self.reason)

    def _failed_despite(self, number: int) -> RankProcess | None:
        """Returns the rank on the terminal if it failed by itself, perhaps long after a Ctrl-C."""
        code = self.ranks[0].code or 0
        return self.ranks[0] if code not in (0, -number, shell_code(-number)) else None


def code_of_ended_job(codes: Sequence[int], ended_by: int | None, *, forced: bool) -> int:
    """Returns the code of a job in which no rank failed by itself.

    Args:
        codes: its ranks' codes, in the order in which they ended.
        ended_by: the signal that was forwarded to end it; ``None`` if it ended by itself.
        forced: whether something besides a signal to the launcher ended it, so that it failed even if all its
            ranks succeeded.

    Returns:
        The code as in :mod:`subprocess`: a rank's own exit code if there is one, else that of the signal.
    """
    if ended_by is None or (not any(codes) and not forced):
        return 0
    return next((code for code in codes if code > 0), -ended_by)


def _view(tagged: bool, writer: Writer) -> View:
    if not tagged:
        return Plain(writer)
    draws = writer.is_terminal and (os.environ.get("TERM") or "dumb") != "dumb"
    return (TaggedTerminal if draws else TaggedLines)(writer)


def _open_standard_streams() -> None:
    """Opens closed standard streams, since a rank's pipe would get their numbers."""
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


@contextmanager
def _terminal_settings_kept(wanted: bool) -> Iterator[None]:
    """Restores the terminal's settings, which a killed rank may have changed, such as its echo."""
    terminal = next(filter(os.isatty, range(3)), None) if wanted else None
    if terminal is None:
        yield
        return
    before = termios.tcgetattr(terminal)
    try:
        yield
    finally:
        with suppress(termios.error, OSError):
            if termios.tcgetattr(terminal) != before and os.tcgetpgrp(terminal) == os.getpgrp():
                termios.tcsetattr(terminal, termios.TCSADRAIN, before)
