"""torch's own tests of a device from outside, run on sim, with the reason for each that does not pass.

    python tests/openreg.py --tests FOLDER

FOLDER is ``test/cpp_extensions/open_registration_extension/torch_openreg/tests`` of a checkout of torch, best
of the version that is installed. They are torch's tests of its example of such a device, "openreg"; here that
name is replaced by sim's. Exits with 1 where a test fails without a known reason.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 600

KNOWN = {
    "custom_autograd_fn|compile_autograd_function|custom_abs": "an operator that only openreg has",
    "poison_fork": "openreg refuses to work in a forked child; sim's host memory works there, so it does not",
    "TestFactory::test_empty$": "torch.empty of this torch takes no names=, on no device",
    "metadata_propagation|fake_tensor_metadata|copy_backend_meta": (
        "torch 2.13 neither gives a fake tensor the flags of its tensor, nor copies them"
    ),
    "test_device_properties": "torch.accelerator.get_memory_info of torch 2.13 returns a tuple",
    "OCCL|occl": "the communication backend that only openreg has",
    "TestIpcWorkflow": "sim does not share the memory of a tensor between processes",
}
"""By a pattern of the test's name, why it does not pass on sim."""

REPLACED = (("openreg", "sim"), ("OpenReg", "Sim"), ("OPENREG", "SIM"))
CHOOSES_SIM = "from acclimate import get_accelerator\n\nget_accelerator()\n"


@dataclass(frozen=True)
class Outcome:
    """What became of one test."""

    name: str
    verdict: str
    """passed, failed or skipped."""
    reason: str = ""

    @property
    def known_reason(self) -> str | None:
        """Why sim does not do what this test wants, where that is known."""
        return next((why for pattern, why in KNOWN.items() if re.search(pattern, self.name)), None)


def copy_with_name_replaced(tests: Path, target: Path) -> list[Path]:
    """The test files, about sim, in another folder."""
    copies = []
    for file in sorted(tests.glob("test_*.py")):
        text = file.read_text()
        for name, ours in REPLACED:
            text = text.replace(name, ours)
        copies.append(target / file.name)
        copies[-1].write_text(text)
    (target / "conftest.py").write_text(CHOOSES_SIM)
    (target / "torch_sim.py").write_text(CHOOSES_SIM)  # which the tests import as torch_openreg
    return copies


def run_file(file: Path) -> Iterator[Outcome]:
    """Runs one file's tests in a process of their own."""
    report = file.with_suffix(".xml")
    env = {**os.environ, "ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", file]
    try:
        ran = subprocess.run(
            command, cwd=file.parent, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield Outcome(file.stem, "failed", f"did not end within {TIMEOUT_S} s")
        return
    if not report.exists():
        yield Outcome(
            file.stem, "failed", f"ended with {ran.returncode}: {last_line(ran.stdout + ran.stderr)}"
        )
        return
    for case in ElementTree.parse(report).iter("testcase"):
        yield outcome_of(file.stem, case)


def outcome_of(module: str, case: ElementTree.Element) -> Outcome:
    """What pytest's report says of one test."""
    name = f"{module}::{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
    for tag, verdict in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
        if (part := case.find(tag)) is not None:
            return Outcome(name, verdict, " ".join((part.get("message") or "").split())[:200])
    return Outcome(name, "passed")


def last_line(text: str) -> str:
    """What a program said last."""
    return (text.strip().splitlines() or ["nothing"])[-1]


def print_table(outcomes: list[Outcome]) -> bool:
    """Prints the counts and each test that did not pass; whether each that failed has a known reason."""
    for outcome in outcomes:
        if outcome.verdict != "passed":
            known = outcome.known_reason if outcome.verdict == "failed" else None
            sys.stdout.write(f"{outcome.verdict:8} {outcome.name}: {known or outcome.reason}\n")
    counts = Counter(outcome.verdict for outcome in outcomes)
    unknown = [o for o in outcomes if o.verdict == "failed" and o.known_reason is None]
    sys.stdout.write(
        f"{len(outcomes)} tests: {counts['passed']} passed, {counts['failed']} failed "
        f"({len(unknown)} of them without a known reason), {counts['skipped']} skipped\n"
    )
    return not unknown


def main() -> int:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(description="Runs torch's tests of a device from outside on sim.")
    parser.add_argument("--tests", type=Path, required=True, help="the folder of torch's checkout")
    parser.add_argument("files", nargs="*", help="names such as test_rng.py; all of the folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copies = copy_with_name_replaced(options.tests, Path(folder))
        if not copies:
            parser.error(f"{options.tests} has no test_*.py")
        chosen = [file for file in copies if not options.files or file.name in options.files]
        outcomes = [outcome for file in chosen for outcome in run_file(file)]
    return 0 if print_table(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
