"""One agent on each host, over the system's ``ssh``.

The plan goes to the agent's standard input, so it is not visible in a list of processes and needs no quoting.
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
        return find_ssh(environ)

    def launch(self, job: JobPlan, program: str) -> Outcome:
        # Imported only for a job on many hosts, so that ranks of this host alone start sooner.
        from acclimate.launch.remote.ssh_agents import SshAgents

        return SshAgents(job, program).run()
