"""Builds and loads the native library of the backend ``shm``."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

from acclimate.errors import CompilerNotFoundError
from acclimate.ops.build import store
from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source, target_machine
from acclimate.ops.simd import KERNEL_FLAGS, chosen_isa, compile_flags

_FLAGS = compile_flags(target_machine())

TRANSPORT: tuple[str | Source, ...] = (
    "csrc/call.cpp",
    "csrc/collectives.cpp",
    "csrc/group.cpp",
    "csrc/peers.cpp",
    "csrc/reduce.cpp",
    # The plain kernels would take the longest to optimise, and few processors run them.
    Source("csrc/reduce_plain.cpp", flags=("-O2",)),
    # On processors other than x86 each of these is a second plain copy, which nothing calls.
    Source("csrc/reduce_avx2.cpp", flags=_FLAGS.get("avx2", ())),
    Source("csrc/reduce_avx512.cpp", flags=_FLAGS.get("avx512", ())),
)
"""The sources of the transport between ranks, which do not use torch."""

_lock = threading.Lock()
_loaded: list[Any] = []


class TransportBuilder(OpBuilder):
    """Builds a library that contains the transport."""

    def include_paths(self) -> list[str]:
        return ["csrc"]

    def cxx_args(self) -> list[str]:
        return ["-pthread", *KERNEL_FLAGS]

    def link_args(self) -> list[str]:
        return ["-pthread"]  # which older C libraries keep in a separate library


class ShmBackendBuilder(TransportBuilder):
    """Builds the backend. It is not an op: ``torch.distributed`` calls it."""

    name = "shm_backend"
    # c10d has no stable ABI, so there is one library for each torch and Python.
    stable_abi = False

    def sources(self) -> list[str | Source]:
        # The backend's files only pass memory to the transport, so optimising them harder gains nothing.
        callers = ("csrc/backend.cpp", "csrc/messages.cpp")
        return [*(Source(path, flags=("-O1",)) for path in callers), *TRANSPORT]

    def define(self) -> None:
        """Does nothing: the backend has no operator."""

    def module(self) -> ModuleType:
        module: ModuleType = load_backend()
        return module


def load_backend() -> Any:
    """Returns the native module. The first rank builds it if needed; the others wait.

    Raises:
        CompilerNotFoundError: the module is not built yet, and there is no compiler.
        InvalidEnvironmentError: ``ACCLIMATE_CPU_ISA`` names none of this machine.
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
