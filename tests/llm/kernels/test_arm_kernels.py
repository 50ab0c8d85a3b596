"""The kernels for 64-bit Arm, run by an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import acclimate.llm.kernels
from acclimate.llm.kernels.builder import CPUInferenceBuilder, kernel_flags

SOURCES = Path(acclimate.llm.kernels.__file__).parent / "csrc"


@pytest.mark.slow
def test_arm_kernels_multiply_within_the_bound_with_and_without_dot_products(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64 on PATH")
    sources = {SOURCES / "linear.cpp": (), SOURCES / "gguf_pack.cpp": ()}
    for name, flags in kernel_flags("aarch64").items():
        sources[SOURCES / f"kernels_{name}.cpp"] = flags
    sources[Path(__file__).with_name("check_kernels.cpp")] = ()
    objects = [str(tmp_path / f"{source.stem}.o") for source in sources]
    for (source, flags), result in zip(sources.items(), objects, strict=True):
        command = [compiler, "-std=c++20", "-O2", "-Wall", "-Werror", f"-I{SOURCES}",
                   *CPUInferenceBuilder().cxx_args(), *flags, "-c", str(source), "-o", result]  # fmt: skip
        subprocess.run(command, check=True)
    program = str(tmp_path / "check")
    subprocess.run([compiler, "-static", *objects, "-o", program], check=True)
    told = {
        processor: subprocess.run(
            [emulator, "-cpu", processor, program], check=True, capture_output=True
        ).stdout
        for processor in ("max", "cortex-a57")
    }
    assert told["max"].split()[0] == told["cortex-a57"].split()[0]
