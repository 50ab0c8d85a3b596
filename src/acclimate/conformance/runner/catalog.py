"""All checks, by category in the order of the interface's documentation."""

from __future__ import annotations

from types import ModuleType

from acclimate.conformance.checks import (
    communication,
    devices,
    dtypes,
    graphs,
    launching,
    memory,
    ops,
    pinning,
    random,
    runtime,
    streams,
)
from acclimate.conformance.checks.check import Check
from acclimate.conformance.checks.signatures import signature_checks

MODULES: tuple[ModuleType, ...] = (
    devices,
    random,
    streams,
    memory,
    dtypes,
    graphs,
    pinning,
    ops,
    runtime,
    communication,
    launching,
)


def checks() -> list[Check]:
    """Every check, each category's signatures first."""
    signatures = {check.category: check for check in signature_checks()}
    found: list[Check] = []
    for module in MODULES:
        category = module.__name__.rpartition(".")[2]
        if category in signatures:
            found.append(signatures[category])
        found += [check for check in vars(module).values() if isinstance(check, Check)]
    return found
