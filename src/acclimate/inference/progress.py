"""A progress bar on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on stderr, if that is a terminal; yields ``advance(bytes)``."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda done: progress.advance(task, done)
