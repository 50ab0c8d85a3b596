"""`acclimate info`: this machine's accelerator and devices, as tables for a person or JSON for a program."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from acclimate.errors import AcclimateError
from acclimate.host import topology
from acclimate.host.exit_codes import NEGATIVE_RESULT
from acclimate.imports import describe, import_torch
from acclimate.selection import Candidate, chosen_by, detect_all, get_accelerator

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator


@dataclass(frozen=True)
class Device:
    """One device of the accelerator."""

    name: str
    """torch's name."""
    product: str
    """The vendor's name."""
    total_memory: int
    """Bytes."""
    available_memory: int
    """Bytes."""


@dataclass(frozen=True)
class Chosen:
    """The accelerator of this process."""

    name: str
    device_type: str
    chosen_by: str
    devices: list[Device]
    supported_dtypes: list[str]
    communication_backend: str
    compile_backend: str
    visible_devices_variables: list[str]
    triton: bool
    toolkit_version: str | None
    """The version of the vendor's software below torch, if known."""


@dataclass(frozen=True)
class Host:
    """The host's resources that this process may use."""

    processors: int
    memory_nodes: int
    processor_quota: float | None
    """The number of processors' time that a cgroup allows, if it is limited."""
    total_memory: int
    """Bytes, within this process's cgroups."""
    available_memory: int
    """Bytes, within this process's cgroups."""


@dataclass(frozen=True)
class Report:
    """The content of ``acclimate info``."""

    acclimate: str
    torch: str
    python: str
    system: str
    host: Host
    accelerator: Chosen | None
    """``None`` if it cannot be used or described; :attr:`error` then says why."""
    error: str | None
    candidates: list[Candidate] = field(default_factory=list)
    """All records, in the order of detection."""

    def as_dict(self) -> dict[str, object]:
        """Returns nested dicts and lists, for JSON."""
        return asdict(self)


def collect() -> Report:
    """Selects this process's accelerator and probes all others."""
    import_torch()
    import torch

    from acclimate import __version__

    chosen, error = None, None
    try:
        chosen = _describe(get_accelerator())
    except AcclimateError as problem:
        error = str(problem)
    except Exception as problem:  # noqa: BLE001 - the report must show a failing driver
        error = f"The accelerator was selected, but querying its devices failed: {describe(problem)}"
    return Report(
        acclimate=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        host=_host(),
        accelerator=chosen,
        error=error,
        candidates=detect_all(),
    )


def _host() -> Host:
    found = topology.read_topology()
    return Host(
        processors=len(found.allowed_cpus),
        memory_nodes=topology.usable_node_count(),
        processor_quota=topology.cpu_quota() if sys.platform == "linux" else None,
        total_memory=topology.total_memory(),
        available_memory=topology.available_memory(),
    )


def _describe(accelerator: Accelerator) -> Chosen:
    # All devices of the CPU have the same name in torch.
    indices = range(accelerator.device_count())
    names = dict.fromkeys(accelerator.device_name(index) for index in indices)
    return Chosen(
        name=accelerator.name,
        device_type=accelerator.device_type,
        chosen_by=chosen_by(),
        devices=[
            Device(
                name=name,
                product=accelerator.get_device_name(name),
                total_memory=accelerator.total_memory(name),
                available_memory=accelerator.available_memory(name),
            )
            for name in names
        ],
        supported_dtypes=[str(dtype).removeprefix("torch.") for dtype in accelerator.supported_dtypes()],
        communication_backend=accelerator.communication_backend_name(),
        compile_backend=accelerator.get_compile_backend(),
        visible_devices_variables=accelerator.visible_devices_envs(),
        triton=accelerator.is_triton_supported(),
        toolkit_version=accelerator.toolkit_version(),
    )


_WHOLE_LINES = 10_000
"""A width at which nothing is wrapped, for `grep`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``acclimate info``."""
    parser.add_argument(
        "--all", action="store_true", help="show a table of every accelerator, with the full reasons"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 1 if an explicitly chosen accelerator cannot be used, else 0."""
    logger = logging.getLogger("acclimate")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the report itself gives the reasons of which detection warns
    try:
        report = collect()
    finally:
        logger.setLevel(level)
    if args.json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n")
    else:
        # No markup: vendors' messages may contain brackets and colons.
        on_terminal = sys.stdout.isatty()
        width = None if on_terminal or os.environ.get("COLUMNS") else _WHOLE_LINES
        console = Console(width=width, soft_wrap=not on_terminal, markup=False, emoji=False)
        console.print(render(report, args.all))
    return 0 if report.error is None else NEGATIVE_RESULT


def render(report: Report, all_candidates: bool = False) -> Group:
    """Returns the report for rich: the accelerator in use first, then all others, in full or a line each."""
    shown = _candidates if all_candidates else _other_candidates
    parts: list[RenderableType] = [_summary(report), Text(), shown(report)]
    return Group(*parts)


def _summary(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row(
        "acclimate", f"{report.acclimate}, torch {report.torch}, Python {report.python}, {report.system}"
    )
    chosen, host = report.accelerator, report.host
    if chosen is not None:
        table.add_row(
            "accelerator", Text(chosen.name, style="bold green").append(f"  by {chosen.chosen_by}", "dim")
        )
        for device in chosen.devices:
            memory = f"{_gib(device.available_memory)} of {_gib(device.total_memory)} available"
            table.add_row(f"  {device.name}", f"{device.product}, {memory}")
        table.add_row("  dtypes", ", ".join(chosen.supported_dtypes))
        table.add_row("  communication", chosen.communication_backend)
        table.add_row("  compiler", chosen.compile_backend + (", Triton" if chosen.triton else ""))
        if chosen.toolkit_version is not None:
            table.add_row("  toolkit", chosen.toolkit_version)
    elif report.error is not None:
        table.add_row("accelerator", Text("none  ", style="bold red").append(report.error, "not bold"))
    quota = f", {host.processor_quota:g} of them by quota" if host.processor_quota is not None else ""
    nodes = "memory node" if host.memory_nodes == 1 else "memory nodes"
    table.add_row("host", f"{host.processors} processors{quota}, {host.memory_nodes} {nodes}")
    return table


def _other_candidates(report: Report) -> Group:
    """Shows each accelerator that is not used on one line, cut at the terminal's width."""
    chosen = report.accelerator.name if report.accelerator is not None else None
    others = [
        candidate
        for candidate in report.candidates
        if candidate.reason is not None or candidate.name != chosen
    ]
    width = max((len(other.name) for other in others), default=0)
    lines = []
    for other in others:
        style = "dim" if other.reason is not None else ""
        note = " ".join((other.reason or _how_to_choose(other)).split())
        line = Text(f"  {other.name:{width}}  {note}", style=style)
        if sys.stdout.isatty():
            line.no_wrap, line.overflow = True, "ellipsis"
        lines.append(line)
    title = Text("Not used", style="bold").append("  acclimate info --all has the reasons in full", "dim")
    return Group(title, *lines)


def _how_to_choose(candidate: Candidate) -> str:
    """Says how to choose a usable accelerator."""
    only = "" if candidate.auto_detect else ", only by name"
    return f"can be used{only}: ACCLIMATE_ACCELERATOR={candidate.name}"


def _candidates(report: Report) -> Table:
    table = Table(title="In the order of detection", title_justify="left", title_style="bold")
    table.add_column("accelerator")
    table.add_column("found", justify="center")
    table.add_column("why not", overflow="fold")
    name = report.accelerator.name if report.accelerator is not None else None
    for candidate in report.candidates:
        usable = candidate.reason is None
        by_name = "" if candidate.auto_detect else "only by name: ACCLIMATE_ACCELERATOR=" + candidate.name
        note = candidate.reason or by_name
        style = "bold green" if usable and candidate.name == name else "" if usable else "dim"
        table.add_row(candidate.name, "yes" if usable else "no", note, style=style)
    return table


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
