"""Builds the native library of the inference ops."""

from __future__ import annotations

import platform
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source
from acclimate.ops.simd import chosen_isa

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
# The kernels without vector instructions would take longest to optimise, and few processors need them.
PLAIN_KERNELS = {"plain": ("-O2",)}
"""The flags of each file of kernels that every processor can run."""
_X86_KERNELS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
}
ARM_KERNELS: dict[str, tuple[str, ...]] = {"neon": (), "neon_dot": ("-march=armv8.2-a+dotprod+fp16",)}
"""The flags of each file of kernels for 64-bit Arm."""
_KERNELS_OF_MACHINE = {
    **dict.fromkeys(("x86_64", "AMD64"), _X86_KERNELS),
    **dict.fromkeys(("aarch64", "arm64"), ARM_KERNELS),
}


class InferenceBuilder(OpBuilder):
    """``load()`` returns :mod:`acclimate.ops.inference`, with :class:`PackedWeight`, on plain torch."""

    name = "inference"

    def define(self) -> None:
        """Defines the operators."""
        from acclimate.ops.inference import decode_operators, operators

        operators.define()
        decode_operators.define()

    def module(self) -> ModuleType:
        """Returns :mod:`acclimate.ops.inference`."""
        # Imported by name, since the package itself loads this op.
        return import_module("acclimate.ops.inference")


class CPUInferenceBuilder(InferenceBuilder):
    """The same with native kernels for the host."""

    def sources(self) -> list[str | Source]:
        """Returns one file for each instruction set of this kind of processor, and what chooses one."""
        kernels = {**PLAIN_KERNELS, **_KERNELS_OF_MACHINE.get(platform.machine(), {})}
        return [
            *(f"csrc/{name}.cpp" for name in ("operators", "linear", "pool", "gguf_pack", "file_pages")),
            *(f"csrc/decode_{name}.cpp" for name in ("operators", "step", "rows", "reading")),
            *(f"csrc/decode_{name}.cpp" for name in ("head", "screen", "coarse", "math")),
            *(Source(f"csrc/kernels_{name}.cpp", flags) for name, flags in kernels.items()),
        ]

    def cxx_args(self) -> list[str]:
        """Returns the flags that keep values as GGUF defines them: a product and a sum round twice."""
        return ["-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]

    def link_args(self) -> list[str]:
        """Returns the flag for threads, which are a separate library in older C libraries."""
        return ["-pthread"]

    def open_library(self, path: Path) -> None:
        """Loads the library and chooses its instruction set."""
        super().open_library(path)
        torch.ops.acclimate.inference_use_isa(chosen_isa())
