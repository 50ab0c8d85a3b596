"""The Slurm allocation and step of a process: how to know that it has one, and its hosts and tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping

JOB_ID = "SLURM_JOB_ID"
NODE_LIST = "SLURM_JOB_NODELIST"
"""The allocation's hosts, in Slurm's notation."""
NODE_INDEX = "SLURM_NODEID"
"""The number of this host in its step."""

_FIRST_RESERVED_STEP = 0xFFFFFFF0
"""From here on, the numbers of steps mean a batch script, an interactive shell and the like."""
_SCONTROL_S = 60
_REPEATED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)
_MOST_NODES = 1 << 16


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether a process with these variables is in an allocation."""
    return bool(environ.get(JOB_ID))


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` started the process, as a task of a step. A batch script is not a task."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    return step.isdecimal() and int(step[:20]) < _FIRST_RESERVED_STEP


def tasks_of_nodes(text: str) -> list[int]:
    """Returns the tasks of each node: ``2(x3),1`` means 2, 2, 2 and 1. Empty if the text means nothing."""
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part.strip())
        times = int(match[2] or 1) if match else 0
        if match is None or len(counts) + times > _MOST_NODES:
            return []
        counts += [int(match[1])] * times
    return counts


def expand_hosts(names: str, environ: Mapping[str, str]) -> list[str]:
    """Returns the hosts of a list in Slurm's notation, such as ``node[1-3]``; asks ``scontrol``.

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
