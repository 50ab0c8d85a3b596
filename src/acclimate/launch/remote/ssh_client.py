"""The system's ``ssh``: its options, its exit code, and the command that it runs on a host.

Host keys, users and jump hosts are configured in ssh: if ``ssh HOST`` works, this does.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping

from acclimate.errors import LaunchOptionError
from acclimate.host.process_status import how_it_ended
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.supervise.processes import own_python

CONNECT_S = 7
"""The time limit for a host to accept a connection."""
FAILED = 255
"""ssh's exit code for its own failures; others are those of the remote command."""


def find_ssh(environ: Mapping[str, str]) -> str | None:
    """Returns the path of ssh's client; ``None`` if it is not installed."""
    return shutil.which("ssh", path=environ.get("PATH"))


def ssh_options(connect_s: int = CONNECT_S) -> tuple[str, ...]:
    """Returns options with which ssh asks no questions, and notices the loss of a host.

    The user's own options come first, since ssh uses the first of several values.
    """
    notices = "-oServerAliveInterval=5", "-oServerAliveCountMax=3"
    return "-T", "-oBatchMode=yes", f"-oConnectTimeout={connect_s}", *notices


def common_port(job: JobPlan, engine: str) -> int | None:
    """Returns the ssh port of all hosts, for engines with a single port; ``None`` if none is given.

    Raises:
        LaunchOptionError: there are several ports, or an IPv6 address among the names.
    """
    odd = next((host for host in job.hosts if ":" in host.name), None)
    if odd is not None:
        raise LaunchOptionError(
            f"{engine} takes no IPv6 address such as {odd.label}. Give a name, or use --launcher ssh."
        )
    ports = {host.port or job.ssh_port for host in job.hosts}
    if len(ports) > 1:
        raise LaunchOptionError(
            f"{engine} takes one ssh port for all hosts. Give all hosts the same port, or use --launcher ssh."
        )
    return ports.pop()


def what_was_said(code: int, words: str) -> str:
    """Returns why a host's ssh ended, with the message of ssh or of the remote command."""
    if code == FAILED:
        return words or "ssh did not say why"
    if code < 0:
        ended = f"ssh {how_it_ended(code)}"
        return f"{ended}: {words}" if words else ended
    return f"exit code {code}: {words}" if words else f"exit code {code}"


def agent_command(job: JobPlan, *arguments: str) -> str:
    """Returns the command with which any login shell on a host becomes an agent."""
    words = own_python("acclimate.launch.remote.agent", *arguments)
    if "PYTHONPATH" in job.environment:  # an agent needs it before it has the plan
        words = ["env", f"PYTHONPATH={job.environment['PYTHONPATH']}", *words]
    return "exec " + shlex.join(words)
