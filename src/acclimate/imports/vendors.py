"""Imports torch and vendors' packages so that a broken package affects nothing else.

Without its hardware or drivers, a vendor's package may raise anything at import, end the process or print to
standard output. torch itself imports packages that register as its backends, and fails if one of them fails.
So each package is imported in a forked child first, and in this process only if that succeeds.
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

from acclimate.imports import containment
from acclimate.imports.containment import VendorCodeError, contained, output_to_stderr
from acclimate.imports.fork_safe_lock import ForkSafeLock

TORCH_GROUP = "torch.backends"
"""The entry points that torch loads at import."""
AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""The variable that keeps torch from loading them; "0" does."""

_logger = logging.getLogger("acclimate")
_lock = ForkSafeLock()
_failures: dict[str, str] = {}
"""Why a module cannot be imported in this process, by its name."""
_left_to_load: list[EntryPoint] = []
"""The packages of torch's entry points that :func:`load_torch_packages` still has to load."""
_unclaimed: set[str] = set()
"""The packages that failed and belong to no accelerator that was probed."""


def import_vendor_module(name: str) -> ModuleType:
    """Imports a vendor's module; does not retry after a failure.

    Raises:
        VendorCodeError: it cannot be imported.
    """
    with _lock:
        package = name.partition(".")[0]
        _unclaimed.discard(package)
        if package in _failures:  # one of torch's entry points
            raise VendorCodeError(_failures[package])
        loaded = sys.modules.get(name)
        if loaded is None:
            _try(name, lambda: importlib.import_module(name))
            _load_here(name, lambda: importlib.import_module(name))
            loaded = sys.modules[name]
        return loaded


def import_torch() -> None:
    """Imports torch and the packages of its entry points that can be loaded.

    Does nothing if torch has already been imported, since it has loaded them then.
    """
    import_torch_alone()
    load_torch_packages()


def import_torch_alone() -> None:
    """Imports torch and leaves the packages of its entry points to :func:`load_torch_packages`.

    For modules that such a package may import, and that must be complete by then.
    """
    if "torch" in sys.modules:
        return
    with _lock:
        points = list(entry_points(group=TORCH_GROUP))
        setting = os.environ.get(AUTOLOAD_VARIABLE)
        if not points or setting not in (None, "1"):
            importlib.import_module("torch")
            return
        os.environ[AUTOLOAD_VARIABLE] = "0"
        try:
            importlib.import_module("torch")
        finally:
            if setting is None:
                del os.environ[AUTOLOAD_VARIABLE]
            else:
                os.environ[AUTOLOAD_VARIABLE] = setting
        _left_to_load.extend(points)


def load_torch_packages() -> None:
    """Loads the packages left by :func:`import_torch_alone` that can be loaded."""
    with _lock:
        points = _left_to_load.copy()
        _left_to_load.clear()  # first, since a loaded package may call this again
        # All in children first: once this process uses a device, an attempt in a child proves nothing.
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
            "%s, which torch loads at import, is not used: %s. Programs that import torch before acclimate "
            "fail: uninstall the package, or set %s=0.",
            package,
            error,
            AUTOLOAD_VARIABLE,
        )


def unclaimed_failures() -> dict[str, str]:
    """Returns why packages that torch loads at import failed, except those of known accelerators."""
    return {name: _failures[name] for name in sorted(_unclaimed)}


def package_for(device_type: str) -> str | None:
    """Returns the installed package that adds this device to torch, judged by its name; else ``None``."""
    for point in entry_points(group=TORCH_GROUP):
        package = _package(point)
        if device_type in {point.name, *package.replace("-", "_").split("_")}:
            return package
    if not device_type.isidentifier():
        return None
    usual = (f"torch_{device_type}", f"torch{device_type}", f"torch_{device_type}_backend")
    return next((package for package in usual if containment.origin_of(package)), None)


def failure_of(package: str) -> str | None:
    """Returns why a package could not be imported; ``None`` if it could, or was not tried."""
    return _failures.get(package)


def _try(name: str, load: Callable[[], Any]) -> None:
    """Loads a package in a child and records a failure."""
    reason = _failures.get(name) or containment.why_it_fails(name, load)
    if reason is not None:
        _failures[name] = reason


def _load_here(name: str, load: Callable[[], Any]) -> None:
    """Loads a package in this process, unless it has failed before.

    Raises:
        VendorCodeError: it fails now or has failed before.
    """
    if name in _failures:
        raise VendorCodeError(_failures[name])
    try:
        with contained(), output_to_stderr():
            load()
    except VendorCodeError as error:
        _failures[name] = str(error)
        raise
