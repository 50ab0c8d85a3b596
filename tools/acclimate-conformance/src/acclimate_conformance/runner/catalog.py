"""All checks, by category in the order of the interface's documentation."""

from __future__ import annotations

import importlib
from types import ModuleType

from acclimate_conformance.checks import launching
from acclimate_conformance.checks.check import Check
from acclimate_conformance.checks.signatures import signature_checks

_CATEGORIES: dict[str, tuple[str, ...]] = {
    "devices": ("current", "waiting", "blocks"),
    "random": ("generators", "devices", "states"),
    "streams": ("order", "state", "waiting"),
    "memory": ("figures", "agreement", "capacity", "devices", "bounds", "small"),
    "dtypes": ("arithmetic", "shapes", "exactness", "mixed", "scaling"),
    "graphs": ("replays", "captures", "kinds", "numbers"),
    "pinning": ("contents", "shapes"),
    "ops": ("builders", "optimizers", "aio", "aio_arguments"),
    "runtime": ("marks", "compiling", "results", "types"),
    "communication": ("collectives",),
}
"""By category, the modules of its checks in order."""

MODULES: tuple[ModuleType, ...] = (
    *(
        importlib.import_module(f"acclimate_conformance.checks.{category}.{name}")
        for category, names in _CATEGORIES.items()
        for name in names
    ),
    launching,
)


def checks() -> list[Check]:
    """Every check, each category's signatures first."""
    signatures = {check.category: check for check in signature_checks()}
    found: list[Check] = []
    for module in MODULES:
        for value in vars(module).values():
            for check in value if isinstance(value, tuple) else (value,):
                if isinstance(check, Check):
                    if check.category in signatures:
                        found.append(signatures.pop(check.category))
                    found.append(check)
    return found
