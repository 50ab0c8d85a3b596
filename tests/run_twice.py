"""Runs pytest, and runs the tests that failed once more, alone: what `make test` calls.

Most tests start processes that other work can hold up. As with the test runner of CPython, a test that fails
beside others and passes alone does not fail the run; it is named, since it has a fault that has to be found.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

MOST = 5
"""More failures than this are no accident."""


def main(options: list[str]) -> int:
    """Returns pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pytest",
            *options,
            "-p",
            "cacheprovider",
            "-o",
            f"cache_dir={folder}",
        ]
        code = run(command)
        failed = read_failed(Path(folder))
        if code != 1 or not 0 < len(failed) <= MOST:
            return code
        say(f"\nonce more, alone: {', '.join(failed)}")
        code = run([*command, "--last-failed", "--numprocesses", "0"])
        left = set(read_failed(Path(folder)))
    for name in failed:
        say(f"failed beside other tests, and {'failed' if name in left else 'passed'} alone: {name}")
    return code


def run(command: list[str]) -> int:
    """Runs a program, which decides what an interrupt or the request to end does."""
    with subprocess.Popen(command) as process:

        def pass_on(number: int, frame: FrameType | None) -> None:
            process.send_signal(number)

        signal.signal(signal.SIGINT, lambda number, frame: None)  # a terminal sends it to both
        signal.signal(signal.SIGTERM, pass_on)
        return process.wait()


def say(text: str) -> None:
    """Writes a line at once, since pytest writes to the same place."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def read_failed(folder: Path) -> list[str]:
    """Returns the names of the tests that failed last, from pytest's cache."""
    file = folder / "v" / "cache" / "lastfailed"
    return sorted(json.loads(file.read_text())) if file.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
