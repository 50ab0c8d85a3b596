"""Runs the compilers: all sources of an op at the same time, then the linker."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from acclimate import topology
from acclimate.errors import OpBuildError
from acclimate.ops.build.recipe import Recipe

Progress: TypeAlias = Callable[[int, int, str], None]
"""Told how many steps of a build are done, of how many, and the name of the step that ended."""

LOG_NAME = "build.log"
_NO_SPACE = "No space left on device"


@dataclass
class _Log:
    """The commands of one build and what they printed, written as they end."""

    path: Path
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, command: Sequence[str], output: str) -> None:
        with self.lock, self.path.open("a") as file:
            file.write(f"$ {shlex.join(command)}\n{output}\n")


def build_library(recipe: Recipe, folder: Path, progress: Progress | None = None) -> Path:
    """Compiles and links an op's library in a folder of its own, and writes the log beside it.

    Args:
        recipe: what the library is made of.
        folder: an empty folder that nobody else writes to; object files do not stay in it.
        progress: called from the threads that wait for the compilers.

    Raises:
        OpBuildError: a compiler or the linker refused; it names the log, which is in ``folder``.
        OSError: the folder cannot be written, or the disk is full.
    """
    log = _Log(folder / LOG_NAME)
    objects = [folder / f"{index}.{unit.path.stem}.o" for index, unit in enumerate(recipe.units)]
    steps = len(objects) + 1
    failed = threading.Event()
    done = 0

    def compile_one(index: int) -> None:
        nonlocal done
        if failed.is_set():
            return
        unit = recipe.units[index]
        try:
            _run(recipe, recipe.compile_command(unit, objects[index]), unit.label, log)
        except BaseException:
            failed.set()
            raise
        with log.lock:
            done += 1
            if progress is not None:
                progress(done, steps, unit.label)

    with ThreadPoolExecutor(
        max_workers=min(len(objects), len(topology.read_topology().allowed_cpus))
    ) as pool:
        for result in [pool.submit(compile_one, index) for index in range(len(objects))]:
            result.result()
    library = folder / f"{recipe.name}.so"
    _run(recipe, recipe.link_command(objects, library), library.name, log)
    for path in objects:
        path.unlink()
    if progress is not None:
        progress(steps, steps, library.name)
    return library


def _run(recipe: Recipe, command: list[str], product: str, log: _Log) -> None:
    try:
        result = subprocess.run(
            command,
            cwd=log.path.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except (FileNotFoundError, PermissionError) as error:
        raise OpBuildError(
            f'The op "{recipe.name}" was not built: {command[0]}: {error.strerror}.'
        ) from error
    log.add(command, result.stdout)
    if result.returncode == 0:
        return
    if _NO_SPACE in result.stdout or shutil.disk_usage(log.path.parent).free == 0:
        raise OSError(errno.ENOSPC, _NO_SPACE, str(log.path.parent))
    ending = f"exit code {result.returncode}" if result.returncode > 0 else f"signal {-result.returncode}"
    raise OpBuildError(
        f'The op "{recipe.name}" was not built: {product} failed ({ending}).\n{result.stdout.rstrip()}\n'
        f"Command: {shlex.join(command)}"
    )


# -- what a compiler says of itself ------------------------------------------------------------------


def compiler_versions(commands: Sequence[tuple[str, ...]], memory: Path) -> list[str]:
    """What each compiler says of its version; asking takes longer than all else in loading a cached op, so
    the answer is remembered for as long as its program file does not change.

    Args:
        commands: a program's path, then its fixed arguments.
        memory: the file that the answers are kept in; where it cannot be written they are asked each time.

    Raises:
        OpBuildError: a compiler cannot be run.
    """
    try:
        known: dict[str, str] = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        known = {}
    versions, asked = [], {}
    for command in commands:
        identity = _identity(command)
        version = known.get(identity) if identity else None
        if version is None:
            version = _ask_version(command)
            if identity:
                asked[identity] = version
        versions.append(version)
    if asked:
        _remember(memory, known | asked)
    return versions


def _identity(command: tuple[str, ...]) -> str:
    """The program files of a command as they are now; "" for a script, which may start any compiler."""
    stamps = []
    for word in command:
        path = Path(os.path.realpath(shutil.which(word) or ""))
        if not path.is_file():
            continue
        with path.open("rb") as file:
            if file.read(2) == b"#!":
                return ""
        status = path.stat()
        stamps.append(f"{path}:{status.st_size}:{status.st_mtime_ns}")
    return "|".join([shlex.join(command), *stamps])


def _ask_version(command: tuple[str, ...]) -> str:
    try:
        result = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise OpBuildError(f"The compiler {shlex.join(command)} cannot be run: {error}.") from error
    return result.stdout.strip()


def _remember(memory: Path, versions: dict[str, str]) -> None:
    partial = memory.with_name(f".{memory.name}.{secrets.token_hex(4)}")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(versions, indent=1))
        partial.replace(memory)
    except OSError:
        partial.unlink(missing_ok=True)  # a read-only or full cache: asked again next time
