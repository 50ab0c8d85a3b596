"""The backend ``shm`` of ``torch.distributed``: its library, its registration and its groups.

Between hosts its groups are gloo's."""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from acclimate.accelerator.threads_at_exit import settle_at_exit
from acclimate.comm.rendezvous import Rendezvous, are_on_one_host, why_not_shared
from acclimate.errors import AcclimateError, CompilerNotFoundError
from acclimate.host.local_address import address_towards
from acclimate.ops.build import store
from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source, target_machine
from acclimate.ops.simd import KERNEL_FLAGS, chosen_isa, compile_flags

_FLAGS = compile_flags(target_machine())


def _kernels(isa: str, flags: tuple[str, ...]) -> Source:
    return Source("csrc/reduce_kernels.cpp", (f"-DACCLIMATE_FIND_REDUCE=find_reduce_{isa}", *flags))


TRANSPORT: tuple[str | Source, ...] = (
    "csrc/call.cpp",
    "csrc/collectives.cpp",
    "csrc/group.cpp",
    "csrc/reduce.cpp",
    # The plain kernels would take the longest to optimise, and few processors run them.
    _kernels("plain", ("-DACCLIMATE_EVERY_DTYPE", "-O2")),
    *(_kernels(name, _FLAGS[name]) for name in ("avx2", "avx512") if name in _FLAGS),
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


NAME = "shm"

LONGEST_TIMEOUT = timedelta(days=365 * 100)
"""torch and gloo add a time-out to a clock in nanoseconds, which overflows after 292 years."""

_logger = logging.getLogger("acclimate")


def register() -> None:
    """Registers the backend ``shm`` with ``torch.distributed``; later calls do nothing."""
    settle_at_exit()  # groups between hosts use gloo, and any other group may
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, devices=["cpu"])


def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a group of this backend, or of gloo if ranks cannot share memory; only it uses the store."""
    rendezvous = Rendezvous(store, rank, size, timeout)
    native, refusal = _native()
    offers = rendezvous.offers(refusal)
    if not are_on_one_host(offers):
        return gloo_group(store, rank, size, timeout)
    refusal = why_not_shared(offers, native.MOST_RANKS if native is not None else len(offers))
    if refusal:
        return gloo_instead(store, rank, size, timeout, refusal)
    group, refusal = rendezvous.join(offers, native.bytes, native.open_group)
    if refusal:
        return gloo_instead(store, rank, size, timeout, refusal)
    return native.backend_of(group)


def _native() -> tuple[Any, str]:
    try:
        return load_backend(), ""
    except (AcclimateError, OSError, ImportError) as error:
        return None, str(error)


def gloo_instead(store: Any, rank: int, size: int, timeout: timedelta, refusal: str) -> Any:
    """Returns a gloo group; rank 0 logs a warning that says why the ranks cannot share memory."""
    if rank == 0:
        _logger.warning(
            "This group of %d ranks uses gloo, which gives the same results but is slower, because the "
            "ranks cannot share memory: %s.",
            size,
            refusal,
        )
    return gloo_group(store, rank, size, timeout)


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a gloo group, bound to the address from which this host reaches the store.

    By default gloo binds the address that the host name resolves to, which is a loopback address on many
    systems. If ``GLOO_SOCKET_IFNAME`` is set, gloo uses that interface.
    """
    timeout = min(timeout, LONGEST_TIMEOUT)
    address = None if os.environ.get("GLOO_SOCKET_IFNAME") else _address_towards(store)
    if address is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _address_towards(store: Any) -> str | None:
    """Returns this host's address in the store's network; ``None`` if the store has no address."""
    while isinstance(store, distributed_c10d.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    try:
        return address_towards(store.host)
    except OSError:
        return None
