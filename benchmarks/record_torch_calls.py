"""Record which calls a release of torch offers to device-agnostic code, for `acclimate port --to torch`.

    python benchmarks/record_torch_calls.py src/acclimate/port/torch_calls.json

Adds the installed release to the file. The names of a device's module are those of `torch.xpu`: they are what
torch's own devices have in common, where `torch.cuda` has many of its own.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

MODULES = {
    "torch.accelerator": "torch.accelerator",
    "torch.amp": "torch.amp",
    "device module": "torch.xpu",
}
SINGLE = {
    "torch": ("get_device_module", "OutOfMemoryError", "set_default_device", "set_default_dtype", "device"),
    "torch.distributed": ("get_default_backend_for_device",),
}


def main(path: Path) -> None:
    """Adds the installed torch to the record."""
    torch = importlib.import_module("torch")
    offered: dict[str, list[str]] = {}
    for name, module in MODULES.items():
        found = importlib.import_module(module)
        public = getattr(found, "__all__", None) or [each for each in dir(found) if not each.startswith("_")]
        offered[name] = sorted(set(public) & set(dir(found)))
    for module, names in SINGLE.items():
        offered[module] = sorted(n for n in names if hasattr(importlib.import_module(module), n))
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    record[torch.__version__.partition("+")[0]] = offered
    ordered = {
        version: record[version] for version in sorted(record, key=lambda v: [int(p) for p in v.split(".")])
    }
    path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
