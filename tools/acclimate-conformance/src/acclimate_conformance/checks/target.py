"""The accelerator that is checked, and how another process gets the same one."""

from __future__ import annotations

import gc
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from acclimate import Backend
from acclimate.accelerator import Accelerator
from acclimate.errors import InvalidBackendError
from acclimate.imports import describe
from acclimate.selection import find_backends, get_accelerator, load_by_name, set_accelerator
from acclimate_conformance.checks.assertions import BrokenPromiseError


@dataclass(frozen=True)
class Subject:
    """The accelerator that is checked."""

    accelerator: Accelerator
    source: str
    """The argument with which :func:`load` gets the same one in a child process."""

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A block that restores the current device at its end, frees memory, and waits for queued work."""
        accelerator = self.accelerator
        device = accelerator.current_device()
        try:
            yield
        finally:
            gc.collect()
            if accelerator.current_device() != device:
                accelerator.set_device(device)
            accelerator.synchronize()


def still_computes(accelerator: Accelerator) -> bool:
    """Whether a small kernel on each device works.

    A fault in a kernel, such as a place beyond the end on CUDA, may end that until the process ends.
    """
    try:
        for index in range(accelerator.device_count()):
            if torch.ones(2, device=accelerator.device_name(index)).tolist() != [1, 1]:
                return False
    except Exception:  # noqa: BLE001 - whatever a device raises then
        return False
    return True


@contextmanager
def blamed(accelerator: Accelerator, what: str) -> Iterator[None]:
    """A block at whose end the host waits for the device, so that a fault that lasts names what was called.

    Without this a later call would raise the error.
    """
    try:
        yield
        accelerator.synchronize()
    except Exception as error:
        if still_computes(accelerator):
            raise
        said = describe(error, whole=True)
        raise BrokenPromiseError(f"{what} raises {said}, {LOST}", said) from error


LOST = "after which the device computes nothing more in this process"
"""What is said of a fault that lasts."""


def load(source: str) -> Subject:
    """Finds an accelerator, and makes it this process's; see :func:`find`."""
    subject = find(source)
    set_accelerator(subject.accelerator)
    return subject


def find(source: str) -> Subject:
    """Finds an accelerator.

    Args:
        source: the name of a registered accelerator, ``"module:Class"`` for another one, or empty for the
            one that acclimate selects.

    Raises:
        UnknownAcceleratorError: no accelerator has that name.
        AcceleratorUnavailableError: it cannot be used here.
        InvalidBackendError: the class is not there, or is not an ``Accelerator``.
    """
    if not source:
        return Subject(get_accelerator(), source)
    return Subject(_from_class(source) if ":" in source else load_by_name(source, "--accelerator"), source)


def _from_class(target: str) -> Accelerator:
    try:
        found = pkgutil.resolve_name(target)()
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidBackendError(f'--accelerator is "{target}", which cannot be loaded: {error}') from error
    if not isinstance(found, Accelerator):
        raise InvalidBackendError(
            f'--accelerator is "{target}", which is a {type(found).__name__}; '
            "it must be a subclass of acclimate.Accelerator."
        )
    if found._record is None:
        found._record = _record_of(type(found))
    return found


def record_of(accelerator: Accelerator) -> Backend | None:
    """The record with which the launcher counts an accelerator's devices."""
    own = accelerator._record
    return own if isinstance(own, Backend) else _record_of(type(accelerator))


def _record_of(kind: type[Accelerator]) -> Backend | None:
    """The record that registers a class or its nearest base; it holds what the class does not say."""
    records = {record.target: record for record in find_backends()[0]}
    targets = (f"{base.__module__}:{base.__qualname__}" for base in kind.__mro__)
    return next((records[target] for target in targets if target in records), None)
