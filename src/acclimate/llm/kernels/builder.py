"""Builds the native library of the inference ops, and loads it where the tensors of a device have kernels."""

from __future__ import annotations

import functools
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from acclimate.host.topology import processor_limit
from acclimate.llm.kernels.torch_threads import end_team_before_forks
from acclimate.ops import bus_errors, registry
from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source, target_machine
from acclimate.ops.simd import (
    KERNEL_FLAGS,
    chosen_isa,
    compile_flags,
    has_tile_products,
    has_vector_kernels,
    processor,
)
from acclimate.selection import get_accelerator


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
        """Returns the kernels for each instruction set of this kind of processor, and what uses them."""
        return [
            *(f"csrc/{name}.cpp" for name in ("operators", "linear", "pool", "gguf_pack")),
            "csrc/bus_errors.cpp",
            *(f"csrc/decode_{name}.cpp" for name in ("operators", "step", "rows", "experts", "prefill")),
            *(f"csrc/decode_{name}.cpp" for name in ("head", "latent", "convolution", "delta_rule", "math")),
            *(Source("csrc/kernels.cpp", flags) for flags in kernel_flags(target_machine()).values()),
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
    """Returns the flags of ``kernels.cpp`` for each instruction set of a kind of processor, by its name."""
    flags = compile_flags(machine)
    # The kernels without vector instructions would take longest to optimise, and few processors need them.
    flags["plain"] = ("-O2",)
    # Products of bytes, which some processors of these sets have.
    if "avx512" in flags:
        flags["avx512_vnni"] = (*flags["avx512"], "-mavx512vnni")
    if "neon" in flags:
        flags["neon_dot"] = ("-march=armv8.2-a+dotprod+fp16",)
    return {name: (f"-DACCLIMATE_ISA={name}", *own) for name, own in flags.items()}


WITH_KERNELS = ("cpu",)
"""The device types that native kernels run on."""


@functools.cache
def load(device_type: str) -> None:
    """Defines the operators and loads the kernels for tensors on a device, once per process.

    Raises:
        InvalidEnvironmentError: ``ACCLIMATE_CPU_ISA`` names no instruction set of this machine.
        OpBuildError: the native source does not compile.
    """
    end_team_before_forks()
    if device_type in WITH_KERNELS:
        CPUInferenceBuilder().load()
        return
    InferenceBuilder().load()
    accelerator = get_accelerator()
    if accelerator.device_type == device_type and accelerator.is_triton_supported():
        from acclimate.llm.kernels import triton_linear  # few machines have Triton

        registry.implement("packed_linear", device_type, triton_linear.linear)
        registry.implement("packed_experts", device_type, triton_linear.experts)


@functools.cache
def multiplies_many_rows(device_type: str) -> bool:
    """Whether the kernels multiply many input rows by a quantised weight faster than torch multiplies them by
    the unpacked weight. On Zen 4 they take three quarters of torch's time; with AMX torch is faster."""
    return device_type in WITH_KERNELS and has_vector_kernels() and not has_tile_products()


def prefills(number: int) -> bool:
    """Whether native code should do the prefill of one of its decoders; with AMX tiles torch is faster."""
    return not has_tile_products() and bool(torch.ops.acclimate.decode_can_prefill(number))


def kernels_chosen() -> str:
    """Returns a string that identifies the kernels and what chooses among them.

    These are the build (source, flags and compiler), the user's settings, and the processor: native code also
    depends on its maker and on features that are not instruction sets here, such as VNNI.
    """
    load("cpu")
    build, capability = CPUInferenceBuilder().loaded_key(), torch.backends.cpu.get_cpu_capability()
    return f"{build} {chosen_isa()} {processor()} {capability}"
