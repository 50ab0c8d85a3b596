"""``python -m acclimate.launch.remote.agent``: runs the ranks of one host for a launcher elsewhere.

Without an argument (ssh) the launcher is at the other end of standard input and output. With ``--launcher
WHERE --host NAME`` (pdsh, which passes no input on) the agent calls it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from acclimate.errors import AcclimateError
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.remote.callback import call_launcher
from acclimate.launch.remote.launcher_connection import LauncherConnection, run_assigned_ranks
from acclimate.launch.remote.protocol import AGENT_IS_HERE, PipeChannel, SocketChannel


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one host's part; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m acclimate.launch.remote.agent", description=__doc__)
    parser.add_argument("--launcher", help="where to call it")
    parser.add_argument("--host", help="this host's name in the launcher's list of hosts")
    args = parser.parse_args(arguments)
    channel: PipeChannel | SocketChannel
    try:
        if args.launcher is None:
            channel = _take_standard_streams()
            address = _address_of_this_end(os.environ.get("SSH_CONNECTION", ""))
        else:
            channel = call_launcher(args.launcher, {"host": args.host})
            address = channel.own_address
        launcher = LauncherConnection(channel)
        first = launcher.wait_for("job")
        if first is None:
            return 1
        if isinstance(channel, PipeChannel):
            channel.mark_with(first["mark"])
        return run_assigned_ranks(
            launcher, JobPlan.from_json(first["job"]), int(first["node_rank"]), lambda ranks: ranks, address
        )
    except AcclimateError as error:
        sys.stderr.write(f"acclimate run: error: {error}\n")
        return 1


def _take_standard_streams() -> PipeChannel:
    """Keeps what ranks must neither read nor inherit."""
    channel = PipeChannel(os.dup(0), os.dup(1), AGENT_IS_HERE, waits_for_the_living=True)
    channel.send({"hello": {}})
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return channel


def _address_of_this_end(connection: str) -> str | None:
    """Of ``SSH_CONNECTION``: the client's address and port, then this host's."""
    parts = connection.split()
    return parts[2] if len(parts) == 4 else None


if __name__ == "__main__":
    sys.exit(main())
