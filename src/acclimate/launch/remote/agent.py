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
import os
import sys
from collections.abc import Mapping, Sequence

from acclimate.errors import AcclimateError, LaunchProtocolError, excerpt
from acclimate.launch.remote.callback import LAUNCHER_VARIABLE, call_launcher
from acclimate.launch.remote.launcher_connection import LauncherConnection, run_assigned_ranks
from acclimate.launch.remote.protocol import AGENT_IS_HERE, PipeChannel


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
            return _run_ranks(LauncherConnection(channel), channel.own_address)
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


def _run_ranks(launcher: LauncherConnection, address: str) -> int:
    assignment = launcher.wait_for_assignment()
    return 1 if assignment is None else run_assigned_ranks(launcher, assignment, address)


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
