"""Runs every benchmark, one after another: what `make bench` does.

python benchmarks/run.py             all of them
python benchmarks/run.py core ops    some of them

What they measured goes into docs/results.json, and from there into docs/results.md, docs/costs.png, the
README, docs/deepspeed.md, and docs/inference.md with docs/inference.png.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import results
from peers import deepspeed_python

FOLDER = Path(__file__).parent
ALL = (
    "core",
    "generate",
    "inference",
    "op_build",
    "ops",
    "aio",
    "sim",
    "comm",
    "launch",
    "launch_binding",
    "autotp",
    "autotp_load",
    "zero_offload",
)
"""One at a time: each wants the machine for itself."""


def main() -> int:
    """Runs the benchmarks; returns 1 where one of them missed a goal or failed."""
    parser = argparse.ArgumentParser(description="Benchmarks, each beside its peer in one run.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALL)}; default: all")
    names = parser.parse_args().names or ALL
    unknown = [name for name in names if name not in ALL]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(ALL)}")
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, results.FOLDER_VARIABLE: folder}
        for name in names:
            print(f"\n== {name} ==", flush=True)
            # These can do without their peers, so they are told to measure them.
            peer = ["--deepspeed-python", deepspeed_python()] if name in ("ops", "aio") else []
            peer += ["--peers"] if name == "autotp" else []
            command = [sys.executable, FOLDER / f"{name}.py", *peer]
            if subprocess.run(command, env=env, check=False).returncode != 0:
                missed.append(name)
        runs = results.merge(Path(folder))
    results.write_pages(runs)
    results.draw(runs)
    if "inference" in runs:
        results.draw_inference(runs["inference"])
    if missed:
        print(f"\nmissed a goal or failed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
