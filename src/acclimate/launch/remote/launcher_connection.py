"""Runs this host's part of a job for a launcher on another host."""

from __future__ import annotations

import errno
import logging
import os
import select
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from acclimate.errors import AcclimateError, LaunchOptionError, LaunchProtocolError
from acclimate.host.exit_codes import shell_code
from acclimate.launch.plan.job import JobPlan, RankPlan, plan_ranks
from acclimate.launch.plan.outcome import Outcome, RankFailure
from acclimate.launch.remote.addresses import free_port
from acclimate.launch.remote.protocol import SILENCE_S, Assignment, Channel, Ready, SocketChannel, Start
from acclimate.launch.remote.remote_writer import RemoteWriter
from acclimate.launch.supervise.signals import TERMINATING, USER_SIGNALS
from acclimate.launch.supervise.supervisor import StopRequest, supervise
from acclimate.launch.wire import Message

LAUNCHER_LOST = "The connection to the launcher was lost."


class LauncherConnection:
    """The connection to the launcher: returns its messages, and detects its loss.

    Args:
        channel: to the launcher.
        sends_output: whether the ranks' output is sent too; if not, the engine's program forwards it.
    """

    def __init__(self, channel: Channel, *, sends_output: bool = False) -> None:
        self._channel = channel
        self.writers: dict[int, RemoteWriter] | None = None
        """For the ranks' output, by stream; ``None`` if it is not sent."""
        if sends_output:
            self.writers = {stream: RemoteWriter(channel, stream) for stream in (1, 2)}
        self._readable = select.poll()
        self._readable.register(channel.fileno(), select.POLLIN)
        self.lost = False
        self.lost_at: float | None = time.monotonic() + SILENCE_S
        """When the launcher counts as lost without a further message; ``None``: never."""
        self._trouble = LAUNCHER_LOST

    def fileno(self) -> int:
        """Readable when a message has arrived."""
        return self._channel.fileno()

    def send(self, **message: object) -> None:
        """Sends a message."""
        self._channel.send(message)

    def receive(self) -> list[Message]:
        """Returns the messages so far; waits for one until the launcher counts as lost."""
        wait_s = None if self.lost_at is None else max(0.0, self.lost_at - time.monotonic())
        has_message = bool(self._readable.poll(None if wait_s is None else wait_s * 1000))
        messages = self._read() if has_message else None
        if messages is None:
            self.lost, self.lost_at = True, None
            for writer in (self.writers or {}).values():
                writer.fail(ConnectionResetError(errno.ECONNRESET, LAUNCHER_LOST))
            return []
        for message in messages:
            if "taken" in message and self.writers is not None:
                self.writers[message["taken"].stream].taken(message["taken"].count)
        paused = any("pause" in message for message in messages)
        self.lost_at = None if paused else time.monotonic() + SILENCE_S
        return messages

    def _read(self) -> list[Message] | None:
        try:
            return self._channel.receive()
        except LaunchProtocolError as error:
            self._trouble = f"The launcher sent an invalid message: {error}"
            return None

    def finish(self) -> None:
        """Waits until the launcher has read everything and closes the connection.

        If this process closed it with an unread message, the kernel would drop data that is still being sent.
        """
        self.writers = None
        if isinstance(self._channel, SocketChannel):
            self._channel.end_sending()
            while not self.lost:
                self.receive()

    def wait_for(self, key: str) -> Message | None:
        """Returns the next message with this key; ``None`` if the job ends before it starts."""
        while not self.lost:
            messages = self.receive()
            if any("stop" in message or "signal" in message for message in messages):
                return None
            for message in messages:
                if key in message:
                    return message
        return None

    def wait_for_assignment(self) -> Assignment | None:
        """Returns the assignment; ``None`` if the job ends before it starts."""
        message = self.wait_for("assignment")
        return None if message is None else message["assignment"]

    def tell_failure(self, failure: RankFailure) -> None:
        """Reports a failed rank before ranks on other hosts fail because of it; for the supervisor."""
        self.send(failed=asdict(Outcome(failure.code, failure)))

    def reason_to_stop(self) -> str | None:
        """Forwards the launcher's signals; returns why the ranks must end, if so; for the supervisor."""
        for message in self.receive():
            if message.get("signal") in (*TERMINATING, *USER_SIGNALS):
                os.kill(os.getpid(), message["signal"])  # which the supervisor passes on
            if "stop" in message:
                return str(message["stop"])
        return self._trouble if self.lost else None


def run_assigned_ranks(
    launcher: LauncherConnection,
    assignment: Assignment,
    address: str | None,
    only_local_rank: int | None = None,
) -> int:
    """Runs this host's part of a job, from accepting it to reporting its outcome.

    Args:
        launcher: the connection to the launcher.
        assignment: the job, and this host's number in it.
        address: this host's address for other hosts, if known.
        only_local_rank: the only one of this host's ranks to run; ``None``: all.

    Returns:
        0 if the launcher got the outcome, else the exit code.
    """
    job, node_rank = assignment.job, assignment.node_rank
    logging.getLogger("acclimate").setLevel(job.log_level.upper())
    try:
        _enter(job.directory)
        # Errors on this host are reported before a rank starts anywhere.
        _plan(job, node_rank, job.master_addr or "localhost", job.master_port or 1)
        ready = Ready(address, free_port())
    except (AcclimateError, OSError) as error:
        launcher.send(refused=str(error))
        return 0
    launcher.send(ready=asdict(ready))
    start = launcher.wait_for("start")
    if start is None:
        return 0 if not launcher.lost else 1
    try:
        meeting: Start = start["start"]
        ranks = _plan(job, node_rank, meeting.master_addr, meeting.master_port)
        if only_local_rank is not None:
            ranks = ranks[only_local_rank : only_local_rank + 1]
        outcome = supervise(
            ranks,
            grace_s=job.grace_s,
            quiet=job.quiet,
            tagged=job.world_size > 1,
            stop=StopRequest(
                launcher.fileno(),
                launcher.reason_to_stop,
                launcher.tell_failure,
                lambda: launcher.lost_at,
                lambda: not launcher.lost,
            ),
            writers=launcher.writers,
        )
    except (AcclimateError, OSError) as error:
        outcome = Outcome(1, None, f"host {job.hosts[node_rank].name}: {error}")
    launcher.send(outcome=asdict(outcome))
    code = shell_code(outcome.code) if launcher.lost else 0
    launcher.finish()
    return code


def _plan(job: JobPlan, node_rank: int, master_addr: str, master_port: int) -> Sequence[RankPlan]:
    settled = replace(job, master_addr=master_addr, master_port=master_port)
    return plan_ranks(settled, node_rank, os.environ)


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise LaunchOptionError(
            f"The working directory {directory} cannot be used there ({why}). Start the job in a folder that "
            "all hosts have."
        ) from error
