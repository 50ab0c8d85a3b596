"""The ranks of one host: how many, on which devices, with which cores and variables."""

from __future__ import annotations

from collections.abc import Mapping

from acclimate.launch.job import JobPlan
from acclimate.launch.plan import RankPlan


def plan_ranks(job: JobPlan, node_rank: int, environ: Mapping[str, str]) -> tuple[RankPlan, ...]:
    """What the supervisor of one host starts; also what a slot takes its own rank from, by local rank.

    Args:
        job: with its master address and port, which only a job on one host may leave open.
        node_rank: of this host.
        environ: the variables of this host that ranks inherit; the job's are laid over them.

    Raises:
        BindingError: the cores cannot be shared as asked for.
        LaunchOptionError: the master's address or port is open, or a variable cannot be set.
    """
    raise NotImplementedError
