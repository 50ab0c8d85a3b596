"""Which instruction set native kernels use: the best one this machine has, or the one asked for."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from acclimate.errors import InstructionSetError

VARIABLE = "ACCLIMATE_CPU_ISA"
"""The environment variable that overrides the choice, to test or to compare variants."""

BEST = 0
"""What a native kernel is given to choose for itself."""

# The numbers are the protocol with simd/isa.h.
_NUMBERS: Mapping[str, int] = {"plain": 1, "avx2": 2, "avx512": 3, "avx512_bf16": 4, "neon": 5}
_FLAGS: Mapping[str, frozenset[str]] = {
    "avx2": frozenset({"avx2", "f16c"}),
    "avx512": frozenset({"avx2", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx512_bf16": frozenset({"avx2", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}),
}


def chosen_isa() -> int:
    """The number of the instruction set that ``ACCLIMATE_CPU_ISA`` names; :data:`BEST` where it is not set.

    Raises:
        InstructionSetError: it names none, or one that this machine lacks.
    """
    name = os.environ.get(VARIABLE, "")
    return isa_number(name) if name else BEST


def isa_number(name: str) -> int:
    """The number by which a native kernel knows an instruction set.

    Raises:
        InstructionSetError: there is none of that name, or this machine lacks it.
    """
    usable = usable_isas()
    if name not in _NUMBERS:
        raise InstructionSetError(
            f'{VARIABLE} must be one of {", ".join(usable)}. Value "{name}" is unknown.'
        )
    if name not in usable:
        raise InstructionSetError(
            f"{VARIABLE} is {name}, which this machine cannot run. Unset it, or choose one of "
            f"{', '.join(usable)}."
        )
    return _NUMBERS[name]


@functools.cache
def usable_isas() -> tuple[str, ...]:
    """The names of the instruction sets that this machine can run, best last."""
    if platform.machine() in ("aarch64", "arm64"):
        return ("plain", "neon")
    flags = _processor_flags()
    return ("plain", *(name for name, needed in _FLAGS.items() if needed <= flags))


def _processor_flags() -> frozenset[str]:
    """What the kernel says processors can do here; it leaves out what the system does not support."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(flags, []))
