"""The instruction set of native kernels: each kernel's own best choice, or that in ``ACCLIMATE_CPU_ISA``."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from acclimate.errors import InvalidEnvironmentError, excerpt

VARIABLE = "ACCLIMATE_CPU_ISA"
"""The environment variable that overrides the choice, to test or compare kernels."""

BEST = 0
"""The number with which a native kernel chooses the instruction set itself."""

KERNEL_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")
"""The flags for kernels of several instruction sets. A fused multiply-add, which only some sets have, would
round once instead of twice, so the last bit would depend on the set. Without errno a square root is one
instruction. Hidden symbols keep two libraries in one process apart."""


@dataclass(frozen=True)
class _InstructionSet:
    number: int
    """As in csrc/isa.h."""
    features: tuple[str, ...] = ()
    """What it needs besides the sets before it, as ``/proc/cpuinfo`` names it."""


_PLAIN = {"plain": _InstructionSet(1)}
# In the order of csrc/isa.h. Each set includes those before it.
_X86 = {
    **_PLAIN,
    "avx2": _InstructionSet(2, ("avx2", "fma", "f16c")),
    "avx512": _InstructionSet(3, ("avx512f", "avx512bw", "avx512dq", "avx512vl")),
    "avx512_bf16": _InstructionSet(4, ("avx512_bf16",)),
}
_ARM = {**_PLAIN, "neon": _InstructionSet(5)}
_OF_MACHINE = {**dict.fromkeys(("x86_64", "AMD64"), _X86), **dict.fromkeys(("aarch64", "arm64"), _ARM)}
_IDENTITY = frozenset(
    {"vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features"}
)


def chosen_isa() -> int:
    """Returns the number of the instruction set in ``ACCLIMATE_CPU_ISA``; :data:`BEST` if it is not set.

    Raises:
        InvalidEnvironmentError: it names no instruction set, or one that this machine lacks.
    """
    name = os.environ.get(VARIABLE, "")
    return isa_number(name) if name else BEST


def isa_number(name: str) -> int:
    """Returns an instruction set's number in native kernels.

    Raises:
        InvalidEnvironmentError: there is none of that name, or this machine lacks it.
    """
    usable = usable_isas()
    if name not in _X86 | _ARM:
        raise InvalidEnvironmentError(
            f'{VARIABLE} must be one of {", ".join(usable)}. Value "{excerpt(name)}" is unknown.'
        )
    if name not in usable:
        raise InvalidEnvironmentError(
            f"{VARIABLE} is {name}, which this machine cannot run. Unset it, or choose one of "
            f"{', '.join(usable)}."
        )
    return (_X86 | _ARM)[name].number


def has_vector_kernels() -> bool:
    """Whether native kernels use vector instructions here."""
    return (chosen_isa() or isa_number(usable_isas()[-1])) != _PLAIN["plain"].number


@functools.cache
def usable_isas() -> tuple[str, ...]:
    """Returns the names of the instruction sets that this machine can run, best last."""
    flags = _processor_flags()
    of_machine = _OF_MACHINE.get(platform.machine(), _PLAIN).items()
    return tuple(name for name, _ in takewhile(lambda item: flags.issuperset(item[1].features), of_machine))


def compile_flags(machine: str) -> dict[str, tuple[str, ...]]:
    """Returns the instruction sets of a processor (``x86_64``), best last, and flags to compile for each."""
    flags: tuple[str, ...] = ()
    found = {}
    for name, isa in _OF_MACHINE.get(machine, _PLAIN).items():
        flags += tuple(f"-m{feature.replace('_', '')}" for feature in isa.features)
        if "avx512f" in isa.features:  # without this flag compilers use half of its registers
            flags += ("-mprefer-vector-width=512",)
        found[name] = flags
    return found


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
