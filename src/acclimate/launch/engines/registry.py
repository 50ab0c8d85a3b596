"""The engines, and the choice of one for a job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from acclimate.errors import EngineNotFoundError, LaunchOptionError, excerpt
from acclimate.launch.engines.engine import Engine
from acclimate.launch.engines.mpi import IntelMpi, Mpich, OpenMpi
from acclimate.launch.engines.slurm import Slurm
from acclimate.launch.engines.ssh import Pdsh, Ssh
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.plan.outcome import Outcome

AUTO = "auto"

# In the order in which `auto` looks for them. ssh comes first: it is installed wherever pdsh is, and keeps
# the job's key out of the hosts' lists of processes. MPI comes later: it must be installed on all hosts,
# which cannot be checked from here.
ENGINES: tuple[Engine, ...] = (Ssh(), Pdsh(), OpenMpi(), Mpich(), IntelMpi(), Slurm())


def engine_names() -> tuple[str, ...]:
    """Returns the values of ``--launcher``."""
    return (AUTO, *(engine.name for engine in ENGINES))


def choose_engine(name: str, environ: Mapping[str, str]) -> tuple[Engine, str]:
    """Returns the engine with this name, and its program.

    ``auto`` means Slurm inside an allocation of several nodes, else the first installed of ssh, pdsh, Open
    MPI, MPICH and Intel MPI.

    Raises:
        LaunchOptionError: no engine has this name.
        EngineNotFoundError: its program is not installed here, or does not answer.
    """
    allocating = allocating_engine(name, environ)
    if allocating is not None:
        wanted = [allocating]
    elif name == AUTO:
        wanted = [engine for engine in ENGINES if not engine.needs_allocation]
    else:
        wanted = [engine for engine in ENGINES if engine.name == name]
    if not wanted:
        raise LaunchOptionError(
            f'--launcher "{excerpt(name)}" is not known; it is one of {", ".join(engine_names())}.'
        )
    broken = None
    for engine in wanted:
        try:
            program = engine.find(environ)
        except EngineNotFoundError as error:
            broken = broken or error
            continue
        if program is not None:
            return engine, program
    if broken is not None:
        raise broken
    if len(wanted) > 1:
        raise EngineNotFoundError(
            f"No program that starts ranks on other hosts is installed here. {wanted[0].remedy}"
        )
    raise EngineNotFoundError(f"--launcher {wanted[0].name} is not installed here. {wanted[0].remedy}")


def allocating_engine(name: str, environ: Mapping[str, str]) -> Engine | None:
    """Returns the engine whose allocation gives the hosts of a job without a hostfile; ``None`` if none does.

    ``auto`` means an engine in whose allocation this process runs.
    """
    allocating = (engine for engine in ENGINES if engine.needs_allocation)
    if name == AUTO:
        return next((engine for engine in allocating if engine.is_allocated(environ)), None)
    return next((engine for engine in allocating if engine.name == name), None)


def launch(job: JobPlan, engine_name: str = AUTO) -> Outcome:
    """Runs a job on its hosts to its end."""
    engine, program = choose_engine(engine_name, os.environ)
    return engine.launch(job, program)
