"""The definition of a check, and the code that runs one."""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from acclimate.accelerator import CATEGORIES
from acclimate.conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    device_names,
    exactly,
    in_thread,
    refused,
    require,
)
from acclimate.conformance.checks.calls import Calls, place_of, where_to_mend
from acclimate.conformance.checks.claims import false_claim
from acclimate.conformance.checks.target import Subject
from acclimate.conformance.result import Result
from acclimate.errors import UnsupportedError
from acclimate.imports import describe

Observation = Callable[[Subject], "str | None"]
"""Observes an accelerator; returns a note for the reader, or raises :class:`BrokenPromiseError` or
:class:`NotOfferedError`."""

_HOME = f"{__package__}."


@dataclass(frozen=True)
class Check:
    """One promise of the interface, and the function that checks it."""

    category: str
    """The package or module of this folder that it is in."""
    name: str
    promise: str
    """The promise, as a sentence."""
    observes: tuple[str, ...]
    """The names of the interface that make the promise."""
    function: Observation
    timeout_s: int
    """How long it may take, in seconds."""
    once: bool = False
    """Whether it runs in the main thread only, and does not run :func:`elsewhere` too."""

    @property
    def id(self) -> str:
        """``category/name``."""
        return f"{self.category}/{self.name}"

    @property
    def rules(self) -> tuple[str, ...]:
        """What the interface's documentation says about each observed name."""
        return tuple(_rule(name) for name in self.observes)


def check(
    *observes: str, timeout_s: int = 60, once: bool = False
) -> Callable[[Callable[..., str | None]], Check]:
    """Makes a check from a function whose docstring is the promise.

    The function takes the accelerator. If its parameter is called ``subject``, it takes the whole
    :class:`Subject`, with which it can start processes that load the same accelerator.

    Args:
        observes: the names of the interface that make the promise.
        timeout_s: how long it may take, in seconds.
        once: whether not to run it a second time, in a new thread on the last device: because it takes too
            long, or because it runs in other processes, where the result would be the same.
    """

    def make(function: Callable[..., str | None]) -> Check:
        takes_subject = "subject" in inspect.signature(function).parameters
        return Check(
            category=function.__module__.removeprefix(_HOME).partition(".")[0],
            name=function.__name__,
            promise=" ".join(inspect.cleandoc(function.__doc__ or "").split()),
            observes=observes,
            function=function if takes_subject else lambda subject: function(subject.accelerator),
            timeout_s=timeout_s,
            once=once,
        )

    return make


def examine(check: Check, subject: Subject) -> Result:
    """Runs one check in this process.

    Any exception from a vendor's code is a failure with that reason, even ``SystemExit``.
    """
    start = time.perf_counter()
    outcome: Literal["passed", "failed", "not offered"]
    reason, detail, place, where = "", "", "", ""
    claimed_by: tuple[str, ...] = ()
    calls = Calls()
    try:
        with subject.restored(), calls.recorded(subject.accelerator):
            _require_offered(check.category, subject)
            reason = check.function(subject) or ""
            require(not calls.disturbance, "")
            if not check.once:
                where = f"in a new thread, on {device_names(subject.accelerator)[-1]}: "
                _observe_elsewhere(check, subject)
                require(not calls.disturbance, "")
        outcome = "passed"
    except NotOfferedError as absent:
        outcome, reason = "not offered", str(absent)
    except BrokenPromiseError as broken:
        outcome, reason, place = "failed", str(broken), place_of(broken)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a vendor's code may raise anything
        outcome, reason, detail = "failed", describe(error, whole=True), traceback.format_exc()
        place = place_of(error)
        if isinstance(error, Exception):
            claim, claimed_by = false_claim(subject.accelerator, error)
            reason = claim or reason
    failed = outcome == "failed"
    if failed:
        # An unexpected change of state explains later observations.
        reason = where + "; then ".join(filter(None, (calls.disturbance, reason)))
    return Result(
        check=check.id,
        category=check.category,
        promise=check.promise,
        outcome=outcome,
        reason=reason,
        rules=check.rules,
        seconds=time.perf_counter() - start,
        detail=detail,
        calls=calls.told(check.observes) if failed else (),
        place=place,
        changes=where_to_mend(subject.accelerator, claimed_by or check.observes, calls) if failed else (),
    )


def _observe_elsewhere(check: Check, subject: Subject) -> None:
    """Runs a check again in a new thread with the last device current.

    This finds faults that a first use, the main thread or device 0 hides.
    """

    def observe() -> None:
        if len(device_names(subject.accelerator)) > 1:
            subject.accelerator.set_device(len(device_names(subject.accelerator)) - 1)
        with suppress(NotOfferedError), subject.restored():
            check.function(subject)

    in_thread(observe)


_OFFERS = {
    "graphs": ("supports_graphs", "it says that it has no graphs"),
    "communication": ("supports_collectives", "it says that it has no collectives"),
}
"""For each category, the flag that is false if an accelerator lacks the whole category."""


def _require_offered(category: str, subject: Subject) -> None:
    flag, meaning = _OFFERS.get(category, ("", ""))
    if not flag or exactly(getattr(subject.accelerator, flag), bool, flag):
        return
    if flag == "supports_graphs":
        with refused("create_graph() of an accelerator that says it has no graphs", UnsupportedError):
            subject.accelerator.create_graph()
    raise NotOfferedError(meaning)


def _rule(name: str) -> str:
    for category in CATEGORIES:
        if name in vars(category):
            member = vars(category)[name]
            explained = callable(member) or isinstance(member, property)
            documentation = inspect.getdoc(member) if explained else None
            first = (documentation or "").split("\n\n")[0].replace("\n", " ")
            return f"{name}: {first}" if first else name
    raise ValueError(f"The interface has no {name}.")
