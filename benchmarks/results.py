"""The benchmarks' figures: stored in one committed file, shown in the README, on a page and in a picture.

A benchmark calls :func:`record`; `make bench` sets the folder that it writes to, and :func:`merge` adds the
results to ``docs/results.json``. A benchmark that was not run keeps its older figures, date and machine.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results.json"
CHART = ROOT / "docs" / "costs.png"
README = ROOT / "README.md"
FOLDER_VARIABLE = "ACCLIMATE_BENCHMARK_RESULTS"
PAGE = ROOT / "docs" / "results.md"
INFERENCE_PAGE = ROOT / "docs" / "inference.md"
DEEPSPEED_PAGE = ROOT / "docs" / "deepspeed.md"
INFERENCE_CHART = ROOT / "docs" / "inference.png"
HEAD = "# What it costs\n\nWritten by `make bench` from `results.json`.\n"
BEGIN, END = "<!-- written by make bench -->\n", "<!-- end -->\n"
DEMO_LINE = re.compile(r"^\[\w+ \| .* \| .*\]$", re.MULTILINE)
"""The last line of the demo's output, as in the README."""
COLOURS = ("#2a6f97", "#e09f3e", "#9e2a2b", "#6a994e", "#8338ec", "#495057")


@dataclass(frozen=True)
class Figure:
    """One piece of work, measured for us and for peers in one run."""

    work: str
    unit: str
    """``s``, ``ms``, ``µs``, ``ns``, ``GB`` (less is good); ``tokens/s``, ``MB/s``, ``models`` (more is)."""
    ours: float
    peers: dict[str, float] = field(default_factory=dict)

    @property
    def more_is_better(self) -> bool:
        """Whether the unit is a rate or a count of what works."""
        return self.unit.endswith("/s") or self.unit == "models"

    def advantage(self, peer: str) -> float:
        """How many times better ours is than a peer's; below 1 where it is worse."""
        ratio = self.peers[peer] / self.ours
        return 1 / ratio if self.more_is_better else ratio


@dataclass(frozen=True)
class Run:
    """All figures of one benchmark, and where and when they were measured."""

    benchmark: str
    date: str
    machine: str
    versions: dict[str, str]
    figures: tuple[Figure, ...]
    closing_line: str = ""
    """The last line of the demo's output, for the README."""


def record(
    benchmark: str,
    figures: Sequence[Figure],
    peers: dict[str, str] | None = None,
    closing_line: str = "",
) -> None:
    """Stores figures for `make bench`; does nothing in a run by hand.

    Args:
        benchmark: the benchmark's file name without ``.py``.
        figures: the measured figures.
        peers: the peers' versions.
        closing_line: the last line of the demo's output, from the benchmark that runs it.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    versions = {name: importlib.metadata.version(name) for name in ("acclimate", "torch")}
    versions["Python"] = platform.python_version()
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    run = Run(benchmark, today, machine(), versions | (peers or {}), tuple(figures), closing_line)
    Path(folder, f"{benchmark}.json").write_text(json.dumps(asdict(run)), encoding="utf-8")


def machine() -> str:
    """The processor, how many of it, and what decides the speed of kernels."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    flags = fields.get("flags", "").split()
    known = [("amx_bf16", "AMX"), ("avx512_bf16", "AVX-512 BF16"), ("avx512f", "AVX-512"), ("avx2", "AVX2")]
    best = next((name for flag, name in known if flag in flags), "")
    name = fields.get("model name", platform.machine())
    return ", ".join(filter(None, [f"{os.cpu_count()} processors", name, best]))


def read() -> dict[str, Run]:
    """The committed runs by benchmark."""
    if not RESULTS.exists():
        return {}
    runs = {}
    for entry in json.loads(RESULTS.read_text(encoding="utf-8")):
        figures = tuple(Figure(**figure) for figure in entry.pop("figures"))
        runs[entry["benchmark"]] = Run(**entry, figures=figures)
    return runs


def merge(folder: Path) -> dict[str, Run]:
    """Puts the runs that benchmarks left in a folder into the committed file."""
    runs = read()
    for path in sorted(folder.glob("*.json")):
        entry = json.loads(path.read_text(encoding="utf-8"))
        entry["figures"] = tuple(Figure(**figure) for figure in entry["figures"])
        runs[entry["benchmark"]] = Run(**entry)
    entries = [asdict(run) for _, run in sorted(runs.items())]
    RESULTS.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return read()  # in the order of the file, which the pages have too


def shown(value: float, unit: str) -> str:
    """A value as a table shows it: three significant digits."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def table(runs: dict[str, Run]) -> str:
    """A row for each piece of work and each peer beside us."""
    rows = ["| work | acclimate | peer | times better |", "|---|---|---|---|"]
    for run in runs.values():
        for figure in run.figures:
            for peer, theirs in figure.peers.items():
                cells = shown(figure.ours, figure.unit), f"{peer}: {shown(theirs, figure.unit)}"
                rows.append(f"| {figure.work} | {' | '.join(cells)} | {figure.advantage(peer):.3g} |")
    return "\n".join(rows) + "\n"


def origin(runs: dict[str, Run]) -> str:
    """A sentence on how, where, when and beside what the figures were measured."""
    dates: dict[str, set[str]] = {}
    for run in runs.values():
        dates.setdefault(run.machine, set()).add(run.date)
    versions = {name: version for run in runs.values() for name, version in run.versions.items()}
    versions.pop("acclimate", None)
    where = "; ".join(f"{machine} ({', '.join(sorted(days))})" for machine, days in sorted(dates.items()))
    beside = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return f"Medians of runs in which the contestants took turns, on {where}, with {beside}.\n"


def closing_line(runs: dict[str, Run]) -> str:
    """The last line of the demo's output in its latest run; empty if it was never run."""
    return next((run.closing_line for run in runs.values() if run.closing_line), "")


def write_pages(runs: dict[str, Run]) -> None:
    """Writes the page with the table, the figures' origin and the demo's last line into the README, and the
    figures of text generation and of DeepSpeed into their pages."""
    PAGE.write_text(f"{HEAD}\n{origin(runs)}\n![what it costs](costs.png)\n\n{table(runs)}", encoding="utf-8")
    text = _with_block(README, origin(runs))
    README.write_text(DEMO_LINE.sub(lambda line: closing_line(runs) or line[0], text), encoding="utf-8")
    if "inference" in runs:
        INFERENCE_PAGE.write_text(_with_block(INFERENCE_PAGE, inference_block(runs)), encoding="utf-8")
    if "zero_offload" in runs:
        DEEPSPEED_PAGE.write_text(_with_block(DEEPSPEED_PAGE, deepspeed_block(runs)), encoding="utf-8")


def inference_block(runs: dict[str, Run]) -> str:
    """The figures of text generation beside its peers, as their page shows them."""
    run = {"inference": runs["inference"]}
    return f"{origin(run)}\n![text generation beside its peers]({INFERENCE_CHART.name})\n\n{table(run)}"


def deepspeed_block(runs: dict[str, Run]) -> str:
    """The figures of DeepSpeed on our accelerator, as their page shows them."""
    run = {"zero_offload": runs["zero_offload"]}
    return f"{origin(run)}\n{table(run)}"


def _with_block(page: Path, block: str) -> str:
    """Returns a page's text with another block between its marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + block + END + rest.partition(END)[2]


def draw_inference(run: Run, path: Path = INFERENCE_CHART) -> None:
    """One group of bars for each piece of work, a bar for each system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    speeds = [figure for figure in run.figures if figure.more_is_better]
    kinds = list(dict.fromkeys(figure.work.rpartition(" ")[2] for figure in speeds))
    works = list(dict.fromkeys(figure.work.rpartition(",")[0] for figure in speeds))
    rows = sum(1 + max(len(f.peers) for f in speeds if f.work.endswith(f" {kind}")) for kind in kinds)
    size = 4.2 * len(works), 1 + 0.3 * (rows + len(kinds))
    chart, axes = pyplot.subplots(1, len(works), figsize=size, squeeze=False)
    for axis, work in zip(axes[0], works, strict=True):
        place, names, places = 0, [], []
        for kind in kinds:
            figure = next(f for f in speeds if f.work.startswith(f"{work},") and f.work.endswith(f" {kind}"))
            for name, value in {f"acclimate {kind}": figure.ours, **figure.peers}.items():
                colour = COLOURS[0 if name.startswith("acclimate") else 5]
                bars = axis.barh(place, value, color=colour, height=0.8)
                axis.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
                names.append(name)
                places.append(place)
                place += 1
            place += 0.6
        axis.set_yticks(places, names, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(work, fontsize=10)
        axis.set_xlabel("tokens/s")
        axis.margins(x=0.15)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    chart.tight_layout()
    chart.savefig(path, dpi=110)


def draw(runs: dict[str, Run], path: Path = CHART) -> None:
    """One row for each piece of work, one dot for each peer: how many times better ours is (log scale).

    Text generation and collectives have charts of their own.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown_runs = [run for name, run in runs.items() if name not in ("inference", "comm")]
    figures = [figure for run in shown_runs for figure in run.figures if figure.peers][::-1]
    names = sorted({peer for figure in figures for peer in figure.peers})
    colours = dict(zip(names, itertools.cycle(COLOURS), strict=False))
    chart, axes = pyplot.subplots(figsize=(10, 1.2 + 0.38 * len(figures)))
    axes.axvline(1, color="black", linewidth=1)
    for row, figure in enumerate(figures):
        for peer in figure.peers:
            ratio = figure.advantage(peer)
            axes.plot([1, ratio], [row, row], color=colours[peer], alpha=0.25, linewidth=3)
            axes.plot(ratio, row, "o", color=colours[peer], markersize=8)
            # A number stands where neither another peer nor the line at 1 covers it.
            lower = ratio < max(1, *(figure.advantage(other) for other in figure.peers))
            shift = (-8, -3) if lower else (8, -3)
            axes.annotate(f"{ratio:.2g}", (ratio, row), shift, textcoords="offset points", fontsize=8,
                          ha="right" if lower else "left")  # fmt: skip
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.3, high * 1.6)
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100, 200) if low / 1.3 <= tick <= high * 1.6]
    axes.set_xticks(ticks, [f"{tick:g} x" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(figures)), [figure.work for figure in figures], fontsize=9)
    axes.set_xlabel("times better than the peer (right of 1: acclimate is better)")
    handles = [pyplot.Line2D([], [], marker="o", ls="", color=colours[name], label=name) for name in names]
    axes.legend(handles=handles, loc="lower right", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    chart.tight_layout()
    chart.savefig(path, dpi=120)
