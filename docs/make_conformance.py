"""Writes docs/conformance.md from the checks, and from the faults planted to test them.

python docs/make_conformance.py            writes it
python docs/make_conformance.py --check    exits 1 when it is not up to date
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

from acclimate.conformance.checks.check import Check
from acclimate.conformance.runner.catalog import checks

TARGET = Path(__file__).with_name("conformance.md")
FAULTS = Path(__file__).parents[1] / "tests" / "conformance"
INTRODUCTION = """\
# Conformance

Does an accelerator keep every promise of the interface (`docs/interface.md`)? Made from the checks by
`python docs/make_conformance.py`; a test holds it up to date.

    acclimate conformance                               the accelerator of this machine
    acclimate conformance --accelerator NAME            another one
    acclimate conformance --accelerator module:Class    one that is not registered yet
    acclimate conformance --only memory --only random/seeds
    acclimate conformance --report out.html --json results.json --junit results.xml

The exit code is 0 where nothing failed, 1 where something did, 2 where the accelerator cannot be loaded, an
argument is wrong or a file cannot be written, 130 where the run was cut off by Ctrl-C or SIGTERM. What came
out is shown in every case, and written to the files that can be written.

`--report` writes one HTML file for a browser, without script and without network access: the counts by
category, and for each failure what was observed, the calls of the interface that led to it, whose code is to
change, and the interface's own words. It also tells a run that was cut off.

For a vendor's own continuous integration there is a plugin for pytest, which is there wherever acclimate is
installed; each check is one test:

    pytest --acclimate-accelerator NAME       the project's own tests and the checks
    pytest --pyargs acclimate.conformance     the checks alone, of the accelerator that selection gives

## How it judges

- Checks observe: they allocate and look whether the figures move, save a state and draw again, change an
  input and replay. Whether an attribute exists proves nothing.
- **passed**: what was seen agrees with the interface. A note says what could not be seen.
- **failed**: it does not. The reason says what was seen, followed by the interface's own words.
- **not offered**: the device does not have it, and does not claim to. A device without streams, with memory
  that cannot be pinned or without Triton is not at fault; one that says it has them and has not, is. What is
  not offered does not count in the score.
- What a device says about itself can only be refuted where it shows: `handles_memory_backpressure()` and
  `resolves_data_dependency()` of a device that does its work at once cannot be told from the truth.
- The score is passed / (passed + failed), rounded down.
- Checks run in a process apart. One that crashes it, exits, or takes longer than its time-out fails with the
  signal, the exit code or the time; the next runs in a fresh one.

Rules that may surprise:

- A dtype that is left out of `supported_dtypes()` need not be refused. bfloat16 and float16 count as
  supported where the hardware has them, and may be emulated all the same: the results then have to be right,
  and the check says so. float64 counts as supported wherever it computes, so leaving it out while it computes
  right is a fault.
- A host has no allocator to ask, and its figures are those of the whole process. Allocations are therefore
  large (96 MiB) and an eighth of that is allowed for what else the process does.
- Where torch's allocator raises a plain `RuntimeError` when memory runs out, as on a host,
  `is_out_of_memory()` has to tell it from every other error.
- A device says what it does not have in its class: `supports_streams`, `supports_graphs`,
  `supports_collectives` ([extension.md](extension.md)). Graphs that it denies, it has to refuse.
- Where a method takes a device, it takes an index, a name, a `torch.device`, and `None` for the current one.
  Each is tried for every device, with another device current.
- Devices that all have the same name for torch, as on a host, count as one.
- Two ranks on one device are refused by many communication backends. With one device the collectives are
  tried between two processes all the same, and where that fails, in one.

## The checks
"""
FAULTS_INTRODUCTION = """\
## Planted faults

Accelerators with one fault each (`tests/conformance/`), and the check that has to find it; a test holds that
it does. The CPU and the emulated accelerator without faults have no failure.

| accelerator | fault | found by |
|---|---|---|
"""


def table(category: str, found: list[Check]) -> str:
    """The checks of one category."""
    lines = [f"### {category}", "", "| check | what is promised | by |", "|---|---|---|"]
    for check in found:
        methods = (
            "all of the category" if check.name == "signatures" else ", ".join(map(code, check.observes))
        )
        lines.append(f"| {code(check.name)} | {check.promise} | {methods} |")
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """As Markdown's code."""
    return f"`{text}`"


def faults(path: Path, accelerator: str) -> list[str]:
    """Rows for the planted faults of a file, read without importing it, as it may need what is not here."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    explained = {node.name: ast.get_docstring(node) for node in module.body if isinstance(node, ast.ClassDef)}
    rows = []
    for node in module.body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            for mapping in [part for part in ast.walk(node.value) if isinstance(part, ast.Dict)]:
                for key, value in zip(mapping.keys, mapping.values, strict=True):
                    if isinstance(key, ast.Name) and isinstance(value, ast.Constant):
                        rows.append(f"| {accelerator} | {explained[key.id]} | {code(value.value)} |")
    return rows


def document() -> str:
    """The whole page."""
    by_category: dict[str, list[Check]] = {}
    for check in checks():
        by_category.setdefault(check.category, []).append(check)
    parts = [INTRODUCTION, *(table(category, found) for category, found in by_category.items())]
    files = (("mutants.py", "CPU"), ("state_mutants.py", "CPU"), ("sim_mutants.py", "sim"))
    rows = [row for name, accelerator in files for row in faults(FAULTS / name, accelerator)]
    return "\n".join([*parts, FAULTS_INTRODUCTION + "\n".join(rows)]) + "\n"


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    args = parser.parse_args()
    page = document()
    if args.check:
        current = TARGET.exists() and TARGET.read_text(encoding="utf-8") == page
        state = "up to date" if current else "out of date: run python docs/make_conformance.py"
        print(f"{TARGET.name} is {state}.")
        return 0 if current else 1
    TARGET.write_text(page, encoding="utf-8")
    print(f"wrote {TARGET.name}: {len(checks())} checks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
