"""The ranks' accelerator: its record, the number of ranks per host, and the devices that ranks see."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping

from acclimate.backends import Backend
from acclimate.backends.device_counts import first_set, visible_entries
from acclimate.errors import (
    AcceleratorUnavailableError,
    InvalidBackendError,
    LaunchOptionError,
    UnknownAcceleratorError,
    excerpt,
)
from acclimate.selection import find_backends, requested

_logger = logging.getLogger("acclimate")


def find_accelerator() -> Backend | None:
    """Returns the accelerator that ranks here will probably use, without importing torch.

    This is the one that ``DS_ACCELERATOR`` or ``ACCLIMATE_ACCELERATOR`` names, else the first in the order of
    detection whose software is installed and whose devices are present. ``None`` means that the variable
    names a device that only torch knows.

    Raises:
        InvalidEnvironmentError: the two variables differ.
    """
    records, _ = find_backends()
    request = requested()
    if request is not None:
        named = [record for record in records if record.name == request[1]]
        # If several records are of the same accelerator, the one whose software is installed here.
        alone = len(named) == 1
        return next((record for record in named if alone or record.is_installed()), next(iter(named), None))
    usable = [record for record in records if record.auto_detect and _is_usable(record)]
    names = {record.name for record in usable}
    return next(record for record in usable if names.isdisjoint(record.yields_to))


def _is_usable(record: Backend) -> bool:
    """Whether ranks can use an accelerator here; false if its plug-in fails."""
    if record.is_fallback:
        return True
    try:
        record.visible_devices_variable()
        return record.is_installed() and record.device_count() > 0
    except InvalidBackendError as error:
        _logger.warning("The %s accelerator is not used: %s", record.name, error)
        return False


def count_local_ranks(accelerator: Backend | None) -> int:
    """Returns the default number of ranks of a host: one for each device.

    On CPU a device is a memory node with cores that this process may use.

    Raises:
        UnknownAcceleratorError: no accelerator of that name is known before torch is imported.
        AcceleratorUnavailableError: it was chosen by name, but there is no such device.
    """
    request = requested()
    if accelerator is None:
        variable, name = request or ("DS_ACCELERATOR", "")
        broken = find_backends()[1]
        if name in broken:
            raise AcceleratorUnavailableError(f'{variable} is "{name}", whose plug-in failed: {broken[name]}')
        raise UnknownAcceleratorError(_unknown(variable, name))
    count = accelerator.device_count()
    if count > 0:
        return count
    variable = request[0] if request is not None else "DS_ACCELERATOR"
    raise AcceleratorUnavailableError(
        f'{variable} is "{accelerator.name}", but this host has no such device that this process may use. '
        f"Unset {variable} to detect what is here, or say how many ranks to start with --num_accelerators."
    )


def _unknown(variable: str, name: str) -> str:
    known = list(dict.fromkeys(record.name for record in find_backends()[0]))
    close = difflib.get_close_matches(excerpt(name).lower(), known, n=1)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    return (
        f'{variable} is "{excerpt(name)}", which is none of {known}.{hint} Devices that only torch knows '
        "cannot be counted without torch: say how many ranks to start with --num_accelerators."
    )


def visible_devices(accelerator: str, slots: tuple[int, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the accelerator's visible-devices variable, with the devices of these slots.

    It is the same for all ranks of a host, as with torchrun: a local rank is an index of the list.

    Raises:
        LaunchOptionError: a slot has no device.
    """
    records, _ = find_backends()
    record = next((record for record in records if record.name == accelerator), None)
    variable = None if record is None else record.visible_devices_variable()
    if record is None or variable is None:
        return {}
    # The variable in which the user has chosen devices, since the ranks' runtime reads that one.
    variable = first_set((variable, *record.visible_devices_fallbacks), environ) or variable
    text = environ.get(variable, "")
    if not text.strip():
        return {variable: ",".join(map(str, slots))}
    already = visible_entries(text)
    if slots[-1] >= len(already):
        raise LaunchOptionError(
            f'Slot {slots[-1]} has no device: {variable} names {len(already)} ("{excerpt(text)}"). Ask for '
            "fewer slots, or let the variable name more devices."
        )
    return {variable: ",".join(already[slot] for slot in slots)}
