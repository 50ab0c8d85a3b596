"""An accelerator's compilers and flags, and how compilers are run and asked for their versions."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from acclimate.cache.folder import check_folder, make_folder, read_file
from acclimate.errors import CompilerNotFoundError, InvalidEnvironmentError, OpBuildError, excerpt
from acclimate.process_status import how_it_ended

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator

_VERSION_TIMEOUT_S = 60.0
# Reads the running process groups, one line at each change; at the end of input kills those of the last line.
_WATCHER = 'while read -r line; do groups=$line; done; [ -z "$groups" ] || kill -s KILL -- $groups'
# A compiler starts once the watcher knows its process group, and not at all if this process is killed before.
_WAITING = 'read -r go && exec "$@" </dev/null'


@dataclass(frozen=True)
class Toolchain:
    """The compilers and flags with which an accelerator builds one op."""

    compilers: Mapping[str, tuple[str, ...]]
    """By suffix of the source: a program's path and its fixed arguments; empty if there is none."""
    flags: Mapping[str, tuple[str, ...]]
    """By suffix of the source: the accelerator's flags."""
    include_paths: tuple[str, ...]
    """The accelerator's folders of headers."""
    link_flags: tuple[str, ...]
    """The accelerator's flags for the linker, which is the C++ compiler."""
    missing: str | None
    """Why there is no compiler for one of the sources; ``None`` if there is one for each."""

    @classmethod
    def of(cls, accelerator: Accelerator, suffixes: Sequence[str], portable: bool = False) -> Toolchain:
        """Returns the toolchain of an accelerator.

        Args:
            accelerator: the accelerator to build for.
            suffixes: the suffixes of the sources, and that of C++ for the linker.
            portable: compile for all devices of the accelerator's kind, not only for those present.
        """
        compilers: dict[str, tuple[str, ...]] = {}
        missing = None
        for suffix in suffixes:
            try:
                compilers[suffix] = tuple(accelerator.op_compiler(suffix))
            except CompilerNotFoundError as error:
                compilers[suffix] = ()
                missing = missing or str(error)
        return cls(
            compilers=compilers,
            flags={suffix: tuple(accelerator.op_compile_flags(suffix, portable)) for suffix in suffixes},
            include_paths=tuple(accelerator.op_include_paths()),
            link_flags=tuple(accelerator.op_link_flags(suffixes)),
            missing=missing,
        )


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


# -- running compilers -------------------------------------------------------------------------------


class Compilers:
    """Runs compilers from several threads; the end of the ``with`` block kills them and their children.

    If this process dies, a shell that waits for its end kills their process groups.

    Args:
        timeout_s: the time limit for each; 0: none.
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
        """Runs a compiler and waits for it.

        Args:
            command: the command.
            folder: the working directory, also for temporary files; ``None``: this process's.

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


# -- versions of compilers ---------------------------------------------------------------------------


def compiler_versions(commands: Sequence[tuple[str, ...]], memory: Path | None) -> list[str]:
    """Returns each compiler's output of ``--version``.

    Running ``--version`` takes longer than the rest of loading a cached op, so the output is stored until the
    program's file changes.

    Args:
        commands: for each compiler, the program's path and its fixed arguments.
        memory: the file that stores the outputs. If it cannot be used, the compilers are run each time.

    Raises:
        OpBuildError: a compiler cannot be run.
    """
    known = _remembered(memory) if memory is not None else {}
    versions, asked = [], {}
    for command in commands:
        identity = _identity(command)
        version = known.get(identity) if identity else None
        if version is None:
            version = _ask_version(command)
            if identity:
                asked[identity] = version
        versions.append(version)
    if asked and memory is not None:
        _remember(memory, known | asked)
    return versions


def _identity(command: tuple[str, ...]) -> str:
    """Identifies the program files of a command; "" for a script, which may start any compiler."""
    stamps = []
    for word in command:
        path = Path(os.path.realpath(shutil.which(word) or ""))
        if not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                if file.read(2) == b"#!":
                    return ""
        except OSError:  # executable, but not readable
            return ""
        status = path.stat()
        stamps.append(f"{path}:{status.st_size}:{status.st_mtime_ns}")
    return "|".join([shlex.join(command), *stamps])


def _ask_version(command: tuple[str, ...]) -> str:
    name = f"The compiler {shlex.join(command)}"
    limit_s = min(build_timeout_s() or _VERSION_TIMEOUT_S, _VERSION_TIMEOUT_S)
    try:
        with Compilers(limit_s) as compilers:
            code, answer = compilers.run([*command, "--version"])
    except OpBuildError as error:
        raise OpBuildError(f"{name} does not print its version: {error}.") from error
    if code != 0:
        raise OpBuildError(
            f"{name} cannot be run: with --version it {how_it_ended(code)}.\n{answer}".rstrip()
        )
    return answer.strip()


def _remembered(memory: Path) -> dict[str, str]:
    """Reads the stored outputs; none if the file is damaged or others could have written it."""
    try:
        check_folder(memory.parent)
        known = json.loads(read_file(memory))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {key: value for key, value in known.items() if isinstance(value, str)}


def _remember(memory: Path, versions: dict[str, str]) -> None:
    partial = memory.with_name(f".{memory.name}.{secrets.token_hex(4)}")
    # Without room or permission, the compilers are run again next time.
    with contextlib.suppress(OSError):
        make_folder(memory.parent)
        try:
            partial.write_text(json.dumps(versions, indent=1), encoding="utf-8")
            partial.chmod(0o644)
            partial.replace(memory)
        finally:
            partial.unlink(missing_ok=True)
