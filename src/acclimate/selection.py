"""Selects the accelerator of this process, once: by explicit choice, else by detection.

An explicit choice (``set_accelerator``, ``DS_ACCELERATOR``, ``ACCLIMATE_ACCELERATOR``) raises an error if it
cannot be used. Detection tries the records by rank, collects why each cannot be used, and ends with the CPU.
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from acclimate.backends import BUILTIN, COMMON_WORDS, GENERIC_RANK, SPECIFIED
from acclimate.backends.plug_ins import find_plug_ins
from acclimate.backends.record import Backend
from acclimate.errors import (
    AcceleratorUnavailableError,
    AcclimateError,
    InvalidBackendError,
    InvalidEnvironmentError,
    SelectionInProgressError,
    UnknownAcceleratorError,
    excerpt,
)
from acclimate.imports import (
    AUTOLOAD_VARIABLE,
    ForkSafeLock,
    VendorCodeError,
    contained,
    failure_of,
    import_torch,
    import_vendor_module,
    output_to_stderr,
    package_for,
    unclaimed_failures,
)

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator

OTHER_DEVICE = "(other)"
"""The name of the generic record, unless torch knows a device that has no record of its own."""
_VARIABLES = ("DS_ACCELERATOR", "ACCLIMATE_ACCELERATOR")

_logger = logging.getLogger("acclimate")
_fallback_logger = logging.getLogger("acclimate.selection.fallback")  # which commands turn off
_lock = ForkSafeLock()
_active: Accelerator | None = None
_chosen_by = ""
_chooser: int | None = None
"""The thread that is selecting."""
_failures: dict[str, str] = {}
"""Why detection could not load an accelerator that its probe had found, by the record's target."""


@dataclass(frozen=True)
class Candidate:
    """The result of probing one record."""

    name: str
    """The record's name."""
    reason: str | None
    """Why it cannot be used here; ``None`` if it can."""
    auto_detect: bool = True
    """Whether detection may choose it."""


# -- the accelerator of this process ---------------------------------------------------------------


def get_accelerator() -> Accelerator:
    """Returns the accelerator of this process, which the first call selects.

    Raises:
        UnknownAcceleratorError: ``DS_ACCELERATOR`` or ``ACCLIMATE_ACCELERATOR`` names no accelerator.
        InvalidEnvironmentError: the two variables name different accelerators.
        AcceleratorUnavailableError: the named accelerator cannot be used here.
    """
    _choose_once()
    active = _active  # read once: another thread may leave use_accelerator() meanwhile
    return active if active is not None else _choose()


def set_accelerator(choice: Accelerator | str) -> None:
    """Sets the accelerator of this process, given as an object or by name.

    Replacing an accelerator that is in use logs a warning: existing objects, such as a model on its device,
    do not move.

    Raises:
        UnknownAcceleratorError: no accelerator has that name.
        AcceleratorUnavailableError: it cannot be used here.
        InvalidBackendError: the object is not an ``Accelerator``.
    """
    accelerator = _resolve(choice)
    global _active, _chosen_by
    with _lock:
        if _active is not None and _active.name != accelerator.name:
            _logger.warning(
                "The accelerator of this process changes from %s to %s.", _active.name, accelerator.name
            )
        _active, _chosen_by = accelerator, "set_accelerator"


@contextmanager
def use_accelerator(choice: Accelerator | str) -> Iterator[Accelerator]:
    """Makes ``get_accelerator()`` return ``choice`` in the ``with`` block, in all threads; for tests.

    Raises:
        UnknownAcceleratorError: no accelerator has that name.
        AcceleratorUnavailableError: it cannot be used here.
        InvalidBackendError: the object is not an ``Accelerator``.
    """
    accelerator = _resolve(choice)
    global _active, _chosen_by
    with _lock:
        before = _active, _chosen_by
        _active, _chosen_by = accelerator, "use_accelerator"
    try:
        yield accelerator
    finally:
        with _lock:
            _active, _chosen_by = before


def chosen_by() -> str:
    """Returns how the accelerator was selected: a variable with its value, a function, or "detection"."""
    return _chosen_by


def is_current_accelerator_supported() -> bool:
    """Whether this process's accelerator is one of the nine in DeepSpeed's specification."""
    return get_accelerator().name in SPECIFIED


# -- choosing ----------------------------------------------------------------------------------------


def _choose_once() -> bool:
    if _active is None:
        _choose()
    return True


# What torch.compiler.assume_constant_result sets, without importing torch: torch.compile calls this function
# while it traces, so that the first call of a process may be in compiled code. It could not trace the choice.
_choose_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _choose() -> Accelerator:
    global _active, _chosen_by, _chooser
    with _lock:
        if _active is not None:  # another thread was first
            return _active
        if _chooser is not None:
            raise SelectionInProgressError(
                "get_accelerator() was called while the accelerator is being chosen: a backend's module "
                "must not call it at import."
            )
        _chooser = threading.get_ident()
        try:
            request = requested()
            if request is not None:
                variable, name = request
                accelerator, how = load_by_name(name, variable), f"{variable}={name}"
            else:
                accelerator, how = _detect(), "detection"
        finally:
            _chooser = None
        _active, _chosen_by = accelerator, how
        _logger.info("The accelerator is %s (%s).", accelerator.name, how)
        return accelerator


def _start_over_in_child() -> None:
    """Lets a child select again if another thread of the parent was selecting."""
    global _chooser
    if _chooser != threading.get_ident():
        _chooser = None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_start_over_in_child)


def requested() -> tuple[str, str] | None:
    """Returns the variable that names an accelerator, and the name; ``None`` for detection.

    Raises:
        InvalidEnvironmentError: both variables are set and differ.
    """
    values = {variable: os.environ[variable] for variable in _VARIABLES if os.environ.get(variable)}
    if len(set(values.values())) > 1:
        stated = " and ".join(f'{variable} is "{excerpt(value)}"' for variable, value in values.items())
        raise InvalidEnvironmentError(f"{stated}. Unset one of them, or give both the same value.")
    return next(iter(values.items()), None)


def _resolve(choice: Accelerator | str) -> Accelerator:
    if isinstance(choice, str):
        return load_by_name(choice, "The accelerator")
    from acclimate.accelerator import Accelerator

    if not isinstance(choice, Accelerator):
        raise InvalidBackendError(
            "An accelerator must be an object of a subclass of acclimate.Accelerator or a name, "
            f"not {type(choice).__name__}."
        )
    return choice


def load_by_name(name: str, source: str) -> Accelerator:
    """Returns the accelerator with this name, whether or not detection would select it.

    ``source``, such as a variable, is where the message says that the name came from.

    Raises:
        UnknownAcceleratorError: no record has that name, and torch does not know it.
        AcceleratorUnavailableError: it cannot be used here.
        InvalidBackendError: the target of a plug-in's record is not an ``Accelerator``.
    """
    import_torch()
    records, broken = find_backends()
    named = [record for record in records if record.name == name]
    if not named:
        if name in broken:
            raise AcceleratorUnavailableError(f'{source} is "{name}", whose plug-in failed: {broken[name]}')
        named = [_device_without_record(name, source, records)]
    reasons = []
    for record in named:
        reason = probe(record)
        if reason is None:
            try:
                with contained():
                    return record.load()
            except VendorCodeError as error:
                if isinstance(error.__cause__, AcclimateError):  # a message for users
                    raise error.__cause__ from None
                reason = f"The {name} accelerator was found, but cannot be loaded: {error}."
        reasons.append(reason)
    raise AcceleratorUnavailableError(_unavailable(name, source, reasons, named))


def _device_without_record(name: str, source: str, records: list[Backend]) -> Backend:
    """Returns the generic record for a device with torch's name ``name``.

    Not every package that adds a device is one that torch imports by itself: one that carries the device's
    name is imported here.

    Raises:
        UnknownAcceleratorError: torch does not know the device, and no package is named like it.
        AcceleratorUnavailableError: such a package is installed, but did not add the device to torch.
    """
    generic = _generic(records)
    if generic.name == name != OTHER_DEVICE:
        return generic
    package = package_for(name)
    if package is None:
        raise UnknownAcceleratorError(_unknown(name, source, records))
    with suppress(VendorCodeError):  # whose reason the message has
        import_vendor_module(package)
    generic = _generic(records)
    if generic.name != name:
        raise AcceleratorUnavailableError(_absent_device(name, source, package))
    return generic


def _absent_device(name: str, source: str, package: str) -> str:
    """The message for a device without a record, whose installed package did not add it to torch."""
    failure = failure_of(package)
    why = (
        f"fails to import: {failure}"
        if failure is not None
        else "adds no such device to torch when it is imported: it finds none on this machine, or a function "
        "of it must be called first, as the probe of a record can do"
    )
    undo = f"unset {source}" if source in _VARIABLES else "call get_accelerator() without choosing"
    return (
        f'{source} is "{name}". Its package, {package}, is installed, but {why}.\n'
        f"Install the drivers that {package} needs, or {undo} to detect what is here."
    )


def _unknown(name: str, source: str, records: list[Backend]) -> str:
    known = list(dict.fromkeys([*SPECIFIED, *(record.name for record in records)]))
    shown = excerpt(name)
    word = shown.strip().lower().partition(":")[0]  # without the index of a device
    close = [COMMON_WORDS[word]] if word in COMMON_WORDS else difflib.get_close_matches(word, known, n=1)
    hint = f'; did you mean "{close[0]}"?' if close else "."
    return f'{source} must be one of {known}. Value "{shown}" is not supported{hint}'


def _unavailable(name: str, source: str, reasons: list[str], records: list[Backend]) -> str:
    remedies = list(dict.fromkeys(record.remedy for record in records if record.remedy))
    first, *others = remedies or [f"Repair the {name} accelerator"]
    advice = ", or ".join([first, *(other[0].lower() + other[1:] for other in others)])
    undo = f"unset {source}" if source in _VARIABLES else "call get_accelerator() without choosing"
    return f"{' '.join(dict.fromkeys(reasons))}\n{advice}, or {undo} to detect what is here."


def _detect() -> Accelerator:
    import_torch()
    records, _ = find_backends()
    for record in _in_order(records):
        if not record.auto_detect:
            continue
        reason = probe(record) or _preferred_over(record, records)
        if reason is None:
            try:
                with contained():
                    accelerator = record.load()
            except VendorCodeError as error:  # tries the next record
                reason = _failures[record.target] = f"it was found, but cannot be loaded: {error}"
                _logger.warning("The %s accelerator is not used: %s", record.name, reason)
                continue
            if record.is_fallback:
                is_first_rank = (os.environ.get("LOCAL_RANK") or "0") == "0"  # only one rank of a host warns
                _fallback_logger.log(
                    logging.WARNING if is_first_rank else logging.INFO,
                    "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to "
                    "detect it; `acclimate info` says why.",
                )
            return accelerator
        _logger.debug("%s is not used: %s", record.name, reason)
    raise AcceleratorUnavailableError("No accelerator can be used here, not even the CPU.")


def _preferred_over(record: Backend, records: list[Backend]) -> str | None:
    """Returns why detection skips a usable accelerator: another one that it yields to is usable, too."""
    for other in records:
        if other.name in record.yields_to and probe(other) is None:
            return (
                f"{other.name} can be used, too, and is preferred. "
                f"DS_ACCELERATOR={record.name} selects this one."
            )
    return None


def probe(record: Backend) -> str | None:
    """Returns why a record's accelerator cannot be used here, or ``None`` if it can; never raises."""
    try:
        with contained(), output_to_stderr():
            return record.probe()
    except VendorCodeError as error:
        refused = error.__cause__ if isinstance(error.__cause__, InvalidBackendError) else None
        return f"its probe failed: {error if refused is None else refused.__cause__ or refused}"


def detect_all() -> list[Candidate]:
    """Probes all records, in the order of detection; a selection ends at the first usable one."""
    import_torch()
    records, broken = find_backends()
    found = [
        Candidate(
            record.name,
            probe(record) or _failures.get(record.target) or _preferred_over(record, records),
            record.auto_detect,
        )
        for record in _in_order(records)
    ]
    found += [Candidate(name, f"its plug-in failed: {why}") for name, why in broken.items()]
    # After the probes, which claim their own packages.
    return found + [
        Candidate(
            package,
            f"{package}, which torch loads at import, fails to import: {why}. Import acclimate before torch, "
            f"or set {AUTOLOAD_VARIABLE}=0.",
        )
        for package, why in unclaimed_failures().items()
    ]


# -- records -----------------------------------------------------------------------------------------


def find_backends() -> tuple[list[Backend], dict[str, str]]:
    """Returns all records by rank, and why plug-ins failed to load, by entry-point name."""
    plug_ins, broken = find_plug_ins()
    return sorted([*BUILTIN, *plug_ins], key=lambda record: record.rank), broken


def _in_order(records: list[Backend]) -> Iterator[Backend]:
    """Yields the records by rank, and the generic one in its turn.

    Once torch is asked for its accelerator, it knows none that a package adds later: the packages of the
    records before are imported first.
    """
    ordered = sorted(records, key=lambda record: record.rank)
    yield from (record for record in ordered if record.rank <= GENERIC_RANK)
    yield _generic(records)
    yield from (record for record in ordered if record.rank > GENERIC_RANK)


def _generic(records: Iterable[Backend]) -> Backend:
    """Returns the record of the device that torch knows but no other record names."""
    from acclimate.backends.generic import unnamed_device

    try:
        with contained():
            device_type = unnamed_device({record.torch_type for record in records})
    except VendorCodeError:
        device_type = None

    def probe_torch() -> str | None:
        import torch

        if device_type is None:
            return "torch knows no device in this process besides those listed here."
        count = torch.accelerator.device_count()
        return None if count > 0 else f"torch knows {device_type}, but finds no device."

    return Backend(
        name=device_type or OTHER_DEVICE,
        target="acclimate.backends.generic:GenericAccelerator",
        probe=probe_torch,
        rank=GENERIC_RANK,
    )
