"""The compilers and flags of an accelerator, asked for once a build, and how compilers are run."""

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
from types import TracebackType
from typing import IO, TYPE_CHECKING

from acclimate.cache.folder import check_folder, make_folder, read_file
from acclimate.errors import CompilerNotFoundError, InvalidEnvironmentError, OpBuildError

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator

_LONGEST_ANSWER_S = 60.0  # of a compiler that is asked for its version


@dataclass(frozen=True)
class Toolchain:
    """What an accelerator compiles and links the sources of one op with."""

    compilers: Mapping[str, tuple[str, ...]]
    """By how a source's name ends: a program's path, then its fixed arguments; empty where there is none."""
    flags: Mapping[str, tuple[str, ...]]
    """By how a source's name ends: the accelerator's flags."""
    include_paths: tuple[str, ...]
    """The accelerator's folders of headers."""
    link_flags: tuple[str, ...]
    """The accelerator's flags for the linker, which is the compiler of C++."""
    missing: str | None
    """Why there is no compiler for one of the sources; ``None`` where there is one for each."""

    @classmethod
    def of(cls, accelerator: Accelerator, suffixes: Sequence[str], portable: bool = False) -> Toolchain:
        """Asks an accelerator.

        Args:
            accelerator: to build for.
            suffixes: how the names of the sources end, and C++'s for the linker.
            portable: for all devices of the accelerator's kind, not only for those present.
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
    """``ACCLIMATE_BUILD_TIMEOUT``: the longest wait for another process's build, and for one compiler.

    Raises:
        InvalidEnvironmentError: it is no number from 0 on.
    """
    text = os.environ.get("ACCLIMATE_BUILD_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise InvalidEnvironmentError(
            f'ACCLIMATE_BUILD_TIMEOUT is "{text}", but has to be a number of seconds from 0 on.'
        )
    return seconds


# -- running compilers -------------------------------------------------------------------------------


class Compilers:
    """Runs compilers from several threads; at the end of the ``with`` block none is left, nor its children.

    Args:
        timeout_s: the longest that one may run; 0 for no limit.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s or None
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def __enter__(self) -> Compilers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Ends those that run, and lets no other start."""
        with self._lock:
            self._is_over = True
            for process in self._running:
                _kill(process)

    def run(self, command: Sequence[str], folder: Path | None = None) -> tuple[int, str]:
        """Runs one and waits for it.

        Args:
            command: what to run.
            folder: its working directory, where its temporary files go too; ``None``: this process's.

        Returns:
            Its exit code, or minus the number of the signal that ended it; and what it wrote.

        Raises:
            OpBuildError: it took too long, or cannot be run.
        """
        # Others could replace the temporary files of a compiler where TMPDIR is open to them.
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
            try:
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a group of its own, which can be ended as a whole
                )
            except (OSError, ValueError) as error:
                raise OpBuildError(f"{command[0]} cannot be run: {error}") from error
            self._running.add(process)
        try:
            return process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            raise OpBuildError(
                f"{command[0]} did not end within {self._timeout_s:g} s, so it was ended, with its children. "
                "Set ACCLIMATE_BUILD_TIMEOUT to a longer time in seconds, or 0 for no limit"
            ) from None
        finally:
            with self._lock:
                self._running.discard(process)
                _kill(process)


def _output_file() -> IO[bytes]:
    """For what a compiler writes. No pipe, which a server that it starts may keep open; in memory where that
    can be, as the disk may be full."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("compiler-output"), "w+b")
    return tempfile.TemporaryFile()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# -- what a compiler says of itself ------------------------------------------------------------------


def compiler_versions(commands: Sequence[tuple[str, ...]], memory: Path | None) -> list[str]:
    """What each compiler says of its version.

    Asking takes longer than all else in loading a cached op, so the answer is kept for as long as the
    program's file does not change.

    Args:
        commands: a program's path, then its fixed arguments.
        memory: the file that the answers are kept in. Where it cannot be used they are asked for each time.

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
    """The program files of a command as they are now; "" for a script, which may start any compiler."""
    stamps = []
    for word in command:
        path = Path(os.path.realpath(shutil.which(word) or ""))
        if not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                if file.read(2) == b"#!":
                    return ""
        except OSError:  # a program that may be run and not read
            return ""
        status = path.stat()
        stamps.append(f"{path}:{status.st_size}:{status.st_mtime_ns}")
    return "|".join([shlex.join(command), *stamps])


def _ask_version(command: tuple[str, ...]) -> str:
    name = f"The compiler {shlex.join(command)}"
    limit_s = min(build_timeout_s() or _LONGEST_ANSWER_S, _LONGEST_ANSWER_S)
    try:
        with Compilers(limit_s) as compilers:
            code, answer = compilers.run([*command, "--version"])
    except OpBuildError as error:
        raise OpBuildError(f"{name} does not tell its version: {error}.") from error
    if code != 0:
        raise OpBuildError(
            f"{name} cannot be run: with --version it ended with {ending(code)}.\n{answer}".rstrip()
        )
    return answer.strip()


def ending(code: int) -> str:
    """How a program ended, to follow "ended with"."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _remembered(memory: Path) -> dict[str, str]:
    """The answers that a file holds; none where it is damaged, or others could have written it."""
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
    # A cache that is full or cannot be written to: they are asked for again next time.
    with contextlib.suppress(OSError):
        make_folder(memory.parent)
        try:
            partial.write_text(json.dumps(versions, indent=1), encoding="utf-8")
            partial.chmod(0o644)
            partial.replace(memory)
        finally:
            partial.unlink(missing_ok=True)
