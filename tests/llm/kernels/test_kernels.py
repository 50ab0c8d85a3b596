"""The kernels in a program of their own: for this processor, and for 64-bit Arm by an emulator."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import acclimate.llm.kernels
from acclimate.llm.kernels.builder import CPUInferenceBuilder, kernel_flags
from acclimate.ops.build.recipe import target_machine

sys.path.insert(0, str(Path(__file__).parents[2] / "comm"))

from cpp_programs import cpp_compiler

SOURCES = Path(acclimate.llm.kernels.__file__).parent / "csrc"


def built(folder: Path, compiler: str, machine: str, warnings: Sequence[str] = ()) -> str:
    """The program of check_kernels.cpp, for a kind of processor."""
    sources: list[tuple[Path, tuple[str, ...]]] = [
        (SOURCES / "linear.cpp", ()),
        (SOURCES / "gguf_pack.cpp", ()),
        (Path(__file__).with_name("check_kernels.cpp"), ()),
        *((SOURCES / "kernels.cpp", own) for own in kernel_flags(machine).values()),
    ]
    objects = [str(folder / f"{number}.{source.stem}.o") for number, (source, _) in enumerate(sources)]
    for (source, own), result in zip(sources, objects, strict=True):
        command = [compiler, "-std=c++20", "-O2", *warnings, f"-I{SOURCES}",
                   *CPUInferenceBuilder().cxx_args(), *own, "-c", str(source), "-o", result]  # fmt: skip
        subprocess.run(command, check=True)
    program = str(folder / "check")
    subprocess.run([compiler, "-static", *objects, "-o", program], check=True)
    return program


@pytest.mark.slow
def test_kernels_multiply_within_the_bound_and_read_nothing_beside_an_overwritten_input(
    tmp_path: Path,
) -> None:
    subprocess.run([built(tmp_path, cpp_compiler(), target_machine())], check=True, capture_output=True)


@pytest.mark.slow
def test_arm_kernels_multiply_within_the_bound_with_and_without_dot_products(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64 on PATH")
    program = built(
        tmp_path, compiler, "aarch64", ("-Wall", "-Werror")
    )  # GCC warns of its headers for AVX-512
    told = {
        processor: subprocess.run(
            [emulator, "-cpu", processor, program], check=True, capture_output=True
        ).stdout
        for processor in ("max", "cortex-a57")
    }
    assert told["max"].split()[0] == told["cortex-a57"].split()[0]
