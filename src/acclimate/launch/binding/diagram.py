"""Draws the cores of each memory node and their ranks, for ``acclimate run --show_binding``.

Ranks have numbers and colours, so the diagram can be read without colours. Only the frames are not ASCII;
rich draws them in ASCII if the terminal needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from acclimate.host.topology import Core, MemoryNode, Topology, format_cpu_list
from acclimate.launch.binding.cores import RankBinding

# Okabe and Ito's palette for colour-blind readers, each with a readable text colour.
_COLOURS = (
    "#000000 on #56b4e9",
    "#000000 on #e69f00",
    "#ffffff on #006e50",
    "#000000 on #f0e442",
    "#ffffff on #005c91",
    "#000000 on #e08152",
    "#000000 on #d795b9",
    "#000000 on #bbbbbb",
)
# For terminals with 16 colours (TERM=xterm), which show some of the above as the same grey.
_SIXTEEN_COLOURS = (
    "black on bright_cyan",
    "black on yellow",
    "white on green",
    "black on bright_yellow",
    "white on blue",
    "white on red",
    "white on magenta",
    "black on white",
)
_UNUSED, _FORBIDDEN = ".", "x"
_BLOCK = 8  # cells between gaps, to count by
_FRAME = 4  # the sides of a panel, with their padding


def show_binding(topology: Topology, bindings: Sequence[RankBinding], console: Console) -> None:
    """Draws each memory node with its cores and their ranks, and lists the binding of every rank."""
    rank_of = {cpu: rank for rank, binding in enumerate(bindings) for cpu in binding.cpus}
    colours = _SIXTEEN_COLOURS if console.color_system == "standard" else _COLOURS
    grid = _Grid(
        topology,
        rank_of,
        colours,
        heading=2 * len(str(max(topology.online_cpus))) + 2,
        cell=len(str(len(bindings) - 1)) + 1,
        width=console.width - _FRAME,
    )
    frames = [
        Panel(grid.of_node(node), title=Text(_title(topology, node)), title_align="left", expand=False)
        for node in topology.nodes
        if node.cpus
    ]
    # All of the same width, so that they form columns.
    widest = max(console.measure(frame).maximum for frame in frames)
    for frame in frames:
        frame.expand, frame.width = True, widest
    console.print(Columns(frames, padding=(0, 1)))
    for node in topology.nodes:
        if not node.cpus and node.memory_bytes:
            console.print(Text(f"{_title(topology, node)}, no cores"))
    console.print(_key(topology, rank_of), end="\n\n")
    console.print(_legend(topology, bindings, colours))
    if across := sum(len(_nodes_of(topology, binding)) > 1 for binding in bindings):
        verb = "has" if across == 1 else "have"
        console.print(
            Text(
                f"\n{across} of {len(bindings)} ranks {verb} cores of more than one memory node: ranks get"
                " the same number of cores, give or take one, from as few memory nodes as that allows."
            )
        )


def _title(topology: Topology, node: MemoryNode) -> str:
    packages = sorted({core.package for core in topology.cores if core.node == node.index} - {-1})
    parts = [f"memory node {node.index}"]
    if packages:
        parts.append(f"package{'s' if len(packages) > 1 else ''} {format_cpu_list(packages)}")
    parts.append(_size(node.memory_bytes) if node.memory_bytes else "no memory")
    return ", ".join(parts)


def _size(size_bytes: int) -> str:
    mib = size_bytes >> 20
    return f"{mib} MiB" if mib < 1024 else f"{mib / 1024:.0f} GiB"


# -- the cores of a memory node --------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """Draws the cores of a memory node, with hardware threads of one core below each other."""

    topology: Topology
    rank_of: Mapping[int, int]
    colours: Sequence[str]
    heading: int
    cell: int
    width: int

    def of_node(self, node: MemoryNode) -> Group:
        cores = [core for core in self.topology.cores if core.node == node.index]
        cores.sort(key=lambda core: (core.package, core.cpus))
        lines: list[Text] = []
        for kind in ("performance", "efficiency"):
            of_kind = [core for core in cores if core.kind == kind]
            if of_kind and len(of_kind) < len(cores):
                lines.append(Text(f"{kind} cores", style="italic"))
            for first in range(0, len(of_kind), self.cores_per_row):
                row = of_kind[first : first + self.cores_per_row]
                if first and any(len(core.cpus) > 1 for core in of_kind):
                    lines.append(Text())
                lines += (self.row(row, thread) for thread in range(max(len(core.cpus) for core in row)))
        if node.memory_bytes and node.index not in self.topology.allowed_memory_nodes:
            lines.append(Text("its memory is not allowed", style="italic"))
        return Group(*lines)

    @property
    def cores_per_row(self) -> int:
        room = self.width - self.heading - 1
        return next((n for n in (32, 16, 8) if n * self.cell + n // _BLOCK - 1 <= room), 4)

    def row(self, cores: Sequence[Core], thread: int) -> Text:
        cpus = [core.cpus[thread] for core in cores if len(core.cpus) > thread]
        heading = format_cpu_list(cpus)
        if len(heading) > self.heading:
            heading = f"{min(cpus)}..{max(cpus)}"
        row = Text()
        row.append(f"{heading:>{self.heading}} ", style="dim")
        for position, core in enumerate(cores):
            if position and position % _BLOCK == 0:
                row.append(" ")
            cpu = core.cpus[thread] if len(core.cpus) > thread else None
            if cpu is None:
                row.append(" " * self.cell)
            elif (rank := self.rank_of.get(cpu)) is not None:
                row.append(f"{rank:>{self.cell}}", style=self.colours[rank % len(self.colours)])
            else:
                mark = _UNUSED if cpu in self.topology.allowed_cpus else _FORBIDDEN
                row.append(f"{mark:>{self.cell}}", style="dim")
        return row


# -- what it means ---------------------------------------------------------------------------------


def _key(topology: Topology, rank_of: Mapping[int, int]) -> Text:
    parts = ["a number is the rank that a core goes to"]
    if topology.allowed_cpus - set(rank_of):
        parts.append(f'"{_UNUSED}" is not used')
    if topology.online_cpus - topology.allowed_cpus:
        parts.append(f'"{_FORBIDDEN}" is not allowed to this process')
    if any(len(core.cpus) > 1 for core in topology.cores):
        parts.append("second hardware threads are below their cores")
    return Text(f"({'; '.join(parts)})", style="dim")


def _legend(topology: Topology, bindings: Sequence[RankBinding], colours: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("cores", justify="right", no_wrap=True)
    table.add_column("processors", overflow="fold")
    table.add_column("node", overflow="fold")
    table.add_column("memory", overflow="fold")
    for rank, binding in enumerate(bindings):
        nodes = _nodes_of(topology, binding)
        table.add_row(
            Text(f" {rank} ", style=colours[rank % len(colours)]),
            str(binding.cores),
            format_cpu_list(binding.cpus),
            format_cpu_list(nodes),
            _memory(binding),
        )
    return table


def _memory(binding: RankBinding) -> str:
    if binding.preferred_memory_node is not None:
        return f"prefers node {binding.preferred_memory_node}"
    if not binding.memory_nodes:
        return "as the kernel chooses"
    plural = "s" if len(binding.memory_nodes) > 1 else ""
    return f"bound to node{plural} {format_cpu_list(binding.memory_nodes)}"


def _nodes_of(topology: Topology, binding: RankBinding) -> list[int]:
    return [node.index for node in topology.nodes if not set(node.cpus).isdisjoint(binding.cpus)]
