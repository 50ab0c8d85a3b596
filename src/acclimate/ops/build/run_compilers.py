"""Runs compilers, each in a process group of its own, and kills them with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from acclimate.errors import InvalidEnvironmentError, OpBuildError, excerpt

# Reads the running process groups, one line at each change; at the end of input kills those of the last line.
_WATCHER = 'while read -r line; do groups=$line; done; [ -z "$groups" ] || kill -s KILL -- $groups'
# A compiler starts once the watcher knows its process group, and not at all if this process is killed before.
_WAITING = 'read -r go && exec "$@" </dev/null'


def build_timeout_s() -> float:
    """Returns ``ACCLIMATE_BUILD_TIMEOUT``, the time limit for another process's build and for one compiler.

    Raises:
        InvalidEnvironmentError: it is not a number of 0 or more.
    """
    text = os.environ.get("ACCLIMATE_BUILD_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise InvalidEnvironmentError(
            f'ACCLIMATE_BUILD_TIMEOUT is "{excerpt(text)}", but must be a number of seconds, 0 or more.'
        )
    return seconds


class Compilers:
    """Runs compilers from several threads; the end of the ``with`` block kills them and their children.

    If this process dies, a shell that waits for its end kills their process groups. A ``timeout_s`` of 0 is
    none.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s or None
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._watcher: subprocess.Popen[bytes] | None = None
        self._is_over = False

    def __enter__(self) -> Compilers:
        with contextlib.suppress(OSError):  # there is no shell
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHER],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # outlives this process's group
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kills the running compilers, and lets no other start."""
        with self._lock:
            self._is_over = True
            for process in self._running:
                _kill(process)
            self._running.clear()
            if self._watcher is not None and self._watcher.stdin is not None:
                self._tell_watcher()
                self._watcher.stdin.close()
                self._watcher.wait()
                self._watcher = None

    def _tell_watcher(self) -> None:
        if self._watcher is not None and self._watcher.stdin is not None:
            groups = " ".join(f"-{process.pid}" for process in self._running)
            with contextlib.suppress(OSError):  # something has killed it
                self._watcher.stdin.write(f"{groups}\n".encode())

    def run(self, command: Sequence[str], folder: Path | None = None) -> tuple[int, str]:
        """Runs a compiler in a folder, also for temporary files, and waits for it.

        Returns:
            Its exit code, or minus the number of the signal that killed it; and its output.

        Raises:
            OpBuildError: it timed out or cannot be run.
        """
        # In a TMPDIR that is open to other users, they could replace a compiler's temporary files.
        environ = dict(os.environ) if folder is None else {**os.environ, "TMPDIR": str(folder)}
        with _output_file() as output:
            code = self._run(command, folder, environ, output)
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def _run(
        self, command: Sequence[str], folder: Path | None, environ: Mapping[str, str], output: IO[bytes]
    ) -> int:
        with self._lock:
            if self._is_over:
                return -signal.SIGKILL
            waits = self._watcher is not None and folder is not None  # --version ends at once
            try:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", _WAITING, "sh", *command] if waits else command,
                    bufsize=0,
                    cwd=folder,
                    env=environ,
                    stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # its own process group, which can be killed as a whole
                )
            except (OSError, ValueError) as error:
                raise OpBuildError(f"{command[0]} cannot be run: {error}") from error
            self._running.add(process)
            self._tell_watcher()
            if process.stdin is not None:
                with contextlib.suppress(OSError), process.stdin:  # something has killed it
                    process.stdin.write(b"\n")
        try:
            return process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            raise OpBuildError(
                f"{command[0]} did not end within {self._timeout_s:g} s, so it was killed with its children. "
                "Set ACCLIMATE_BUILD_TIMEOUT to a longer time in seconds, or to 0 for no limit"
            ) from None
        finally:
            with self._lock:
                self._running.discard(process)
                _kill(process)
                self._tell_watcher()


def _output_file() -> IO[bytes]:
    """Returns a file for a compiler's output: not a pipe, which a server that the compiler starts may keep
    open; in memory if possible, since the disk may be full."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("compiler-output"), "w+b")
    return tempfile.TemporaryFile()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
