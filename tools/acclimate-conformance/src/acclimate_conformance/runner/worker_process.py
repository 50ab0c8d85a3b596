"""Communicates with the worker process: requests checks, reads results, and reports how the process ended."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import IO, Any

import psutil

from acclimate.host.process_status import how_it_ended
from acclimate_conformance.processes import inherited_path

_REAPING_S = 5  # how long a process that closed its output may take to end


class WorkerDiedError(Exception):
    """The worker ended, or was ended, before it answered; the message says how."""


class WorkerProcess:
    """A process of :mod:`acclimate_conformance.runner.worker`.

    Args:
        source: which accelerator it loads.
        output: a file that receives what it and its children write.
    """

    def __init__(self, source: str, output: IO[bytes]) -> None:
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "acclimate_conformance.runner.worker", source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**os.environ, "PYTHONPATH": inherited_path()},
            start_new_session=True,  # a group of its own, which can be ended as a whole
        )

    def ask(self, question: str, timeout_s: float) -> dict[str, Any]:
        """Sends a line and waits for the answer.

        Raises:
            WorkerDiedError: there was none, and the process has ended.
        """
        stdin = self._process.stdin
        if stdin is not None:
            with suppress(BrokenPipeError):  # then there is no answer either
                stdin.write(question.encode() + b"\n")
                stdin.flush()
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Waits for the next answer.

        Raises:
            WorkerDiedError: there was none, and the process has ended.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            chunk = self._read(max(0.0, deadline - time.monotonic()))
            if chunk is None:
                self._process.send_signal(signal.SIGABRT)  # makes it write where it was
                self._end()
                raise WorkerDiedError(f"it did not finish within {timeout_s:g} s")
            if not chunk:
                raise WorkerDiedError(f"its process {self._end()}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the process and all processes that it started."""
        self._process.kill()
        self._end()

    def _read(self, timeout_s: float) -> bytes | None:
        """The output of the process; empty if it ended, ``None`` if it took too long."""
        stdout = self._process.stdout
        if stdout is None:
            return b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            return os.read(stdout.fileno(), 65536) if selector.select(timeout_s) else None

    def _end(self) -> str:
        """Waits for the process to end, kills it if it does not, and says how it ended."""
        process = self._process
        try:
            process.wait(_REAPING_S)
        except subprocess.TimeoutExpired:
            process.kill()
        end_group(process.pid)  # what a check started and did not end
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        return how_it_ended(process.returncode)


def end_group(group: int) -> None:
    """Kills the processes of a group and waits until they have ended, which takes a moment."""
    deadline = time.monotonic() + _REAPING_S
    with suppress(ProcessLookupError, PermissionError):  # there is none
        os.killpg(group, signal.SIGKILL)
        while _runs(group) and time.monotonic() < deadline:
            time.sleep(0.01)
            os.killpg(group, signal.SIGKILL)


def _runs(group: int) -> bool:
    """Whether a process of a group is alive; a zombie is not."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
