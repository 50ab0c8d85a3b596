"""Progress bars and figures on a terminal, no wider than it."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

_COLUMNS: ContextVar[int] = ContextVar("columns", default=0)
"""The width of the terminal on which another process shows this one's stderr; 0 if there is none."""

_NUMBERS = 33
"""The columns of ``1023.9/1023.9 MB 10:00:00`` and of a short bar."""


@contextlib.contextmanager
def progress_on_terminal(columns: int) -> Iterator[None]:
    """Shows progress bars in the ``with`` block even if stderr is a pipe to a process with a terminal."""
    token = _COLUMNS.set(columns)
    try:
        yield
    finally:
        _COLUMNS.reset(token)


def terminal_columns() -> int:
    """Returns the width of the terminal that shows stderr; 0 if there is none."""
    if (elsewhere := _COLUMNS.get()) > 0:
        return elsewhere
    return shutil.get_terminal_size().columns if sys.stderr.isatty() else 0


def figures_line(parts: Sequence[str]) -> str:
    """Returns ``[a | b]``, on a terminal in lines that break between two parts."""
    columns, lines = terminal_columns(), [f"[{parts[0]}"]
    for part in parts[1:]:
        # A bar or a bracket follows.
        if 0 < columns < len(f"{lines[-1]} | {part}  |"):
            lines[-1] += " |"
            lines.append(f" {part}")
        else:
            lines[-1] += f" | {part}"
    return "\n".join(lines) + "]"


@contextlib.contextmanager
def progress_bar(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on stderr, if that is a terminal; yields ``advance(bytes)``."""
    from rich.progress import DownloadColumn, TimeRemainingColumn

    with _bar(DownloadColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(description, total=total_bytes)
        yield lambda done: bar.advance(task, done)


@contextlib.contextmanager
def compile_progress() -> Iterator[Callable[[int, int, str], None]]:
    """Yields what shows the steps of compilers on stderr: a bar on a terminal, else a line for each step.

    It is called with the steps done, their total and the name of the last one, from any thread.
    """
    from rich.progress import TextColumn, TimeElapsedColumn

    with _bar(TextColumn("{task.completed} of {task.total}"), TimeElapsedColumn()) as bar:
        task = bar.add_task("compiling", total=None, visible=False)

        def show(done: int, total: int, step: str) -> None:
            if bar.disable:
                bar.console.print(
                    f"acclimate: compiled {done} of {total}: {step}", highlight=False, soft_wrap=True
                )
            else:
                bar.update(task, completed=done, total=total, visible=done < total)

        yield show


def _bar(*columns: Any) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    elsewhere = _COLUMNS.get()
    console = (
        Console(stderr=True, force_terminal=True, width=elsewhere) if elsewhere else Console(stderr=True)
    )
    # The bar gives way, and then the description, so that the numbers fit into a narrow terminal.
    column = Column(no_wrap=True, overflow="ellipsis", max_width=max(console.width - _NUMBERS, 10))
    described = TextColumn("{task.description}", table_column=column)
    bar = BarColumn(bar_width=None, table_column=Column(ratio=1))
    return Progress(
        described,
        bar,
        *columns,
        console=console,
        disable=not console.is_terminal,
        transient=True,
        expand=True,
    )
