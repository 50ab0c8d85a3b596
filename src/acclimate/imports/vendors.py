"""Imports torch and vendors' packages so that one that fails costs no more than itself.

Without its hardware or its drivers a vendor's package raises anything at import, ends the process or prints
to standard output. torch imports those that register as its backends by itself, and cannot be imported
where one of them fails. So a package is imported in a forked child first, and here only where that went well.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from acclimate.imports import trial
from acclimate.imports.containment import VendorCodeError, contained, output_to_stderr
from acclimate.imports.fork_safe_lock import ForkSafeLock

TORCH_GROUP = "torch.backends"
"""The entry points that torch loads when it is imported."""
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_logger = logging.getLogger("acclimate")
_lock = ForkSafeLock()
_failures: dict[str, str] = {}
"""By a module's name, why it cannot be imported in this process."""
_left_to_load: list[EntryPoint] = []
"""Of the packages that torch loads by itself, those that wait for :func:`load_torch_packages`."""
_unclaimed: set[str] = set()
"""Those of the failures that no accelerator's probe has asked about."""


def import_vendor_module(name: str) -> ModuleType:
    """Imports a vendor's module; one that failed once is not tried again.

    Raises:
        VendorCodeError: it cannot be imported.
    """
    with _lock:
        package = name.partition(".")[0]
        _unclaimed.discard(package)
        if package in _failures:  # torch was to load it
            raise VendorCodeError(_failures[package])
        loaded = sys.modules.get(name)
        if loaded is None:
            _try(name, lambda: importlib.import_module(name))
            _load_here(name, lambda: importlib.import_module(name))
            loaded = sys.modules[name]
        return loaded


def import_torch() -> None:
    """Imports torch, with the packages that it loads by itself as far as they can be loaded.

    Does nothing where torch was imported before; torch has loaded them then.
    """
    import_torch_alone()
    load_torch_packages()


def import_torch_alone() -> None:
    """Imports torch and leaves the packages that it loads by itself to :func:`load_torch_packages`.

    For modules that such a package may import in its turn, and that have to be whole before.
    """
    if "torch" in sys.modules:
        return
    with _lock:
        points = list(entry_points(group=TORCH_GROUP))
        setting = os.environ.get(_AUTOLOAD)
        if not points or setting not in (None, "1"):
            importlib.import_module("torch")
            return
        os.environ[_AUTOLOAD] = "0"
        try:
            importlib.import_module("torch")
        finally:
            if setting is None:
                del os.environ[_AUTOLOAD]
            else:
                os.environ[_AUTOLOAD] = setting
        _left_to_load.extend(points)


def load_torch_packages() -> None:
    """Loads the packages that :func:`import_torch_alone` left, as far as they can be loaded."""
    with _lock:
        points = _left_to_load.copy()
        _left_to_load.clear()  # first, as what is loaded may come here again
        # All in children first: once a device is in use here, a child cannot be trusted with it.
        for point in points:
            _try(_package(point), _loading(point))
        for point in points:
            _load_as_torch_does(point)


def _package(point: EntryPoint) -> str:
    return point.module.partition(".")[0]


def _loading(point: EntryPoint) -> Callable[[], None]:
    def load() -> None:
        point.load()()

    return load


def _load_as_torch_does(point: EntryPoint) -> None:
    package = _package(point)
    try:
        _load_here(package, _loading(point))
    except VendorCodeError as error:
        _unclaimed.add(package)
        _logger.warning(
            "%s, which torch loads by itself, is not used: %s. Remove it, or set %s=0 for programs that "
            "import torch first.",
            package,
            error,
            _AUTOLOAD,
        )


def unclaimed_failures() -> dict[str, str]:
    """By name, the packages that torch loads by itself and that failed, less those of known accelerators."""
    return {name: _failures[name] for name in sorted(_unclaimed)}


def package_for(device_type: str) -> str | None:
    """The installed package that should bring a device to torch, by its name; ``None`` where none has it."""
    for point in entry_points(group=TORCH_GROUP):
        package = _package(point)
        if device_type in {point.name, *package.replace("-", "_").split("_")}:
            return package
    named_so = f"torch_{device_type}"
    return named_so if named_so.isidentifier() and trial.origin_of(named_so) else None


def failure_of(package: str) -> str | None:
    """Why a package could not be imported in this process; ``None`` where it could, or was not tried."""
    return _failures.get(package)


def _try(name: str, load: Callable[[], Any]) -> None:
    """Loads a package in a child, and notes its failure."""
    reason = _failures.get(name) or trial.why_it_fails(name, load)
    if reason is not None:
        _failures[name] = reason


def _load_here(name: str, load: Callable[[], Any]) -> None:
    """Loads a package in this process unless it failed before.

    Raises:
        VendorCodeError: it failed, now or before.
    """
    if name in _failures:
        raise VendorCodeError(_failures[name])
    try:
        with contained(), output_to_stderr():
            load()
    except VendorCodeError as error:
        _failures[name] = str(error)
        raise
