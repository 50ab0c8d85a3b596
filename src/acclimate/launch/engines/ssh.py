"""One agent on each host, over the system's ``ssh``.

The plan goes to the agent's standard input: nothing of it is seen in a list of processes, or needs quoting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from acclimate.launch.engines.engine import Engine
from acclimate.launch.remote.ssh_client import find_ssh

if TYPE_CHECKING:
    from acclimate.launch.plan.job import JobPlan
    from acclimate.launch.plan.outcome import Outcome


class Ssh(Engine):
    """OpenSSH's client."""

    name = "ssh"
    remedy = "Install OpenSSH's client (Debian: openssh-client)."

    def find(self, environ: Mapping[str, str]) -> str | None:
        """Returns the path of ssh's client; ``None`` if it is not installed."""
        return find_ssh(environ)

    def launch(self, job: JobPlan, program: str) -> Outcome:
        """Runs the job to its end.

        Raises:
            HostUnreachableError: a host does not answer or cannot do its part; no rank was started.
        """
        # Imported only for a job on many hosts, so that ranks of this host alone start sooner.
        from acclimate.launch.remote.ssh_agents import SshAgents

        return SshAgents(job, program).run()
