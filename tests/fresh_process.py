"""Runs code in fresh processes that have imported torch, psutil and rich, in 40 ms each instead of 2 s.

One server imports them. Each run is a fork of it with folders, environment and output of its own, so what
a run imports, selects or breaks stays in it. Run as a script, this file is that server.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.metadata
import json
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOR_THE_RUNS = ("torch", "psutil", "rich.progress", "rich.table")

# Each would change which accelerator is selected, or what the CPU says of itself.
_UNWANTED = (
    "DS_ACCELERATOR",
    "ACCLIMATE_ACCELERATOR",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "COLUMNS",
)


def plain_environment() -> dict[str, str]:
    """This process's environment without what would select an accelerator."""
    return {name: value for name, value in os.environ.items() if name not in _UNWANTED}


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    returncode: int
    stdout: str
    stderr: str
    told: dict[str, Any]
    """What the code gave to ``tell(name=value)``."""


class FreshProcesses:
    """The server, and the runs it is asked for.

    Args:
        within: a context in which the server starts.
    """

    def __init__(self, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._within = within
        self._server = self._start()

    def _start(self) -> subprocess.Popen[str]:
        with self._within():
            return subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=plain_environment(),
                text=True,
                start_new_session=True,
            )

    def run(
        self, code: str, path: Sequence[Path] = (), env: Mapping[str, str] | None = None, timeout_s: int = 600
    ) -> Outcome:
        """Runs ``code`` with the folders of ``path`` in front of ``sys.path``.

        The code has a function ``tell(**values)``, whose values (of JSON's types) come back.
        """
        with tempfile.TemporaryDirectory() as folder:
            request = {
                "code": code,
                "path": [str(entry) for entry in path],
                "env": dict(env or {}),
                "timeout_s": timeout_s,
                "folder": folder,
            }
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            try:
                self._server.stdin.write(json.dumps(request) + "\n")
                self._server.stdin.flush()
                returncode = int(self._server.stdout.readline())
            except BaseException:  # the time limit of a test, which the next one must not pay for
                with suppress(ProcessLookupError):
                    os.killpg(self._server.pid, signal.SIGKILL)
                self.close()
                self._server = self._start()
                raise
            stdout, stderr, told = (
                (Path(folder) / name).read_text() for name in ("stdout", "stderr", "told.jsonl")
            )
        values: dict[str, Any] = {}
        for line in told.splitlines():
            values.update(json.loads(line))
        return Outcome(returncode, stdout, stderr, values)

    def check(self, code: str, **options: Any) -> Outcome:
        """As :meth:`run`, for code that has to end well."""
        outcome = self.run(code, **options)
        assert outcome.returncode == 0, f"exit code {outcome.returncode}\n{outcome.stdout}\n{outcome.stderr}"
        return outcome

    def close(self) -> None:
        """Ends the server."""
        self._server.communicate(timeout=30)


def _serve() -> None:
    for name in _FOR_THE_RUNS:
        importlib.import_module(name)
    gc.freeze()  # else every run would copy the pages that its garbage collector marks

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(request)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _run(request: dict[str, Any]) -> None:
    """Becomes the run; does not return."""
    atexit._clear()  # of the server, of which some take longer than many a run
    atexit.register(multiprocessing.util._exit_function)
    folder = Path(request["folder"])
    signal.alarm(request["timeout_s"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    told = (folder / "told.jsonl").open("w")

    def tell(**values: Any) -> None:
        told.write(json.dumps(values) + "\n")
        told.flush()

    _hide_installed_plug_ins(request["path"])
    os.environ.update(request["env"])
    tempfile.tempdir = None  # the server may have asked for it, and its environment is another one
    os.chdir(folder)
    sys.path[:] = [*request["path"], *(entry for entry in sys.path if entry != str(Path(__file__).parent))]
    code = 1
    try:
        exec(compile(request["code"], "<run>", "exec"), {"__name__": "__main__", "tell": tell})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()  # they remove temporary folders
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _hide_installed_plug_ins(path: Sequence[str]) -> None:
    """Leaves only the backends that the run's own folders hold, whatever is installed beside acclimate."""
    find = importlib.metadata.entry_points

    def all_entry_points() -> Iterator[importlib.metadata.EntryPoint]:
        for distribution in importlib.metadata.distributions():
            yield from distribution.entry_points

    def entry_points(**selection: Any) -> Any:
        # Up to Python 3.11 a call without a selection, as triton makes one, gives a dictionary of groups.
        found = find(**selection) if selection else all_entry_points()
        return importlib.metadata.EntryPoints(
            point
            for point in found
            if point.group != "acclimate.backends" or str(point.dist.locate_file("")) in path
        )

    importlib.metadata.entry_points = entry_points


if __name__ == "__main__":
    _serve()
