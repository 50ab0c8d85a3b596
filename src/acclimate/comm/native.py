"""Builds and loads the native library of the backend ``shm``."""

from __future__ import annotations

import platform
import threading
from types import ModuleType
from typing import Any

from acclimate.errors import CompilerNotFoundError
from acclimate.ops.build import store
from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source
from acclimate.ops.simd import chosen_isa

_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_AVX2 = ("-mavx2", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")

TRANSPORT: tuple[str | Source, ...] = (
    "csrc/call.cpp",
    "csrc/collectives.cpp",
    "csrc/group.cpp",
    "csrc/peers.cpp",
    "csrc/placement.cpp",
    "csrc/reduce.cpp",
    # The plain kernels would take the longest to optimise, and few processors run them.
    Source("csrc/reduce_plain.cpp", flags=("-O2",)),
    # On processors other than x86 each of these is a second plain copy, which nothing calls.
    Source("csrc/reduce_avx2.cpp", flags=_AVX2 if _IS_X86 else ()),
    Source("csrc/reduce_avx512.cpp", flags=_AVX512 if _IS_X86 else ()),
)
"""The sources of the transport between ranks, which do not use torch."""

CXX_FLAGS = ["-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
"""Without FMA contraction, every instruction set gives the same bits."""

_lock = threading.Lock()
_loaded: list[Any] = []


class TransportBuilder(OpBuilder):
    """Builds a library that contains the transport."""

    def include_paths(self) -> list[str]:
        """The folder of the headers."""
        return ["csrc"]

    def cxx_args(self) -> list[str]:
        """Flags for threads, and for the same results on every instruction set."""
        return list(CXX_FLAGS)

    def link_args(self) -> list[str]:
        """The flag for threads, which older C libraries keep in a separate library."""
        return ["-pthread"]


class ShmBackendBuilder(TransportBuilder):
    """Builds the backend. It is not an op: ``torch.distributed`` calls it."""

    name = "shm_backend"
    # c10d has no stable ABI, so there is one library for each torch and Python.
    stable_abi = False

    def sources(self) -> list[str | Source]:
        """The sources of the transport and of the backend around it."""
        # The backend's files only pass memory to the transport, so optimising them harder gains nothing.
        callers = ("csrc/backend.cpp", "csrc/hosts.cpp", "csrc/messages.cpp")
        return [*(Source(path, flags=("-O1",)) for path in callers), *TRANSPORT]

    def define(self) -> None:
        """Does nothing: the backend has no operator."""

    def module(self) -> ModuleType:
        """Loads the library, which is a Python module."""
        module: ModuleType = load_backend()
        return module


def load_backend() -> Any:
    """Returns the native module. The first rank builds it if needed; the others wait.

    Raises:
        CompilerNotFoundError: the module is not built yet, and there is no compiler.
        InstructionSetError: ``ACCLIMATE_CPU_ISA`` names none of this machine.
        OpBuildError: the module does not compile.
        OpLockTimeoutError: another process did not finish building it in time.
        OSError: the built library cannot be loaded from its folder.
    """
    with _lock:
        if not _loaded:
            isa = chosen_isa()
            builder = ShmBackendBuilder()
            reason = store.unloadable_reason() if builder.built_library() is None else None
            library = builder.build() if reason is None else None
            if library is None:
                raise CompilerNotFoundError(reason)
            module = builder.import_library(library)
            module.use_isa(isa)
            _loaded.append(module)
        return _loaded[0]
