"""Runs a table of short programs on a device and on the host, and compares what they return."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from acclimate.accelerator import Accelerator
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import (
    TOLERANCE,
    NotOfferedError,
    all_told,
    distance,
    is_host,
    note_of_lacks,
    short,
)
from acclimate_conformance.checks.claims import lacking
from acclimate_conformance.checks.dtypes.arithmetic import numbers
from acclimate_conformance.checks.target import LOST, still_computes


class Offered(dict[str, Any]):
    """Results by name, of which a device may lack some."""


Program: TypeAlias = Callable[[str], Any]
"""Takes a device's name; returns tensors of that device, numbers, texts, and structures of these."""
_HOST = "cpu"


def there(place: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """The same quarters between -2 and 2 on each place, in float32."""
    return numbers(*shape, seed=seed).float().to(place)


def moves_parameters(place: str) -> bool:
    """Whether modules that move to a device keep their parameters.

    torch replaces those that move to such devices as XLA's: a shared one becomes two, and one that is not yet
    initialised or belongs to a script is lost.
    """
    return bool(torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=place)))


def raised(call: Callable[[], object]) -> bool:
    """Whether a call raises what torch raises for arguments or states that do not fit."""
    try:
        call()
    except NotImplementedError:
        raise
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError):
        return True
    return False


def require_as_on_the_host(
    accelerator: Accelerator, programs: Mapping[str, Program], optional: Collection[str] = ()
) -> str | None:
    """Fails the check if a program returns something else on the device than on the host.

    Args:
        accelerator: whose current device runs them.
        programs: by description, each program. Those that raise on the host are left out.
        optional: descriptions of those that a device may refuse, with any error.

    Returns:
        A note of what the device lacks.
    """
    if is_host(accelerator):
        raise NotOfferedError("a host has no other device to be compared with")
    device = accelerator.current_device_name()
    if torch.device(device).index is None:  # as an accelerator of one device may name it
        device = str(torch.empty(0, device=device).device)
    lacks: set[str] = set()
    with warnings.catch_warnings(), all_told() as noted:
        warnings.simplefilter("ignore")
        for what, program in programs.items():
            wanted: Any = None
            with suppress(Exception):  # this torch does not have it
                torch.manual_seed(0)
                wanted = program(_HOST)
            if wanted is None:
                continue
            torch.manual_seed(0)
            try:
                found = program(device)
                accelerator.synchronize()
                reason = difference(found, wanted, device)
            except NotImplementedError:
                lacks.add(what)
                continue
            except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
                if what in optional or lacking(accelerator, error):
                    lacks.add(what)
                    continue
                reason = f"it raises {describe(error, whole=True)}"[:300]
                if not still_computes(accelerator):
                    noted(False, f"{what}, on {device}: {reason}, {LOST}")
                    break
            noted(not reason, f"{what}, on {device}: {reason}")
    return note_of_lacks(lacks)


def difference(found: Any, wanted: Any, device: str) -> str:
    """How a result differs from the host's, as text; empty if it does not."""
    if isinstance(wanted, torch.Tensor):
        return _difference_of_tensors(found, wanted, device)
    if isinstance(wanted, Mapping):
        keys = [key for key in wanted if key in found or not isinstance(wanted, Offered)]
        if list(found) != keys:
            return f"it has {list(found)}, not {list(wanted)}"
        return _first((f"{key}: ", difference(found[key], wanted[key], device)) for key in keys)
    if isinstance(wanted, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
            return f"it is {found!r:.120}, not {wanted!r:.120}"
        return _first(
            (f"part {number + 1}: ", difference(ours, theirs, device))
            for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True))
        )
    if isinstance(wanted, (str, torch.device)):
        same = str(found).replace(device, _HOST) == str(wanted)
    elif isinstance(wanted, float) and isinstance(found, float):
        near = abs(found - wanted) <= TOLERANCE[torch.float32] * max(1.0, abs(wanted))
        same = near or (found != found and wanted != wanted) or found == wanted
    else:
        same = type(found) is type(wanted) and found == wanted
    return "" if same else f"it is {found!r:.120}, not {wanted!r:.120}"


def _first(parts: Any) -> str:
    return next((f"{where}{reason}" for where, reason in parts if reason), "")


def _difference_of_tensors(found: Any, wanted: torch.Tensor, device: str) -> str:
    if not isinstance(found, torch.Tensor):
        return f"it is a {type(found).__name__}, not a tensor"
    if str(found.device) != device:
        return f"it is on {found.device}"
    if (found.dtype, tuple(found.shape)) != (wanted.dtype, tuple(wanted.shape)):
        return f"it is {short(found.dtype)}{list(found.shape)}, not {short(wanted.dtype)}{list(wanted.shape)}"
    if found.requires_grad != wanted.requires_grad:
        return f"it has requires_grad={found.requires_grad}"
    ours, theirs = _plain(found), _plain(wanted)
    if not wanted.numel() or torch.equal(ours, theirs):
        return ""
    if wanted.dtype not in TOLERANCE or not bool(torch.isfinite(theirs).all()):
        same = bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())
        return "" if same else f"it is {ours.tolist()!r:.100}, not {theirs.tolist()!r:.100}"
    apart = distance(ours, theirs)
    if apart <= TOLERANCE[wanted.dtype]:
        return ""
    return f"it is off by {apart:.1e}: {ours.flatten()[:4].tolist()}, not {theirs.flatten()[:4].tolist()}"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.detach().cpu().resolve_conj().resolve_neg()
    return whole.to_dense() if whole.layout != torch.strided else whole
