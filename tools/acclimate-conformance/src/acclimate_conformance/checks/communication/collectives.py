"""Checks of communication: collectives of the accelerator's own backend between processes.

The same three processes check all topics, since a process takes seconds to start; two if there are two
devices that three cannot share. With three, a group can leave one out.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import distributed

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import NotOfferedError, exactly, require
from acclimate_conformance.checks.check import Check, check
from acclimate_conformance.checks.communication.observer import Observer
from acclimate_conformance.checks.communication.ranks import require_topic
from acclimate_conformance.checks.communication.topics import TOPICS

_TIMEOUT_S = 510


@check(
    "communication_backend_name", "communication_backend",
    promise="The communication backend is a name that torch.distributed knows.",
)  # fmt: skip
def backend_name(accelerator: Accelerator) -> None:
    name = exactly(accelerator.communication_backend_name(), str, "communication_backend_name()")
    declared = accelerator.communication_backend
    require(name == declared, f"communication_backend_name() is {name!r}, communication_backend {declared!r}")
    if not distributed.is_available():
        raise NotOfferedError("this torch is built without torch.distributed")
    require(distributed.is_backend_available(name), f'torch.distributed has no backend "{name}" here')


def _check_of(topic: Callable[[Observer], None], promise: str) -> Check:
    name = topic.__name__
    return Check(
        category="communication",
        name=name,
        promise=promise,
        observes=("communication_backend", "supports_collectives"),
        function=lambda subject: require_topic(subject, name),
        timeout_s=_TIMEOUT_S,
        once=True,
    )


topic_checks = tuple(_check_of(topic, promise) for topic, promise in TOPICS.items())
