"""Child processes, for checks that need a new process: of selection, a fork, several ranks.

Run as a module, this file is such a child.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import pkgutil
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from acclimate.host.process_status import how_it_ended
from acclimate_conformance.checks.assertions import BrokenPromiseError
from acclimate_conformance.processes import inherited_path, own_channel, tail

_POLL_S = 0.01
_RAISED = 98
_TELLING_S = 2.0  # how long a process may take to write which call it is in
_STACK = "Stack (most recent call first):\n"  # as faulthandler writes it
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_CHECKS = str(Path(__file__).parent)


class Child:
    """A task that runs in its own process.

    Args:
        task: ``"module:function"``, called with ``source`` and ``arguments``.
        source: the argument of :func:`acclimate_conformance.checks.target.load`.
        arguments: values that JSON can express.
        environment: the variables of the process; this process's if ``None``.
    """

    def __init__(
        self,
        task: str,
        source: str,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        variables = dict(os.environ if environment is None else environment)
        # Files, since a process that the task leaves behind would keep a pipe open for as long as it runs.
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - both are closed by result()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, task, source, json.dumps(dict(arguments or {}))],
            stdin=subprocess.DEVNULL,
            stdout=self._answer,
            stderr=self._errors,
            env={**variables, "PYTHONPATH": inherited_path()},
        )

    def result(self, timeout_s: float = 150) -> Any:
        """Waits for the task and returns its result.

        Args:
            timeout_s: seconds to wait.

        Raises:
            BrokenPromiseError: the task found a promise broken, raised, crashed, or took too long.
        """
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            said = self._said()
            where = self._where()
            self.stop()
            raise BrokenPromiseError(
                f"a child process did not finish within {timeout_s:.0f} s{where}{said}"
            ) from None
        finally:
            said = self._said()
            self._errors.close()
            self._answer.seek(0)
            told = self._answer.read()
            self._answer.close()
        if not told:
            raise BrokenPromiseError(f"a child process {how_it_ended(self._process.returncode)}{said}")
        answer = json.loads(told)
        if "broken" in answer:
            raise BrokenPromiseError(answer["broken"])
        if "error" in answer:
            raise BrokenPromiseError(f"in a child process: {answer['error']}")
        return answer["result"]

    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def ended_well(self) -> bool:
        """Whether the process has ended with exit code 0."""
        return self._process.poll() == 0

    def exit_code(self) -> int | None:
        """The exit code of the process, negative for a signal; ``None`` while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ends the process, and those that it has started."""
        started = []
        with suppress(psutil.Error):
            started = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for process in started:
            with suppress(psutil.Error):
                process.kill()
        self._process.wait()

    def _where(self) -> str:
        """The call that the process is in, as text; empty if unknown."""
        self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _TELLING_S
        frames: list[tuple[str, str, str]] = []
        while time.monotonic() < deadline:
            stack = tail(self._errors, lines=200).partition(_STACK)[2]
            found = _FRAME.findall(stack)
            if found and found == frames:  # it has written all of it
                break
            frames = found
            time.sleep(0.1)
        if not frames:
            return ""
        file, line, function = frames[0]
        text = f", and was in {function} (line {line} of {Path(file).name})"
        checks = ((file, int(line)) for file, line, _ in frames if file.startswith(_CHECKS))
        ours = next((place for place in checks if place[0] != __file__), None)
        if ours is not None and ours != (file, int(line)):
            text += f", called by: {linecache.getline(*ours).strip()}"
        return text

    def _said(self) -> str:
        text = tail(self._errors, lines=3)
        return f"; it wrote: {text}" if text else ""


def in_fork(call: Callable[[], int], limit_s: float) -> int | None:
    """Makes a call in a fork of this process.

    A lock that another thread holds while the process forks is never released in the child, which may wait
    for it before it makes the call: no alarm of the child's ends that.

    Args:
        call: returns an exit code; if it raises, the exit code is 98.
        limit_s: after so many seconds the child is killed.

    Returns:
        Its exit code, negative for a signal; ``None`` if it did not end in time.

    Raises:
        ChildProcessError: something else has taken its exit code.
    """
    child = os.fork()
    if child == 0:
        code = _RAISED
        with suppress(BaseException):
            code = call()
        os._exit(code)
    deadline = time.monotonic() + limit_s
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(_POLL_S)
    return os.waitstatus_to_exitcode(ended[1])


def _main(task: str, source: str, arguments: str) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    channel = own_channel()
    try:
        # The task loads the accelerator itself: some check what happens between loading and first use.
        result = pkgutil.resolve_name(task)(source, **json.loads(arguments))
        answer = {"result": result}
    except BrokenPromiseError as broken:
        answer = {"broken": str(broken)}
    except Exception as error:  # noqa: BLE001 - becomes the reason of the check
        answer = {"error": f"{type(error).__name__}: {error}"}
    channel.write(json.dumps(answer))
    channel.flush()
    if isinstance(answer.get("result"), dict):
        sys.exit(answer["result"].get("exits_with", 0))


if __name__ == "__main__":
    _main(*sys.argv[1:])
