"""What the MPI engines have in common: a process per slot, its environment named, its place ours to bind.

Variables are exported by name, so that their values do not show in a list of processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from acclimate.launch.engines import ssh
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.remote.callback_server import CHECK_AFTER_S, CallbackServer, MemoryFile
from acclimate.launch.remote.ssh_check import SshReachabilityCheck
from acclimate.launch.supervise.own_python import own_python

if TYPE_CHECKING:
    from acclimate.launch.plan.outcome import Outcome

SLOT = tuple(own_python("acclimate.launch.remote.slot"))

Arguments = Callable[[str, Sequence[str]], Sequence[str]]
"""Makes an MPI's arguments from its hostfile's path and the names of the variables to carry."""


def launch_slots(
    job: JobPlan,
    program: str,
    arguments: Arguments,
    host_line: Callable[[HostPlan], str],
    environment: Mapping[str, str],
) -> Outcome:
    """Runs the job to its end, each rank started by MPI.

    Args:
        job: what to run.
        program: MPI's.
        arguments: makes its arguments, besides the user's own and the slot's command.
        host_line: a host in the syntax of this MPI's hostfile.
        environment: settings of this MPI.

    Raises:
        HostUnreachableError: a host does not answer or cannot do its part; no rank was started.
    """
    with MemoryFile("".join(f"{host_line(host)}\n" for host in job.hosts)) as hostfile:

        def command(where: Mapping[str, str]) -> list[str]:
            exported = sorted({*job.environment, *where})
            return [program, *arguments(hostfile.path, exported), *job.launcher_args, *SLOT]

        return CallbackServer(
            job,
            command,
            each_rank=True,
            environment=environment,
            hostfile=hostfile,
            ssh_check=_ssh_check(job),
        ).run()


def ssh_options(job: JobPlan) -> str:
    """For MPI's own ssh, so that it asks for no password and gives up on a silent host; none inside Slurm.

    There MPI takes ``srun`` instead, and would pass them on to it.

    Raises:
        LaunchOptionError: the hosts have different ports.
    """
    return "" if _in_slurm() else " ".join(_ssh_options(job, ssh.CONNECT_S))


def _ssh_options(job: JobPlan, connect_s: int) -> list[str]:
    port = ssh.common_port(job, "MPI")
    return [*ssh.options(connect_s), *([] if port is None else [f"-p{port}"])]


def _in_slurm() -> bool:
    return "SLURM_JOB_ID" in os.environ


def _ssh_check(job: JobPlan) -> SshReachabilityCheck | None:
    """None where MPI reaches hosts by other means than ssh, or ssh is not here to ask."""
    program = ssh.find(os.environ)
    if program is None or _in_slurm():
        return None
    # So that it has given up on a silent host when MPI's ssh has, which began before it.
    connect_s = ssh.CONNECT_S - int(CHECK_AFTER_S)
    return SshReachabilityCheck([host.name for host in job.hosts], [program, *_ssh_options(job, connect_s)])
