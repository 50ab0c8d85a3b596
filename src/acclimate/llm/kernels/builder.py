"""Builds the native library of the inference ops."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from acclimate.host.topology import processor_limit
from acclimate.ops import bus_errors
from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source, target_machine
from acclimate.ops.simd import KERNEL_FLAGS, chosen_isa, compile_flags


class InferenceBuilder(OpBuilder):
    """``load()`` returns :mod:`acclimate.llm.kernels`, with :class:`PackedWeight`, on plain torch."""

    name = "inference"

    def define(self) -> None:
        """Defines the operators."""
        from acclimate.llm.kernels import operators

        operators.define()

    def module(self) -> ModuleType:
        """Returns :mod:`acclimate.llm.kernels`."""
        # Imported by name, since the package itself loads this op.
        return import_module("acclimate.llm.kernels")


class CPUInferenceBuilder(InferenceBuilder):
    """The same with native kernels for the host."""

    def sources(self) -> list[str | Source]:
        """Returns one file for each instruction set of this kind of processor, and what chooses one."""
        kernels = kernel_flags(target_machine())
        return [
            *(f"csrc/{name}.cpp" for name in ("operators", "linear", "pool", "gguf_pack")),
            "csrc/bus_errors.cpp",
            *(f"csrc/decode_{name}.cpp" for name in ("operators", "step", "rows", "experts", "prefill")),
            *(f"csrc/decode_{name}.cpp" for name in ("head", "latent", "convolution", "delta_rule", "math")),
            *(Source(f"csrc/kernels_{name}.cpp", flags) for name, flags in kernels.items()),
        ]

    def cxx_args(self) -> list[str]:
        """Returns the flags that keep values as GGUF defines them: a product and a sum round twice."""
        # Without the last one GCC 12 takes kernels of some formats for functions without effects, and drops
        # their calls (repack_rows of "uint4", for AVX-512).
        return ["-pthread", *KERNEL_FLAGS, "-fno-delete-null-pointer-checks"]

    def link_args(self) -> list[str]:
        """Returns the flag for threads, which are a separate library in older C libraries."""
        return ["-pthread"]

    def open_library(self, path: Path) -> None:
        """Loads the library, chooses its instruction set and tells it how many processors there are."""
        super().open_library(path)
        torch.ops.acclimate.inference_use_isa(chosen_isa())
        torch.ops.acclimate.inference_limit_threads(processor_limit())
        bus_errors.install(path)


def kernel_flags(machine: str) -> dict[str, tuple[str, ...]]:
    """Returns the flags of each file ``kernels_*.cpp`` for a kind of processor, by what ``*`` stands for."""
    flags = compile_flags(machine)
    # The kernels without vector instructions would take longest to optimise, and few processors need them.
    flags["plain"] = ("-O2",)
    # Products of bytes, which some processors of these sets have.
    if "avx512" in flags:
        flags["avx512_vnni"] = (*flags["avx512"], "-mavx512vnni")
    if "neon" in flags:
        flags["neon_dot"] = ("-march=armv8.2-a+dotprod+fp16",)
    return flags
