"""Jobs on the hosts of tests, as a user starts them: ``acclimate run`` on the machine named head."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fresh_process import plain_environment
from hosts import Hosts, Machine

ROOT = Path(__file__).parents[2]
ENGINES_FOLDER = ROOT / ".engines"
"""Where `make` puts the MPIs, each in a folder of its own as their programs have the same names."""
ACCLIMATE = [sys.executable, "-m", "acclimate", "run"]

ALL_REDUCE = """
import os, socket, sys
import torch, torch.distributed as distributed
torch.set_num_threads(1)
distributed.init_process_group("gloo")
total = torch.tensor([2.0 ** distributed.get_rank()])
distributed.all_reduce(total)
cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
print("result", socket.gethostname(), os.environ["LOCAL_RANK"], os.environ["OMP_NUM_THREADS"], cores, total.item())
distributed.destroy_process_group()
"""
"""Each rank's result is the sum over all of 2 to the power of the rank."""


class Jobs:
    """Starts jobs on the hosts.

    Args:
        hosts: with their names in the hostfile, two slots each.
        folder: for scripts and hostfiles.
        path: folders to put in front of ``PATH``.
        environment: of the launcher, besides.
    """

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        path: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts, self.folder = hosts, folder
        ssh = folder / "bin" / "ssh"  # as if the user's own configuration had these hosts' keys
        ssh.parent.mkdir(exist_ok=True)
        ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {hosts.folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)
        folders = [ssh.parent, *path, Path(sys.executable).parent, *os.environ["PATH"].split(os.pathsep)]
        self.environment = {
            **plain_environment(),
            "PATH": os.pathsep.join(map(str, folders)),
            **(environment or {}),
        }

    def hostfile(self, *names: str) -> Path:
        """Of these hosts, or of all."""
        path = self.folder / "hostfile"
        path.write_text("".join(f"{name} slots=2\n" for name in names or [host.name for host in self.hosts.hosts]))
        return path

    def script(self, code: str) -> Path:
        path = self.folder / "script.py"
        path.write_text(code)
        return path

    def start(self, code: str, *options: str, hosts: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Starts a job of this code on two slots of each host."""
        command = [*ACCLIMATE, "--hostfile", str(self.hostfile(*hosts)), *options, str(self.script(code))]
        return self.hosts.head.popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env=self.environment,
        )

    def run(
        self, code: str, *options: str, hosts: Sequence[str] = (), timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Runs such a job to its end."""
        with self.start(code, *options, hosts=hosts) as job:
            try:
                stdout, stderr = job.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                job.kill()
                raise
        return subprocess.CompletedProcess(job.args, job.returncode, stdout, stderr)


def eventually(holds: Callable[[], bool], within_s: float = 20.0) -> bool:
    """Whether something comes true."""
    give_up = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
    return True


def leftovers(machines: Sequence[Machine]) -> dict[str, dict[int, str]]:
    """What still runs on the hosts."""
    return {machine.name: found for machine in machines if (found := machine.processes())}
