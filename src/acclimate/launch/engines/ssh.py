"""One agent on each host, over the system's ``ssh``, or over ``pdsh`` with its ssh module."""

from __future__ import annotations

import re
import shutil
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from acclimate.launch.engines.engine import Engine
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.plan.outcome import KEPT_BYTES, Outcome
from acclimate.launch.remote.ssh_client import (
    CONNECT_S,
    FAILED,
    agent_command,
    common_port,
    find_ssh,
    ssh_options,
    what_was_said,
)

if TYPE_CHECKING:
    from acclimate.launch.plan.job import JobPlan
    from acclimate.launch.plan.outcome import Outcome
    from acclimate.launch.remote.engine_program import EngineProgram


class Ssh(Engine):
    """OpenSSH's client.

    The plan goes to the agent's standard input, so it is not visible in a list of processes and needs no
    quoting.
    """

    name = "ssh"
    remedy = "Install OpenSSH's client (Debian: openssh-client)."

    def find(self, environ: Mapping[str, str]) -> str | None:
        return find_ssh(environ)

    def launch(self, job: JobPlan, program: str) -> Outcome:
        # Imported only for a job on many hosts, so that ranks of this host alone start sooner.
        from acclimate.launch.remote.ssh_agents import SshAgents

        return SshAgents(job, program).run()


_HOST_ENDED = re.compile(rb"^pdsh@[^:]*: ([^:]+): \S+ exited with exit code (\d+)$")
_KEPT = 100
"""How many lines of pdsh are kept to explain a host's end."""
_LONGEST_LINE = 1 << 16
"""Longer lines are shown in pieces."""


class Pdsh(Engine):
    """pdsh with its ssh module.

    It passes no input on, so the agents call the launcher, which must be reachable from the hosts. The job's
    key is on their command line, where other users of the hosts can see it while the job starts: if ``--env``
    contains a secret, use ssh.
    """

    name = "pdsh"
    remedy = "Install pdsh with its ssh module (Debian: pdsh)."

    def find(self, environ: Mapping[str, str]) -> str | None:
        return shutil.which("pdsh", path=environ.get("PATH"))

    def launch(self, job: JobPlan, program: str) -> Outcome:
        # Imported only for a job on many hosts, so that ranks of this host alone start sooner.
        from acclimate.launch.remote.callback import LAUNCHER_VARIABLE
        from acclimate.launch.remote.engine_program import EngineProgram

        port = common_port(job, "pdsh")

        def command(where: Mapping[str, str]) -> list[str]:
            agent = agent_command(job, "--launcher", where[LAUNCHER_VARIABLE], "--host", "pdsh-host")
            # %h is pdsh's word for the host; a percent sign of our own is written twice.
            agent = agent.replace("%", "%%").replace("pdsh-host", "%h")
            fan_out = [
                "-f",
                str(len(job.hosts)),
                "-t",
                str(CONNECT_S),
                "-w",
                ",".join(host.name for host in job.hosts),
            ]
            return [program, "-R", "ssh", "-N", *fan_out, *job.launcher_args, agent]

        # pdsh's own default also names the user, which would override ssh's configuration.
        to_port = "" if port is None else f"-p{port} "
        arguments = f"{' '.join(ssh_options())} {to_port}-a -x %h"
        environment = {"PDSH_SSH_ARGS": arguments}
        return EngineProgram(
            job, command, each_rank=False, environment=environment, on_stderr=_Listener()
        ).run()


class _Listener:
    """Finds in pdsh's standard error which host's ssh ended and its message; returns the rest to be shown."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._words: deque[str] = deque(maxlen=_KEPT)

    def __call__(self, program: EngineProgram, data: bytes) -> bytes:
        """Processes output of pdsh; empty at the end."""
        shown = bytearray()
        *whole, rest = data.split(b"\n")
        for end_of_line in whole:
            self._line += end_of_line
            shown += self._read(program, bytes(self._line), b"\n")
            self._line.clear()
        self._line += rest
        if len(self._line) > _LONGEST_LINE or (self._line and not data):
            shown += self._read(program, bytes(self._line), b"")
            self._line.clear()
        return bytes(shown)

    def _read(self, program: EngineProgram, line: bytes, end: bytes) -> bytes:
        ended = _HOST_ENDED.match(line)
        if ended is None:
            self._words.append(line[:KEPT_BYTES].decode(errors="backslashreplace"))
            return line + end if program.coordinator.started else b""
        host, code = ended[1].decode(errors="backslashreplace"), int(ended[2][:9])
        peer = program.peers.get(host)
        if peer is not None:
            said = what_was_said(code, self._about(host))
            program.coordinator.lost(peer, said, was_reached=code != FAILED)
        return b""

    def _about(self, host: str) -> str:
        """Returns the lines that name the host, else the last lines."""
        naming = [words for words in self._words if host in words]
        return "; ".join(naming or list(self._words)[-1:])
