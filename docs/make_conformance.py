"""Writes docs/conformance.md from the checks, and from the faults planted to test them.

python docs/make_conformance.py            writes it
python docs/make_conformance.py --check    exits 1 when it is not up to date
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

from acclimate_conformance.checks.check import Check
from acclimate_conformance.runner.catalog import checks

TARGET = Path(__file__).with_name("conformance.md")
FAULTS = Path(__file__).parents[1] / "tools" / "acclimate-conformance" / "tests"
INTRODUCTION = """\
# Conformance

The conformance suite checks whether an accelerator keeps every promise of the [interface](interface.md).
It is a package of its own: in a clone, `pip install ./tools/acclimate-conformance` after acclimate itself.
`python docs/make_conformance.py` generates this page from the checks; a test keeps it up to date.

    acclimate conformance                               the accelerator of this machine
    acclimate conformance --accelerator NAME            another one
    acclimate conformance --accelerator module:Class    one that is not registered
    acclimate conformance --only memory --only random/seeds
    acclimate conformance --report out.html --json results.json --junit results.xml

The exit code is 0 if no check failed, 1 if one did, 2 if the accelerator cannot be loaded, an argument is
wrong or a file cannot be written, and 130 if Ctrl-C or SIGTERM interrupted the run. The results so far are
always shown, and written to all files that can be written.

`--report` writes one HTML file that needs no script and no network. It shows the counts by category and, for
each failure, what was observed, the calls of the interface that led to it, whose code has to change, and what
the interface says. It also shows which checks an interrupted run did not reach.

*To change* names the method at fault: the one that raised the error, else the one that the observation names, else
the one that all failing observations use and the others do not. A method that one check proves to be at fault is
named by the failing checks that use it too. A call that changes something comes before one that only tells it, and
what explains several failures before what explains one. In place of a default of acclimate, it names the
vendor's method that the default called, or the one behind it that another failure names. If a check leaves torch in another state, such as without gradients, it
names the method whose `with` block ended last. For a collective it names the communication backend, for an op its
builder, for a wrong number the device's operator, for a field of the record the record. Failures with the same error or the same method are listed
together, such as "27 checks: this device has no complex64". If one rank of a collective ends, the others wait 5 s
for it, and the checks that they do not reach have one cause: which rank ended, where, and why.

Each check is a test of pytest, which the command runs in a worker of pytest-xdist. The JUnit XML is its own.
For a vendor's own continuous integration, the package installs a plugin for pytest:

    pytest --acclimate-accelerator NAME       the project's own tests and the checks
    pytest --pyargs acclimate_conformance     only the checks, of the accelerator that acclimate selects
    pytest -n1 --acclimate-accelerator NAME   the same in a worker, so that a crash fails one check only

## How it judges

- Checks observe behaviour: they allocate and see whether the figures change, save a state and draw again,
  change an input and replay. An attribute that exists proves nothing.
- **passed**: the device does what the interface says. A note says what could not be observed.
- **failed**: it does not. The reason says what was observed, followed by what the interface says.
- **not offered**: the device lacks the feature, and does not claim to have it. A device without streams,
  pinned memory or Triton is not at fault; one that claims a feature that it lacks is. Features that are not
  offered do not count in the score.
- A false claim is only found if it has an effect: if a device does its work before each call returns,
  checks cannot tell whether `handles_memory_backpressure()` and `resolves_data_dependency()` are true.
- The score is passed / (passed + failed), rounded down.
- The command runs checks in a separate process. A check fails if it crashes that process, exits, or exceeds
  its time limit, even in a call that holds Python's lock; the next check runs in a new process.
- After a check that fails, the process asks each device for a small result. If it gives none, as after an assert in
  a kernel of CUDA, the check is told so, and the next runs in a new process. A plain run of pytest, which cannot replace
  its process, says of the checks that are left after which one they were not run.
- A call with numbers that the host refuses is not made on the device, whose kernel may end its work in the process. One
  check makes such calls, in a process of its own: the error at the next wait is then as good as a refusal, and ends them.

Rules that may surprise:

- A device need not refuse a dtype that `supported_dtypes()` leaves out. bfloat16 and float16 are
  supported if the hardware has them; a device may emulate them, and the results must then be right. One that
  computes right in bfloat16 says so at least in `is_bf16_supported(including_emulation=True)`.
  float64 is supported if operators in float64 work at all, so it is a fault to leave it out if they
  compute right.
- No method of the interface says whether a device has int64, complex or other dtypes that `supported_dtypes()`
  cannot list. A check that needs one is *not offered* if the device refuses even a sum in that dtype.
- A device may compute with subnormal numbers or take them for zero. Copies and casts must keep them.
- Some checks run operators on the inputs of torch's own tests (`op_db`, `module_db` and `optim_db` of
  `torch.testing._internal`) and compare a device with the host. On a host these have nothing to compare, so they are
  *not offered*. If a device lacks an operator, a note says so. These checks run in a process of their own, since
  torch's modules of tests change torch.
- A host is compared with results that are known without torch, and with other ways to compute the same numbers: samples
  one by one, parts of a long tensor, slopes, and Python's sums and orders. So are devices, in a few seconds.
- The host rounds and overflows too. A number that differs from the host's is right if it is at least as near to what the
  host computes from the same inputs in float64.
- Within autocast, a result may be in float32 or in 16 bits where no dtype is asked for, and be off by a tenth of the
  largest. Operators on float64, in place and into tensors given as out must give what they give elsewhere.
- What torch leaves open is not compared: which of several equal numbers is chosen, the sign of a chosen zero, what a
  normalization saves for its backward pass, integers made of numbers beyond their dtype, and NaN or infinity where
  infinities are subtracted. Nor is an operator whose test in torch is marked as failing on this type of device. Of
  equal numbers, `argmax` and `argmin` must tell the first, as torch documents, and stable sorts keep their order.
- A few results of 16 bits may differ in the last digit. If many do, the device truncates, and fails. Running sums and
  products of 16 bits may be rounded after each step: their errors grow with the square root of the length.
- NCCL and similar backends have no tags of messages, and end the process after a time-out. Others keep both promises.
- A host has no allocator to ask, and its figures are those of the whole process. Allocations are therefore
  large (96 MiB), with a tolerance of an eighth for everything else that the process does.
- An allocator may reserve blocks of any size, take tensors from them, and keep one empty block. Reserved memory must
  then grow only if no block has room.
- If torch's allocator raises a plain `RuntimeError` when memory runs out, as on a host, `is_out_of_memory()`
  must distinguish it from every other error.
- A device's class says which features it lacks: `supports_streams`, `supports_graphs`,
  `supports_collectives` ([extension.md](extension.md)). If `supports_graphs` is false, `create_graph()`
  must raise an error.
- A method that takes a device takes an index, a name, a `torch.device`, and `None` for the current device.
  Each is tried for every device, while another device is current.
- Devices that have the same name in torch, as on a host, count as one.
- Many communication backends refuse two ranks on one device. With one device, collectives are tried
  between two processes first, and in one process if that fails.

## Profiles of the emulated device

`ACCLIMATE_SIM` ([extension.md](extension.md)) gives the emulated device other limits. With the profiles in this table
no check fails, but more are *not offered*. A slow test runs one profile of each row.

| profile | not offered |
|---|---|
| none, `sync=check`, `hpu-like`, `asserts` | what the emulated device lacks in any profile, such as Triton |
| `devices=…` | with one device, the checks that need a second |
| `no=float64`, `mps-like`, `v100-like`, `no=float8` | nothing more: checks take the dtypes that `supported_dtypes()` lists |
| `no=float16+bfloat16` | the checks of autocast |
| `no=complex` | the checks that copy complex numbers |
| `no=int64` | the checks that index, count, sort or draw integers |
| `memory=…`, 1 GiB or more | below 5 GiB, the check of figures beyond 32 bits |

## The checks
"""
FAULTS_INTRODUCTION = """\
## Planted faults

Each accelerator in `tools/acclimate-conformance/tests/` has one fault, and a test proves that the check named
here finds it.
The CPU and the emulated accelerator without faults pass all checks.

Such faults prove little, since their author knew the checks. So people who do not know the checks plant faults too. Of
their latest 216, each with a program that shows that it breaks a promise, the suite found 201 (93 %) before any check
was changed: 116 of a first 124, and 85 of the other 92, which are all faults of operators. In 32 of 40 reports chosen at
random the first line named the method or operator at fault. There was no false alarm on the CPU or the emulated device.
Checks of the 15 that it missed were added after that, so a new set has to tell how many it finds now. One cause was in
the comparison itself: torch marks attention as an operator that draws random numbers, so it was not compared. The suite
is known to miss, with two devices, a group that leaves a rank out. Before these additions a whole run took 39 to 44 s on
the CPU and 103 to 110 s on the emulated device (2 cores of an AMD EPYC).

Of a later set of 125, of all parts of the interface, it found 114 (91 %) before any check was changed: 40 of 44 faults of
operators, and 74 of 81 others. In 15 of 20 reports chosen at random the first line named what is at fault, although only
the one check that failed first was read. Of the 11 that it missed ten are found since then. The other is an operator that
raises a plain error when its result does not fit into the device's memory.

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
    """Text as Markdown code."""
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
    names = (
        "mutants.py", "state_mutants.py", "value_mutants.py", "argument_mutants.py", "edge_mutants.py",
        "communication_mutants.py",
    )  # fmt: skip
    files = [
        *((name, "CPU") for name in names),
        ("sim_mutants.py", "sim"),
        ("operator_mutants.py", "sim"),
        ("bounds_mutants.py", "sim"),
        ("detail_mutants.py", "sim"),
    ]
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
