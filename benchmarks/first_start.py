"""The first and the second start of `acclimate generate`, from the source and from a wheel with libraries.

    python benchmarks/first_start.py MODEL [--wheel acclimate-….whl]

Each installation begins with an empty cache of its own. Its first start compiles, unless the wheel has the
libraries; the second finds them. A figure is the time to the end of a text of one token. Without --wheel, one
is made with ACCLIMATE_PREBUILT=1, which compiles too.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROMPT = "The capital of France"


def start(model: str, package: Path, cache: Path) -> tuple[float, float]:
    """Returns the seconds of one start, and the seconds of its processors."""
    environment = {**os.environ, "PYTHONPATH": str(package), "ACCLIMATE_CACHE": str(cache)}
    command = [
        sys.executable,
        "-m",
        "acclimate",
        "generate",
        PROMPT,
        "--model",
        model,
        "--max-new-tokens",
        "1",
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True, check=False)
    took = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took, used


def made_wheel(folder: Path) -> Path:
    """Makes a wheel with the libraries."""
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    environment = {**os.environ, "ACCLIMATE_PREBUILT": "1", "ACCLIMATE_CACHE": str(folder / "cache")}
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options], env=environment, check=True)
    (wheel,) = folder.glob("acclimate-*.whl")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder, a GGUF file or a hub id")
    parser.add_argument("--wheel", type=Path)
    args = parser.parse_args()
    model = str(Path(args.model).resolve()) if os.path.exists(args.model) else args.model
    with tempfile.TemporaryDirectory() as folder:
        wheel = args.wheel or made_wheel(Path(folder))
        installed = Path(folder) / "installed"
        install = ["--no-deps", "--no-index", "--target", str(installed), str(wheel)]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *install], check=True)
        for name, package in {"source": ROOT / "src", "wheel": installed}.items():
            cache = Path(folder) / name
            cache.mkdir()
            for which in ("first", "second"):
                took, used = start(model, package, cache)
                print(f"{name}, {which} start: {took:.1f} s, {used:.1f} s of processors", flush=True)


if __name__ == "__main__":
    main()
