"""Runs `acclimate run` as a user would, and finds the processes that are left."""

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
PATIENCE_S = 240.0
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


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Waits for something that is about to happen."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"waited in vain for: {what}"
        time.sleep(0.01)


def names_in(folder: Path) -> set[str]:
    """Files that ranks made to say that they are there; one that is being written counts when it is done."""
    return {path.name for path in folder.iterdir()}


READY = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path({folder!r})
def ready(name=None):
    (folder / (name or f"ready{{rank}}")).write_text(str(os.getpid()))
def wait():
    while True: time.sleep(0.05)  # Python misses a signal that comes just before a long sleep
"""
"""How each of these ranks begins: it tells that it is ready by a file with its pid."""


def ranks_code(folder: Path, text: str) -> str:
    return READY.format(folder=str(folder)) + text


def pid_in(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text(), f"{path.name} with a pid")
    return int(path.read_text())


def all_ready(folder: Path, ranks: int) -> None:
    wait_until(lambda: {f"ready{rank}" for rank in range(ranks)} <= names_in(folder), "all ranks to be ready")


FAMILY = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
deaf = subprocess.Popen([sys.executable, "-c", '''
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
open(os.environ["DEAF"], "w").write(str(os.getpid()))
time.sleep(600)
'''], env={**os.environ, "DEAF": str(folder / f"deaf{rank}")})
if os.fork() == 0:  # a daemon: a session of its own, and a parent that is gone
    os.setsid()
    if os.fork() == 0:
        ready(f"daemon{rank}")
        time.sleep(600)
    os._exit(0)
while not ((folder / f"deaf{rank}").exists() and (folder / f"daemon{rank}").exists()): time.sleep(0.01)
"""
"""A rank's children: one in its process group, one that ignores all but SIGKILL, and a daemon."""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def assert_nothing_is_left(job: Launched) -> None:
    wait_until(lambda: not job.living(), f"the end of {job.living()}")
