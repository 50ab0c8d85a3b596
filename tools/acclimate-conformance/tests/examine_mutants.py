"""Examines planted faults, all in this one process, and writes what the checks say as JSON.

python examine_mutants.py SECONDS MODULES LENGTH NAMES [PROFILE]

After so many seconds it ends, and says which fault it was examining, and in which call. LENGTH is "quick" or
"long"; faults of these names are long.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from acclimate.accelerator import Accelerator
from acclimate.selection import use_accelerator
from acclimate_conformance.checks import innermost
from acclimate_conformance.checks.check import Check
from acclimate_conformance.checks.target import load
from acclimate_conformance.runner import examine as runner
from acclimate_conformance.runner.catalog import checks
from acclimate_conformance.runner.causes import ranked
from acclimate_conformance.runner.examine import examine
from quick_faults import one_for_each


def main(limit_s: str, modules: str, length: str, long: str, profile: str | None = None) -> None:
    """Writes a name, check and outcome for one quick fault of each check, or for all other faults."""
    # What a check runs, compilers among it, may write to standard output, which is the answer's alone.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    imported = [importlib.import_module(module) for module in modules.split(",")]
    catalog = {check.id: check for check in checks()}
    gc.collect()
    gc.freeze()  # as the worker does: each check collects garbage
    tables = [
        module.CAUGHT_BY if profile is None else module.CAUGHT_BY.get(profile, {}) for module in imported
    ]
    names = long.split(",")
    quick = one_for_each(tables, names)
    found = []
    for module, table in zip(imported, tables, strict=True):
        chosen = {fault: check for fault, check in table.items() if (fault in quick) == (length == "quick")}
        found += [one(fault, check, catalog[check]) for fault, check in chosen.items()]
        sound = getattr(module, "SOUND", {}) if not profile else {}
        for right, ids in sound.items():
            if (right.__name__ in names) == (length == "long"):
                found += [{**one(right, check, catalog[check]), "sound": True} for check in ids]
    with answer:
        json.dump(found, answer)


def one(accelerator_class: type[Accelerator], check: str, examined: Check) -> dict[str, Any]:
    """What one check says of one accelerator, which has a fault."""
    sys.stderr.write(f"{accelerator_class.__name__}: {check}\n")
    subject = load(f"{accelerator_class.__module__}:{accelerator_class.__qualname__}")
    module = importlib.import_module(accelerator_class.__module__)
    try:
        with use_accelerator(subject.accelerator), ExitStack() as without:
            # To look for the operator at fault takes several times as long as to find that one is.
            if accelerator_class.__name__ not in getattr(module, "NAMED", {}):
                without.enter_context(patch.object(runner, "_operator_at_fault", lambda *_, **__: None))
                without.enter_context(patch.object(innermost, "_SECONDS", 0.0))
            result = examine(examined, subject)
    finally:
        getattr(subject.accelerator, "uninstall", bool)()  # what is outside of the class
    return {
        "module": accelerator_class.__module__,
        "name": accelerator_class.__name__,
        "check": check,
        "sound": False,
        "outcome": result.outcome,
        "reason": result.reason,
        "change": next(iter(ranked([result])[0].changes), ""),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
