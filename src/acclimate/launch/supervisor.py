"""Runs the ranks of this host to their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from acclimate.launch.outcome import Outcome
from acclimate.launch.plan import RankPlan


@dataclass(frozen=True)
class StopRequest:
    """Somebody else who may tell the supervisor to end its ranks."""

    descriptor: int
    """Readable, or at its end, when there is something to look at."""
    read: Callable[[], str | None]
    """Called then; a sentence on why the ranks have to end, or ``None`` to go on."""


def supervise(
    ranks: Sequence[RankPlan],
    *,
    grace_s: float = 5.0,
    quiet: bool = False,
    tagged: bool | None = None,
    stop: StopRequest | None = None,
) -> Outcome:
    """Starts the ranks and waits until the last of their processes is gone.

    Must be called in the main thread. SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to the ranks, which
    then have the grace to end; so are SIGUSR1 and SIGUSR2, which end nothing.

    Args:
        ranks: of this host.
        grace_s: between SIGTERM and SIGKILL, when one failed or the job is to end.
        quiet: no notes of the launcher's own; the ranks' output is shown all the same.
        tagged: whether each line begins with ``[rank N]``; ``None``: where there are several ranks.
        stop: somebody else who may end the job.
    """
    raise NotImplementedError
