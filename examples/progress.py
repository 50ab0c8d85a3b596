"""The output of a run: a progress bar or lines of text, metrics.jsonl, and a plot of the loss."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Row = dict[str, Any]


class Metrics:
    """``metrics.jsonl``: one JSON object per step, which any tool can read during the run."""

    def __init__(self, path: Path, last_step: int = 0) -> None:
        """Continues after ``last_step``: rows that a killed run wrote after its checkpoint are dropped."""
        self.path = path
        self.rows = [row for row in read_metrics(path) if row["step"] <= last_step]
        self._file: TextIO | None = None

    def add(self, row: Row) -> str | None:
        """Appends the figures of a step; returns why they could not be written, if so."""
        self.rows.append(row)
        try:
            if self._file is None:
                partial = self.path.with_suffix(".partial")
                partial.write_text("".join(f"{json.dumps(kept)}\n" for kept in self.rows), encoding="utf-8")
                partial.replace(self.path)
                self._file = self.path.open("a", encoding="utf-8")
            else:
                self._file.write(f"{json.dumps(row)}\n")
                self._file.flush()
        except OSError as error:
            self._file = None  # half a line may have been written, so the next row rewrites the file
            return error.strerror
        return None


def read_metrics(path: Path) -> list[Row]:
    """The rows of a file; none if there is no file. An incomplete last line is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


class Display:
    """A progress bar if the console is a terminal, else lines of text."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=steps)
        self._steps = steps

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, row: Row, keep: bool) -> None:
        """Shows the figures of a step; with ``keep`` also as a permanent line."""
        figures = (
            f"loss {row['loss']:.3f} | {row['tokens_per_s']:,.0f} tokens/s | {row['memory'] / 1e6:,.0f} MB"
        )
        self._bar.update(self._task, completed=row["step"], description=figures)
        if "validation_loss" in row:
            figures += f" | validation {row['validation_loss']:.3f}"
        if keep:
            self.say(f"step {row['step']:>{len(str(self._steps))}}/{self._steps} | {figures}")

    def say(self, line: str) -> None:
        """Prints one line, above the bar if there is one."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary(rows: list[Row]) -> str:
    """A line with the first and the last losses."""
    last = [row["loss"] for row in rows[-10:]]
    fell = f"loss {rows[0]['loss']:.3f} at step {rows[0]['step']} -> {sum(last) / len(last):.3f}"
    checked = [row["validation_loss"] for row in rows if "validation_loss" in row]
    validated = f"; on validation text {checked[-1]:.3f}" if checked else ""
    return f"{fell} over the last {len(last)} up to step {rows[-1]['step']}{validated}"


def draw_curve(rows: list[Row], path: Path, title: str) -> str:
    """Plots the loss over the steps; returns a line with the path, or with the reason for no plot."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no curve is drawn without matplotlib: pip install matplotlib"
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    axes.plot(steps, losses, color="C0", alpha=0.3, linewidth=0.8)
    axes.plot(steps, running_mean(losses), color="C0", label="training")
    checked = [row for row in rows if "validation_loss" in row]
    axes.plot(
        [row["step"] for row in checked],
        [row["validation_loss"] for row in checked],
        "o-",
        color="C1",
        markersize=4,
        label="validation",
    )
    for row in checked[-1:]:
        at = (row["step"], row["validation_loss"])
        axes.annotate(f"{at[1]:.2f}", at, xytext=(6, 0), textcoords="offset points", va="center", color="C1")
    axes.set(title=title, xlabel="step", ylabel="loss (nats a byte)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except OSError as error:
        return f"{path} cannot be written ({error.strerror})"
    return f"curve: {path}"


def running_mean(values: list[float]) -> list[float]:
    """The mean around each value, over about a thirtieth of all values; over fewer at the beginning, where
    the loss falls fast."""
    means = []
    for place in range(len(values)):
        reach = min(place, len(values) // 60)
        near = values[place - reach : place + reach + 1]
        means.append(sum(near) / len(near))
    return means
