"""Checks of operators on the inputs of torch's own tests."""

from __future__ import annotations

from acclimate_conformance.checks.check import Check
from acclimate_conformance.checks.dtypes.sampled.child import TOPICS, Topic, require_sampled

_TIMEOUT_S = 1200


def _check_of(topic: Topic, promise: str) -> Check:
    name = topic.__name__
    return Check(
        category="dtypes",
        name=name,
        promise=promise,
        observes=("supported_dtypes",),
        function=lambda subject: require_sampled(subject, name),
        timeout_s=_TIMEOUT_S,
        once=True,
        of="operators",
    )


sampled_checks = tuple(_check_of(topic, promise) for topic, promise in TOPICS.items())
