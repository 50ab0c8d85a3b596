"""The process that runs checks one after another, so that a crash ends it and not the report.

It reads the names of checks from standard input, one per line, and answers each with a line of JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import platform
import sys
from dataclasses import asdict
from typing import Any

from acclimate.errors import AcclimateError
from acclimate_conformance.processes import own_channel

_MANY_MODULES = 20


def main(source: str) -> int:
    """Answers until standard input ends; returns the exit code."""
    channel = own_channel()
    faulthandler.enable()

    def tell(answer: dict[str, Any]) -> None:
        channel.write(json.dumps(answer) + "\n")
        channel.flush()

    try:
        # torch is imported here, and with it whatever a vendor's package does at import.
        from acclimate_conformance.checks.target import load
        from acclimate_conformance.runner.catalog import checks
        from acclimate_conformance.runner.examine import examine

        subject = load(source)
        catalog = {check.id: check for check in checks()}
        about = _about(subject.accelerator)
    except AcclimateError as error:
        tell({"unusable": str(error)})
        return 2
    imported = _spare_imports(0)
    known = [{"id": c.id, "category": c.category, "promise": c.promise, "rules": c.rules,
              "timeout_s": c.timeout_s} for c in catalog.values()]  # fmt: skip
    tell({"about": about, "checks": known})
    for line in sys.stdin:
        tell(asdict(examine(catalog[line.strip()], subject)))
        imported = _spare_imports(imported)
    return 0


def _spare_imports(before: int) -> int:
    """Excludes imported objects from garbage collection, if there are many; returns the number of modules.

    Each check collects garbage twice, to see what is freed. Compilers leave a million objects to look at.
    """
    now = len(sys.modules)
    if now - before < _MANY_MODULES:
        return before
    gc.collect()
    gc.freeze()
    return now


def _about(accelerator: Any) -> dict[str, Any]:
    import torch

    from acclimate import __version__
    from acclimate_conformance.checks.assertions import device_names

    return {
        "accelerator": accelerator.name,
        "implementation": f"{type(accelerator).__module__}:{type(accelerator).__qualname__}",
        "devices": [f"{name} ({accelerator.get_device_name(name)})" for name in device_names(accelerator)],
        "acclimate": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
