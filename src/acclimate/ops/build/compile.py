"""Runs the compilers of one op: all sources in parallel, then the linker; callers may watch."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from acclimate.errors import OpBuildError
from acclimate.host.process_status import how_it_ended
from acclimate.ops.build.recipe import Recipe
from acclimate.ops.build.run_compilers import Compilers, build_timeout_s

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with the steps done, their total, and the name of the step that just ended."""

LOG_NAME = "build.log"
_NO_SPACE = "No space left on device"


@dataclass
class _Build:
    """One build under way."""

    recipe: Recipe
    folder: Path
    scratch: Path
    """For object files and the compilers' temporary files."""
    compilers: Compilers
    progress: Progress | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: int = 0

    def run(self, command: Sequence[str], label: str, output: Path) -> None:
        """Runs one compiler, checks that it wrote ``output``, and logs what it printed."""
        try:
            code, said = self.compilers.run(command, self.scratch)
        except OpBuildError as error:
            self._log(command, str(error))
            raise OpBuildError(f'The op "{self.recipe.name}" was not built: {error}.') from error
        self._log(command, said)
        if code == 0 and output.is_file():
            with self.lock:
                self.done += 1
                if self.progress is not None:
                    self.progress(self.done, len(self.recipe.units) + 1, label)
            return
        if _NO_SPACE in said or shutil.disk_usage(self.folder).free == 0:
            raise OSError(errno.ENOSPC, _NO_SPACE, str(self.folder))
        how = how_it_ended(code)
        how = f"{how}." if code else f"{how}, but wrote no output file: is it a compiler?"
        raise OpBuildError(
            f'The op "{self.recipe.name}" was not built: {label} failed: the compiler {how}\n'
            f"{said.rstrip()}\nCommand: {shlex.join(command)}"
        )

    def _log(self, command: Sequence[str], said: str) -> None:
        with self.lock, (self.folder / LOG_NAME).open("a", encoding="utf-8", errors="replace") as log:
            log.write(f"$ {shlex.join(command)}\n{said}\n")


def build_library(recipe: Recipe, folder: Path, progress: Progress | None = None) -> Path:
    """Compiles and links an op's library and writes a log beside it.

    ``folder`` is empty and this build's own; object files are removed from it. ``progress`` is called from
    the threads that wait for the compilers.
    """
    scratch = folder / "tmp"
    scratch.mkdir(0o700)
    objects = [scratch / f"{index}.{unit.path.stem}.o" for index, unit in enumerate(recipe.units)]
    library = folder / f"{recipe.name}.so"
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, min(len(objects), processors))
    # The pool waits for its threads, so the compilers they wait for are ended first: when one fails, or on
    # Ctrl-C.
    with (
        ThreadPoolExecutor(threads) as pool,
        Compilers(build_timeout_s()) as compilers,
    ):
        build = _Build(recipe, folder, scratch, compilers, progress)
        compilations = [
            pool.submit(build.run, recipe.compile_command(unit, path), unit.label, path)
            for unit, path in zip(recipe.units, objects, strict=True)
        ]
        ended, _ = wait(compilations, return_when=FIRST_EXCEPTION)
        for compilation in ended:
            compilation.result()
        build.run(recipe.link_command(objects, library), library.name, library)
    shutil.rmtree(scratch)
    return library


Show: TypeAlias = Callable[[], AbstractContextManager[Progress]]
"""Opens what shows the steps of one build."""


@dataclass
class BuildWatch:
    """What was built in a ``with`` block."""

    show: Show | None
    seconds: float = 0.0
    """The time that the block waited for compilers, of this process or of another one."""


_watches: ContextVar[tuple[BuildWatch, ...]] = ContextVar("watches", default=())


@contextmanager
def watch_builds(show: Show | None = None) -> Iterator[BuildWatch]:
    """Yields the watch of all builds in the ``with`` block, also of those that an inner block watches.

    ``show`` shows the steps of each build that has no ``progress`` of its own.
    """
    watch = BuildWatch(show)
    token = _watches.set((*_watches.get(), watch))
    try:
        yield watch
    finally:
        _watches.reset(token)


@contextmanager
def watched(progress: Progress | None) -> Iterator[Progress | None]:
    """Counts the time of one build, and yields what shows its steps."""
    watches = _watches.get()
    show = next((watch.show for watch in reversed(watches) if watch.show is not None), None)
    started = time.monotonic()
    try:
        with nullcontext(progress) if progress is not None or show is None else show() as shown:
            yield shown
    finally:
        seconds = time.monotonic() - started
        for watch in watches:
            watch.seconds += seconds
