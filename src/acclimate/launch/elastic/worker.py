"""``python -m acclimate.launch.elastic.worker``: this host's ranks between two rendezvous of an elastic job.

It is a separate process because a supervisor forks, and the elastic agent's process has torch's threads. It
reads a line of JSON: ``job``, ``node_rank``, and ``variables`` (additional ones for all ranks). When standard
input ends, it ends the ranks. It writes their outcome as JSON to the descriptor that its only argument names.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace

from acclimate.errors import AcclimateError
from acclimate.launch.plan.job import JobPlan, plan_ranks
from acclimate.launch.plan.outcome import Outcome
from acclimate.launch.supervise.supervisor import StopRequest, supervise

REGROUPING = "the ranks were ended because the hosts of the job have changed."


def main() -> int:
    """Runs the ranks; returns 0 if it could report their outcome."""
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            return 1
        line += piece
    values = json.loads(line)
    job = JobPlan.from_json(values["job"])
    try:
        ranks = [
            replace(plan, environment={**plan.environment, **values["variables"]})
            for plan in plan_ranks(job, values["node_rank"], os.environ)
        ]
        outcome = supervise(
            ranks, grace_s=job.grace_s, quiet=job.quiet, tagged=True, stop=StopRequest(0, _reason_to_stop)
        )
    except AcclimateError as error:
        outcome = Outcome(2, None, str(error))
    with open(answers, "wb") as answer:
        answer.write(json.dumps(asdict(outcome)).encode())
    return 0


def _reason_to_stop() -> str | None:
    """Returns a reason once standard input has ended, as the hosts changed or the agent exited."""
    return None if os.read(0, 1 << 16) else REGROUPING


if __name__ == "__main__":
    sys.exit(main())
