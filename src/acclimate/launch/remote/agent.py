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
from acclimate.launch.remote.launcher_connection import Launcher, play
from acclimate.launch.remote.protocol import AGENT_IS_HERE, SocketLink, StreamLink


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one host's part; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m acclimate.launch.remote.agent", description=__doc__)
    parser.add_argument("--launcher", help="where to call it")
    parser.add_argument("--host", help="this host's name in the launcher's list of hosts")
    args = parser.parse_args(arguments)
    link: StreamLink | SocketLink
    try:
        if args.launcher is None:
            link = _take_standard_streams()
            address = _address_of_this_end(os.environ.get("SSH_CONNECTION", ""))
        else:
            link = call_launcher(args.launcher, {"host": args.host})
            address = link.own_address
        launcher = Launcher(link)
        first = launcher.wait_for("job")
        if first is None:
            return 1
        if isinstance(link, StreamLink):
            link.mark_with(first["mark"])
        return play(
            launcher, JobPlan.from_json(first["job"]), int(first["node_rank"]), lambda ranks: ranks, address
        )
    except AcclimateError as error:
        sys.stderr.write(f"acclimate run: error: {error}\n")
        return 1


def _take_standard_streams() -> StreamLink:
    """Keeps what ranks must neither read nor inherit."""
    link = StreamLink(os.dup(0), os.dup(1), AGENT_IS_HERE, waits_for_the_living=True)
    link.send({"hello": {}})
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return link


def _address_of_this_end(connection: str) -> str | None:
    """Of ``SSH_CONNECTION``: the client's address and port, then this host's."""
    parts = connection.split()
    return parts[2] if len(parts) == 4 else None


if __name__ == "__main__":
    sys.exit(main())
