"""Loads the operators, with native kernels where the tensors of a device have them."""

from __future__ import annotations

import functools

import torch

from acclimate.llm.kernels.builder import CPUInferenceBuilder, InferenceBuilder
from acclimate.llm.kernels.torch_threads import end_team_before_forks
from acclimate.ops import registry
from acclimate.ops.simd import chosen_isa, has_tile_products, has_vector_kernels, processor
from acclimate.selection import get_accelerator

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
