"""Finds out which hosts ssh cannot reach, for engines whose programs do not say so, or not in ssh's words."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from functools import partial

from acclimate.launch.remote.coordinator import Coordinator
from acclimate.launch.remote.ssh_client import FAILED

_READ_BYTES = 1 << 16


class SshReachabilityCheck:
    """One ssh to each host when a job does not begin. What it finds explains, and decides nothing.

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
        """Whether an answer is still to come."""
        return bool(self._running)

    def begin(self, coordinator: Coordinator) -> None:
        """Asks all hosts, once."""
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
        """Asks no longer."""
        for process in self._running.values():
            with process:
                process.kill()
