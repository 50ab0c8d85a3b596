"""The instruction set of native kernels: each kernel's own best choice, or that in ``ACCLIMATE_CPU_ISA``."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from acclimate.errors import InstructionSetError, excerpt

VARIABLE = "ACCLIMATE_CPU_ISA"
"""The environment variable that overrides the choice, to test or compare kernels."""

BEST = 0
"""The number with which a native kernel chooses the instruction set itself."""

# As csrc/isa.h numbers them.
_NUMBERS: Mapping[str, int] = {"plain": 1, "avx2": 2, "avx512": 3, "avx512_bf16": 4, "neon": 5}
_FLAGS: Mapping[str, frozenset[str]] = {
    "avx2": frozenset({"avx2", "f16c"}),
    "avx512": frozenset({"avx2", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx512_bf16": frozenset({"avx2", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}),
}
_IDENTITY = frozenset(
    {"vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features"}
)


def chosen_isa() -> int:
    """Returns the number of the instruction set in ``ACCLIMATE_CPU_ISA``; :data:`BEST` if it is not set.

    Raises:
        InstructionSetError: it names no instruction set, or one that this machine lacks.
    """
    name = os.environ.get(VARIABLE, "")
    return isa_number(name) if name else BEST


def isa_number(name: str) -> int:
    """Returns an instruction set's number in native kernels.

    Raises:
        InstructionSetError: there is none of that name, or this machine lacks it.
    """
    usable = usable_isas()
    if name not in _NUMBERS:
        raise InstructionSetError(
            f'{VARIABLE} must be one of {", ".join(usable)}. Value "{excerpt(name)}" is unknown.'
        )
    if name not in usable:
        raise InstructionSetError(
            f"{VARIABLE} is {name}, which this machine cannot run. Unset it, or choose one of "
            f"{', '.join(usable)}."
        )
    return _NUMBERS[name]


def has_vector_kernels() -> bool:
    """Whether native kernels use vector instructions here."""
    return (chosen_isa() or isa_number(usable_isas()[-1])) != _NUMBERS["plain"]


@functools.cache
def usable_isas() -> tuple[str, ...]:
    """Returns the names of the instruction sets that this machine can run, best last."""
    if platform.machine() in ("aarch64", "arm64"):
        return ("plain", "neon")
    flags = _processor_flags()
    return ("plain", *(name for name, needed in _FLAGS.items() if needed <= flags))


def has_tile_products() -> bool:
    """Whether this machine multiplies whole tiles of a matrix in one instruction, as Intel's AMX does."""
    return "amx_tile" in _processor_flags()


def processor() -> str:
    """Returns the processor's maker, model and features, by which kernels are chosen; "" if it is unknown."""
    return "; ".join(f"{name}: {value}" for name, value in _cpuinfo().items() if name in _IDENTITY)


def _processor_flags() -> frozenset[str]:
    return frozenset(_cpuinfo().get("flags", "").split())


@functools.cache
def _cpuinfo() -> Mapping[str, str]:
    """Returns ``/proc/cpuinfo`` of the first processor; it lists only features that the kernel supports."""
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    parts = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in parts}
