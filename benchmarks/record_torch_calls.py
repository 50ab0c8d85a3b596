"""Record which calls a release of torch offers to device-agnostic code, for `acclimate port --to torch`.

    cd tools/acclimate-port/src/acclimate_port/new_code
    python ../../../../../benchmarks/record_torch_calls.py torch_calls.json [FOLDER VERSION]

Adds the installed release to the file, or the one whose wheel was unpacked in FOLDER: that one is read, not
imported, as a wheel for CUDA cannot be imported without CUDA's libraries. Both ways give the same for an
installed release. The names of a device's module are those of `torch.xpu`: they are what torch's own devices
have in common, where `torch.cuda` has many of its own.
"""

from __future__ import annotations

import ast
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
DEFINED_IN = {
    "torch": ("__init__.py", "_C/__init__.pyi"),
    "torch.distributed": ("distributed/distributed_c10d.py",),
}
"""Where a wheel's source defines the single names."""


def installed() -> tuple[str, dict[str, list[str]]]:
    """The version of the installed torch, and its names."""
    torch = importlib.import_module("torch")
    offered: dict[str, list[str]] = {}
    for name, module in MODULES.items():
        found = importlib.import_module(module)
        public = getattr(found, "__all__", None) or [
            attribute for attribute in dir(found) if not attribute.startswith("_")
        ]
        offered[name] = sorted(set(public) & set(dir(found)))
    for module, names in SINGLE.items():
        offered[module] = sorted(n for n in names if hasattr(importlib.import_module(module), n))
    return torch.__version__.partition("+")[0], offered


def unpacked(folder: Path) -> dict[str, list[str]]:
    """The names of a torch whose files are in a folder."""
    offered: dict[str, list[str]] = {}
    for name, module in MODULES.items():
        file = folder.joinpath(*module.split("."), "__init__.py")
        offered[name] = sorted(public_names(ast.parse(file.read_text(encoding="utf-8"))))
    for module, names in SINGLE.items():
        defined: set[str] = set()
        for place in DEFINED_IN[module]:
            tree = ast.parse((folder / "torch" / place).read_text(encoding="utf-8"))
            defined |= {
                statement.name
                for statement in tree.body
                if isinstance(statement, (ast.FunctionDef, ast.ClassDef))
            }
        offered[module] = sorted(set(names) & defined)
    return offered


def public_names(tree: ast.Module) -> set[str]:
    """What `__all__` names; the names that are imported where there is none."""
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = getattr(node, "value", None)
            return set(ast.literal_eval(value)) if value is not None else set()
    imported = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {name for name in imported if not name.startswith("_")}


def main(path: Path, *unpacked_release: str) -> None:
    """Adds a release to the record."""
    if unpacked_release:
        folder, version = unpacked_release
        offered = unpacked(Path(folder))
    else:
        version, offered = installed()
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    record[version] = offered
    ordered = {
        version: record[version] for version in sorted(record, key=lambda v: [int(p) for p in v.split(".")])
    }
    path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
