"""``python -m acclimate.launch.remote.agent``: runs ranks of one host for a launcher on another.

- Without arguments (ssh) it runs all ranks of its host, and talks with the launcher over standard input and
  output.
- With ``--launcher WHERE --host NAME`` (pdsh, which passes no input) it does the same, but calls the
  launcher.
- With ``--rank_variable NAME --local_rank_variable NAME`` (MPI, Slurm) it runs one rank, whose numbers are in
  these variables, and calls the launcher at the address in ``ACCLIMATE_LAUNCHER``.
"""

from __future__ import annotations

import argparse
import base64
import errno
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from acclimate.errors import AcclimateError, LaunchOptionError, LaunchProtocolError, excerpt
from acclimate.host.exit_codes import shell_code
from acclimate.host.local_address import free_port
from acclimate.launch.event_loop import EventLoop
from acclimate.launch.output.writer import Writer
from acclimate.launch.plan.job import JobPlan, RankPlan, plan_ranks
from acclimate.launch.plan.outcome import Outcome, RankFailure
from acclimate.launch.remote.callback import LAUNCHER_VARIABLE, call_launcher
from acclimate.launch.remote.protocol import (
    AGENT_IS_HERE,
    SILENCE_S,
    WINDOW_BYTES,
    Assignment,
    Channel,
    Output,
    PipeChannel,
    Ready,
    SocketChannel,
    Start,
)
from acclimate.launch.supervise.signals import TERMINATING, USER_SIGNALS
from acclimate.launch.supervise.supervisor import StopRequest, supervise
from acclimate.launch.wire import Message

LAUNCHER_LOST = "The connection to the launcher was lost."


class LauncherConnection:
    """The connection to the launcher: returns its messages, and detects its loss.

    If it does not send the ranks' output, the engine's program forwards that.
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
    """Runs this host's part of a job, or one of its ranks, from accepting it to reporting its outcome.

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
        begin: Start = start["start"]
        ranks = _plan(job, node_rank, begin.master_addr, begin.master_port)
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


_PIECE_BYTES = 1 << 13


class RemoteWriter(Writer):
    """One of the launcher's streams 1 and 2, seen from an agent."""

    def __init__(self, channel: Channel, stream: int) -> None:
        super().__init__()
        self._channel, self._stream = channel, stream
        self._room = WINDOW_BYTES
        self._react: Callable[[], None] | None = None

    def drain(self) -> None:
        while self._waiting and self._may_send():
            piece = bytes(self._waiting[: min(_PIECE_BYTES, self._room)])
            self._room -= len(piece)
            del self._waiting[: len(piece)]
            output = Output(self._stream, base64.b64encode(piece).decode())
            self._channel.send({"output": asdict(output)})

    def _may_send(self) -> bool:
        """Whether a whole piece can be sent, or nothing is under way: not many small ones, as in TCP."""
        return self._room == WINDOW_BYTES or min(len(self._waiting), self._room) >= _PIECE_BYTES

    def taken(self, count: int) -> None:
        """Handles the launcher's message that it has shown some bytes."""
        self._room += count
        if self._react is not None:
            self._react()

    def fail(self, error: OSError) -> None:
        """Drops all output, since the launcher has gone."""
        self.error = error
        self._waiting.clear()
        if self._react is not None:
            self._react()

    def watch(self, loop: EventLoop, react: Callable[[], None]) -> None:
        self._react = react

    def unwatch(self, loop: EventLoop) -> None:
        self._react = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the ranks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m acclimate.launch.remote.agent", description=__doc__)
    parser.add_argument("--launcher", help="key and addresses of the launcher")
    parser.add_argument("--host", help="this host's name in the launcher's list of hosts")
    parser.add_argument("--rank_variable", help="variable with the number of this rank")
    parser.add_argument("--local_rank_variable", help="variable with the local rank on this host")
    args = parser.parse_args(arguments)
    try:
        if args.rank_variable is not None:
            return _run_one_rank(args.rank_variable, args.local_rank_variable)
        if args.launcher is not None:
            channel = call_launcher(args.launcher, args.host)
            launcher = LauncherConnection(channel)
            assignment = launcher.wait_for_assignment()
            return 1 if assignment is None else run_assigned_ranks(launcher, assignment, channel.own_address)
        return _run_ranks_over_standard_streams()
    except AcclimateError as error:
        sys.stderr.write(f"acclimate run: error: {error}\n")
        return 1


def _run_ranks_over_standard_streams() -> int:
    # Ranks must neither read nor inherit these.
    channel = PipeChannel(os.dup(0), os.dup(1), AGENT_IS_HERE, waits_while_alive=True)
    channel.send({"here": True})
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    launcher = LauncherConnection(channel)
    address = _address_of_this_end(os.environ.get("SSH_CONNECTION", ""))
    assignment = launcher.wait_for_assignment()
    if assignment is None:
        return 1
    channel.mark_with(assignment.mark)
    return run_assigned_ranks(launcher, assignment, address)


def _run_one_rank(rank_variable: str, local_rank_variable: str) -> int:
    rank = read_rank(os.environ, rank_variable)
    local_rank = read_rank(os.environ, local_rank_variable)
    channel = call_launcher(os.environ.pop(LAUNCHER_VARIABLE, ""), str(rank))
    # MPI and Slurm forward the output of all ranks in pieces, which cut lines.
    launcher = LauncherConnection(channel, sends_output=True)
    assignment = launcher.wait_for_assignment()
    if assignment is None:
        return 1
    planned = rank - assignment.job.rank_offset(assignment.node_rank)
    if local_rank != planned:
        launcher.send(
            refused=f"rank {rank} was started there as local rank {local_rank}, but the hostfile makes it "
            f"{planned}. Remove options that place ranks from --launcher_args."
        )
        return 0
    return run_assigned_ranks(launcher, assignment, channel.own_address, only_local_rank=local_rank)


def read_rank(environ: Mapping[str, str], variable: str) -> int:
    """Returns the rank that the engine assigned to this process.

    Raises:
        LaunchProtocolError: the variable is not set, or holds something else.
    """
    value = environ.get(variable, "")
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise LaunchProtocolError(
            f'{variable} is "{excerpt(value)}", which is not the number of a rank. `acclimate run --launcher '
            "…` starts agents."
        )
    return int(value)


def _address_of_this_end(connection: str) -> str | None:
    """Reads ``SSH_CONNECTION``: the client's address and port, then this host's."""
    parts = connection.split()
    return parts[2] if len(parts) == 4 else None


if __name__ == "__main__":
    sys.exit(main())
