"""Checks of communication: collectives of the accelerator's own backend between two processes.

All topics are looked at by one pair of processes, as each takes seconds to start.
"""

from __future__ import annotations

from torch import distributed

from acclimate.conformance.checks.assertions import NotOfferedError, exactly, require
from acclimate.conformance.checks.check import check
from acclimate.conformance.checks.communication.ranks import require_topic
from acclimate.conformance.checks.target import Subject

_TIMEOUT_S = 330


@check("communication_backend_name", "communication_backend")
def backend_name(subject: Subject) -> None:
    """The communication backend is a name that torch.distributed knows."""
    accelerator = subject.accelerator
    name = exactly(accelerator.communication_backend_name(), str, "communication_backend_name()")
    declared = accelerator.communication_backend
    require(name == declared, f"communication_backend_name() is {name!r}, communication_backend {declared!r}")
    if not distributed.is_available():
        raise NotOfferedError("this torch is built without torch.distributed")
    require(distributed.is_backend_available(name), f'torch.distributed has no backend "{name}" here')


@check("communication_backend_name", "set_device", "supports_collectives", timeout_s=_TIMEOUT_S)
def collectives(subject: Subject) -> str | None:
    """Two processes reduce, broadcast and gather tensors of every dtype on their devices."""
    return require_topic(subject, "every_dtype")


@check("communication_backend_name", timeout_s=_TIMEOUT_S)
def exact_numbers(subject: Subject) -> str | None:
    """Collectives keep every digit of large integers and of floating-point numbers."""
    return require_topic(subject, "exact_numbers")


@check("communication_backend_name", timeout_s=_TIMEOUT_S)
def reductions(subject: Subject) -> str | None:
    """all_reduce adds, multiplies, and finds the smallest and largest as it is told; AVG may be lacking."""
    return require_topic(subject, "reductions")


@check("communication_backend_name", timeout_s=_TIMEOUT_S)
def tensors_of_any_shape(subject: Subject) -> str | None:
    """Collectives are right for megabytes, parts, batches and numbers; transposed ones may be refused."""
    return require_topic(subject, "any_shape")


@check("communication_backend_name", timeout_s=_TIMEOUT_S)
def roots(subject: Subject) -> str | None:
    """Every rank can be the root of a broadcast, and of a reduce, gather or scatter where there is one."""
    return require_topic(subject, "roots")


@check("communication_backend_name", timeout_s=_TIMEOUT_S)
def groups(subject: Subject) -> str | None:
    """Groups of some ranks, and several groups of all, do not mix with each other."""
    return require_topic(subject, "groups")


@check("communication_backend_name", timeout_s=_TIMEOUT_S)
def barrier(subject: Subject) -> str | None:
    """No process leaves a barrier before every process has reached it."""
    return require_topic(subject, "barrier")


@check("communication_backend_name", timeout_s=_TIMEOUT_S)
def asynchronous_collectives(subject: Subject) -> str | None:
    """Several collectives may be under way at once; each is done when its wait returns, in any order."""
    return require_topic(subject, "asynchronous")


@check("communication_backend_name", timeout_s=_TIMEOUT_S)
def point_to_point(subject: Subject) -> str | None:
    """Messages between two ranks arrive in order and whole, both ways, where the backend has them."""
    return require_topic(subject, "point_to_point")


@check("communication_backend_name", timeout_s=_TIMEOUT_S)
def other_collectives(subject: Subject) -> str | None:
    """Gathering into one tensor, reduce_scatter and all_to_all are right where the backend has them."""
    return require_topic(subject, "optional")


@check("communication_backend_name", timeout_s=_TIMEOUT_S)
def objects(subject: Subject) -> str | None:
    """Python objects are broadcast and gathered whole."""
    return require_topic(subject, "objects")
