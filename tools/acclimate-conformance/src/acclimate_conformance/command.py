"""`acclimate conformance`: the report as tables, as a page, as JSON and as JUnit XML."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from acclimate.host.exit_codes import NEGATIVE_RESULT
from acclimate.host.replace_file import replace_file
from acclimate_conformance.errors import ConformanceError
from acclimate_conformance.result import Report, Result
from acclimate_conformance.runner import page
from acclimate_conformance.runner.run import run as run_checks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``acclimate conformance``."""
    parser.add_argument(
        "--accelerator",
        metavar="NAME",
        default="",
        help='name of the accelerator, or "module:Class" of one that is not registered; '
        "default: the one that acclimate selects",
    )
    parser.add_argument(
        "--only", metavar="CHECK", action="append", default=[],
        help="a category or category/check; may be repeated",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results as JSON")
    parser.add_argument("--report", metavar="FILE", type=Path, help="also write the results as an HTML page")
    parser.add_argument("--junit", metavar="FILE", type=Path, help="also write the results as JUnit XML")


def run(args: argparse.Namespace) -> int:
    """Checks the accelerator and shows the report; returns 1 if a check failed, else 0."""
    # Vendors' messages are shown as they are, brackets and colons included.
    console = Console(soft_wrap=not sys.stdout.isatty(), markup=False, emoji=False)
    waiting = Console(stderr=True, markup=False, emoji=False)
    with waiting.status("loading the accelerator") as status:
        report = run_checks(args.accelerator, args.only, status.update)
    console.print(render(report))
    _write(report, args)
    if report.not_run:
        raise KeyboardInterrupt  # after showing the results so far
    return NEGATIVE_RESULT if report.total.failed else 0


def _write(report: Report, args: argparse.Namespace) -> None:
    """Writes each requested file, even if another cannot be written."""
    writers: dict[str, tuple[Path | None, Callable[[Report, Path], None]]] = {
        "--json": (args.json, _write_json),
        "--junit": (args.junit, _write_junit),
        "--report": (args.report, page.write),
    }
    failures = []
    for option, (path, write) in writers.items():
        if path is not None:
            try:
                write(report, path)
            except OSError as error:
                failures.append(f"{option} {path}: {error.strerror or error}")
    if failures:
        raise ConformanceError(f"The results cannot be written: {'; '.join(failures)}")


def _write_junit(report: Report, path: Path) -> None:
    replace_file(path, report.junit)


def _write_json(report: Report, path: Path) -> None:
    content = json.dumps(report.as_dict(), indent=2) + "\n"
    replace_file(path, content.encode(errors="replace"))


def render(report: Report) -> Group:
    """The report as rich renderables."""
    about = report.about
    parts: list[RenderableType] = [
        Text(f"{about.accelerator}  ", style="bold").append(about.implementation, "dim"),
        *(Text(f"  {device}") for device in about.devices),
        Text(f"  acclimate {about.acclimate}, torch {about.torch}, Python {about.python}, {about.system}"),
        _tallies(report),
    ]
    if report.total.failed:
        parts.append(Text("\nfailed", "bold red"))
    for cause, failures in report.causes:
        if len(failures) > 1:
            parts.append(Text(f"  {len(failures)} checks: {cause}", "bold"))
        parts += [_explained(result) for result in failures]
    absent = report.with_outcome("not offered")
    if absent:
        parts += [Text("\nnot offered", "bold dim"), *(_line(result) for result in absent)]
    if report.not_run:
        left = ", ".join(dict.fromkeys(check.category for check in report.not_run))
        parts.append(Text(f"\ninterrupted: {len(report.not_run)} checks not run, in {left}", "bold yellow"))
    noted = [result for result in report.with_outcome("passed") if result.reason]
    if noted:
        parts += [Text("\npassed, with a note", style="bold dim"), *(_line(result) for result in noted)]
    return Group(*parts)


def _tallies(report: Report) -> Table:
    total = report.total
    table = Table(show_footer=True)
    table.add_column("category", footer=f"all, in {report.seconds:.0f} s")
    table.add_column("passed", justify="right", footer=str(total.passed))
    table.add_column("failed", justify="right", footer=str(total.failed))
    table.add_column("not offered", justify="right", footer=str(total.not_offered))
    table.add_column("score", justify="right", footer=total.percent)
    for tally in report.tallies:
        table.add_row(
            tally.category,
            str(tally.passed),
            str(tally.failed),
            str(tally.not_offered),
            tally.percent,
            style="red" if tally.failed else "",
        )
    return table


def _line(result: Result) -> Text:
    return Text(f"  {result.check}: ").append(result.reason)


def _explained(result: Result) -> Text:
    """A failure with its reason, the promise, and the interface's documentation."""
    line = _line(result).append(f"\n    promised: {result.promise}")
    if result.calls:
        line.append(f"\n    call: {result.calls[-1]}")
    if result.changes:
        line.append(f"\n    to change: {result.changes[0]}")
    for rule in result.rules[:3] if result.name == "signatures" else result.rules:
        line.append(f"\n    {rule}", "dim")
    return line
