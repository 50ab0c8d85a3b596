"""``acclimate port``: parses the options, ports the files, and prints the result."""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from acclimate_port.engine import Settings, Site, Status
from acclimate_port.errors import InvalidPortSettingsError, PortError
from acclimate_port.exit_codes import NEGATIVE_RESULT, USER_ERROR
from acclimate_port.files import text_files
from acclimate_port.files.workers import FileResult, port_files, usual_jobs
from acclimate_port.output import formats
from acclimate_port.output.page import page
from acclimate_port.settings import TARGETS, check_rules, read_settings

_FORMATS = ("text", "json", "sarif", "github")
_MOST_EXEMPT = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``acclimate port``."""
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="files, notebooks and folders")
    parser.add_argument(
        "--write", action="store_true", help="write the edits to the files; default: print a diff"
    )
    parser.add_argument("--unsafe", action="store_true", help="also make edits that a person must review")
    parser.add_argument(
        "--to", choices=TARGETS, help="the API that the ported code calls; default: acclimate"
    )
    parser.add_argument(
        "--statistics", action="store_true", help="also print how many places each rule found"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if hardware-specific code is left")
    parser.add_argument("--format", choices=_FORMATS, default="text", help="output format; default: text")
    parser.add_argument(
        "--report", metavar="FILE", type=Path, help="also write the changes and the code left as an HTML page"
    )
    parser.add_argument(
        "--select",
        metavar="RULES",
        type=_names,
        default=(),
        help="apply only these rules, such as ACC101,ACC2",
    )
    parser.add_argument("--ignore", metavar="RULES", type=_names, default=(), help="not these")
    parser.add_argument(
        "--exclude",
        metavar="PATTERN",
        action="append",
        default=[],
        help="files and folders to skip; repeatable",
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=_positive,
        default=usual_jobs(),
        help="parallel processes; default: one per core",
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f'must be a positive number, not "{text}"')
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Ports the files; returns 2 if one could not be ported, 1 if ``--check`` finds something, else 0."""
    was_on = gc.isenabled()
    gc.disable()  # also between the files, where Python would look for cycles in all syntax trees
    try:
        return _port(args)
    except PortError as error:
        sys.stderr.write(f"acclimate port: error: {error}\n")
        return USER_ERROR
    finally:
        gc.freeze()  # else it looks for them before it ends
        if was_on:
            gc.enable()


def _port(args: argparse.Namespace) -> int:
    if args.check and args.write:
        raise InvalidPortSettingsError(
            "--check writes nothing, so it cannot be combined with --write. Run them one after the other"
        )
    project = read_settings(args.paths[0])
    check_rules((*args.select, *args.ignore), "the command line")
    settings = Settings(
        args.to or project.target or TARGETS[0],
        args.unsafe or project.unsafe,
        frozenset(args.select or project.select),
        frozenset((*args.ignore, *project.ignore)),
    )
    found, failures = text_files.find(args.paths, (*project.exclude, *args.exclude))
    console = Console(highlight=False, soft_wrap=True)

    def wrote(result: FileResult) -> None:
        if args.format == "text":
            _show_written(console, result)

    with _progress(len(found), args.format) as advance:
        beside = text_files.find_beside(args.paths, found)
        results = port_files(found, settings, args.write, args.jobs, advance, wrote, beside)
    results = [*(FileResult(path, failure=reason) for path, reason in failures), *results]
    _show(results, args, len(found))
    if args.report is not None:
        args.report.write_text(page(results, settings.target), encoding="utf-8", errors="backslashreplace")
    if any(result.failure for result in results):
        return USER_ERROR
    return NEGATIVE_RESULT if args.check and any(map(formats.remaining, results)) else 0


@contextmanager
def _progress(total: int, form: str) -> Iterator:  # type: ignore[type-arg]
    console = Console(stderr=True)
    if form != "text" or not console.is_terminal:
        yield lambda: None
        return
    # Imported here, as it takes long, and only a terminal shows progress.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("porting"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("porting", total=total)
        yield lambda: progress.advance(task)


# -- output ------------------------------------------------------------------------------------------


def _show(results: Sequence[FileResult], args: argparse.Namespace, looked_at: int) -> None:
    if args.format == "json":
        sys.stdout.write(f"{formats.as_json(results)}\n")
    elif args.format == "sarif":
        sys.stdout.write(f"{formats.as_sarif(results)}\n")
    elif args.format == "github":
        sys.stdout.writelines(f"{line}\n" for line in formats.as_github(results))
    else:
        _show_text(results, args, looked_at)
    if args.format != "text":
        for result in results:
            if result.failure and args.format != "github":
                sys.stderr.write(f"acclimate port: {result.path}: {result.failure}\n")


def _show_written(console: Console, result: FileResult) -> None:
    """Lists the edits of a file as soon as it is written, in case the run is killed later."""
    edits = [site for site in result.sites if site.status is Status.CONVERTED]
    console.print(f"[bold]{escape(str(result.path))}[/]: wrote {plural(len(edits), 'edit')}")
    for site in edits:
        mark = "" if site.safe else f" [yellow](unsafe: {escape(site.reason)})[/]"
        console.print(f"  {site.line}: {site.code} {escape(site.text)}{mark}")
    sys.stdout.flush()


def _show_statistics(console: Console, results: Sequence[FileResult]) -> None:
    """A table of the number of sites of each rule, by what became of them."""
    counted: Counter[tuple[str, str, Status]] = Counter(
        (site.code, site.rule, site.status) for result in results for site in result.sites
    )
    table = Table("code", "rule", *(word for word in ("converted", "need --unsafe", "left", "no hardware")))
    for code, rule in sorted({(code, rule) for code, rule, _ in counted}):
        table.add_row(code, rule, *(str(counted[code, rule, status]) for status in Status))
    console.print(table)


def plural(count: int, noun: str) -> str:
    """A number with its noun: ``1 file``, ``2 files``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _show_text(results: Sequence[FileResult], args: argparse.Namespace, looked_at: int) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if args.check:
        for result in results:
            for site in formats.remaining(result):
                where = f"{result.path}:{site.line}:{site.column}"
                console.print(f"{escape(where)}: [bold]{site.code}[/] {escape(formats.message(site))}")
    elif not args.write:
        for result in results:
            for line in formats.diff(result) if result.changed else ():
                console.print(Text(line.rstrip("\n"), style=_style(line)))
    if not args.check:
        _show_rest(console, results, Status.LEFT, "Left, because")
        _show_rest(
            console, results, Status.UNSAFE, "Edited only with --unsafe, because a person must review it"
        )
        _show_exempt(console, results)
    for result in results:
        if result.failure:
            console.print(f"[red]{escape(str(result.path))}[/]: not ported: {escape(result.failure)}")
    if args.statistics:
        _show_statistics(console, results)
    _summarise(console, results, args, looked_at)


def _style(line: str) -> str:
    if line.startswith(("+++", "---")):
        return "bold"
    return {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")


def _show_rest(console: Console, results: Sequence[FileResult], status: Status, title: str) -> None:
    places = [(result, site) for result in results for site in result.sites if site.status is status]
    if not places:
        return
    console.print(f"\n[bold]{escape(title)}[/]")
    for result, site in places:
        console.print(_line(result, site))


def _line(result: FileResult, site: Site) -> str:
    where = f"{result.path}:{site.line}"
    return f"  {escape(where)}: {site.code} [bold]{escape(site.text)}[/]: {escape(site.reason)}"


def _show_exempt(console: Console, results: Sequence[FileResult]) -> None:
    places = [(result, site) for result in results for site in result.sites if site.status is Status.EXEMPT]
    if not places:
        return
    console.print("\n[bold]Left, because it is not hardware-specific code[/]")
    for result, site in places[:_MOST_EXEMPT]:
        console.print(_line(result, site))
    if len(places) > _MOST_EXEMPT:
        console.print(f"  … and {len(places) - _MOST_EXEMPT} more; --report FILE and --format json list all")


def _summarise(
    console: Console, results: Sequence[FileResult], args: argparse.Namespace, looked_at: int
) -> None:
    total: Counter[Status] = formats.counts(results)
    changed = sum(result.changed and not result.failure for result in results)
    failed = sum(bool(result.failure) for result in results)
    done = "converted" if args.write else "would be converted"
    needs = "needs" if total[Status.UNSAFE] == 1 else "need"
    parts = [
        f"{total[Status.CONVERTED]} {done} in {changed} of {plural(looked_at, 'file')}",
        f"{total[Status.UNSAFE]} {needs} --unsafe",
        f"{total[Status.LEFT]} left",
    ]
    if failed:
        parts.append(f"{plural(failed, 'file')} could not be ported")
    console.print(f"\n{'; '.join(parts)}.")
    if not args.write and not args.check and total[Status.CONVERTED]:
        console.print("Nothing was written; --write writes the edits.")
