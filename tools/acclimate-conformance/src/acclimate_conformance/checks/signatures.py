"""Checks of signatures, one for each category: every accelerator takes the interface's arguments."""

from __future__ import annotations

import inspect
import re

from acclimate.accelerator import CATEGORIES
from acclimate.accelerator.devices import Devices
from acclimate_conformance.checks.assertions import require
from acclimate_conformance.checks.check import Check
from acclimate_conformance.checks.target import Subject

_Kind = inspect._ParameterKind
_WITHOUT_EFFECT = {"align_bytes"}
"""Parameters that the interface takes only for programs of older releases of DeepSpeed."""
_SIMPLE = (bool, int, str, type(None))
"""Types of defaults that can be compared."""


def _signature_check(category: type[Devices]) -> Check:
    methods = {name: member for name, member in vars(category).items()
               if not name.startswith("_") and inspect.isfunction(member)}  # fmt: skip

    def look(subject: Subject) -> None:
        for name, stated in methods.items():
            found = getattr(type(subject.accelerator), name)
            objection = incompatibility(inspect.signature(stated), inspect.signature(found))
            require(objection is None, f"{name}{inspect.signature(found)}: {objection}")

    return Check(
        category=category.__module__.rpartition(".")[2],
        name="signatures",
        promise=f"Every method takes the arguments that the interface says ({len(methods)} methods).",
        observes=tuple(methods),
        function=look,
        timeout_s=240,
        once=True,
    )


def incompatibility(stated: inspect.Signature, found: inspect.Signature) -> str | None:
    """Why a call that the interface allows would fail or mean something else; ``None`` if none would."""
    ours, theirs = list(stated.parameters.values()), list(found.parameters.values())
    names = [parameter.name for parameter in theirs]
    takes_all = any(parameter.kind is _Kind.VAR_KEYWORD for parameter in theirs) and any(
        parameter.kind is _Kind.VAR_POSITIONAL for parameter in theirs
    )
    for place, parameter in enumerate(ours):
        if takes_all:
            break
        if parameter.name not in names:
            if parameter.name in _WITHOUT_EFFECT:
                continue
            return f'it lacks the parameter "{parameter.name}"'
        other = theirs[names.index(parameter.name)]
        if parameter.kind is _Kind.POSITIONAL_OR_KEYWORD and names.index(parameter.name) != place:
            return f'its parameter "{parameter.name}" is not at place {place}'
        if other.kind is not parameter.kind:
            kind = re.sub("_", " ", other.kind.name).lower()
            return f'its parameter "{parameter.name}" is {kind}'
        if parameter.default is not parameter.empty and other.default is other.empty:
            return f'its parameter "{parameter.name}" has no default'
        if isinstance(parameter.default, _SIMPLE) and other.default != parameter.default:
            return f'its "{parameter.name}" is {other.default!r} by default, not {parameter.default!r}'
    added = [p for p in theirs if p.name not in stated.parameters and p.default is p.empty]
    required = [p.name for p in added if p.kind not in (_Kind.VAR_POSITIONAL, _Kind.VAR_KEYWORD)]
    return f'it requires "{required[0]}", which the interface does not have' if required else None


signature_checks = tuple(map(_signature_check, CATEGORIES))
"""One check for each category of the interface."""
