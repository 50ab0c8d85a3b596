"""The protocol of an engine, a way to start ranks on many hosts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

from acclimate.host.rank_variables import RankVariables
from acclimate.launch.supervise.processes import own_python

if TYPE_CHECKING:
    from acclimate.launch.plan.hostfile import Host
    from acclimate.launch.plan.job import JobPlan
    from acclimate.launch.plan.outcome import Outcome


def rank_agent(variables: RankVariables) -> list[str]:
    """Returns the command of an agent that runs the one rank whose number is in these variables."""
    names = ("--rank_variable", variables.rank, "--local_rank_variable", variables.local_rank)
    return own_python("acclimate.launch.remote.agent", *names)


class Engine(Protocol):
    """A way to start ranks on many hosts. ``registry.py`` lists all."""

    name: ClassVar[str]
    """The engine's name for ``--launcher``."""
    remedy: ClassVar[str]
    """What to install if the program is missing."""
    needs_allocation: ClassVar[bool] = False
    """Whether ``auto`` uses it only inside its own allocation, where it precedes all others."""

    @abstractmethod
    def find(self, environ: Mapping[str, str]) -> str | None:
        """Returns the path of the engine's program; ``None`` if it is not installed."""

    @abstractmethod
    def launch(self, job: JobPlan, program: str) -> Outcome:
        """Runs the job to its end with the program that :meth:`find` returned.

        Raises:
            HostUnreachableError: a host does not answer or cannot do its part; no rank was started.
            LaunchOptionError: the engine cannot reach such a host.
        """

    def is_allocated(self, environ: Mapping[str, str]) -> bool:
        """Whether this process runs inside the engine's allocation of several hosts."""
        return False

    def hosts(self, environ: Mapping[str, str], slots: int) -> tuple[Host, ...]:
        """Returns the hosts of the allocation, for a job without a hostfile; none without allocations.

        They have ``slots`` slots if the allocation does not say.

        Raises:
            HostfileError: this process is in no allocation, or its hosts cannot be read.
        """
        return ()
