"""``python -m acclimate.launch.elastic.worker``: this host's ranks between two rendezvous of an elastic job.

It is a separate process because a supervisor forks, and the elastic agent's process has torch's threads. It
reads one message, its order. When standard input ends, it ends the ranks. It writes their outcome to the
descriptor that its only argument names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from acclimate.errors import AcclimateError
from acclimate.host.exit_codes import USER_ERROR
from acclimate.launch.plan.job import JobPlan, plan_ranks
from acclimate.launch.plan.outcome import Outcome
from acclimate.launch.remote.protocol import LONGEST_FROM_LAUNCHER
from acclimate.launch.supervise.supervisor import StopRequest, supervise
from acclimate.launch.wire import LineBuffer, decode, encode

REGROUPING = "the ranks were ended because the hosts of the job have changed."


@dataclass(frozen=True)
class Order:
    """The elastic agent's message: the job to run."""

    job: JobPlan
    node_rank: int
    variables: Mapping[str, str]
    """More variables for all ranks."""


FROM_AGENT = {"order": Order}
"""The field of the agent's only message, with its type."""
FROM_WORKER = {"outcome": Outcome}
"""The field of the worker's only message, with its type."""


def main() -> int:
    """Runs the ranks; returns 0 if it could report their outcome."""
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)
    order = _read_order()
    if order is None:
        return 1
    job = order.job
    try:
        ranks = [
            replace(plan, environment={**plan.environment, **order.variables})
            for plan in plan_ranks(job, order.node_rank, os.environ)
        ]
        outcome = supervise(
            ranks, grace_s=job.grace_s, quiet=job.quiet, tagged=True, stop=StopRequest(0, _reason_to_stop)
        )
    except AcclimateError as error:
        outcome = Outcome(USER_ERROR, None, str(error))
    with open(answers, "wb") as answer:
        answer.write(encode({"outcome": asdict(outcome)}))
    return 0


def _read_order() -> Order | None:
    """Returns the order; ``None`` if the agent has exited before."""
    lines = LineBuffer(LONGEST_FROM_LAUNCHER)
    while piece := os.read(0, 1 << 16):
        for line in lines.feed(piece):
            order: Order = decode(line, FROM_AGENT)["order"]
            return order
    return None


def _reason_to_stop() -> str | None:
    """Returns a reason once standard input has ended, as the hosts changed or the agent exited."""
    return None if os.read(0, 1 << 16) else REGROUPING


if __name__ == "__main__":
    sys.exit(main())
