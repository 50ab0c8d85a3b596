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
    # The plain kernels would take the longest to optimise, and hardly any processor runs them.
    Source("csrc/reduce_plain.cpp", flags=("-O2",)),
    # On processors of another kind these are one more plain copy each, which nothing calls.
    Source("csrc/reduce_avx2.cpp", flags=_AVX2 if _IS_X86 else ()),
    Source("csrc/reduce_avx512.cpp", flags=_AVX512 if _IS_X86 else ()),
)
"""What moves bytes between ranks, without torch."""

CXX_FLAGS = ["-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
"""Without contraction every instruction set gives the same bits."""

_lock = threading.Lock()
_loaded: list[Any] = []


class TransportBuilder(OpBuilder):
    """Builds a library that has the transport in it."""

    def include_paths(self) -> list[str]:
        """The folder of the headers."""
        return ["csrc"]

    def cxx_args(self) -> list[str]:
        """Threads, and the same results on every instruction set."""
        return list(CXX_FLAGS)

    def link_args(self) -> list[str]:
        """Threads, which older C libraries keep in a library of their own."""
        return ["-pthread"]


class ShmBackendBuilder(TransportBuilder):
    """Builds the backend itself. Not an op: ``torch.distributed`` calls it."""

    name = "shm_backend"
    # c10d has no stable ABI, so there is one library for each torch and Python.
    stable_abi = False

    def sources(self) -> list[str | Source]:
        """The transport, and what makes a backend of it."""
        # They hand memory to the transport: optimising them harder costs build time and gains nothing.
        callers = ("csrc/backend.cpp", "csrc/hosts.cpp", "csrc/messages.cpp")
        return [*(Source(path, flags=("-O1",)) for path in callers), *TRANSPORT]

    def define(self) -> None:
        """Nothing: it has no operator."""

    def module(self) -> ModuleType:
        """The library, which is a Python module."""
        module: ModuleType = load_backend()
        return module


def load_backend() -> Any:
    """The native module, built now if it was not yet: once, however many ranks ask.

    Raises:
        CompilerNotFoundError: it was not built yet, and there is no compiler.
        OpBuildError: it does not compile.
        OpLockTimeoutError: another process was building it for too long.
        OSError: it cannot be loaded from where it can be kept.
    """
    with _lock:
        if not _loaded:
            builder = ShmBackendBuilder()
            reason = store.unloadable_reason() if builder.built_library() is None else None
            library = builder.build() if reason is None else None
            if library is None:
                raise CompilerNotFoundError(reason)
            _loaded.append(builder.import_library(library))
        return _loaded[0]
