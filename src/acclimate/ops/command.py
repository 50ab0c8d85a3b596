"""`acclimate ops`: lists an accelerator's native ops, builds them ahead of time, and cleans the cache."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from acclimate.errors import AcceleratorUnavailableError, AcclimateError, UnknownOpError, excerpt
from acclimate.host.exit_codes import NEGATIVE_RESULT
from acclimate.imports import describe
from acclimate.ops.build import store
from acclimate.ops.build.builder import OpBuilder
from acclimate.selection import find_backends, get_accelerator, load_by_name

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator


BUILT = "built"
BUILDABLE = "can be built"
IMPOSSIBLE = "cannot be built"
PURE = "needs no building"
FAILED = "failed"


@dataclass(frozen=True)
class OpState:
    """One op of an accelerator."""

    builder_name: str
    """The argument of ``create_op_builder()``."""
    op: str
    """The op's own name; empty if its builder could not be imported."""
    state: str
    """One of :data:`BUILT`, :data:`BUILDABLE`, :data:`IMPOSSIBLE`, :data:`PURE`; after an attempt to build it
    also :data:`FAILED`."""
    reason: str | None = None
    """Why it cannot be built here; it may still have been built elsewhere."""
    library: Path | None = None
    """The library, if it is built."""
    builder: OpBuilder | None = None
    seconds: float | None = None
    """How long an attempt to build it took; ``None`` if there was none."""


def accelerator_to_build_for(name: str | None) -> Accelerator:
    """Returns the named accelerator, whether or not this machine has one; ``None``: this process's.

    Raises:
        UnknownAcceleratorError: no accelerator has that name.
        AcceleratorUnavailableError: its module cannot be imported here.
    """
    if name is None:
        return get_accelerator()
    records, _ = find_backends()
    named = [record for record in records if record.name == name]
    if not named:
        return load_by_name(name, "--accelerator")
    try:
        return named[0].load()  # not probed: a device is not needed
    except Exception as error:
        raise AcceleratorUnavailableError(
            f'--accelerator is "{name}", which cannot be imported here: {describe(error)}'
        ) from error


def survey(accelerator: Accelerator) -> list[OpState]:
    """Returns every op of the accelerator, in alphabetical order."""
    return [_state(accelerator, name) for name in sorted(accelerator.op_builders)]


def select(states: Sequence[OpState], names: Sequence[str], accelerator_name: str) -> list[OpState]:
    """Returns the ops with the given names, ``CPUAdamBuilder`` or ``cpu_adam``, or all if there are no names.

    Raises:
        UnknownOpError: there is no such op.
    """
    if not names:
        return list(states)
    known: dict[str, OpState] = {}
    for state in states:
        known[state.builder_name] = state
        if state.op:
            known.setdefault(state.op, state)  # two builders can share one library
    chosen: dict[str, OpState] = {}
    for name in names:
        if name not in known:
            raise UnknownOpError(_unknown(name, list(known), accelerator_name))
        chosen[known[name].builder_name] = known[name]
    return list(chosen.values())


def _unknown(name: str, known: list[str], accelerator_name: str) -> str:
    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), folded, n=1)
    hint = f'; did you mean "{folded[close[0]]}"?' if close else ". `acclimate ops` lists them."
    return f'The {accelerator_name} accelerator has no op "{excerpt(name)}"{hint}'


def _state(accelerator: Accelerator, name: str) -> OpState:
    try:
        builder = accelerator.create_op_builder(name)
    except Exception as error:  # noqa: BLE001 - one broken builder must not hide the others
        return OpState(name, "", IMPOSSIBLE, f"its builder failed: {describe(error)}")
    if not isinstance(builder, OpBuilder):
        return OpState(name, "", IMPOSSIBLE, f"{type(builder).__name__} is not an acclimate OpBuilder")
    if not builder.sources():
        return OpState(name, builder.name, PURE, builder=builder)
    try:
        reason = builder.incompatibility() or store.unloadable_reason()
        library = builder.built_library()
    except AcclimateError as error:
        return OpState(name, builder.name, IMPOSSIBLE, str(error), builder=builder)
    if library is not None:
        return OpState(name, builder.name, BUILT, reason, library, builder)
    state = BUILDABLE if reason is None else IMPOSSIBLE
    return OpState(name, builder.name, state, reason, builder=builder)


_STYLES = {BUILT: "green", BUILDABLE: "", IMPOSSIBLE: "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``acclimate ops``."""
    _add_common(parser, accelerator=None, as_json=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    # An option before the action must not be overwritten by the action's default.
    quiet = argparse.SUPPRESS
    build = actions.add_parser("build", help="build ops ahead of time, so that no load() has to")
    build.add_argument("names", nargs="*", metavar="NAME", help="CPUAdamBuilder or cpu_adam; default: all")
    _add_common(build, accelerator=quiet, as_json=quiet)
    clean = actions.add_parser("clean", help="remove built ops from the cache")
    clean.add_argument("names", nargs="*", metavar="NAME", help="default: everything in the cache")
    _add_common(clean, accelerator=quiet, as_json=quiet)


def _add_common(parser: argparse.ArgumentParser, accelerator: str | None, as_json: bool | str) -> None:
    parser.add_argument(
        "--accelerator",
        metavar="NAME",
        default=accelerator,
        help="an accelerator other than this machine's; it need not be present",
    )
    parser.add_argument("--json", action="store_true", default=as_json, help="JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Lists, builds or cleans; returns 1 if a requested op could not be built, else 0."""
    actions = {None: _list, "build": _build, "clean": _clean}
    return actions[args.action](args)


# -- list --------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    accelerator = accelerator_to_build_for(args.accelerator)
    states = survey(accelerator)
    if args.json:
        _write_json(accelerator.name, ops=[_as_dict(state) for state in states])
    else:
        table = _table(accelerator.name)
        for state in states:
            table.add_row(state.builder_name, state.state, _note(state), style=_STYLES.get(state.state, ""))
        _console().print(table)
    return 0


def _table(accelerator_name: str) -> Table:
    table = Table(
        title=f"Ops of the {accelerator_name} accelerator",
        title_justify="left",
        title_style="bold",
        caption=f"libraries are in {store.ops_folder()}",
        caption_justify="left",
    )
    table.add_column("op", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("library, or why not", overflow="fold")
    return table


def _note(state: OpState) -> str:
    if state.library is not None:
        return _describe(state.library)
    return state.reason or ""


def _as_dict(state: OpState) -> dict[str, Any]:
    return {
        "builder": state.builder_name,
        "op": state.op,
        "state": state.state,
        "reason": state.reason,
        "library": str(state.library) if state.library is not None else None,
    }


# -- build -------------------------------------------------------------------------------------------


def _build(args: argparse.Namespace) -> int:
    accelerator = accelerator_to_build_for(args.accelerator)
    states = select(survey(accelerator), args.names, accelerator.name)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[step]}"),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        results = [_build_one(state, progress) for state in states]
    if args.json:
        shown = [_as_dict(result) | {"seconds": round(result.seconds or 0.0, 2)} for result in results]
        _write_json(accelerator.name, ops=shown)
    else:
        table = _table(accelerator.name)
        for result in results:
            style = "green" if result.library is not None else "red" if result.reason else ""
            table.add_row(result.builder_name, _outcome(result), _note(result), style=style)
        _console().print(table)
    # Without names an op that cannot be built here is no failure; a named one is.
    failed = {FAILED, IMPOSSIBLE} if args.names else {FAILED}
    return NEGATIVE_RESULT if any(result.state in failed for result in results) else 0


def _build_one(state: OpState, progress: Progress) -> OpState:
    """Returns the op after an attempt to build it, if it needs one."""
    if state.builder is None or state.state != BUILDABLE:
        return replace(state, reason=None) if state.state == BUILT else state
    steps = len(state.builder.sources()) + 1
    task = progress.add_task(state.op, total=steps, step="")
    started = time.monotonic()
    compiled = False

    def show(done: int, total: int, step: str) -> None:
        nonlocal compiled
        compiled = True
        progress.update(task, completed=done, total=total, step=step)

    try:
        store.check_cache()
        library = state.builder.build(show)
    except AcclimateError as error:
        return replace(state, state=FAILED, reason=str(error))
    # If nothing was compiled, another op shares the library, or another process built it first.
    seconds = time.monotonic() - started if compiled else None
    return replace(state, state=BUILT, library=library, seconds=seconds)


def _outcome(result: OpState) -> str:
    if result.state != BUILT:
        return result.state
    return "was built" if result.seconds is None else f"built in {result.seconds:.1f} s"


# -- clean -------------------------------------------------------------------------------------------


def _clean(args: argparse.Namespace) -> int:
    names = _cached_names(args) if args.names else None
    removed, busy = store.clean(names)
    folder = store.ops_folder()
    if args.json:
        text = json.dumps({"cache": str(folder), "removed": [*map(str, removed)], "busy": [*map(str, busy)]})
        sys.stdout.write(text + "\n")
        return 0
    libraries = "library" if len(removed) == 1 else "libraries"
    sys.stdout.write(f"Removed {len(removed)} {libraries} from {folder}\n")
    for lock in busy:
        sys.stdout.write(f"Kept, since it is being built: {lock.parent.name}\n")
    return 0


def _cached_names(args: argparse.Namespace) -> list[str]:
    """Returns the cache folders of the named ops, which may belong to another accelerator."""
    folder = store.ops_folder()
    cached = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
    others = [name for name in args.names if name not in cached]
    if not others:
        return list(args.names)
    accelerator = accelerator_to_build_for(args.accelerator)
    try:
        states = select(survey(accelerator), others, accelerator.name)
    except UnknownOpError as error:
        raise UnknownOpError(f"{error} In the cache are: {', '.join(sorted(cached)) or 'none'}.") from None
    return [*(name for name in args.names if name in cached), *(state.op for state in states)]


# -- showing -----------------------------------------------------------------------------------------


def _write_json(accelerator_name: str, **content: Any) -> None:
    report = {"accelerator": accelerator_name, "cache": str(store.ops_folder()), **content}
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


def _console() -> Console:
    return Console(soft_wrap=not sys.stdout.isatty())


def _describe(library: Path) -> str:
    folder = store.ops_folder()
    place = library.relative_to(folder) if library.is_relative_to(folder) else library
    return f"{place}, {library.stat().st_size / 1024:.0f} KiB"
