"""Coordinates a job on many hosts: waits for all, starts their ranks together, and ends all if one fails."""

from __future__ import annotations

import base64
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Protocol

from acclimate.errors import HostUnreachableError, LaunchProtocolError, RankStartError
from acclimate.host.local_address import is_loopback
from acclimate.host.process_status import signal_name
from acclimate.launch.event_loop import EventLoop
from acclimate.launch.output.pump import OutputPump, missing_output, own_streams, stream_failure
from acclimate.launch.output.views import Source, WholeLines
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.plan.outcome import Outcome
from acclimate.launch.remote.protocol import (
    ALIVE_EVERY_S,
    WINDOW_BYTES,
    Channel,
    Output,
    Ready,
    Taken,
    check_outcome,
)
from acclimate.launch.supervise.processes import NO_MORE
from acclimate.launch.supervise.signals import KEYBOARD, RELAYED, SignalRelay
from acclimate.launch.wire import Message

# Python and its packages may come from a slow network file system that all hosts read at once.
HOST_ANSWER_S = 120.0
"""The time limit for answers of hosts that can be reached."""
_BRIEFLY_S = 2.0
"""The limit of three short waits: for further unreachable hosts, to report all of them at once; for the exit
of the engine's program, once all agents of a failed job have gone; and after a slow reader has read all."""
_SETTLE_S = 10.0
"""How long hosts may take to end after their grace, or after a second Ctrl-C, before the engine is killed."""
_LOST = 1
"""The exit code after the loss of a host."""


@dataclass
class Peer:
    """The launcher's view of a host's agent, or of a single rank's."""

    host: str
    channel: Channel | None = None
    """``None`` before it has connected and after it has disconnected."""
    ready: Ready | None = None
    refused: bool = False
    gone: bool = False
    failing: Outcome | None = None
    """Its report of a failed rank, before all its ranks had ended."""
    outcome: Outcome | None = None
    untaken: Counter[int] = field(default_factory=Counter)
    """The bytes of each stream of its output that wait for the launcher's reader."""

    @property
    def decided(self) -> bool:
        """Whether it has accepted or refused its part."""
        return self.ready is not None or self.refused or self.gone


@contextmanager
def starting_programs() -> Iterator[None]:
    """Turns an OSError into an error that says which limits stopped the programs that reach the hosts.

    Raises:
        RankStartError: one was not started.
    """
    try:
        yield
    except OSError as error:
        raise RankStartError(
            error.errno,
            f"The programs that reach the hosts cannot be started: {error.strerror}. {NO_MORE}",
        ) from error


class RemoteProcesses(Protocol):
    """The processes of an engine, which the coordinator waits for and ends."""

    def open(self, coordinator: Coordinator) -> None:
        """Starts the engine's processes and lets the coordinator receive their messages."""

    @property
    def running(self) -> bool:
        """Whether a process of the engine runs, or has unread output."""

    def kill(self) -> None:
        """Kills the engine's processes and thereby closes the connections to their agents."""


class Coordinator:
    """One job from its first host's answer to its last host's end.

    Args:
        job: the job to run.
        peers: one for each host, or one for each rank, in their order.
        answer_s: the time limit for the first answer; the others then have :data:`HOST_ANSWER_S`.
    """

    def __init__(self, job: JobPlan, peers: Sequence[Peer], answer_s: float = HOST_ANSWER_S) -> None:
        self.job, self.peers = job, peers
        self.started = False
        self.loop = EventLoop()
        self.pump = OutputPump(self.loop, own_streams(WholeLines), self._stream_failed)
        """Shows the output that the engine's processes pass to the launcher."""
        self._refusals: list[str] = []
        self._explanations: list[str] = []
        self._blamed: Peer | None = None
        self._reason: str | None = None
        self._engines_end = f"{HOST_ANSWER_S:.0f} s have passed"
        self._signalled: int | None = None
        self._own_end: Outcome | None = None
        self._missing: tuple[str, ...] = ()
        self._deadline = time.monotonic() + answer_s

    def run(self, processes: RemoteProcesses) -> Outcome:
        """Runs the job to its end.

        Raises:
            HostUnreachableError: a host does not answer or cannot do its part; no rank was started.
            RankStartError: the system refuses the engine's processes.
        """
        self.loop.after(ALIVE_EVERY_S, self._say_alive)
        with SignalRelay(RELAYED) as signals:
            self.loop.watch(signals.descriptor, lambda: signals.relay(self))
            try:
                with starting_programs():
                    processes.open(self)
                while (processes.running or self.pump.waiting) and time.monotonic() < self._deadline:
                    self.loop.wait(self._deadline)
                    # A host's login may write for ever, so before the start the time limit holds.
                    is_finite = self.started or not processes.running
                    if self.pump.waiting and self._signalled is None and is_finite:
                        # As on one host, a slow reader loses no output.
                        self._deadline = max(self._deadline, time.monotonic() + _BRIEFLY_S)
            finally:
                processes.kill()
                self.loop.close()
        ended = [(peer.host, peer.outcome) for peer in self.peers if peer.outcome is not None]
        missing = [f'host "{host}": {what}' for host, outcome in ended for what in outcome.missing]
        return replace(self._conclude(), missing=(*self._missing, *missing))

    def _say_alive(self) -> None:
        self.tell_all(alive=True)
        self.loop.after(ALIVE_EVERY_S, self._say_alive)

    # -- calls from an engine ------------------------------------------------------------------------

    def handle(self, peer: Peer, message: Message) -> bool:
        """Handles a peer's message; returns whether the peer still takes part."""
        if peer.gone:
            return False
        try:
            self._act_on(peer, message)
        except LaunchProtocolError as error:
            self.lost(peer, f"it sent an invalid message: {error}", was_reached=True)
        return not peer.gone

    def _act_on(self, peer: Peer, message: Message) -> None:
        if "ready" in message:
            peer.ready = message["ready"]
            self._end_within(HOST_ANSWER_S)
            self._start_when_all_are_ready()
        elif "refused" in message:
            peer.refused = True
            self.refuse(f'host "{peer.host}": {message["refused"]}')
        elif "output" in message:
            self._show(peer, message["output"])
        elif "failed" in message:
            check_outcome(message["failed"], self.job)
            peer.failing = message["failed"]
            self._blame(peer)
        elif "outcome" in message:
            check_outcome(message["outcome"], self.job)
            peer.outcome = message["outcome"]
            self._end_output(peer)
            if message["outcome"].code != 0:
                self._blame(peer)
            self._end_when_all_have_ended()

    def _show(self, peer: Peer, output: Output) -> None:
        """Shows a peer's output; it may send as much again once a slow reader has taken that."""
        try:
            data = base64.b64decode(output.data, validate=True)
        except ValueError:
            raise LaunchProtocolError("output.data is not base64.") from None
        peer.untaken[output.stream] += len(data)
        if peer.untaken[output.stream] > WINDOW_BYTES:
            raise LaunchProtocolError("It sent more output than it may.")
        self.pump.feed(output.stream, _source(peer, output.stream), data)
        self.pump.when_room(output.stream, partial(_give_room, peer, Taken(output.stream, len(data))))

    def _end_output(self, peer: Peer) -> None:
        for stream in (1, 2):
            self.pump.end(stream, _source(peer, stream))

    def lost(self, peer: Peer, words: str, *, was_reached: bool = False) -> None:
        """Handles a lost connection to a peer; ``words`` is the reason, if the engine knows it."""
        if peer.gone:
            return
        peer.gone, peer.channel = True, None
        self._end_output(peer)
        if peer.outcome is not None or peer.refused:
            return
        words = f": {words}" if words else "."
        if not self.started:
            how = "cannot run an agent" if was_reached else "cannot be reached"
            self.refuse(f'host "{peer.host}" {how}{words}')
        elif self._blamed is None:
            self._reason = f'host "{peer.host}" was lost{words}'
            self._blame(peer)
        self._end_when_all_have_ended()

    def end(self, reason: str, code: int) -> None:
        """Ends the job for a reason on the launcher's side."""
        if self._own_end is None and self._blamed is None:
            self._own_end = Outcome(code, None, reason)
            self.tell_all(stop=reason)
            self._allow_the_grace()

    def refuse(self, sentence: str) -> None:
        """Refuses to start the job; the other hosts may add their reasons for a short time."""
        self._refusals.append(sentence)
        self._end_within(_BRIEFLY_S)
        self._end_when_all_are_decided()

    def engine_ended(self, how: str, seconds: float) -> None:
        """Handles the end of the engine's program; agents have some seconds left to report their outcome."""
        self._engines_end = how
        self._end_within(seconds)

    def explain(self, sentence: str) -> None:
        """Records a possible reason, in case the job does not start."""
        self._explanations.append(sentence)

    def _stream_failed(self, stream: int, error: OSError) -> None:
        sentence = stream_failure(stream, error)
        if isinstance(error, BrokenPipeError):
            self.end(sentence, -signal.SIGPIPE)
        else:
            self._missing += missing_output(stream, error)
            self.pump.feed(2, Source("", 0), f"acclimate run: {sentence}\n".encode())

    def tell_all(self, **message: object) -> None:
        """Sends a message to all connected peers."""
        for peer in self.peers:
            if peer.channel is not None and peer.outcome is None:
                peer.channel.send(message)

    # -- reactions -----------------------------------------------------------------------------------

    def _start_when_all_are_ready(self) -> None:
        if self._refusals:
            self._end_when_all_are_decided()
            return
        if self.started or any(peer.ready is None for peer in self.peers):
            return
        first = self.peers[0].ready
        if first is None:
            return
        address = self.job.master_addr or first.address
        if address is None or (len(self.job.hosts) > 1 and is_loopback(address)):
            address = self.job.hosts[0].name
        self.started = True
        self._deadline = float("inf")
        port = self.job.master_port or first.port
        self.tell_all(start={"master_addr": address, "master_port": port})

    def _end_when_all_are_decided(self) -> None:
        if all(peer.decided for peer in self.peers):
            self._deadline = 0.0

    def _end_when_all_have_ended(self) -> None:
        """Gives the engine's program a short time to end, since all agents have gone."""
        if self.started and all(peer.outcome is not None or peer.gone for peer in self.peers):
            self._end_within(_SETTLE_S if self._blamed is None else _BRIEFLY_S)

    def _blame(self, peer: Peer) -> None:
        """Ends the job at the first failure; later failures are its consequences."""
        if self._blamed is not None:
            return
        self._blamed = peer
        self._allow_the_grace()
        if self._signalled is None:
            self.tell_all(stop=self._reason or f'A rank on host "{peer.host}" failed.')

    def _allow_the_grace(self) -> None:
        self._end_within(self.job.grace_s + _SETTLE_S)

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    # -- signals -------------------------------------------------------------------------------------

    def notify(self, number: int) -> None:
        """Sends the agents a notice."""
        self.tell_all(signal=number)

    def end_by(self, number: int) -> None:
        """Sends the agents a signal that ends the job; a second Ctrl-C makes them kill their ranks."""
        is_ending = (self._signalled, self._blamed, self._own_end) != (None, None, None)
        self._signalled = self._signalled or number
        if not self.started:
            self._deadline = 0.0
        elif is_ending and number in KEYBOARD:
            self._end_within(_SETTLE_S)
        else:
            self._allow_the_grace()
        self.tell_all(signal=number)

    def pause(self) -> None:
        """Announces that no heartbeat comes until the next message; the ranks go on."""
        self.tell_all(pause=True)

    def resume(self) -> None:
        """Sends the next message."""
        self.tell_all(alive=True)

    # -- the outcome ---------------------------------------------------------------------------------

    def _conclude(self) -> Outcome:
        if not self.started:
            return self._end_before_the_start()
        if self._own_end is not None:
            return self._own_end
        silent = [peer.host for peer in self.peers if peer.outcome is None]
        if self._blamed is None:
            if not silent:
                return Outcome(0)
            code = _LOST if self._signalled is None else -self._signalled
            return Outcome(code, None, f"{_not_reported(silent)}: {self._engines_end}.")
        told = [one for one in (self._blamed.outcome, self._blamed.failing) if one is not None]
        if not told:
            told = [Outcome(_LOST, None, self._reason)]
            silent = [host for host in silent if host != self._blamed.host]  # the reason names it
        outcome = next((one for one in told if one.failed is not None), told[0])
        return self._with_silent_hosts(outcome, silent) if silent else outcome

    def _end_before_the_start(self) -> Outcome:
        if self._signalled is not None:
            return Outcome(-self._signalled, None, f"{signal_name(self._signalled)} came before the start.")
        silent = dict.fromkeys(f'"{peer.host}"' for peer in self.peers if not peer.decided)
        reasons = [*self._refusals, *self._explanations]
        if not reasons and silent:
            reasons.append(f"no answer from {', '.join(silent)}: {self._engines_end}.")
        raise HostUnreachableError("no rank was started:\n" + "\n".join(dict.fromkeys(reasons)))

    def _with_silent_hosts(self, outcome: Outcome, silent: Sequence[str]) -> Outcome:
        """Adds to an outcome the hosts that did not report theirs."""
        sentence = f"{_not_reported(silent)}, so they may still run."
        if outcome.failed is None and self._signalled is not None:
            # Instead of the host's own reason, which says that the ranks have ended.
            sentence = f"{signal_name(self._signalled)} was forwarded, but {sentence}"
        elif outcome.reason is not None:
            sentence = f"{outcome.reason.removesuffix('.')}. {sentence}"
        return replace(outcome, reason=sentence)


def _give_room(peer: Peer, taken: Taken) -> None:
    peer.untaken[taken.stream] -= taken.count
    if peer.channel is not None:
        peer.channel.send({"taken": asdict(taken)})


def _source(peer: Peer, stream: int) -> Source:
    return Source(f"peer {id(peer)}", stream)


def _not_reported(hosts: Sequence[str]) -> str:
    names = list(dict.fromkeys(f'"{host}"' for host in hosts))
    its = "its" if len(names) == 1 else "their"
    return f"{', '.join(names)} did not report how {its} ranks ended"
