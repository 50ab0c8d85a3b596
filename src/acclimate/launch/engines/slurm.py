"""One process for each rank, started by Slurm's ``srun``, inside an allocation or in a new one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from acclimate.errors import HostfileError, excerpt
from acclimate.host.rank_variables import SLURM
from acclimate.host.slurm_allocation import NODE_LIST, expand_hosts, in_allocation, in_step, tasks_of_nodes
from acclimate.launch.engines.engine import Engine, rank_agent
from acclimate.launch.plan.hostfile import Host
from acclimate.launch.plan.job import JobPlan

if TYPE_CHECKING:
    from acclimate.launch.plan.outcome import Outcome

_SEVERAL = re.compile(r"[2-9]|[1-9][0-9]{1,8}")


class Slurm(Engine):
    """Slurm."""

    name = "slurm"
    remedy = "Install Slurm's client (Debian: slurm-client) on a machine of the cluster."
    needs_allocation = True

    def find(self, environ: Mapping[str, str]) -> str | None:
        return shutil.which("srun", path=environ.get("PATH"))

    def is_allocated(self, environ: Mapping[str, str]) -> bool:
        # A process that srun started is one task of a job step, which is not for a job that it starts itself.
        nodes = environ.get("SLURM_JOB_NUM_NODES", "")
        several = in_allocation(environ) and bool(_SEVERAL.fullmatch(nodes))
        return several and not in_step(environ)

    def hosts(self, environ: Mapping[str, str], slots: int) -> tuple[Host, ...]:
        import subprocess

        names = environ.get(NODE_LIST, "")
        if not names:
            raise HostfileError(
                "--launcher slurm has no hosts: there is no Slurm allocation and no --hostfile. Make an "
                "allocation first (salloc, sbatch), or name the hosts in a hostfile: srun makes one for them."
            )
        try:
            hosts = expand_hosts(names, environ)
        except (OSError, subprocess.SubprocessError) as error:
            raise HostfileError(
                f"Slurm's allocation {excerpt(names)} cannot be read with scontrol ({excerpt(str(error))}). "
                "Give a hostfile."
            ) from error
        # Without --ntasks, Slurm sets SLURM_TASKS_PER_NODE to the number of tasks that would fit.
        asked_for = environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE")
        tasks = tasks_of_nodes(environ.get("SLURM_TASKS_PER_NODE", "")) if asked_for else []
        counts = tasks if len(tasks) == len(hosts) and all(tasks) else [slots] * len(hosts)
        return tuple(Host(name, count) for name, count in zip(hosts, counts, strict=True))

    def launch(self, job: JobPlan, program: str) -> Outcome:
        # Imported only for a job on many hosts, so that ranks of this host alone start sooner.
        from acclimate.launch.remote.engine_program import EngineProgram, MemoryFile

        # One line for each task: the only way to give hosts different numbers of them, in this order.
        with MemoryFile("".join(f"{host.name}\n" for host in job.hosts for _ in host.slots)) as hostfile:

            def command(where: Mapping[str, str]) -> list[str]:
                return [
                    program,
                    f"--nodes={len(job.hosts)}",
                    f"--ntasks={job.world_size}",
                    "--distribution=arbitrary",
                    "--cpu-bind=none",
                    "--kill-on-bad-exit=0",  # the launcher ends the others itself, after the grace
                    "--unbuffered",
                    f"--export={','.join(sorted({*job.environment, *where}))}",
                    *job.launcher_args,
                    *rank_agent(SLURM),
                ]

            environment = {"SLURM_HOSTFILE": hostfile.path}
            # A job may wait in Slurm's queue for any time.
            return EngineProgram(
                job,
                command,
                each_rank=True,
                environment=environment,
                hostfile=hostfile,
                answer_s=float("inf"),
            ).run()
