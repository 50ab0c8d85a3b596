"""What the MPI engines have in common: a process per slot, its environment named, its place ours to bind.

Variables are carried by name, so that their values do not show in a list of processes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from acclimate.launch.engines.ssh import OPTIONS
from acclimate.launch.engines.switchboard import Switchboard
from acclimate.launch.hostfile import HostPlan
from acclimate.launch.job import JobPlan

if TYPE_CHECKING:
    from acclimate.launch.outcome import Outcome

SSH_OPTIONS = " ".join(OPTIONS)
"""So that MPI's own ssh does not ask for passwords, and gives up on a silent host as ours does."""
SLOT = (sys.executable, "-m", "acclimate.launch.slot")

Arguments = Callable[[Path, Sequence[str]], Sequence[str]]
"""Makes an MPI's arguments from its hostfile and the names of the variables to carry."""


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
    with tempfile.TemporaryDirectory(prefix="acclimate-") as folder:
        hostfile = Path(folder) / "hosts"
        hostfile.write_text("".join(f"{host_line(host)}\n" for host in job.hosts))

        def command(where: Mapping[str, str]) -> list[str]:
            carried = sorted({*job.environment, *where})
            return [program, *arguments(hostfile, carried), *job.launcher_args, *SLOT]

        return Switchboard(job, command, each_rank=True, environment=environment).run()
