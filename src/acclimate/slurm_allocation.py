"""The Slurm allocation and step of a process: how to know that it has one, and the hosts of a list."""

from __future__ import annotations

from collections.abc import Mapping

JOB_ID = "SLURM_JOB_ID"
NODE_LIST = "SLURM_JOB_NODELIST"
"""The allocation's hosts, in Slurm's notation."""

_SCONTROL_S = 60


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether a process with these variables is in an allocation."""
    return JOB_ID in environ


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` started the process, as a task of a step. A batch script is no task."""
    return "SLURM_STEP_ID" in environ


def expand_hosts(names: str, environ: Mapping[str, str]) -> list[str]:
    """Returns the hosts of a list in Slurm's notation, such as ``node[1-3]``.

    Args:
        names: the list.
        environ: the variables of ``scontrol``, which is looked up in its ``PATH``.

    Raises:
        OSError: ``scontrol`` cannot be run.
        subprocess.SubprocessError: it failed, or did not answer within 60 s.
    """
    import subprocess  # most processes that import this module start none

    asked = subprocess.run(
        ["scontrol", "show", "hostnames", names],
        capture_output=True,
        text=True,
        check=True,
        timeout=_SCONTROL_S,
        env=dict(environ),
    )
    return asked.stdout.split()
