"""A progress bar on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_COLUMNS: ContextVar[int] = ContextVar("columns", default=0)
"""The width of the terminal on which another process shows this one's stderr; 0 if there is none."""


@contextlib.contextmanager
def progress_on_terminal(columns: int) -> Iterator[None]:
    """Shows progress bars in the ``with`` block even if stderr is a pipe to a process with a terminal."""
    token = _COLUMNS.set(columns)
    try:
        yield
    finally:
        _COLUMNS.reset(token)


@contextlib.contextmanager
def progress_bar(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on stderr, if that is a terminal; yields ``advance(bytes)``."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    elsewhere = _COLUMNS.get()
    console = (
        Console(stderr=True, force_terminal=True, width=elsewhere) if elsewhere else Console(stderr=True)
    )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda done: progress.advance(task, done)
