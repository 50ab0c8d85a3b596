"""Loads the operators, with native kernels where the tensors of a device have them."""

from __future__ import annotations

import functools

from acclimate.ops.inference.builder import CPUInferenceBuilder, InferenceBuilder

WITH_KERNELS = ("cpu",)
"""The kinds of devices that native kernels run on."""


@functools.cache
def load(device_type: str) -> None:
    """Defines the operators and loads the kernels for tensors on a device, once per process.

    Raises:
        InstructionSetError: ``ACCLIMATE_CPU_ISA`` names none of this machine.
        OpBuildError: the native source does not compile.
    """
    (CPUInferenceBuilder if device_type in WITH_KERNELS else InferenceBuilder)().load()
