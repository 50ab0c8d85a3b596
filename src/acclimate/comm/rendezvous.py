"""The ranks of a group find each other, and agree on their shared memory, through a store."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from acclimate.comm import memory
from acclimate.comm.memory import Geometry, SharedMemory
from acclimate.errors import AcclimateError, GroupCreationError, InvalidEnvironmentError, InvalidRankError
from acclimate.host import topology
from acclimate.host.process_status import stat_fields

# A group takes at most this share of the free memory, so that small containers get smaller buffers.
_SHARE_OF_FREE_MEMORY = 1 / 16
# How often a waiting rank checks whether the other process still runs.
_SLICE = timedelta(seconds=0.5)


@dataclass(frozen=True)
class Offer:
    """The facts about one rank's process that all ranks exchange."""

    host: str
    """Identifies the boot of the host and the process's network and PID namespaces; empty if unknown."""
    process: int
    cores: tuple[int, ...]
    processors: float
    """The CPU quota of the process, in processors."""
    most_bytes: int
    """The most shared memory that the group may take."""
    refusal: str
    """Why this rank cannot share memory; empty if it can."""


class Rendezvous:
    """One rank's side of the agreement, through a store that only its group uses."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._processes: list[int] = []

    def offers(self, refusal: str) -> tuple[Offer, ...]:
        """Returns the offers of all ranks; ``refusal`` is why this rank cannot share memory, or empty."""
        received = self._exchange("offer", asdict(_own_offer(refusal)))
        return tuple(Offer(**{**offer, "cores": tuple(offer["cores"])}) for offer in received)

    def join(
        self,
        offers: tuple[Offer, ...],
        total_bytes: Callable[[int, int, int], int],
        open_group: Callable[..., Any],
    ) -> tuple[Any, str]:
        """Allocates the memory on rank 0, and opens the group on all ranks or on none.

        Args:
            offers: those of all ranks.
            total_bytes: as for :func:`~acclimate.comm.memory.geometries`.
            open_group: the native function, which gets the descriptor of the memory, this rank, all ranks'
                processes, the sizes of slots and rings in bytes, the time-out in ms, and whether there is a
                core for each rank.

        Returns:
            The result of ``open_group``, and an empty string; or the reason why there is no group, equal on
            all ranks.
        """
        self._processes = [offer.process for offer in offers]
        made, message = self._make(offers, total_bytes) if self._rank == 0 else (None, {})
        values = self._broadcast_from_first(message)
        group, refusal = None, values["refusal"]
        if not refusal:
            try:
                shared = made or _open_made(values)
                try:
                    group = open_group(
                        shared.descriptor,
                        self._rank,
                        self._processes,
                        shared.geometry.slot_bytes,
                        shared.geometry.ring_bytes,
                        int(self._timeout.total_seconds() * 1000),
                        _have_spare_cores(offers),
                    )
                finally:
                    if made is None:
                        shared.close()
            except (OSError, RuntimeError) as error:
                refusal = f"{error}"
        answers = self._exchange("ready", {"refusal": refusal})
        refusal = _first_refusal([answer["refusal"] for answer in answers])
        if made is not None:
            made.close()
        return None if refusal else group, refusal

    def _exchange(self, topic: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Sends a message to all ranks and returns every rank's message."""
        if self._size == 1:
            return [dict(message)]
        self._store.set(f"shm/{topic}/{self._rank}", json.dumps(message))
        return [self._receive(f"shm/{topic}/{rank}", rank) for rank in range(self._size)]

    def _receive(self, key: str, rank: int) -> dict[str, Any]:
        """Returns the message that a rank wrote to the store.

        Raises:
            GroupCreationError: the rank has ended, or wrote nothing in time.
        """
        end = time.monotonic() + self._timeout.total_seconds()
        while not self._wait_for(key, min(_SLICE, timedelta(seconds=max(0.001, end - time.monotonic())))):
            has_ended = bool(self._processes) and _has_ended(self._processes[rank])
            if has_ended and not self._store.check([key]):
                raise GroupCreationError(
                    f"Rank {rank} (process {self._processes[rank]}) ended while rank {self._rank} waited "
                    "for it to create a group."
                )
            if time.monotonic() >= end:
                raise GroupCreationError(
                    f"Rank {self._rank} gave up after {self._timeout.total_seconds():g} s: rank {rank} did "
                    "not join the creation of a group. All ranks of a job must create its groups in the "
                    "same order."
                )
        received: dict[str, Any] = json.loads(self._store.get(key))
        return received

    def _wait_for(self, key: str, longest: timedelta) -> bool:
        try:
            self._store.wait([key], longest)
        except RuntimeError:  # each kind of store has its own error for a time-out
            return bool(self._store.check([key]))  # raises where the store is lost
        return True

    def _broadcast_from_first(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if self._rank == 0:
            if self._size > 1:
                self._store.set("shm/memory", json.dumps(message))
            return dict(message)
        return self._receive("shm/memory", 0)

    def _make(
        self, offers: tuple[Offer, ...], total_bytes: Callable[[int, int, int], int]
    ) -> tuple[SharedMemory | None, dict[str, Any]]:
        limit = min(offer.most_bytes for offer in offers)
        try:
            made = memory.make(memory.geometries(self._size, limit, total_bytes))
        except OSError as error:
            return None, {"refusal": f"its buffers do not fit into memory: {error.strerror or error}"}
        where = {"process": made.process, "descriptor": made.descriptor, "token": made.token}
        return made, {"refusal": "", **where, **asdict(made.geometry)}


def why_not_shared(offers: tuple[Offer, ...], most_ranks: int) -> str:
    """Returns why ranks of one host cannot share memory, equal on all ranks; empty if they can."""
    if len(offers) > most_ranks:
        return f"there are {len(offers)} ranks, but at most {most_ranks} can"
    return _first_refusal([offer.refusal for offer in offers])


def are_on_one_host(offers: tuple[Offer, ...]) -> bool:
    """Whether all ranks are on one host, and none in a container with its own PID or network namespace."""
    return len({offer.host for offer in offers if offer.host}) <= 1


def _first_refusal(refusals: list[str]) -> str:
    return next((f"rank {rank}: {refusal}" for rank, refusal in enumerate(refusals) if refusal), "")


def _have_spare_cores(offers: tuple[Offer, ...]) -> bool:
    """Whether there is a core for each rank."""
    cores = set[int]().union(*(offer.cores for offer in offers))
    return min(len(cores), *(offer.processors for offer in offers)) >= len(offers)


def _open_made(values: Mapping[str, Any]) -> SharedMemory:
    geometry = Geometry(values["slot_bytes"], values["ring_bytes"], values["total_bytes"])
    try:
        return memory.open_made(values["process"], values["descriptor"], values["token"], geometry)
    except OSError as error:
        raise OSError(f"the memory that rank 0 made cannot be opened: {error}") from error


def _has_ended(process: int) -> bool:
    try:
        _, fields = stat_fields(str(process))
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return True
    except OSError:
        return False
    return fields[0] in (b"Z", b"X")


def _own_offer(refusal: str) -> Offer:
    try:
        cores = tuple(sorted(os.sched_getaffinity(0)))
        host = _host()
        quota = topology.cpu_quota()
        free = topology.available_memory()
    except (OSError, AttributeError, AcclimateError) as error:  # not Linux, or no /proc
        return Offer("", os.getpid(), (), 0.0, 0, refusal or f"it needs Linux's /proc: {error}")
    if not hasattr(os, "memfd_create"):
        refusal = refusal or f"os.memfd_create does not exist here ({sys.platform})"
    return Offer(
        host,
        os.getpid(),
        cores,
        quota if quota is not None else float(len(cores) + 2**20),
        int(free * _SHARE_OF_FREE_MEMORY),
        refusal,
    )


def _host() -> str:
    # Ranks open each other's memory by process id, so another PID namespace counts as another host. A
    # separate network namespace does too, because it is meant to look like another host.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = ":".join(str(os.stat(f"/proc/self/ns/{space}").st_ino) for space in ("pid", "net"))
    return f"{boot}:{spaces}"


def require_rank(size: int, rank: int) -> None:
    """Checks that ``rank`` is a rank of a group of ``size`` ranks.

    Raises:
        InvalidRankError: ``rank`` is not from 0 to ``size`` - 1.
    """
    if not 0 <= rank < size:
        raise InvalidRankError(f"rank is {rank}, but must be from 0 to {size - 1}, as size is {size}.")


def store_for(op: str, number: int, size: int, rank: int) -> Any:
    """Returns the store of one group of an op, of which this process created ``number`` groups before."""
    return distributed_c10d.PrefixStore(f"acclimate/{op}/{number}", _shared(size, rank))


def _shared(size: int, rank: int) -> Any:
    if dist.is_initialized() and dist.get_world_size() == size:
        return distributed_c10d._get_default_store()
    if size > 1 and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        raise InvalidEnvironmentError(
            "initialize() does not know where the ranks find each other. Call acclimate.init_distributed() "
            "first, or set MASTER_ADDR and MASTER_PORT."
        )
    if size == 1:
        return torch._C._distributed_c10d.HashStore()
    store, _, _ = next(rendezvous("env://", rank, size))
    return store
