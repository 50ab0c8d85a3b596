"""Finds hosts that ssh cannot reach, for engines whose programs do not report them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from functools import partial

from acclimate.launch.remote.coordinator import Coordinator
from acclimate.launch.remote.ssh_client import FAILED

_READ_BYTES = 1 << 16


class SshReachabilityCheck:
    """One ssh to each host if a job does not start. Its findings only explain the failure.

    Args:
        hosts: names.
        command: of ssh, up to the host's name.
    """

    def __init__(self, hosts: Sequence[str], command: Sequence[str]) -> None:
        self._hosts, self._ssh = hosts, command
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._words: dict[str, bytes] = {}
        self._has_begun = False

    @property
    def running(self) -> bool:
        """Whether an answer is still missing."""
        return bool(self._running)

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
            if process.stderr is not None:
                self._running[host] = process
                self._words[host] = b""
                descriptor = process.stderr.fileno()
                coordinator.loop.watch(descriptor, partial(self._read, coordinator, host, descriptor))

    def _read(self, coordinator: Coordinator, host: str, descriptor: int) -> None:
        data = os.read(descriptor, _READ_BYTES)
        self._words[host] += data
        if data:
            return
        coordinator.loop.forget(descriptor)
        with self._running.pop(host) as process:
            failed = process.wait() == FAILED
        if failed and not coordinator.started:
            words = self._words[host].decode(errors="backslashreplace").strip()
            coordinator.explain(f'host "{host}" cannot be reached: {words or "ssh did not say why"}')

    def end(self) -> None:
        """Stops the check."""
        for process in self._running.values():
            with process:
                process.kill()
