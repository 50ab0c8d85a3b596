"""Runs the ranks of this host to their end: shows their output, passes signals on, ends all with one."""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from acclimate.launch.output.views import Plain, Source, TaggedLines, TaggedTerminal, View
from acclimate.launch.output.writer import Writer
from acclimate.launch.plan.outcome import Outcome, RankFailure, signal_name
from acclimate.launch.plan.rank_plan import RankPlan
from acclimate.launch.supervise import processes
from acclimate.launch.supervise.guard_process import KILL_PATIENCE_S
from acclimate.launch.supervise.oom import count_kills
from acclimate.launch.supervise.rank_process import RankProcess
from acclimate.launch.supervise.signals import KEYBOARD, NOTICES, TERMINATING, SignalInbox

_GUARD_PATIENCE_S = 2 * KILL_PATIENCE_S
"""How long a guard may take, after the grace, to kill its rank and to end."""
_CHUNK = 1 << 16

_logger = logging.getLogger("acclimate")


@dataclass(frozen=True)
class StopRequest:
    """Somebody else who may tell the supervisor to end its ranks."""

    descriptor: int
    """Readable, or at its end, when there is something to look at."""
    read: Callable[[], str | None]
    """Called then; a sentence on why the ranks have to end, or ``None`` to go on."""
    failing: Callable[[RankFailure], None] = lambda failure: None
    """Told of the first rank that failed, at once: others have their grace before them, and ranks elsewhere
    fail for want of it meanwhile."""


def supervise(
    ranks: Sequence[RankPlan],
    *,
    grace_s: float = 5.0,
    quiet: bool = False,
    tagged: bool | None = None,
    stop: StopRequest | None = None,
) -> Outcome:
    """Starts the ranks and waits until the last of their processes is gone.

    Must be called in the main thread. SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to the ranks, which
    then have the grace to end; so are SIGUSR1 and SIGUSR2, which end nothing. What a rank leaves running when
    it ends is ended too.

    Args:
        ranks: of this host.
        grace_s: between SIGTERM and SIGKILL, when one failed or the job is to end.
        quiet: no notes of the launcher's own; the ranks' output is shown all the same.
        tagged: whether each line begins with ``[rank N]``; ``None``: where there are several ranks. A single
            rank that is not tagged keeps the launcher's terminal.
        stop: somebody else who may end the job; standard input is then not the ranks'.

    Raises:
        RankStartError: the system refuses a process, a pipe or a log file; no rank is left running.
    """
    _open_standard_streams()
    tagged = len(ranks) > 1 if tagged is None else tagged
    # A terminal's keys signal the group in front, and only that may read: a rank that is to have the terminal
    # has to be in the launcher's own group.
    shares_terminal = len(ranks) == 1 and not tagged and any(map(os.isatty, range(3)))
    numbers = (*TERMINATING, *NOTICES) if shares_terminal else (*TERMINATING, *NOTICES, signal.SIGTSTP)
    adopted_before = processes.adopt_orphans()
    try:
        with SignalInbox(numbers) as inbox, _terminal_settings_kept(shares_terminal):
            return _Supervisor(ranks, grace_s, quiet, tagged, shares_terminal, stop, inbox).run()
    finally:
        processes.adopt_orphans(adopted_before)


class _Supervisor:
    """One run."""

    def __init__(
        self,
        plans: Sequence[RankPlan],
        grace_s: float,
        quiet: bool,
        tagged: bool,
        shares_terminal: bool,
        stop: StopRequest | None,
        inbox: SignalInbox,
    ) -> None:
        self.ranks = [RankProcess(plan) for plan in plans]
        self.grace_s = grace_s
        self.quiet = quiet
        self.shares_terminal = shares_terminal
        self.stop = stop
        self.inbox = inbox
        self.views = _views(tagged)
        self.tagged = tagged
        self.selector = selectors.PollSelector()  # epoll refuses files, and stdout may be one
        self.readers: dict[int, tuple[RankProcess, int]] = {}
        """By descriptor of a pipe: whose stream 1 or 2 it is."""
        self.failed: RankProcess | None = None
        """The first that failed by itself."""
        self.ended_by: int | None = None
        """The signal that was passed on to end the job."""
        self.reason: str | None = None
        self.ending = False
        self.abandons_output = False
        self.output_deadline: float | None = None
        """When to stop waiting for a reader that does not read, where the job was interrupted."""
        self.guards_deadline: float | None = None
        """When to kill guards that do not end, where the job is to end."""
        self.said: set[str] = set()
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
        return self._outcome()

    def _start(self) -> None:
        for rank in self.ranks:
            rank.open_log()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            for rank in self.ranks:
                pipes = rank.start(
                    self._stdin_of(rank, nothing),
                    self._captured(),
                    grace_s=self.grace_s,
                    shares_terminal=self.shares_terminal,
                    ignored=self.inbox.ignored,
                    private=self._private_descriptors(),
                )
                self.readers.update({reading: (rank, stream) for stream, reading in pipes.items()})
                if rank.guard is not None:
                    self.selector.register(rank.guard.channel, selectors.EVENT_READ, rank)
        finally:
            os.close(nothing)
        for reading in self.readers:
            self.selector.register(reading, selectors.EVENT_READ, None)
        self.selector.register(self.inbox.descriptor, selectors.EVENT_READ, self._take_signals)
        if self.stop is not None:
            self.selector.register(self.stop.descriptor, selectors.EVENT_READ, self._take_request)

    def _captured(self) -> list[int]:
        """The streams that pass through the launcher; the others are the terminal itself."""
        if not self.shares_terminal:
            return [1, 2]
        return [stream for stream in (1, 2) if not os.isatty(stream) or self.ranks[0].log is not None]

    def _stdin_of(self, rank: RankProcess, nothing: int) -> int:
        """The launcher's own for a single rank, and for the first of several unless it is a terminal."""
        if self.stop is not None or rank is not self.ranks[0]:
            return nothing
        return 0 if len(self.ranks) == 1 or not os.isatty(0) else nothing

    def _private_descriptors(self) -> list[int]:
        guards = (rank.guard for rank in self.ranks if rank.guard is not None)
        logs = (rank.log for rank in self.ranks if rank.log is not None)
        return [
            *self.inbox.descriptors,
            *self.readers,
            *(guard.channel.fileno() for guard in guards),
            *(log.descriptor for log in logs),
        ]

    def _is_unfinished(self) -> bool:
        if any(rank.guard is not None for rank in self.ranks):
            return True
        if self.ended_by is not None and self.output_deadline is None:
            self.output_deadline = time.monotonic() + self.grace_s
        if self.abandons_output or (self.output_deadline or math.inf) < time.monotonic():
            return False
        # All processes are gone: what is in the pipes is all there will be, even if someone kept an end open.
        for reading in list(self.readers):
            os.set_blocking(reading, False)
            self._read(reading)
        return bool(self.readers) or any(view.writer.waiting for view in self.views.values())

    def _wait(self) -> None:
        """Waits for one thing to happen, and deals with all that did."""
        delays = [view.flush() for view in self._distinct_views()]
        if self.output_deadline is not None:
            delays.append(max(0.0, self.output_deadline - time.monotonic()) + 0.001)
        if self.guards_deadline is not None:
            delays.append(max(0.0, self.guards_deadline - time.monotonic()))
        self._watch_output()
        for key, _ in self.selector.select(
            min((delay for delay in delays if delay is not None), default=None)
        ):
            if isinstance(key.data, RankProcess):
                self._listen(key.data)
            elif key.data is not None:
                key.data()
            elif key.fd in self.readers:
                self._read(key.fd)
        self._kill_unresponsive_guards()
        self._judge()

    def _leave_nothing(self) -> None:
        for rank in self.ranks:  # only where something above failed
            if rank.guard is not None:
                rank.guard.kill()
                rank.reap_guard()
        self._kill_orphans()
        for reading in list(self.readers):
            self._close(reading)
        for view in self._distinct_views():
            view.flush()
        for rank in self.ranks:
            if rank.log is not None:
                rank.log.close()
        self.selector.close()

    # -- output ----------------------------------------------------------------------------------

    def _distinct_views(self) -> list[View]:
        return list({id(view): view for view in self.views.values()}.values())

    def _watch_output(self) -> None:
        """Waits for streams that are behind; does not read from ranks what could not be written."""
        for view in self._distinct_views():
            self._watch(
                view.writer.descriptor, selectors.EVENT_WRITE, view.writer.waiting > 0, view.writer.drain
            )
        for reading, (_, stream) in self.readers.items():
            has_room = self.views[stream].writer.waiting < Writer.FULL
            self._watch(reading, selectors.EVENT_READ, has_room, None)

    def _watch(self, descriptor: int, event: int, wanted: bool, action: Callable[[], object] | None) -> None:
        watched = descriptor in self.selector.get_map()
        if wanted and not watched:
            self.selector.register(descriptor, event, action)
        elif watched and not wanted:
            self.selector.unregister(descriptor)

    def _read(self, reading: int) -> None:
        rank, stream = self.readers[reading]
        try:
            data = os.read(reading, _CHUNK)
        except BlockingIOError:
            data = b""
        source = Source(rank.tag if self.tagged else "", stream)
        if not data:
            self.views[stream].end(source)
            self._close(reading)
            return
        rank.tail.feed(stream, data)
        if rank.log is not None and rank.log.error is None:
            rank.log.write(data)
            if rank.log.error is not None:
                why = f"{rank.log.path}: {rank.log.error.strerror}"
                self._note(logging.WARNING, f"the log of rank {rank.plan.rank} ends here: {why}.")
        self.views[stream].feed(source, data)

    def _close(self, reading: int) -> None:
        del self.readers[reading]
        with suppress(KeyError):
            self.selector.unregister(reading)
        os.close(reading)

    def _note(self, level: int, sentence: str) -> None:
        """Says something of the launcher's own, once."""
        wanted = _logger.isEnabledFor(level) and not (self.quiet and level < logging.ERROR)
        if wanted and sentence not in self.said:
            self.said.add(sentence)
            self.views[2].feed(Source("", 0), f"acclimate run: {sentence}\n".encode())

    # -- what happens ----------------------------------------------------------------------------

    def _listen(self, rank: RankProcess) -> None:
        guard = rank.guard
        if guard is None:
            return
        messages = guard.receive()
        if messages is None:
            self._reap_guard(rank)
            return
        for word, *values in messages:
            if word == "started":
                rank.pid, guard.pid = values
                bound = rank.plan.binding
                where = f", on {bound.describe()}" if bound is not None else ""
                self._note(logging.INFO, f"rank {rank.plan.rank} is pid {rank.pid}{where}.")
            elif word == "warning":
                self._note(logging.WARNING, values[0])
            elif word == "unstartable":
                rank.trouble = values[0]
            elif word == "ended":
                rank.code, rank.ended_at = values
            elif word == "guard_lost":
                rank.guard_was_lost(values[0])
            elif word == "stuck":
                self._note(
                    logging.ERROR,
                    f"rank {rank.plan.rank} left processes that do not die when killed, as those waiting for "
                    f"a device or a file server: {', '.join(map(str, values[0]))}.",
                )

    def _reap_guard(self, rank: RankProcess) -> None:
        if rank.guard is not None:
            self.selector.unregister(rank.guard.channel)
        statuses = {} if rank.reap_guard() else self._kill_orphans()
        if rank.code is None:
            status = statuses.get(rank.pid or 0)
            rank.code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
            rank.ended_at = time.monotonic()

    def _kill_unresponsive_guards(self) -> None:
        """Kills guards that are long past the grace: stopped again and again, or frozen."""
        if self.guards_deadline is None or time.monotonic() < self.guards_deadline:
            return
        self.guards_deadline = None
        for rank in self.ranks:
            if rank.guard is not None:
                sentence = f"the guard of rank {rank.plan.rank} (pid {rank.guard.pid}) does not react."
                self._note(logging.ERROR, f"{sentence} It was killed, and the rank with it.")
                rank.guard.kill()
                self._reap_guard(rank)

    def _judge(self) -> None:
        """Ends the job once a rank has failed by itself, or nobody reads its output any more."""
        if not self.ending:
            failed = [rank for rank in self.ranks if rank.code]
            if failed:
                self.failed = min(failed, key=lambda rank: rank.ended_at)
                self._end(signal.SIGTERM)
                if self.stop is not None:
                    self.stop.failing(self.failed.failure(self.kills_before))
        for stream, view in self.views.items():
            writer = view.writer
            if writer.is_abandoned and not self.ending:
                self.reason = f"nobody reads standard {_NAMES[stream]} any more, so the ranks were ended."
                self.ended_by = signal.SIGPIPE
                self._end(signal.SIGTERM)
            elif writer.error is not None and not writer.is_abandoned:
                why = writer.error.strerror
                self._note(
                    logging.WARNING, f"standard {_NAMES[stream]} cannot be written ({why}); the ranks go on."
                )

    def _end(self, number: int) -> None:
        self.ending = True
        self._tell_all("end", number)
        self._expect_guards_to_end(self.grace_s)

    def _expect_guards_to_end(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s + _GUARD_PATIENCE_S
        self.guards_deadline = min(deadline, self.guards_deadline or math.inf)

    def _tell_all(self, command: str, number: int = 0) -> None:
        for rank in self.ranks:
            if rank.guard is not None:
                rank.guard.send(command, number)

    def _take_signals(self) -> None:
        for number in self.inbox.read():
            if number in NOTICES:
                self._tell_all("rank", number)
            elif number == signal.SIGTSTP:
                self._pause()
            elif self.shares_terminal:
                self.ended_by = number
                self._tell_all("end", number)
                if number not in KEYBOARD:  # what those do is up to the program that has the terminal
                    self._expect_guards_to_end(self.grace_s)
            elif self.ending and number in KEYBOARD:
                self._tell_all("kill")
                self._expect_guards_to_end(0.0)
                self.abandons_output = True
            else:
                self.ended_by = self.ended_by or number
                self._end(number)
            if all(rank.guard is None for rank in self.ranks):
                self.abandons_output = True  # nothing is left to end but a reader that does not read

    def _pause(self) -> None:
        # SIGTSTP itself would be ignored: no shell is above the ranks' own sessions to continue them.
        self._tell_all("group", signal.SIGSTOP)
        self.inbox.take_default(signal.SIGTSTP)
        self._tell_all("group", signal.SIGCONT)

    def _take_request(self) -> None:
        if self.stop is None:
            return
        reason = self.stop.read()
        if reason is not None:
            self.selector.unregister(self.stop.descriptor)
            self.reason = self.reason or reason
            self.ended_by = self.ended_by or signal.SIGTERM
            self._end(signal.SIGTERM)

    def _kill_orphans(self) -> dict[int, int]:
        """Kills what came to this process because a guard and its standby died; returns wait statuses."""
        guards = {rank.guard.standby_pid for rank in self.ranks if rank.guard is not None}
        return processes.kill_descendants(guards | self.children_before, patience_s=KILL_PATIENCE_S)

    # -- the outcome -----------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        if self.shares_terminal and self.ended_by is not None:
            self.failed = self._failed_despite(self.ended_by)
        if self.failed is not None:
            failure = self.failed.failure(self.kills_before)
            return Outcome(failure.shell_code, failure)
        codes = [rank.code for rank in sorted(self.ranks, key=lambda rank: rank.ended_at) if rank.code]
        if self.ended_by is None or (not codes and self.reason is None):
            return Outcome(0)
        # A rank's own code tells more than the signal; being killed after it tells nothing new.
        own = next((code for code in codes if code > 0), 128 + self.ended_by)
        if self.reason is None and not self.shares_terminal:
            self.reason = f"{signal_name(self.ended_by)} was passed on, and the ranks have ended."
        return Outcome(own, None, self.reason)

    def _failed_despite(self, number: int) -> RankProcess | None:
        """On a terminal a Ctrl-C may be long past, as in an interactive program, when the rank fails."""
        code = self.ranks[0].code or 0
        return self.ranks[0] if code not in (0, -number, 128 + number) else None


_NAMES = {1: "output", 2: "error"}


def _views(tagged: bool) -> dict[int, View]:
    """A view for each of the launcher's streams 1 and 2; one for both where they are the same file."""
    views: dict[int, View] = {}
    for stream in (1, 2):
        if 1 in views and os.path.sameopenfile(1, stream):
            views[stream] = views[1]
            continue
        writer = Writer(stream)
        draws = writer.is_terminal and os.environ.get("TERM", "dumb") != "dumb"
        views[stream] = (TaggedTerminal if draws else TaggedLines)(writer) if tagged else Plain(writer)
    return views


def _open_standard_streams() -> None:
    """Where the launcher was started without one, a pipe of a rank would take its number."""
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


@contextmanager
def _terminal_settings_kept(wanted: bool) -> Iterator[None]:
    """Undoes what a rank that was killed did to the terminal, such as turning its echo off."""
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
