"""Imports third-party code: torch, vendors' packages, plug-ins."""

from __future__ import annotations

from acclimate.imports.containment import VendorCodeError, contained, describe, output_to_stderr
from acclimate.imports.fork_safe_lock import ForkSafeLock
from acclimate.imports.vendors import (
    AUTOLOAD_VARIABLE,
    failure_of,
    import_torch,
    import_torch_alone,
    import_vendor_module,
    load_torch_packages,
    package_for,
    unclaimed_failures,
)

__all__ = [
    "AUTOLOAD_VARIABLE",
    "ForkSafeLock",
    "VendorCodeError",
    "contained",
    "describe",
    "failure_of",
    "import_torch",
    "import_torch_alone",
    "import_vendor_module",
    "load_torch_packages",
    "output_to_stderr",
    "package_for",
    "unclaimed_failures",
]
