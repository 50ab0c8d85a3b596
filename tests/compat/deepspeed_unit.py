"""Runs DeepSpeed's own unit tests on its accelerator and on ours, and prints counts and differences.

    python tests/compat/deepspeed_unit.py CHECKOUT [--on own cpu sim cpu+ops] [PART...]

CHECKOUT is a clone of DeepSpeed's repository, at or near the release that this Python has; nothing of it is
kept here. A part is a file or folder of tests, and may go on with options of pytest: ``'unit/comm -k init'``.
``own`` is DeepSpeed's CPU accelerator; the others are ours, ``+ops`` with our op builders too.
With ``--results FILE``, what was run is kept there, and is not run again by the next call.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from acclimate.compat.deepspeed import OPS_VARIABLE, child_environment

FILES = (
    "unit/v1/accelerator",
    "unit/launcher",
    "unit/utils",
    "unit/comm",
    "unit/ops/adam/test_cpu_adam.py",
    "unit/ops/adam/test_hybrid_adam.py",
    "unit/ops/adagrad",
    "unit/ops/lion",
    "unit/ops/accelerators",
    "unit/v1/nvme",
    "unit/v1/pin_memory",
    "unit/elasticity",
    "unit/runtime/test_ds_config_dict.py",
    "unit/runtime/test_ds_config_model.py",
    "unit/runtime/test_data.py",
    "unit/runtime/test_runtime_utils.py",
    "unit/runtime/test_autocast.py",
    "unit/runtime/activation_checkpointing/test_activation_checkpointing.py",
    "unit/checkpoint/test_latest_checkpoint.py",
    "unit/checkpoint/test_lr_scheduler.py",
    "unit/checkpoint/test_other_optimizer.py",
    "unit/checkpoint/test_shared_weights.py",
    "unit/checkpoint/test_sparse.py",
    "unit/checkpoint/test_tag_validation.py",
    "unit/checkpoint/test_zero_optimizer.py",
    "unit/runtime/zero/test_ignore_unused_parameters.py",
    "unit/runtime/zero/test_unwrap_model.py",
    "unit/runtime/zero/test_zero_config.py",
    "unit/runtime/zero/test_zero_context.py",
    "unit/runtime/zero/test_zero_context_ancestry.py",
    "unit/runtime/zero/test_zero_context_return.py",
    "unit/runtime/zero/test_zero_dynamic_class.py",
    "unit/runtime/zero/test_zero_nesting_init.py",
    "unit/runtime/zero/test_zero_tiled.py",
)
"""Those that need no GPU: each some minutes of one processor."""

PRELOAD = "import multiprocessing as m; m.set_forkserver_preload(['deepspeed', 'numpy', 'pytest'])"
"""A module for pytest's ``-p``. The tests start ranks from a fork server, and each would import DeepSpeed."""

Outcomes = dict[str, tuple[str, str]]
"""For each test: ``passed``, ``failed``, ``skipped``, and a line that says why."""
Results = dict[str, dict[str, Outcomes]]
"""Outcomes by file of tests and accelerator."""


def environment(on: str, preload: Path) -> dict[str, str]:
    """Returns the variables of a run: the same for all, except what chooses the accelerator."""
    accelerator, _, ops = on.partition("+")
    wanted = {
        # Both count devices by it on the CPU, and the emulated device has two.
        "LOCAL_SIZE": "2",
        # Else the tests ask a vendor's tool, or stop for a device that they do not know.
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "1",
        "DS_UNITTEST_TIMEOUT": "120",
        "DS_ACCELERATOR": "cpu" if accelerator == "own" else accelerator,
        "PYTHONPATH": str(preload),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    if accelerator != "own":
        wanted |= child_environment(str(preload)) | {OPS_VARIABLE: str(int(ops == "ops"))}
    return {**os.environ, **wanted}


def outcomes(tests: Path, file: str, on: str, limit_s: int) -> Outcomes:
    """Runs one file of tests and returns what became of each; those after the limit are absent."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "preload_deepspeed.py").write_text(PRELOAD)
        report = Path(folder, "report.xml")
        options = [
            "-q",
            "--continue-on-collection-errors",
            "-p",
            "no:cacheprovider",
            "-p",
            "preload_deepspeed",
            f"--junitxml={report}",
            "--timeout=150",
            f"--session-timeout={limit_s}",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *shlex.split(file)],
            cwd=tests,
            env=environment(on, Path(folder)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if not report.exists():
            return {file: ("failed", f"pytest ended with code {done.returncode}: {done.stdout[-300:]!r}")}
        return dict(map(outcome, ElementTree.parse(report).iter("testcase")))


def outcome(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    name = f"{case.get('classname')}::{case.get('name')}"
    for tag, became in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            text = found.get("message") or ""
            errors = [line for line in (found.text or "").splitlines() if line.startswith("E  ")]
            return name, (became, " ".join([*text.split(), *errors[-1:]])[:300])
    return name, ("passed", "")


def main() -> int:
    """Reads the command line and runs the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", metavar="PART", default=FILES)
    parser.add_argument("--on", nargs="+", default=["own", "cpu", "sim"])
    parser.add_argument("--limit", type=int, default=3600, metavar="S", help="seconds for each part")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON; where to keep what was run")
    arguments = parser.parse_args()
    known: Results = {}
    if arguments.results and arguments.results.exists():
        known = json.loads(arguments.results.read_text())
    with tempfile.TemporaryDirectory() as folder:
        # Away from the checkout: DeepSpeed imports the "accelerator" that lies beside the tests.
        tests = shutil.copytree(arguments.checkout / "tests", Path(folder, "tests"))
        for file in arguments.files:
            for on in arguments.on:
                ran = known.setdefault(file, {})
                if on not in ran:
                    ran[on] = outcomes(tests, file, on, arguments.limit)
                    if arguments.results:
                        arguments.results.write_text(json.dumps(known, indent=1))
                say(f"{file:70} {on:8} {counts(ran[on])}")
    return compare([known[file] for file in arguments.files], arguments.on)


def compare(ran: Sequence[dict[str, Outcomes]], loads: Sequence[str]) -> int:
    """Prints the counts of each accelerator, and every test that differs; returns 1 where ours fails more."""
    found = {on: {name: each for file in ran for name, each in file[on].items()} for on in loads}
    say()
    for on, each in found.items():
        say(f"{on:8} {counts(each)}")
    first, *others = loads
    worse = 0
    for on in others:
        for name in sorted(found[first].keys() | found[on].keys()):
            theirs, ours = (found[each].get(name, ("absent", "")) for each in (first, on))
            if theirs[0] != ours[0]:
                worse += theirs[0] == "passed"
                say(f"\n{name}\n  {first}: {theirs[0]} {theirs[1]}\n  {on}: {ours[0]} {ours[1]}")
    return 1 if worse else 0


def say(line: str = "") -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def counts(ran: Outcomes) -> str:
    number = Counter(became for became, _ in ran.values())
    return " / ".join(f"{number[became]} {became}" for became in ("passed", "failed", "skipped"))


if __name__ == "__main__":
    sys.exit(main())
