"""The rest of a device's runtime: profiler marks, deferred calls, communication, compilers, launching."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from acclimate.accelerator.devices import Devices
from acclimate.accelerator.threads_at_exit import settle_at_exit
from acclimate.errors import UnknownCompileBackendError, excerpt

_open_ranges = threading.local()


def _ranges() -> list[Any]:
    if not hasattr(_open_ranges, "stack"):
        _open_ranges.stack = []
    stack: list[Any] = _open_ranges.stack
    return stack


class Marks:
    """Profiler marks under the names of ``torch.cuda.nvtx``, for code ported from CUDA."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def range_push(self, msg: str) -> None:
        """Opens a named range."""
        self._runtime.range_push(msg)

    def range_pop(self) -> None:
        """Closes the innermost range of this thread."""
        self._runtime.range_pop()

    @contextmanager
    def range(self, msg: str, *args: object, **kwargs: object) -> Iterator[None]:
        """A named range around a block; also a decorator. Further arguments are those of ``msg.format()``."""
        self.range_push(msg.format(*args, **kwargs) if args or kwargs else msg)
        try:
            yield
        finally:
            self.range_pop()


class Record(Protocol):
    """The fields of a record (``acclimate.Backend``) that its accelerator reads."""

    @property
    def visible_devices_variable(self) -> Callable[[], str | None]:
        """Returns the name of the variable, or ``None``."""

    @property
    def exported_variable_prefixes(self) -> tuple[str, ...]:
        """Prefixes of environment variables."""


@dataclass(frozen=True)
class Declared:
    """The values of a record's fields. Unlike the record's functions, they can be pickled."""

    variable: str | None
    exported_variable_prefixes: tuple[str, ...]

    def visible_devices_variable(self) -> str | None:
        """Returns the name of the variable, or ``None``."""
        return self.variable


class Runtime(Devices):
    """Profiler marks, communication, compilation and launching."""

    # -- what a backend declares -----------------------------------------------------------------

    @property
    @abstractmethod
    def communication_backend(self) -> str:
        """The ``torch.distributed`` backend for this device.

        CPU: ``"ccl"`` if oneCCL's bindings can be imported, else ``"gloo"``.
        CUDA: ``"nccl"``, on Windows ``"gloo"``.
        """

    _record: Record | None = None
    """The class's record, which the launcher reads too; loading an accelerator replaces it by its values."""

    @property
    def visible_devices_variable(self) -> str | None:
        """The environment variable that limits the devices a process sees, or ``None``; taken from the
        accelerator's record.

        CPU: ``None``; ranks are bound to cores instead.
        CUDA: ``"CUDA_VISIBLE_DEVICES"``; on ROCm ``"HIP_VISIBLE_DEVICES"``, unless only the former is set.
        """
        return self._record.visible_devices_variable() if self._record is not None else None

    @property
    def exported_variable_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the environment variables to export to ranks on other hosts; taken from the
        accelerator's record.

        CPU: oneCCL's, OpenMP's and Intel MPI's.
        CUDA: NCCL's.
        """
        return self._record.exported_variable_prefixes if self._record is not None else ()

    supports_nvtx_domain: ClassVar[bool] = False
    """Whether :meth:`range_push` separates ranges by domain.

    CPU: false.
    CUDA: true, with the ``nvtx`` package.
    """

    supports_collectives: ClassVar[bool] = True
    """Whether :attr:`communication_backend` moves tensors of this device between processes. If not, the
    conformance checks of communication count as not offered.

    CPU: true.
    CUDA: true.
    """

    compile_backend: ClassVar[str] = "inductor"
    """The default of :meth:`get_compile_backend`; a backend names its vendor's.

    CPU: ``"inductor"``.
    CUDA: ``"inductor"``.
    """

    _chosen_compile_backend: str | None = None

    # -- profiler marks --------------------------------------------------------------------------

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Opens a named range in profilers, until :meth:`range_pop`. Ranges nest.

        Args:
            msg: the range's name.
            domain: separates ranges of different libraries, if supported.
            category: groups ranges within a domain, if supported.

        Delegates to: ``torch.profiler.record_function``.
        CPU: in torch's profiler.
        CUDA: NVTX; with a domain through the ``nvtx`` package, if that is installed.
        """
        mark = torch.profiler.record_function(msg)
        mark.__enter__()
        _ranges().append(mark)

    def range_pop(self, domain: str | None = None) -> None:
        """Closes this thread's innermost range; does nothing if none is open.

        Delegates to: ``torch.profiler.record_function``.
        CPU: in torch's profiler.
        CUDA: NVTX.
        """
        if _ranges():
            _ranges().pop().__exit__(None, None, None)

    @property
    def nvtx(self) -> Marks:
        """:meth:`range_push` and :meth:`range_pop` under the names of ``torch.cuda.nvtx``.

        Delegates to: :meth:`range_push`, :meth:`range_pop`.
        CPU: in torch's profiler.
        CUDA: NVTX.
        """
        return Marks(self)

    # -- deferred calls --------------------------------------------------------------------------

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Calls ``callback`` once the device's context exists: now, or when it is created.

        Delegates to: ``torch.<device>._lazy_call``.
        CPU: now.
        CUDA: ``torch.cuda._lazy_call``.
        """
        postpone = getattr(self.torch_module, "_lazy_call", None)
        if postpone is None:
            callback()
        else:
            postpone(callback)

    # -- communication ---------------------------------------------------------------------------

    def communication_backend_name(self) -> str:
        """The backend's name for ``torch.distributed.init_process_group``.

        Delegates to: :attr:`communication_backend`.
        CPU: ``"ccl"`` if oneCCL's bindings can be imported, else ``"gloo"``.
        CUDA: ``"nccl"``, on Windows ``"gloo"``.
        """
        settle_at_exit()
        return self.communication_backend

    # -- compilers -------------------------------------------------------------------------------

    def is_triton_supported(self) -> bool:
        """Whether Triton kernels run on the current device.

        Delegates to: no call of torch; a backend overrides it.
        CPU: false.
        CUDA: from compute capability 8.0, if Triton is installed; false on ROCm, where importing Triton has
            broken torch's device API.
        """
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        """Whether a grouped matrix product is faster in Triton than with ``torch._grouped_mm``.

        Delegates to: no call of torch; a backend overrides it.
        CPU: false.
        CUDA: with Triton and compute capability 8.x, where torch computes one group after the other.
        """
        return False

    def get_compile_backend(self) -> str:
        """The backend to pass to ``torch.compile`` on this accelerator.

        Delegates to: :attr:`compile_backend`, until another is set.
        CPU: ``"inductor"`` unless set.
        CUDA: ``"inductor"`` unless set.
        """
        return self._chosen_compile_backend or self.compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Sets the backend that :meth:`get_compile_backend` returns.

        Delegates to: ``torch._dynamo.list_backends``, to check the name.
        CPU: as stated.
        CUDA: as stated.

        Raises:
            UnknownCompileBackendError: torch knows no such backend.
        """
        from torch._dynamo import list_backends  # takes a second to import

        known = list_backends(exclude_tags=())
        if backend not in known:
            raise UnknownCompileBackendError(
                f'Compile backend "{excerpt(backend)}" is not supported by {self.name}. '
                f"Backends that torch knows here: {', '.join(known)}."
            )
        self._chosen_compile_backend = backend

    # -- launching -------------------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """Prefixes of the environment variables to export to ranks on other hosts.

        Delegates to: :attr:`exported_variable_prefixes`.
        CPU: oneCCL's, OpenMP's and Intel MPI's.
        CUDA: ``["NCCL"]``.
        """
        return list(self.exported_variable_prefixes)

    def visible_devices_envs(self) -> list[str]:
        """The environment variables that limit the devices a process sees.

        Delegates to: :attr:`visible_devices_variable`.
        CPU: none.
        CUDA: as stated.
        """
        return [self.visible_devices_variable] if self.visible_devices_variable else []

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int | str]
    ) -> None:
        """Changes an environment so that a process started with it sees only some devices.

        Args:
            current_env: the environment to change.
            local_accelerator_ids: the indices of devices on this host.

        Delegates to: :meth:`visible_devices_envs`.
        CPU: changes nothing.
        CUDA: as stated.
        """
        devices = ",".join(map(str, local_accelerator_ids))
        for variable in self.visible_devices_envs():
            current_env[variable] = devices
