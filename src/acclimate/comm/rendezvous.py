"""How the ranks of a group agree, through the store that they have, on the memory that they share."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from acclimate import topology
from acclimate.comm import memory
from acclimate.comm.memory import Geometry, SharedMemory
from acclimate.errors import AcclimateError, GroupCreationError

# Of the memory that is free when a group is made, so that small containers get smaller buffers.
_SHARE_OF_FREE_MEMORY = 1 / 16
# So often is a process looked for that others wait for.
_SLICE = timedelta(seconds=0.5)


@dataclass(frozen=True)
class Offer:
    """What one rank tells the others of itself."""

    host: str
    """Of the host, its network, and the numbers that its processes have there."""
    name: str
    """What a person calls the host. Several may have the same."""
    process: int
    cores: tuple[int, ...]
    processors: float
    """The processor time that it may use, in processors."""
    most_bytes: int
    """That the group may take."""
    refusal: str
    """Why this rank takes no part; empty where it does."""


@dataclass(frozen=True)
class Joined:
    """A group that all ranks have opened, or the reason why there is none."""

    group: Any
    """What ``open_group`` gave."""
    offers: tuple[Offer, ...]
    refusal: str
    """Equal on all ranks; empty where there is a group."""


@dataclass(frozen=True)
class Opening:
    """What a group is opened with."""

    memory: SharedMemory
    rank: int
    processes: list[int]
    has_spare_cores: bool
    """Whether each rank can have a core of its own."""


class Rendezvous:
    """One rank's side.

    Args:
        store: of the group alone.
        rank: this one.
        size: of the group.
        timeout: so long does a rank wait for another one.
        numbers: what errors call the ranks, where they are a part of a group.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, numbers: Sequence[int] | None = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._numbers = numbers or range(size)
        self._processes: list[int] = []

    def offers(self, refusal: str) -> tuple[Offer, ...]:
        """What all ranks tell of themselves.

        Args:
            refusal: why this rank takes no part; empty where it does.
        """
        heard = self._exchange("offer", asdict(_own_offer(refusal)))
        return tuple(Offer(**{**offer, "cores": tuple(offer["cores"])}) for offer in heard)

    def join(
        self,
        offers: tuple[Offer, ...],
        total_bytes: Callable[[int, int, int], int],
        open_group: Callable[[Opening], Any],
    ) -> Joined:
        """Makes the memory on rank 0, and opens the group on all ranks or on none.

        Args:
            offers: of ranks that can share memory.
            total_bytes: that so many ranks need, with slots and rings of so many bytes.
            open_group: opens this rank's side.
        """
        self._processes = [offer.process for offer in offers]
        made, said = self._make(offers, total_bytes) if self._rank == 0 else (None, {})
        told = self._from_first(said)
        group, refusal = None, told["refusal"]
        if not refusal:
            try:
                shared = made or _open_made(told)
                try:
                    group = open_group(_opening(shared, self._rank, offers))
                finally:
                    if made is None:
                        shared.close()
            except (OSError, RuntimeError) as error:
                refusal = f"{error}"
        refusal = self.agree("ready", refusal)
        if made is not None:
            made.close()
        return Joined(None if refusal else group, offers, refusal)

    def agree(self, topic: str, refusal: str) -> str:
        """The first rank's reason not to go on, equal on all ranks; empty where none has one."""
        answers = self._exchange(topic, {"refusal": refusal})
        return _first_refusal([answer["refusal"] for answer in answers])

    def _exchange(self, topic: str, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Tells the other ranks, and hears all of them."""
        if self._size == 1:
            return [dict(said)]
        self._store.set(f"shm/{topic}/{self._rank}", json.dumps(said))
        return [self._hear(f"shm/{topic}/{rank}", rank) for rank in range(self._size)]

    def _hear(self, key: str, rank: int) -> dict[str, Any]:
        """What a rank wrote to the store.

        Raises:
            GroupCreationError: it has ended, or did not come in time.
        """
        end = time.monotonic() + self._timeout.total_seconds()
        while not self._is_there(key, min(_SLICE, timedelta(seconds=max(0.001, end - time.monotonic())))):
            this, other = self._numbers[self._rank], self._numbers[rank]
            has_ended = bool(self._processes) and _has_ended(self._processes[rank])
            if has_ended and not self._store.check([key]):
                raise GroupCreationError(
                    f"Rank {other} (process {self._processes[rank]}) ended while rank {this} waited for it "
                    "to create a group."
                )
            if time.monotonic() >= end:
                raise GroupCreationError(
                    f"Rank {this} gave up after {self._timeout.total_seconds():g} s: rank {other} did not "
                    "come to create a group. All ranks of a job have to create its groups in the same order."
                )
        heard: dict[str, Any] = json.loads(self._store.get(key))
        return heard

    def _is_there(self, key: str, longest: timedelta) -> bool:
        try:
            self._store.wait([key], longest)
        except RuntimeError:  # each kind of store has its own error for a time-out
            return bool(self._store.check([key]))  # raises where the store is lost
        return True

    def _from_first(self, said: Mapping[str, Any]) -> dict[str, Any]:
        if self._rank == 0:
            if self._size > 1:
                self._store.set("shm/memory", json.dumps(said))
            return dict(said)
        return self._hear("shm/memory", 0)

    def _make(
        self, offers: tuple[Offer, ...], total_bytes: Callable[[int, int, int], int]
    ) -> tuple[SharedMemory | None, dict[str, Any]]:
        limit = min(offer.most_bytes for offer in offers)
        try:
            made = memory.make(memory.geometries(self._size, limit, total_bytes))
        except OSError as error:
            return None, {"refusal": f"there is no memory for its buffers: {error.strerror or error}"}
        where = {"process": made.process, "descriptor": made.descriptor, "token": made.token}
        return made, {"refusal": "", **where, **asdict(made.geometry)}


def why_not_shared(offers: tuple[Offer, ...], most_ranks: int) -> str:
    """Why not even ranks of one host can share memory, which each finds alike; empty where they can."""
    if len(offers) > most_ranks:
        return f"there are {len(offers)} ranks, and {most_ranks} is the most"
    return _first_refusal([offer.refusal for offer in offers])


def ranks_by_host(offers: tuple[Offer, ...]) -> list[list[int]]:
    """The ranks of each host, in the order of their first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        hosts.setdefault(offer.host, []).append(rank)
    return list(hosts.values())


def _first_refusal(refusals: list[str]) -> str:
    return next((f"rank {rank}: {refusal}" for rank, refusal in enumerate(refusals) if refusal), "")


def _opening(shared: SharedMemory, rank: int, offers: tuple[Offer, ...]) -> Opening:
    cores = set[int]().union(*(offer.cores for offer in offers))
    processors = min(len(cores), *(offer.processors for offer in offers))
    return Opening(shared, rank, [offer.process for offer in offers], processors >= len(offers))


def _open_made(told: Mapping[str, Any]) -> SharedMemory:
    geometry = Geometry(told["slot_bytes"], told["ring_bytes"], told["total_bytes"])
    try:
        return memory.open_made(told["process"], told["descriptor"], told["token"], geometry)
    except OSError as error:
        raise OSError(f"the memory that rank 0 made cannot be opened: {error}") from error


def _has_ended(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    # The state follows the name, which is in parentheses and may hold some itself.
    return stat.rpartition(")")[2].split()[0] in "ZX"


def _own_offer(refusal: str) -> Offer:
    try:
        cores = tuple(sorted(os.sched_getaffinity(0)))
        host = _host()
        quota = topology.cpu_quota()
        free = topology.available_memory()
    except (OSError, AttributeError, AcclimateError) as error:  # not Linux, or no /proc
        return Offer("", "", os.getpid(), (), 0.0, 0, refusal or f"this system shares no memory so: {error}")
    if not hasattr(os, "memfd_create"):
        refusal = refusal or f"it needs memfd_create, which {sys.platform} has not"
    return Offer(
        host,
        socket.gethostname(),
        os.getpid(),
        cores,
        quota if quota is not None else float(len(cores) + 2**20),
        int(free * _SHARE_OF_FREE_MEMORY),
        refusal,
    )


def _host() -> str:
    # Processes are found by their number, so those of another PID namespace are as far away as another host.
    # One with a network of its own is meant to be one.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = ":".join(str(os.stat(f"/proc/self/ns/{space}").st_ino) for space in ("pid", "net"))
    return f"{boot}:{spaces}"
