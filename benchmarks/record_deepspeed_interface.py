"""Records the public interface of DeepSpeed's accelerators, for the test that ours has all of it.

Run it with a Python that has DeepSpeed installed, and give the file to write:

    python benchmarks/record_deepspeed_interface.py tests/accelerator/data/deepspeed_interface.json
"""

from __future__ import annotations

import inspect
import json
import sys
from importlib.metadata import version
from pathlib import Path

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator


def describe(member: object) -> dict[str, object]:
    """What kind of member it is and, of a method, its parameters: name, kind and default."""
    if isinstance(member, property):
        return {"kind": "property"}
    if not inspect.isfunction(member):
        return {"kind": "attribute", "type": type(member).__name__}
    parameters = list(inspect.signature(member).parameters.values())[1:]
    return {
        "kind": "method",
        "parameters": [
            {"name": parameter.name, "kind": parameter.kind.name}
            | ({} if parameter.default is parameter.empty else {"default": repr(parameter.default)})
            for parameter in parameters
        ],
    }


def main() -> None:
    """Writes the record."""
    members = inspect.getmembers_static(DeepSpeedAccelerator)
    public = {name: describe(member) for name, member in members if not name.startswith("_")}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(member)}" for name, member in public.items())
    text = f'{{\n "deepspeed": "{version("deepspeed")}",\n "members": {{\n{lines}\n }}\n}}\n'
    Path(sys.argv[1]).write_text(text, encoding="utf-8")
    print(f"{len(public)} members of DeepSpeed {version('deepspeed')}")


if __name__ == "__main__":
    main()
