"""Finds hosts that ssh cannot reach, for engines whose programs do not report them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import partial

from acclimate.launch.remote.coordinator import Coordinator
from acclimate.launch.remote.ssh_client import FAILED
from acclimate.launch.remote.watched_program import WatchedProgram


class SshReachabilityCheck:
    """Connects to each host by ssh if a job does not start, only to explain the failure.

    Args:
        hosts: the hosts' names.
        command: the ssh command, up to the host's name.
    """

    def __init__(self, hosts: Sequence[str], command: Sequence[str]) -> None:
        self._hosts, self._ssh = hosts, command
        self._programs: list[WatchedProgram] = []
        self._words: dict[str, bytes] = {}
        self._has_begun = False

    @property
    def running(self) -> bool:
        """Whether an answer is still missing."""
        return any(program.running for program in self._programs)

    def begin(self, coordinator: Coordinator) -> None:
        """Starts the check of all hosts, once."""
        if self._has_begun:
            return
        self._has_begun = True
        for host in self._hosts:
            process = subprocess.Popen(
                [*self._ssh, "--", host, "true"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._words[host] = b""
            received, exited = partial(self._received, host), partial(self._exited, coordinator, host)
            self._programs.append(WatchedProgram(coordinator.loop, process, received, exited))

    def _received(self, host: str, _: int, data: bytes) -> None:
        self._words[host] += data

    def _exited(self, coordinator: Coordinator, host: str, code: int) -> None:
        if code == FAILED and not coordinator.started:
            words = self._words[host].decode(errors="backslashreplace").strip()
            coordinator.explain(f'host "{host}" cannot be reached: {words or "ssh did not say why"}')

    def end(self) -> None:
        """Stops the check."""
        for program in self._programs:
            program.kill()
            program.close()
