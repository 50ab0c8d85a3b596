"""The systems that benchmarks compare against, each in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEEPSPEED = "deepspeed==0.19.8"


def deepspeed_python() -> Path:
    """The Python of an environment with DeepSpeed and the pinned torch; made in ``.peers/`` when missing.

    ``ACCLIMATE_PEER_DEEPSPEED`` names another one.
    """
    given = os.environ.get("ACCLIMATE_PEER_DEEPSPEED")
    if given:
        return Path(given)
    python = ROOT / ".peers" / "deepspeed" / "bin" / "python"
    if not python.exists():
        print(f"installing {DEEPSPEED} into .peers/ (once)", file=sys.stderr)
        venv.create(python.parents[1], with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
        subprocess.run([*pip, "torch", "setuptools", "wheel", "ninja", "transformers"], check=True)
        # Its setup imports torch, which an isolated build would fetch anew.
        subprocess.run([*pip, "--no-build-isolation", DEEPSPEED], check=True)
    return python
