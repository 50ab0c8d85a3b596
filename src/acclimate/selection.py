"""Which accelerator this process uses: by explicit choice, else by detection; chosen once.

An explicit choice (``set_accelerator``, ``DS_ACCELERATOR``, ``ACCLIMATE_ACCELERATOR``) fails loudly where it
cannot be used. Detection tries every record by rank, keeps the reason of each that cannot be used, and ends
at the CPU.
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from acclimate.backends import BUILTIN, GENERIC_RANK, SPECIFIED
from acclimate.backends.plug_ins import find_plug_ins
from acclimate.backends.record import Backend
from acclimate.errors import (
    AcceleratorUnavailableError,
    AcclimateError,
    ConflictingChoiceError,
    InvalidBackendError,
    SelectionInProgressError,
    UnknownAcceleratorError,
)
from acclimate.imports import (
    ForkSafeLock,
    VendorCodeError,
    contained,
    failure_of,
    import_torch,
    output_to_stderr,
    package_for,
    unclaimed_failures,
)

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator

OTHER_DEVICE = "(other)"
"""What stands for a device that torch knows and no record names, where there is none."""
_VARIABLES = ("DS_ACCELERATOR", "ACCLIMATE_ACCELERATOR")

_logger = logging.getLogger("acclimate")
_lock = ForkSafeLock()
_active: Accelerator | None = None
_chosen_by = ""
_chooser: int | None = None
"""The thread that is choosing."""
_failures: dict[str, str] = {}
"""By a record's target, why detection could not load an accelerator that its probe had found."""


@dataclass(frozen=True)
class Candidate:
    """What was found out about one way to an accelerator."""

    name: str
    """Of the record."""
    reason: str | None
    """Why it cannot be used here; ``None`` when it can."""
    auto_detect: bool = True
    """Whether detection may choose it."""


# -- the accelerator of this process ---------------------------------------------------------------


def get_accelerator() -> Accelerator:
    """The accelerator of this process, chosen at the first call and the same ever after.

    Raises:
        UnknownAcceleratorError: ``DS_ACCELERATOR`` or ``ACCLIMATE_ACCELERATOR`` names none.
        ConflictingChoiceError: they name different ones.
        AcceleratorUnavailableError: the one they name cannot be used here.
    """
    active = _active  # read once: another thread may leave use_accelerator() meanwhile
    return active if active is not None else _choose()


def set_accelerator(choice: Accelerator | str) -> None:
    """Chooses the accelerator of this process: an object, or the name of a record.

    Choosing another than the one in use is possible, and logged: what holds on to the old one, such as a
    model on its device, does not move.

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
    """Within the block, ``get_accelerator()`` gives ``choice``, in all threads; for tests.

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
    """How the accelerator in use was chosen: a variable with its value, a function, or "detection"."""
    return _chosen_by


def is_current_accelerator_supported() -> bool:
    """Whether the accelerator in use is one of the specification's nine."""
    return get_accelerator().name in SPECIFIED


# -- choosing ----------------------------------------------------------------------------------------


def _choose() -> Accelerator:
    global _active, _chosen_by, _chooser
    with _lock:
        if _active is not None:  # another thread was first
            return _active
        if _chooser is not None:
            raise SelectionInProgressError(
                "get_accelerator() was called while the accelerator is being chosen: a backend's module "
                "must not ask for it when imported."
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
    """In a child forked while another thread was choosing, which does not exist here."""
    global _chooser
    if _chooser != threading.get_ident():
        _chooser = None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_start_over_in_child)


def requested() -> tuple[str, str] | None:
    """The variable that names an accelerator, and the name; ``None`` where detection decides.

    Raises:
        ConflictingChoiceError: both variables are set and differ.
    """
    values = {variable: os.environ[variable] for variable in _VARIABLES if os.environ.get(variable)}
    if len(set(values.values())) > 1:
        stated = " and ".join(f'{variable} is "{value}"' for variable, value in values.items())
        raise ConflictingChoiceError(f"{stated}. Unset one of them, or give both the same value.")
    return next(iter(values.items()), None)


def _resolve(choice: Accelerator | str) -> Accelerator:
    if isinstance(choice, str):
        return load_by_name(choice, "The accelerator")
    from acclimate.accelerator import Accelerator

    if not isinstance(choice, Accelerator):
        raise InvalidBackendError(
            "An accelerator has to be a subclass of acclimate.Accelerator or a name, "
            f"not {type(choice).__name__}."
        )
    return choice


def load_by_name(name: str, source: str) -> Accelerator:
    """The accelerator called ``name``, whether or not detection would choose it.

    Args:
        name: of a record, or torch's name for a device that no record has.
        source: what asked for it, for the message: a variable's name.

    Raises:
        UnknownAcceleratorError: no record has that name, and torch does not know it.
        AcceleratorUnavailableError: it cannot be used here.
        InvalidBackendError: a plug-in's record points to something that is no ``Accelerator``.
    """
    import_torch()
    records, broken = find_backends()
    named = [record for record in records if record.name == name]
    if not named:
        if name in broken:
            raise AcceleratorUnavailableError(f'{source} is "{name}", whose plug-in failed: {broken[name]}')
        generic = _generic(records)
        if generic.name != name or name == OTHER_DEVICE:
            package = package_for(name)
            if package is not None:
                raise AcceleratorUnavailableError(_absent_device(name, source, package))
            raise UnknownAcceleratorError(_unknown(name, source, records))
        named = [generic]
    reasons = []
    for record in named:
        reason = probe(record)
        if reason is None:
            try:
                with contained():
                    return record.load()
            except VendorCodeError as error:
                if isinstance(error.__cause__, AcclimateError):  # says by itself what is wrong
                    raise error.__cause__ from None
                reason = f"The {name} accelerator was found, but cannot be loaded: {error}."
        reasons.append(reason)
    raise AcceleratorUnavailableError(_unavailable(name, source, reasons, named))


def _absent_device(name: str, source: str, package: str) -> str:
    """For a device without a record, whose package is installed: it would be torch's if it worked."""
    failure = failure_of(package)
    why = (
        f"fails to import: {failure}"
        if failure is not None
        else "brings no such device to torch in this process: torch finds none on this machine"
    )
    undo = f"unset {source}" if source in _VARIABLES else "call get_accelerator() without choosing"
    return (
        f'{source} is "{name}". The package for it, {package}, is installed, and {why}.\n'
        f"Install what {package} needs to find its devices, or {undo} to detect what is here."
    )


def _unknown(name: str, source: str, records: list[Backend]) -> str:
    known = list(dict.fromkeys([*SPECIFIED, *(record.name for record in records)]))
    close = difflib.get_close_matches(name.strip().lower(), known, n=1)
    hint = f'; did you mean "{close[0]}"?' if close else "."
    return f'{source} must be one of {known}. Value "{name}" is not supported{hint}'


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
            except VendorCodeError as error:  # the next serves
                reason = _failures[record.target] = f"it was found, but cannot be loaded: {error}"
                _logger.warning("The %s accelerator is not used: %s", record.name, reason)
                continue
            if record.is_fallback:
                is_first_rank = os.environ.get("LOCAL_RANK", "0") == "0"  # which says it for all of its host
                _logger.log(
                    logging.WARNING if is_first_rank else logging.INFO,
                    "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to "
                    "detect it; `acclimate info` says why.",
                )
            return accelerator
        _logger.debug("%s is not used: %s", record.name, reason)
    raise AcceleratorUnavailableError("No accelerator can be used here, not even the CPU.")


def _preferred_over(record: Backend, records: list[Backend]) -> str | None:
    """Why detection passes over a usable accelerator: another it yields to can be used too."""
    for other in records:
        if other.name in record.yields_to and probe(other) is None:
            return (
                f"{other.name} can be used too, and is preferred. DS_ACCELERATOR={record.name} chooses this."
            )
    return None


def probe(record: Backend) -> str | None:
    """Why a record's accelerator cannot be used here, or ``None`` when it can; never raises."""
    try:
        with contained(), output_to_stderr():
            return record.probe()
    except VendorCodeError as error:
        refused = error.__cause__ if isinstance(error.__cause__, InvalidBackendError) else None
        return f"looking for it failed: {error if refused is None else refused.__cause__ or refused}"


def detect_all() -> list[Candidate]:
    """Every way to an accelerator in the order of detection, with the reason of each that cannot be used.

    Unlike a selection, which ends at the first that can be used, it looks at all of them.
    """
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
    # After the probes, each of which has claimed its own package.
    return found + [
        Candidate(package, f"{package}, which torch loads by itself, fails to import: {why}")
        for package, why in unclaimed_failures().items()
    ]


# -- records -----------------------------------------------------------------------------------------


def find_backends() -> tuple[list[Backend], dict[str, str]]:
    """All records by rank, and for each plug-in that failed to load, by entry-point name, why."""
    plug_ins, broken = find_plug_ins()
    return sorted([*BUILTIN, *plug_ins], key=lambda record: record.rank), broken


def _in_order(records: list[Backend]) -> list[Backend]:
    return sorted([*records, _generic(records)], key=lambda record: record.rank)


def _generic(records: Iterable[Backend]) -> Backend:
    """The record of the device that torch knows in this process and no other record names."""
    from acclimate.backends.generic import unnamed_device

    try:
        with contained():
            device_type = unnamed_device({record.torch_type for record in records})
    except VendorCodeError:
        device_type = None

    def probe_torch() -> str | None:
        import torch

        if device_type is None:
            return "torch knows no device in this process that is not listed here."
        count = torch.accelerator.device_count()
        return None if count > 0 else f"torch knows {device_type}, but finds no device."

    return Backend(
        name=device_type or OTHER_DEVICE,
        target="acclimate.backends.generic:GenericAccelerator",
        probe=probe_torch,
        rank=GENERIC_RANK,
    )
