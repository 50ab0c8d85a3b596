"""Runs DeepSpeed's own unit tests on its accelerator and on ours, and prints counts and differences.

    python tests/compat/deepspeed_unit.py CHECKOUT [--on own cpu sim cpu+ops] [PART...]

CHECKOUT is a clone of DeepSpeed's repository, at or near the release that this Python has; nothing of it is
kept here. A part is a file or folder of tests, and may go on with options of pytest: 'unit/comm -k init'.
``own`` is DeepSpeed's CPU accelerator; the others are ours, ``+ops`` with our op builders too.
With ``--results FILE``, what was run is kept there, and the next call runs only what is missing.
The exit code is 1 if a test fails that passes on the first accelerator, or if some did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from acclimate.compat.deepspeed import OPS_VARIABLE, child_environment

PARTS = (
    "unit/v1/accelerator",
    "unit/launcher",
    "unit/utils",
    "unit/comm -k 'comms_logger or TestInit or DistArgs or world_size_1'",
    "unit/ops/adam/test_cpu_adam.py -k 'bf16_optimizer_states or subgroup_basic and bf16 and not 128'",
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
    "unit/checkpoint/test_lr_scheduler.py -k '2-True or 3-True'",
    "unit/checkpoint/test_other_optimizer.py",
    "unit/checkpoint/test_shared_weights.py",
    "unit/checkpoint/test_sparse.py",
    "unit/checkpoint/test_tag_validation.py",
    "unit/checkpoint/test_zero_optimizer.py"
    " -k 'immediate_save_load and (2 or 3) or elastic_checkpoint_is_deprecated'",
    "unit/runtime/zero/test_ignore_unused_parameters.py",
    "unit/runtime/zero/test_unwrap_model.py",
    "unit/runtime/zero/test_zero_config.py",
    "unit/runtime/zero/test_zero_context.py -k 'multiple_all or GatheredParametersFree or SerialContext'",
    "unit/runtime/zero/test_zero_context_ancestry.py",
    "unit/runtime/zero/test_zero_context_return.py",
    "unit/runtime/zero/test_zero_dynamic_class.py",
    "unit/runtime/zero/test_zero_nesting_init.py",
    "unit/runtime/zero/test_zero_tiled.py",
)
"""Those that need no GPU: each some minutes of one processor. Five of them are a selection, one test of each
kind, as the whole takes hours. Give a part without ``-k`` to run it whole."""

Outcomes = dict[str, tuple[str, str]]
"""For each test: ``passed``, ``failed``, ``skipped`` or ``not run``, and a line that says why."""
Results = dict[str, dict[str, Outcomes]]
"""Outcomes by part and accelerator."""


PLUGIN = Path(__file__).with_name("deepspeed_outcomes.py")
TEST_LIMIT_S = 150
BUFFERS = Path("/dev/shm")
"""Where a killed run of DeepSpeed leaves 69 MB for each group of ranks."""


def environment(on: str, folder: Path) -> dict[str, str]:
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
        "PYTHONPATH": str(folder),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "ACCLIMATE_OUTCOMES": str(folder / "outcomes"),
        "TORCH_EXTENSIONS_DIR": str(extensions()),
    }
    if accelerator != "own":
        wanted |= child_environment(str(folder)) | {OPS_VARIABLE: str(int(ops == "ops"))}
    return {**os.environ, **wanted}


def extensions() -> Path:
    """Returns the folder of the compiled ops, which all runs in this environment share."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(sys.prefix, "extensions"))


def outcomes(tests: Path, part: Sequence[str], on: str, limit_s: int) -> Outcomes:
    """Runs a part, in at most some seconds more than the limit, and returns what became of each test."""
    for lock in extensions().glob("*/lock"):
        lock.unlink()  # of a process that was killed while it compiled: torch waits for it without end
    buffers = set(BUFFERS.glob("deepspeed_allreduce_buffer*"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(PLUGIN, folder)
        options = [
            "-q",
            "--continue-on-collection-errors",
            "-p",
            "no:cacheprovider",
            "-p",
            PLUGIN.stem,
            f"--timeout={TEST_LIMIT_S}",
            f"--session-timeout={limit_s}",
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *part],
            cwd=tests,
            env=environment(on, folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=limit_s + 2 * TEST_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        for buffer in set(BUFFERS.glob("deepspeed_allreduce_buffer*")) - buffers:
            buffer.unlink(missing_ok=True)
        written = folder / "outcomes"
        lines = written.read_text().splitlines() if written.exists() else []
        ended = f"pytest ended with code {process.returncode}: {said[-300:]!r}"
        return {test: (became, why) for test, became, why in map(json.loads, lines)} or {
            part[0]: ("failed", ended)
        }


def missing(ran: Outcomes) -> list[str]:
    return [name for name, (became, _) in ran.items() if became == "not run"]


def main() -> int:
    """Reads the command line and runs the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART", default=PARTS)
    parser.add_argument("--on", nargs="+", default=["own", "cpu", "sim"])
    parser.add_argument("--limit", type=int, default=3600, metavar="S", help="seconds for each part")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON; where to keep what was run")
    arguments = parser.parse_args()
    if not (arguments.checkout / "tests" / "unit").is_dir():
        parser.error(f"{arguments.checkout} is no clone of DeepSpeed: it has no folder tests/unit.")
    known: Results = {}
    if arguments.results and arguments.results.exists():
        known = json.loads(arguments.results.read_text())
        say(f"What {arguments.results} has is not run again. Remove the file to run all.")
    with tempfile.TemporaryDirectory() as folder:
        # Away from the checkout: DeepSpeed imports the "accelerator" that lies beside the tests.
        tests = shutil.copytree(arguments.checkout / "tests", Path(folder, "tests"))
        for part in arguments.parts:
            for on in arguments.on:
                ran = known.setdefault(part, {})
                before = ran.get(on, {})
                left = missing(before) if before else shlex.split(part)
                if left:
                    ran[on] = before | outcomes(tests, left, on, arguments.limit)
                    if arguments.results:
                        arguments.results.write_text(json.dumps(known, indent=1))
                say(f"{part}\n  {on:8} {counts(ran[on].values())}")
    return compare([known[part] for part in arguments.parts], arguments.on)


def compare(ran: Sequence[dict[str, Outcomes]], loads: Sequence[str]) -> int:
    """Prints the counts of each accelerator, and the tests that differ, by reason."""
    found = {on: {name: outcome for part in ran for name, outcome in part[on].items()} for on in loads}
    say(f"\nAll {len(ran)} parts:")
    for on, results in found.items():
        say(f"  {on:8} {counts(results.values())}")
    first, *others = loads
    worse = 0
    differences: dict[str, list[str]] = defaultdict(list)
    for on in others:
        for name in sorted(found[first].keys() | found[on].keys()):
            theirs, ours = (found[load].get(name, ("not there", "")) for load in (first, on))
            if theirs[0] != ours[0]:
                worse += theirs[0] == "passed" and ours[0] != "not run"
                differences[f"{first}: {' '.join(theirs)}\n{on}: {' '.join(ours)}"].append(name)
    for difference, names in differences.items():
        say("\n  ".join([f"\n{difference}", *names]))
    unfinished = sum(len(missing(item)) for item in found.values())
    say(f"\n{worse} tests pass on {first} and do not on another; {unfinished} did not run.")
    return 1 if worse or unfinished else 0


def say(line: str = "") -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def counts(ran: Iterable[tuple[str, str]]) -> str:
    number = Counter(became for became, _ in ran)
    shown = ["passed", "failed", "skipped", *(["not run"] if number["not run"] else [])]
    return " / ".join(f"{number[became]} {became}" for became in shown)


if __name__ == "__main__":
    sys.exit(main())
