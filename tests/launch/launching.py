"""Runs `acclimate run` as a user would, and looks at which processes are left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fresh_process import plain_environment

MARK = "ACCLIMATE_TEST_MARK"
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
PATIENCE_S = 30.0
"""How long a busy machine may take for what should take milliseconds."""


def command(ranks: int, code: str, *options: str) -> list[str]:
    """`acclimate run` of some ranks that each run a piece of Python."""
    launcher = [sys.executable, "-m", "acclimate", "run", "--num_accelerators", str(ranks), *options]
    return [*launcher, "--no_python", sys.executable, "-c", code]


def environment(**variables: str) -> dict[str, str]:
    """This process's, without what an outer launcher or a shell would tell the ranks."""
    kept = {name: value for name, value in plain_environment().items() if name not in _OF_A_LAUNCHER}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **variables}


@dataclass
class Launched:
    """A running `acclimate run`."""

    process: subprocess.Popen[bytes]
    mark: str

    def living(self) -> dict[int, str]:
        """Its processes that are not zombies, with their command lines."""
        return living(self.mark)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)

    def read(self, timeout_s: float = PATIENCE_S) -> tuple[str, str]:
        """What it wrote until its end."""
        stdout, stderr = self.process.communicate(timeout=timeout_s)
        return stdout.decode(errors="replace"), stderr.decode(errors="replace")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@contextmanager
def launched(arguments: list[str], **settings: Any) -> Iterator[Launched]:
    """Starts it in a session of its own; kills whatever is left at the end."""
    mark = uuid.uuid4().hex
    options: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "start_new_session": True,
        **settings,
    }
    env = environment(**{MARK: mark, **options.pop("variables", {})})
    process = subprocess.Popen(arguments, env=env, **options)
    try:
        yield Launched(process, mark)
    finally:
        for _ in range(100):
            left = living(mark)
            if not left:
                break
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        process.kill()
        for stream in (process.stdout, process.stderr, process.stdin):
            if stream is not None:
                stream.close()
        process.wait()


def run(ranks: int, code: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ranks to their end."""
    return subprocess.run(
        command(ranks, code, *options),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment(**variables),
        timeout=2 * PATIENCE_S,
    )


def living(mark: str) -> dict[int, str]:
    """Every process whose environment holds the mark, zombies left out."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if wanted not in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                continue
            stat = Path(f"/proc/{name}/stat").read_text()
            cmdline = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if stat.rpartition(")")[2].split()[0] not in "ZX":
            found[int(name)] = cmdline
    return found


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Waits for something that is about to happen."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, f"waited in vain for: {what}"
        time.sleep(0.01)


def names_in(folder: Path) -> set[str]:
    """Files that ranks made to say that they are there; one that is being written counts when it is done."""
    return {path.name for path in folder.iterdir()}
