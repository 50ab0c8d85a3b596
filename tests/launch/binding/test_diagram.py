"""Promises of the picture that ``acclimate run --show_binding`` draws."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from acclimate.host.topology import Topology, format_cpu_list, parse_cpu_list, read_topology
from acclimate.launch.binding.cores import bind_ranks
from acclimate.launch.binding.diagram import _COLOURS, _SIXTEEN_COLOURS, show_binding
from machine_trees import XEON_MAX, XEON_MAX_BANDWIDTHS, XEON_MAX_DISTANCES, machine, write_tree


def drawn(
    topology: Topology, ranks: int, *, width: int = 80, encoding: str = "utf-8", **options: Any
) -> list[str]:
    """The lines that a file or a pipe gets."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show_binding(topology, bind_ranks(topology, ranks, **options), Console(file=stream, width=width))
    stream.seek(0)
    return [line.rstrip() for line in stream.read().splitlines()]


@pytest.fixture(scope="module")
def two_sockets(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    """2 nodes of 64 cores of 2 threads."""
    siblings = {cpu: f"{cpu % 128},{cpu % 128 + 128}" for cpu in range(256)}
    nodes = {0: ("0-63,128-191", 512), 1: ("64-127,192-255", 512)}
    return read_topology(
        write_tree(tmp_path_factory.mktemp("sockets"), machine(nodes, ["10 32", "32 10"], siblings))
    )


def test_a_file_gets_plain_text_that_stays_the_same(tmp_path: Path) -> None:
    nodes = {0: ("0-3", 4), 1: ("4-8", 4), 2: ("", 16)}
    files = machine(nodes, ["10 21 80", "21 10 80", "80 80 10"])
    topology = read_topology(write_tree(tmp_path, files), allowed=range(8))
    assert drawn(topology, 3, root=tmp_path) == [
        "╭─ memory node 0, package 0, 4 GiB ─╮ ╭─ memory node 1, package 0, 4 GiB ─╮",
        "│  0-3  0 0 0 1                     │ │  4-8  1 1 2 2 x                   │",
        "╰───────────────────────────────────╯ ╰───────────────────────────────────╯",
        "memory node 2, 16 GiB, no cores",
        '(a number is the rank that a core goes to; "x" is not allowed to this process)',
        "",
        "rank  cores  processors  node  memory",
        "   0      3  0-2         0     bound to node 0",
        "   1      3  3-5         0-1   bound to nodes 0-1",
        "   2      2  6-7         1     bound to node 1",
        "",
        "1 of 3 ranks has cores of more than one memory node: ranks get the same number",
        "of cores, give or take one, from as few memory nodes as that allows.",
    ]


def test_a_terminal_that_knows_only_ascii_gets_only_ascii(two_sockets: Topology) -> None:
    lines = drawn(two_sockets, 3, encoding="ascii")
    assert "\n".join(lines).isascii()
    assert lines[0].startswith("+- memory node 0, package 0, 512 GiB -")


@pytest.mark.parametrize("ranks", [3, 128, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8))])
def test_256_threads_fit_a_terminal_of_80_columns(two_sockets: Topology, ranks: int) -> None:
    lines = drawn(two_sockets, ranks, use_hyperthreads=True)
    assert max(map(len, lines)) <= 80
    cells = [line for line in lines if line.startswith("│") and re.search(r"\d", line)]
    numbers = [int(cell) for line in cells for cell in line.strip("│").split()[1:]]
    assert len(numbers) == 256, "not every thread has a cell"
    assert set(numbers) == set(range(ranks))


def test_second_threads_are_below_their_cores_and_marked_unused(two_sockets: Topology) -> None:
    lines = drawn(two_sockets, 2)
    first = "│     0-31 " + "  ".join([" 0 0 0 0 0 0 0 0"[1:]] * 4).join([" ", " │"])
    assert lines[1] == first
    assert lines[2] == first.replace("    0-31", " 128-159").replace(" 0", " .")
    assert '"." is not used' in " ".join(lines)
    assert "second hardware threads are below their cores" in " ".join(lines)


@pytest.mark.parametrize(
    "width", [30, 200, *(pytest.param(n, marks=pytest.mark.slow) for n in (40, 60, 120))]
)
def test_any_width_shows_every_core(two_sockets: Topology, width: int) -> None:
    lines = drawn(two_sockets, 2, width=width)
    assert max(map(len, lines)) <= width
    frames = "\n".join(line for line in lines if line.startswith("│"))
    assert len(re.findall(r"(?<= )[01](?= )", frames)) == 128


def test_rows_that_interleave_numbers_say_the_first_and_the_last(recorded: Callable[[str], Path]) -> None:
    lines = drawn(read_topology(recorded("40intel64-2g2n4c+pcilocality")), 4)
    assert lines[1].split("│")[1].split() == ["0..36", *["0"] * 10]
    assert lines[-3].split() == ["1", "10", "1,5,9,13,17,21,25,29,33,37", "1", *["bound", "to", "node", "1"]]


def test_nodes_are_drawn_alike_in_width(recorded: Callable[[str], Path]) -> None:
    lines = drawn(read_topology(recorded("64amd64-4s2n4ca2co")), 8)  # node 5 has 8 GiB, the others 16
    assert {tuple(map(len, line.split(" ╭"))) for line in lines if line.startswith("╭")} == {(38, 37)}


def test_kinds_of_cores_are_named_where_a_node_has_both(recorded: Callable[[str], Path]) -> None:
    lines = drawn(read_topology(recorded("nvidia-dgx-gb10")), 2)
    frame = [line.strip("│ ") for line in lines[1:5]]
    assert frame[0] == "performance cores"
    assert frame[1].split() == ["5..19", *"0000011111"]
    assert frame[2] == "efficiency cores"
    assert frame[3].split() == ["0..14", *"0000011111"]


def test_memory_that_is_not_allowed_is_said(recorded: Callable[[str], Path]) -> None:
    text = "\n".join(drawn(read_topology(recorded("16amd64-8n2c-cpusets")), 6))
    assert text.count("its memory is not allowed") == 4  # nodes 0, 5, 6 and 7
    assert "as the kernel chooses" in text


def test_fast_memory_is_shown_and_by_whom_it_is_preferred(tmp_path: Path) -> None:
    root = write_tree(tmp_path, machine(XEON_MAX, XEON_MAX_DISTANCES) | XEON_MAX_BANDWIDTHS)
    lines = drawn(read_topology(root), 2, root=root)
    assert "memory node 2, 64 GiB, no cores" in lines
    assert lines[-2].split()[-3:] == ["prefers", "node", "2"]


def test_nothing_is_said_of_reaching_across_where_no_rank_does(two_sockets: Topology) -> None:
    assert not any("more than one memory node" in line for line in drawn(two_sockets, 4))


@pytest.mark.parametrize("ranks", [1, 3, 10, 11])
def test_the_legend_lists_exactly_what_each_rank_gets(two_sockets: Topology, ranks: int) -> None:
    bindings = bind_ranks(two_sockets, ranks)
    lines = drawn(two_sockets, ranks)
    rows = lines[lines.index(next(line for line in lines if "processors" in line)) + 1 :][:ranks]
    for rank, (binding, row) in enumerate(zip(bindings, rows, strict=True)):
        number, cores, processors, *_ = row.split()
        assert (int(number), int(cores)) == (rank, binding.cores)
        assert processors == format_cpu_list(parse_cpu_list(processors)) == format_cpu_list(binding.cpus)


@pytest.mark.parametrize("colours", ["standard", "256", "truecolor"])
def test_a_terminal_gets_a_colour_for_each_of_eight_ranks(two_sockets: Topology, colours: Any) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, color_system=colours, no_color=False)
    show_binding(two_sockets, bind_ranks(two_sockets, 8), console)
    grounds = re.findall(r"[;\[](4[0-7]|10[0-7]|48;5;\d+|48;2;\d+;\d+;\d+)m", stream.getvalue())
    assert len(set(grounds)) == 8


def contrast(style: str) -> float:
    """By the formula of the Web Content Accessibility Guidelines; 4.5 is legible."""
    lights = []
    for colour in re.findall(r"#([0-9a-f]{6})", style):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_sixteen_colours_are_as_many_and_all_different() -> None:
    assert len({style.split(" on ")[1] for style in _SIXTEEN_COLOURS}) == len(_COLOURS)


@pytest.mark.parametrize("style", _COLOURS)
def test_the_number_is_legible_on_its_colour(style: str) -> None:
    assert contrast(style) >= 4.5
