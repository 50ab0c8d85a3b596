"""The backend ``staged``: collectives for a device that has none of its own, through the host's memory.

gloo takes tensors on the host and on CUDA only, and torch has no other backend for a device that it does not
know. A group of this backend copies tensors to the host, runs the collective there, and copies the results
back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from acclimate.comm import backend as shm

NAME = "staged"
_Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A tensor on the device, and its copy on the host."""

# The names that torch.distributed, DDP and compiled collectives call; a release of torch has some of them.
_OPERATIONS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


def register(device_type: str) -> None:
    """Registers the backend with ``torch.distributed`` for a device type; later calls do nothing."""
    shm.register()
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, devices=[device_type, "cpu"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    on_host = shm.create(store, rank, size, timeout)
    group = StagedGroup(_with_backend(dist.ProcessGroup(store, rank, size), on_host))
    # From its backend a group has its name, its time-out and the device of Python objects.
    return _with_backend(group, on_host)


def _with_backend(group: Any, on_host: Any) -> Any:
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), custom, on_host)
    group._set_default_backend(custom)
    return group


class StagedWork(dist.Work):
    """A collective that is under way on the host; its results are copied to the device by ``wait``.

    Args:
        work: the collective on the host.
        results: the tensors on the device that it writes, with their copies on the host.
        under_way: the works of its group whose results are not on the device yet; this one joins them.
    """

    def __init__(self, work: Any, results: list[_Copy], under_way: list[StagedWork]) -> None:
        super().__init__()
        self._work = work
        self._results = results
        self._tensors = [tensor for tensor, _ in results]
        self._under_way = under_way
        under_way.append(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the collective and copies its results to the device."""
        self._work.wait(timeout)
        self._deliver()
        _deliver_completed(self._under_way)
        return True

    def _deliver(self) -> None:
        with suppress(ValueError):  # it is there no longer
            self._under_way.remove(self)
        results, self._results = self._results, []
        for tensor, on_host in results:
            tensor.copy_(on_host)

    def is_completed(self) -> bool:
        """Whether the results are on the device; copies them if they are on the host."""
        return self._work.is_completed() and self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Waits, and returns a future with the tensors that were written."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def _source_rank(self) -> int:
        return int(self._work._source_rank())


def _deliver_completed(under_way: list[StagedWork]) -> None:
    """Copies the results of works that are complete, for callers who dropped one instead of waiting."""
    for work in list(under_way):
        if work._work.is_completed():
            with suppress(RuntimeError):  # of a collective that failed, which its own wait() raises too
                work._work.wait()
                work._deliver()


class StagedGroup(dist.ProcessGroup):
    """A group whose tensors pass through the memory of the host, where ``host`` is the group."""

    def __init__(self, host: Any) -> None:
        super().__init__(host.rank(), host.size())  # type: ignore[call-arg]  # not in torch's annotations
        self._host = host
        self._under_way: list[StagedWork] = []

    def barrier(self, opts: Any = None) -> Any:
        """Waits on the host; the caller's options name the device, which the host's group does not know."""
        _deliver_completed(self._under_way)
        on_host = dist.BarrierOptions()
        on_host.device = torch.device("cpu")
        return self._host.barrier(on_host)

    def getBackendName(self) -> str:
        """The name under which the backend is registered."""
        return NAME

    def _run(self, operation: str, arguments: tuple[Any, ...]) -> StagedWork:
        _deliver_completed(self._under_way)
        # Every operation but send writes to its first argument, and to no other.
        results: list[_Copy] = []
        read: list[_Copy] = []
        written = _to_host(arguments[0], results if operation != "send" else read)
        others = [_to_host(argument, read) for argument in arguments[1:]]
        return StagedWork(getattr(self._host, operation)(written, *others), results, self._under_way)


def _to_host(value: Any, copies: list[_Copy]) -> Any:
    """Returns tensors, also in lists, as contiguous ones on the host; anything else as it is."""
    if isinstance(value, list | tuple):
        return [_to_host(item, copies) for item in value]
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return value
    copies.append((value.detach(), value.detach().to("cpu").contiguous()))
    return copies[-1][1]


def _operation(name: str) -> Callable[..., StagedWork]:
    def call(self: StagedGroup, *arguments: Any) -> StagedWork:
        return self._run(name, arguments)

    return call


for _name in _OPERATIONS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(StagedGroup, _name, _operation(_name))
