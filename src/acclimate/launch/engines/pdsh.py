"""One agent on each host, over ``pdsh`` with its ssh module.

pdsh passes no input on, so the agents call the launcher, which has to be reachable from the hosts. What they
call it with stands on their command line, where other users of the hosts can see it while the job starts:
with a secret in ``--env``, take ssh.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from acclimate.launch.engines import ssh
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.remote.callback import LAUNCHER_VARIABLE
from acclimate.launch.remote.callback_server import CallbackServer
from acclimate.launch.remote.protocol import Lines

if TYPE_CHECKING:
    from acclimate.launch.plan.outcome import Outcome

_HOST_ENDED = re.compile(rb"^pdsh@[^:]*: ([^:]+): \S+ exited with exit code (\d+)$")


_KEPT = 100
"""Lines of pdsh's that are kept, to say why a host ended."""


def find(environ: Mapping[str, str]) -> str | None:
    """Path of pdsh; None where it is not installed."""
    return shutil.which("pdsh", path=environ.get("PATH"))


def launch(job: JobPlan, program: str) -> Outcome:
    """Runs the job to its end.

    Raises:
        HostUnreachableError: a host does not answer or cannot do its part; no rank was started.
        LaunchOptionError: a host's name or port is nothing that pdsh takes.
    """
    port = ssh.common_port(job, "pdsh")

    def command(where: Mapping[str, str]) -> list[str]:
        agent = ssh.remote_command(job, "--launcher", where[LAUNCHER_VARIABLE], "--host", "pdsh-host")
        # %h is pdsh's word for the host; a percent sign of our own is written twice.
        agent = agent.replace("%", "%%").replace("pdsh-host", "%h")
        fan_out = [
            "-f",
            str(len(job.hosts)),
            "-t",
            str(ssh.CONNECT_S),
            "-w",
            ",".join(host.name for host in job.hosts),
        ]
        return [program, "-R", "ssh", "-N", *fan_out, *job.launcher_args, agent]

    # pdsh's own default names the user too, and that would hide what ssh's configuration says.
    to_port = "" if port is None else f"-p{port} "
    arguments = f"{' '.join(ssh.options(ssh.CONNECT_S))} {to_port}-a -x %h"
    environment = {"PDSH_SSH_ARGS": arguments}
    return CallbackServer(job, command, each_rank=False, environment=environment, on_stderr=_Listener()).run()


class _Listener:
    """Reads from pdsh's standard error which host's ssh ended, and with which words; shows the rest."""

    def __init__(self) -> None:
        self._lines = Lines()
        self._words: list[str] = []

    def __call__(self, server: CallbackServer, data: bytes) -> None:
        for line in self._lines.feed(data):
            ended = _HOST_ENDED.match(line)
            if ended is None:
                words = line.decode(errors="backslashreplace")
                self._words = [*self._words[-_KEPT:], words]
                if server.coordinator.started:
                    sys.stderr.write(f"{words}\n")
                continue
            host, code = ended[1].decode(), int(ended[2])
            peer = server.peers.get(host)
            if peer is not None:
                said = ssh.what_was_said(code, self._about(host))
                server.coordinator.lost(peer, said, was_reached=code != ssh.FAILED)

    def _about(self, host: str) -> str:
        """What was said that names the host, else the last that was said at all."""
        naming = [words for words in self._words if host in words]
        return "; ".join(naming or self._words[-1:])
