"""What the accelerator layer itself costs, beside DeepSpeed's: imports, first and later calls, lines of code.

    python benchmarks/core.py

Each figure is the median over rounds in which ours and the peer's take turns, each in a fresh process.
"""

from __future__ import annotations

import ast
import io
import json
import os
import statistics
import subprocess
import sys
import time
import tokenize
from dataclasses import dataclass
from pathlib import Path

import results
from peers import DEEPSPEED, ROOT, deepspeed_python
from rich.console import Console
from rich.table import Table

ROUNDS = 7

FIRST_CALL = """
import time, torch
start = time.perf_counter()
from {package} import get_accelerator
get_accelerator()
print(time.perf_counter() - start)
"""

LATER_CALLS = """
import json, timeit
from {package} import get_accelerator
acc = get_accelerator()
calls = dict(get=get_accelerator, name=acc.current_device_name, memory=acc.memory_allocated)
print(json.dumps({{k: min(timeit.repeat(f, number=20000, repeat=5)) / 20000 for k, f in calls.items()}}))
"""


@dataclass(frozen=True)
class Figure:
    """One row of the table; seconds, or a count."""

    work: str
    ours: float
    peer: float | None
    goal: str
    reached: bool
    unit: str

    @property
    def scale(self) -> float:
        """How many of the unit make a second, or a count of one."""
        return {"ms": 1e3, "µs": 1e6, "ns": 1e9, "lines": 1.0}[self.unit]

    def shown(self, value: float | None) -> str:
        """A value in the unit of its row."""
        return (
            "—" if value is None else f"{value * self.scale:,.1f} {self.unit}".replace(".0 lines", " lines")
        )


def child(python: Path, code: str) -> str:
    """What a fresh process printed; compiled modules are kept, as on a user's machine."""
    unwanted = {"PYTHONDONTWRITEBYTECODE", "DS_ACCELERATOR", "ACCLIMATE_ACCELERATOR"}
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def wall(python: Path, code: str) -> float:
    """Seconds a whole process takes."""
    start = time.perf_counter()
    child(python, code)
    return time.perf_counter() - start


def in_turns(*measures: object) -> list[float]:
    """The median of each measure over rounds in which they take turns; one warm-up round."""
    seen = [[float(measure()) for measure in measures] for _ in range(ROUNDS + 1)][1:]  # type: ignore[operator]
    return [statistics.median(column) for column in zip(*seen, strict=True)]


def code_lines(file: Path) -> int:
    """Lines that hold code: no blanks, comments or docstrings."""
    source = file.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            text = body[0].value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                docstrings.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    silent = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def measure() -> list[Figure]:
    """All figures, in the order of the table."""
    ours, peer = Path(sys.executable), deepspeed_python()
    bare, imported = in_turns(lambda: wall(ours, "pass"), lambda: wall(ours, "import acclimate"))
    has_torch = child(ours, "import sys, acclimate; print('torch' in sys.modules)") == "True"
    first_ours, first_peer = in_turns(
        lambda: child(ours, FIRST_CALL.format(package="acclimate")),
        lambda: child(peer, FIRST_CALL.format(package="deepspeed.accelerator")),
    )
    rounds = [
        (
            json.loads(child(ours, LATER_CALLS.format(package="acclimate"))),
            json.loads(child(peer, LATER_CALLS.format(package="deepspeed.accelerator"))),
        )
        for _ in range(3)
    ]
    calls = {
        key: (statistics.median(r[0][key] for r in rounds), statistics.median(r[1][key] for r in rounds))
        for key in ("get", "name", "memory")
    }
    excess = imported - bare
    backends = ROOT / "src" / "acclimate" / "backends"
    peer_files = Path(
        child(peer, "import deepspeed.accelerator as a, os; print(os.path.dirname(a.__file__))")
    )
    lines = {
        name: (code_lines(backends / f"{name}.py"), code_lines(peer_files / f"{name}_accelerator.py"))
        for name in ("cpu", "cuda")
    }
    return [
        Figure(
            "import acclimate, over python -c pass",
            excess,
            None,
            "< 30 ms, no torch",
            excess < 0.03 and not has_torch,
            "ms",
        ),
        Figure(
            "get_accelerator(), over import torch", first_ours, first_peer, "< 50 ms", first_ours < 0.05, "ms"
        ),
        Figure("get_accelerator(), once chosen", *calls["get"], "< 80 ns", calls["get"][0] < 80e-9, "ns"),
        Figure("current_device_name()", *calls["name"], "< 300 ns", calls["name"][0] < 300e-9, "ns"),
        Figure(
            "CPU memory_allocated()",
            *calls["memory"],
            "≤ 1/6",
            calls["memory"][0] <= calls["memory"][1] / 6,
            "µs",
        ),
        *(
            Figure(f"code lines of the {name} backend", *counts, "≤ 1/2", counts[0] <= counts[1] / 2, "lines")
            for name, counts in lines.items()
        ),
    ]


def main() -> int:
    """Measures and prints; returns 1 where a goal is missed."""
    figures = measure()
    table = Table(title="The accelerator layer beside DeepSpeed 0.19.8", title_justify="left")
    for column in ("work", "acclimate", "DeepSpeed", "ours / theirs", "goal", "reached"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for figure in figures:
        ratio = "—" if figure.peer is None else f"{figure.ours / figure.peer:.3f}"
        table.add_row(
            figure.work,
            figure.shown(figure.ours),
            figure.shown(figure.peer),
            ratio,
            figure.goal,
            "yes" if figure.reached else "NO",
        )
    Console(width=120).print(table)
    kept = [
        results.Figure(one.work, one.unit, one.ours * one.scale, {"DeepSpeed": one.peer * one.scale})
        for one in figures
        if one.peer is not None
    ]
    results.record("core", kept, {"DeepSpeed": DEEPSPEED.partition("==")[2]})
    return 0 if all(figure.reached for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
