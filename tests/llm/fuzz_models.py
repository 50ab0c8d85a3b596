"""Damages model files in many ways and counts what becomes of them: `fuzz_models.py --seeds 0:1500`.

Each case is made from its seed alone, so a finding is repeated with `--seeds N:N+1`. Processes have a limit
on memory, cases one on processor time; a process that dies counts as a finding of the case it was at.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from warm_processes import WarmProcesses

BATCH = 60
MEMORY_BYTES = 2 << 30
WALL_SECONDS = 900
GOOD = ("refused", "loaded")

CODE = f"""
import sys
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]}
from fuzz_judge import run
run(int(sys.argv[1]), int(sys.argv[2]))
"""


def fuzz(warm: WarmProcesses, first: int, last: int) -> list[dict[str, Any]]:
    """The verdicts on the cases of some seeds."""
    verdicts: list[dict[str, Any]] = []
    while first < last:
        process = warm.start(str(first), str(last), code=CODE, memory_bytes=MEMORY_BYTES)
        try:
            stdout, stderr = process.communicate(timeout=WALL_SECONDS)
        except subprocess.TimeoutExpired:
            stdout, stderr = b"", b"no end"
        lines = [json.loads(line) for line in stdout.decode().splitlines()]
        verdicts += [line for line in lines if "verdict" in line]
        if lines and "verdict" not in lines[-1]:
            verdicts.append(
                lines[-1] | {"verdict": "died", "why": f"{process.returncode}: {stderr[-2000:]!r}"}
            )
        elif not lines or lines[-1]["seed"] + 1 < last:
            raise RuntimeError(f"no case was run: {process.returncode} {stderr[-3000:]!r}")
        first = lines[-1]["seed"] + 1
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:1500")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all verdicts to this file")
    args = parser.parse_args()
    first, last = (int(part) for part in args.seeds.split(":"))
    warm = WarmProcesses()
    batches = [(start, min(start + BATCH, last)) for start in range(first, last, BATCH)]
    with ThreadPoolExecutor(args.jobs) as pool:
        verdicts = [one for some in pool.map(lambda batch: fuzz(warm, *batch), batches) for one in some]
    warm.close()
    if args.json:
        args.json.write_text("".join(json.dumps(verdict) + "\n" for verdict in verdicts))
    for verdict in verdicts:
        if verdict["verdict"] not in GOOD:
            sys.stdout.write(f"{verdict}\n")
    counts = Counter((verdict["kind"], verdict["verdict"]) for verdict in verdicts)
    for (kind, name), count in sorted(counts.items()):
        sys.stdout.write(f"{kind:12} {name:12} {count}\n")
    findings = sum(verdict["verdict"] not in GOOD for verdict in verdicts)
    sys.stdout.write(f"{len(verdicts)} inputs, {findings} findings\n")
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
