"""Count what `acclimate port` makes of other people's repositories.

    python benchmarks/port.py CHECKOUTS [--files N] [--seed S] [--sample FILE]

CHECKOUTS holds a folder per repository. Sites are counted here, from Python's own syntax tree and without the
rules: names of torch.cuda, calls of `.cuda(`, `.is_cuda`, and the strings "cuda", "cuda:N" and "nccl" outside
docstrings. A site is converted when it is gone afterwards, so data that only looks like a device counts
against the tool. Beside it the lines that DeepSpeed's check-torchcuda.py reports (it looks for "torch.cuda",
and edits nothing), and the edits that a regular expression (`torch.cuda` -> `get_accelerator()`) would make.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import time
import warnings
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from cuda_uses import cuda_names

from acclimate_port.engine import Settings, Status, may_concern
from acclimate_port.files.workers import port_file
from acclimate_port.source.survey import Survey, joined, survey

DEVICE = re.compile(r"cuda(:\d+)?$")
_NOT_COUNTED = ("ACC199", "ACC301", "ACC306")
"""Rules whose exempt code is no site: variables of NCCL, definitions of `cuda`, options of torch.backends."""
Edit = tuple[str, int, str, str, bool]
"""File, line, text, rule, and whether it is safe."""


@dataclass
class Counts:
    """What was counted in some files."""

    files: int = 0
    lines: int = 0
    before: int = 0
    after: int = 0
    exempt: int = 0
    broken: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    deepspeed_finds: int = 0
    expression_edits: int = 0
    processor_s: float = 0.0
    edits: list[Edit] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Adds another file's counts."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def main() -> None:
    """Prints a table for each target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--files", type=int, help="only so many, chosen at random")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument(
        "--sample",
        type=Path,
        help="write 300 edits, half of them unsafe, chosen at random, to judge by reading",
    )
    args = parser.parse_args()
    files = [path for path in sorted(args.checkouts.rglob("*.py")) if path.is_file()]
    paths = [path for path in files if may_concern(path.read_bytes())]
    if not paths:
        parser.error(f"no file below {args.checkouts} has code for CUDA; links to folders are not followed")
    random.Random(args.seed).shuffle(paths)
    held: dict[str, list[Survey]] = defaultdict(list)
    for path in files:
        held[repository(args.checkouts, path)].append(survey(path.read_bytes(), path))
    surveys = {name: joined(parts).resolved() for name, parts in held.items()}
    for target in ("acclimate", "torch"):
        total = Counts()
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            chosen = paths[: args.files]
            settings = [
                Settings(target, unsafe=True, survey=surveys[repository(args.checkouts, path)])
                for path in chosen
            ]
            for counts in pool.map(count, chosen, settings, chunksize=4):
                total.add(counts)
        report(target, total)
        if args.sample and target == "acclimate":
            edits = sample(total.edits, args.seed)
            args.sample.write_text("".join(json.dumps(edit) + "\n" for edit in edits), encoding="utf-8")


def repository(checkouts: Path, path: Path) -> str:
    """The name of a file's repository."""
    return path.relative_to(checkouts).parts[0]


def sample(edits: list[Edit], seed: int) -> list[Edit]:
    """300 edits, half of them unsafe, as those are where judgement is needed."""
    chosen: list[Edit] = []
    for is_safe in (True, False):
        kind = sorted(edit for edit in edits if edit[-1] is is_safe)
        chosen += random.Random(seed).sample(kind, min(150, len(kind)))
    return chosen


def report(target: str, total: Counts) -> None:
    """Prints one target's figures."""
    gone, hardware = total.before - total.after, total.before - total.exempt
    kinds = Counter(edit[3] for edit in total.edits).most_common(6)
    rows = {
        "files, lines": f"{total.files}, {total.lines}",
        "processor time": f"{total.processor_s:.0f} s",
        "sites before": total.before,
        "gone after": f"{gone} ({gone / total.before:.1%})",
        "not hardware-specific": f"{total.exempt}; gone of the rest {gone / hardware:.1%}",
        "edits": f"{len(total.edits)}, most of {kinds}",
        "no longer parse": f"{len(total.broken)} {total.broken[:3]}",
        "could not be ported": len(total.failed),
        "check-torchcuda.py": f"{total.deepspeed_finds} lines found, none edited",
        "a regular expression": f"{total.expression_edits} edits",
    }
    print(f"--to {target}")
    for name, value in rows.items():
        print(f"  {name:<24} {value}")


def count(path: Path, settings: Settings) -> Counts:
    """The counts of one file."""
    started = time.process_time()
    result = port_file(path, settings)
    counts = Counts(processor_s=time.process_time() - started, files=1)
    if result.failure:
        counts.failed.append(f"{path}: {result.failure}")
        return counts
    counts.lines = result.before.count("\n")
    try:
        counts.before = sites(result.before)
    except SyntaxError as error:
        counts.failed.append(f"{path}: this Python cannot read it to count in it: {error.msg}")
        return counts
    counted = (site for site in result.sites if site.code not in _NOT_COUNTED)
    counts.exempt = sum(site.status is Status.EXEMPT for site in counted)
    counts.deepspeed_finds = sum("torch.cuda" in line for line in result.before.splitlines())
    counts.expression_edits = len(re.findall(r"\btorch\.cuda\b", result.before))
    try:
        counts.after = sites(result.after)
    except SyntaxError:
        counts.broken.append(str(path))
    counts.edits = [
        (str(path), site.line, site.text, site.code, site.safe)
        for site in result.sites
        if site.status is Status.CONVERTED
    ]
    return counts


def sites(source: str) -> int:
    """How many hardware-specific sites a source has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    names = cuda_names([tree])
    found = 0
    hidden: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            hidden.add(id(node.value))
        if isinstance(node, ast.Attribute):
            found += node.attr == "is_cuda" or dotted(node, names) == "torch.cuda"
        elif isinstance(node, ast.Name):
            found += names.get(node.id, "").startswith("torch.cuda")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found += node.func.attr == "cuda"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden:
            found += node.value == "nccl" or bool(DEVICE.match(node.value)) or node.value == "cuda:"
    return found


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """The full name of a chain of attributes."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    main()
