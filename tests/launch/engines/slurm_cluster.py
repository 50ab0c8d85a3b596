"""A Slurm cluster for tests: the controller on head, a daemon on each host, all files in one folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from engine_jobs import eventually
from hosts import Hosts

PROGRAMS = ("slurmctld", "slurmd", "srun", "salloc", "scontrol", "sinfo")
_SETTINGS = """
ClusterName=test
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_res
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why there can be no cluster here; None where there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(missing)} (.ci/install-packages)" if missing else None


class SlurmCluster:
    """Of all hosts."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        processors = os.cpu_count()
        nodes = "\n".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs={processors}" for host in hosts.hosts
        )
        self.configuration = folder / "slurm.conf"
        self.configuration.write_text(
            _SETTINGS.format(head=hosts.head.address, folder=folder, nodes=nodes.strip())
        )
        (folder / "state").mkdir()
        machines = [(hosts.head, ["slurmctld", "-D", "-c"])]
        for host in hosts.hosts:
            (folder / f"spool-{host.name}").mkdir()
            machines.append((host, ["slurmd", "-D", "-N", host.name]))
        self._daemons = [
            machine.popen(
                [*command, "-f", str(self.configuration)],
                directory=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for machine, command in machines
        ]
        self.environment = {"SLURM_CONF": str(self.configuration)}
        idle = [
            "env",
            f"SLURM_CONF={self.configuration}",
            "sinfo",
            "--noheader",
            "--format=%D",
            "--states=idle",
        ]
        wanted = str(len(hosts.hosts))
        assert eventually(lambda: hosts.head.run(idle).stdout.strip() == wanted), hosts.head.run(idle)

    def close(self) -> None:
        """Ends its daemons."""
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
