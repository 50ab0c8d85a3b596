"""Runs one check, and most checks twice: the second time in a new thread, on the last device."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Literal

from acclimate.errors import UnsupportedError
from acclimate.imports import describe
from acclimate_conformance.checks import ambient
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    device_names,
    exactly,
    in_thread,
    is_host,
    refused,
    require,
)
from acclimate_conformance.checks.calls import Calls, place_of, where_to_mend
from acclimate_conformance.checks.check import Check
from acclimate_conformance.checks.claims import false_claim, lacking
from acclimate_conformance.checks.innermost import FirstDifference
from acclimate_conformance.checks.target import Subject, still_computes
from acclimate_conformance.result import Result


def examine(check: Check, subject: Subject) -> Result:
    """Runs one check in this process.

    Any exception from a vendor's code is a failure with that reason, even ``SystemExit`` and errors of torch
    that are no ``Exception``, such as that of ``torch.distributed.checkpoint``. Only Ctrl-C ends the run.
    """
    start, processed = time.perf_counter(), time.process_time()
    outcome: Literal["passed", "failed", "not offered"]
    reason, detail, place, where = "", "", "", ""
    at_fault: tuple[str, ...] = ()
    cause = ""
    calls = Calls()
    try:
        with _earlier_objects_spared(), subject.restored(), calls.recorded(subject.accelerator):
            _require_offered(check.category, subject)
            with ambient.restored(subject.accelerator, calls.ended_with):
                reason = check.function(subject) or ""
            require(not calls.disturbance, "")
            if not check.once:
                where = f"in a new thread, on {device_names(subject.accelerator)[-1]}: "
                _observe_elsewhere(check, subject, calls)
                require(not calls.disturbance, "")
        outcome = "passed"
    except NotOfferedError as absent:
        outcome, reason = "not offered", str(absent)
    except BrokenPromiseError as broken:
        outcome, reason, place, cause = "failed", str(broken), place_of(broken), broken.cause
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a vendor's code may raise anything
        outcome, reason, detail = "failed", describe(error, whole=True), traceback.format_exc()
        place, cause = place_of(error), reason
        at_fault = calls.raising(error)
        if isinstance(error, Exception):
            claim, claimed_by = false_claim(subject.accelerator, error)
            reason, at_fault = claim or reason, claimed_by or at_fault
            absent_dtype = "" if claim else lacking(subject.accelerator, error)
            if absent_dtype:
                outcome, reason, detail, place, cause = "not offered", absent_dtype, "", "", ""
    failed = outcome == "failed"
    changes: dict[str, float] = {}
    if failed:
        # An unexpected change of state explains later observations.
        reason = "; then ".join(filter(None, (calls.disturbance, reason)))
        is_quick = time.process_time() - processed < check.timeout_s / _SLOWER
        looks = check.of and is_quick and not calls.disturbance and still_computes(subject.accelerator)
        operator = _operator_at_fault(check, subject, is_elsewhere=bool(where)) if looks else None
        at_fault = at_fault or tuple(filter(None, (calls.disturber,)))
        changes = where_to_mend(subject.accelerator, check, calls, reason, at_fault, operator)
    return Result(
        check=check.id,
        category=check.category,
        promise=check.promise,
        outcome=outcome,
        reason=where * failed + reason,
        rules=check.rules,
        seconds=time.perf_counter() - start,
        detail=detail,
        calls=calls.told(check.observes) if failed else (),
        place=place,
        changes=tuple(sorted(changes, key=lambda change: -changes[change])),
        weights=tuple(sorted(changes.values(), reverse=True)),
        cleared=calls.cleared(failed),
        cause=cause,
    )


@contextmanager
def _earlier_objects_spared() -> Iterator[None]:
    """A block in which garbage is only looked for among new objects.

    Checks collect garbage up to 30 times, and compilers leave a million objects to look at.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_SLOWER = 12
"""How much longer a check may take if each operator is repeated on the host."""


def _operator_at_fault(check: Check, subject: Subject, *, is_elsewhere: bool) -> str | None:
    """The first operator that differs from the host's when a check runs again.

    Returns:
        Its name; nothing if each is the host's, ``None`` if none could be looked at.
    """
    if is_host(subject.accelerator):
        return None
    mode = FirstDifference(subject.accelerator.device_type)
    with suppress(Exception):  # the check fails again
        if is_elsewhere:
            _observe_elsewhere(check, subject, Calls(), mode)
        else:
            with subject.restored(), ambient.restored(subject.accelerator, lambda _: None), mode:
                check.function(subject)
    return mode.name or ("" if mode.compared and mode.is_complete else None)


def _observe_elsewhere(
    check: Check, subject: Subject, calls: Calls, mode: AbstractContextManager[object] | None = None
) -> None:
    """Runs a check again in a new thread with the last device current.

    This finds faults that a first use, the main thread or device 0 hides.
    """

    def observe() -> None:
        if len(device_names(subject.accelerator)) > 1:
            subject.accelerator.set_device(len(device_names(subject.accelerator)) - 1)
        with (
            suppress(NotOfferedError),
            subject.restored(),
            ambient.restored(subject.accelerator, calls.ended_with),
            mode or nullcontext(),
        ):
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
