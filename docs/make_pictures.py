"""Draws docs/autotp.svg, a model over ranks, and docs/launch.svg, cores and ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

FOLDER = Path(__file__).parent
COLORS = ("#cfe2f3", "#fce5cd", "#d9ead3", "#ead1dc")
WHOLE, INK = "#eeeeee", "#222222"


def canvas(width: float, height: float) -> Axes:
    """Returns axes in which a unit is a tenth of an inch."""
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "acclimate", "font.size": 11}
    figure = plt.figure(figsize=(width / 10, height / 10), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(axes: Axes, x: float, y: float, width: float, height: float, color: str, text: str = "") -> None:
    """Draws a box with a text in its middle."""
    shape = "round,pad=0,rounding_size=0.6"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, shape, facecolor=color, edgecolor=INK, linewidth=0.9)
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=INK, linespacing=1.25)


def note(axes: Axes, x: float, y: float, text: str, align: str = "left", **style: object) -> None:
    axes.text(x, y, text, ha=align, va="center", color=INK, **style)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1})


def draw_autotp() -> Axes:
    """One block of a transformer on two ranks, from the bottom to the top."""
    axes = canvas(90, 62)
    left, column, width = (18, 54), 30, 12.5
    for rank, x in enumerate(left):
        note(axes, x + column / 2, 59.5, f"rank {rank}", "center", fontweight="bold")
        color = COLORS[rank]
        half = "first half" if rank == 0 else "second half"
        for y, parts, below in (
            (10, ("q, k, v\n" + half + "\nof the heads", "o\ntheir columns"), "attention"),
            (37, ("gate, up\n" + half + "\nof the columns", "down\nthe same ones"), "MLP"),
        ):
            box(axes, x, y, width + 2, 10, color, parts[0])
            box(axes, x + column - width, y, width, 10, color, parts[1])
            arrow(axes, (x + width + 2, y + 5), (x + column - width, y + 5))
            if rank == 0:
                note(axes, 1, y + 5, below, fontweight="bold")
        box(axes, x, 2, column, 4, WHOLE, "norm, whole")
        arrow(axes, (x + 7, 6), (x + 7, 10))
        arrow(axes, (x + column - width / 2, 20), (x + column - width / 2, 24))
        box(axes, x, 29.5, column, 4, WHOLE, "norm, whole")
        arrow(axes, (x + 7, 28), (x + 7, 29.5))
        arrow(axes, (x + 7, 33.5), (x + 7, 37))
        arrow(axes, (x + column - width / 2, 47), (x + column - width / 2, 51))
    for y in (24, 51):
        box(
            axes,
            left[0],
            y,
            left[1] + column - left[0],
            4,
            "#fff2cc",
            "sum over ranks: each rank gets the whole result",
        )
    return axes


def draw_launch() -> Axes:
    """Four ranks on a host with two memory nodes of eight cores."""
    axes = canvas(90, 36)
    note(
        axes, 1, 33.5, "acclimate run --num_accelerators 4 --bind_cores_to_rank train.py", family="monospace"
    )
    for node in range(2):
        x = 1 + node * 45
        axes.add_patch(
            FancyBboxPatch((x, 1), 43, 29, "round,pad=0,rounding_size=0.8", facecolor="white", edgecolor=INK)
        )
        note(axes, x + 21.5, 27.8, f"memory node {node}", "center", fontweight="bold")
        for place in range(2):
            rank = 2 * node + place
            color, start = COLORS[rank], x + 1.5 + place * 20.5
            box(axes, start, 17.5, 19.5, 8, color, f"rank {rank}\nLOCAL_RANK={rank}")
            for core in range(4):
                box(axes, start + core * 5, 10.5, 4.5, 4.5, color, str(8 * node + 4 * place + core))
            arrow(axes, (start + 9.75, 17.5), (start + 9.75, 15.2))
        box(axes, x + 1.5, 2.5, 40, 5, WHOLE, f"memory of ranks {2 * node} and {2 * node + 1}")
        note(axes, x + 21.5, 9, f"cores {8 * node} to {8 * node + 7}", "center", fontsize=9)
    return axes


def main() -> None:
    """Writes the pictures; with an argument, as PNG into that folder."""
    for name, draw in (("autotp", draw_autotp), ("launch", draw_launch)):
        figure = draw().figure
        if len(sys.argv) > 1:
            figure.savefig(Path(sys.argv[1]) / f"{name}.png", dpi=100)
        else:
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
