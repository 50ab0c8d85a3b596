"""The rest of a device's runtime: marks for profilers, calls made late, communication, compilers, and what a
launcher needs to know."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch

from acclimate.accelerator.devices import Devices
from acclimate.errors import UnknownCompileBackendError

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
    def range(self, msg: str) -> Iterator[None]:
        """A named range around a block; also a decorator."""
        self.range_push(msg)
        try:
            yield
        finally:
            self.range_pop()


class Record(Protocol):
    """What an accelerator reads of its record (``acclimate.Backend``)."""

    @property
    def visible_devices_variable(self) -> Callable[[], str | None]:
        """Gives the name of the variable, or ``None``."""

    @property
    def exported_variable_prefixes(self) -> tuple[str, ...]:
        """Beginnings of names."""


class Runtime(Devices):
    """Profiler marks, communication, compilation and launching."""

    # -- what a backend declares -----------------------------------------------------------------

    @property
    @abstractmethod
    def communication_backend(self) -> str:
        """The ``torch.distributed`` backend made for this device.

        CPU: ``"ccl"`` where oneCCL's bindings import, else ``"gloo"``.
        CUDA: ``"nccl"``, on Windows ``"gloo"``.
        """

    _record: Record | None = None
    """Where what the launcher needs too is said, once. Given by whoever loads the record, or by the class."""

    @property
    def visible_devices_variable(self) -> str | None:
        """The environment variable that limits which devices a process sees, or ``None``; as the
        accelerator's record has it.

        CPU: ``None``; a rank's cores are bound instead.
        CUDA: ``"CUDA_VISIBLE_DEVICES"``, on ROCm ``"HIP_VISIBLE_DEVICES"``.
        """
        return self._record.visible_devices_variable() if self._record is not None else None

    @property
    def exported_variable_prefixes(self) -> tuple[str, ...]:
        """Beginnings of the names of environment variables that ranks on other hosts need; as the
        accelerator's record has it.

        CPU: oneCCL's, OpenMP's and Intel MPI's.
        CUDA: NCCL's.
        """
        return self._record.exported_variable_prefixes if self._record is not None else ()

    supports_nvtx_domain: ClassVar[bool] = False
    """Whether :meth:`range_push` keeps ranges of different domains apart.

    CPU: no.
    CUDA: yes, with the ``nvtx`` package.
    """

    supports_collectives: ClassVar[bool] = True
    """Whether :attr:`communication_backend` moves tensors of this device between processes. Where a backend
    says no, the checks of communication count as not offered.

    CPU: true.
    CUDA: true.
    """

    compile_backend: ClassVar[str] = "inductor"
    """The ``torch.compile`` backend of this accelerator, which :meth:`get_compile_backend` returns until
    another is set; a backend gives its vendor's.

    CPU: ``"inductor"``.
    CUDA: ``"inductor"``.
    """

    _chosen_compile_backend: str | None = None

    # -- profiler marks --------------------------------------------------------------------------

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Opens a named range that profilers show, until :meth:`range_pop`. Ranges nest.

        Args:
            msg: its name.
            domain: keeps ranges of different libraries apart, where supported.
            category: groups ranges within a domain, where supported.

        Delegates to: ``torch.profiler.record_function``.
        CPU: in torch's profiler.
        CUDA: NVTX, through the ``nvtx`` package where a domain is given and it is installed.
        """
        mark = torch.profiler.record_function(msg)
        mark.__enter__()
        _ranges().append(mark)

    def range_pop(self, domain: str | None = None) -> None:
        """Closes the innermost range of this thread; does nothing where none is open.

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

    # -- late calls ------------------------------------------------------------------------------

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Calls ``callback`` once the device's context exists: now, or when it is made.

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
        """The name to give to ``torch.distributed.init_process_group``.

        Delegates to: :attr:`communication_backend`.
        CPU: ``"ccl"`` where oneCCL's bindings import, else ``"gloo"``.
        CUDA: ``"nccl"``, on Windows ``"gloo"``.
        """
        return self.communication_backend

    # -- compilers -------------------------------------------------------------------------------

    def is_triton_supported(self) -> bool:
        """Whether Triton kernels run on the current device.

        Delegates to: nothing; a device says so itself.
        CPU: false.
        CUDA: from compute capability 8.0, where Triton is installed; false on ROCm, where importing
            Triton has broken the device's interface.
        """
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        """Whether a grouped matrix product in Triton is faster here than ``torch._grouped_mm``.

        Delegates to: nothing; a device says so itself.
        CPU: false.
        CUDA: with Triton and compute capability 8.x, where torch's runs group by group.
        """
        return False

    def get_compile_backend(self) -> str:
        """The backend that ``torch.compile`` should be given on this accelerator.

        Delegates to: :attr:`compile_backend`, until another is set.
        CPU: ``"inductor"`` unless set.
        CUDA: ``"inductor"`` unless set.
        """
        return self._chosen_compile_backend or self.compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Chooses what :meth:`get_compile_backend` returns.

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
                f'Compile backend "{backend}" is not supported by {self.name}. '
                f"Backends that torch knows here: {', '.join(known)}."
            )
        self._chosen_compile_backend = backend

    # -- launching -------------------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """Beginnings of the names of environment variables that ranks on other hosts need.

        Delegates to: :attr:`exported_variable_prefixes`.
        CPU: oneCCL's, OpenMP's and Intel MPI's.
        CUDA: ``["NCCL"]``.
        """
        return list(self.exported_variable_prefixes)

    def visible_devices_envs(self) -> list[str]:
        """The environment variables that limit which devices a process sees.

        Delegates to: :attr:`visible_devices_variable`.
        CPU: none.
        CUDA: ``["CUDA_VISIBLE_DEVICES"]``.
        """
        return [self.visible_devices_variable] if self.visible_devices_variable else []

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int | str]
    ) -> None:
        """Limits a process that will be started with ``current_env`` to some devices.

        Args:
            current_env: the environment to change.
            local_accelerator_ids: of the devices on this host.

        Delegates to: :meth:`visible_devices_envs`.
        CPU: changes nothing.
        CUDA: sets ``CUDA_VISIBLE_DEVICES``.
        """
        devices = ",".join(map(str, local_accelerator_ids))
        for variable in self.visible_devices_envs():
            current_env[variable] = devices
