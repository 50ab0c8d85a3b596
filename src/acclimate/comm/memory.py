"""The memory that ranks share: an anonymous file, which has no path and is freed with its last process.

One rank creates it with ``memfd_create``, seals its size, and sends its process id and descriptor to the
others. They open it through ``/proc/<process>/fd/<descriptor>``, which the kernel allows only to the same
user. They also compare a random token, because the system reuses process ids.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass

_TOKEN_BYTES = 16

# Bytes of a rank's contribution to one round. Smaller slots fit into more caches, but need more rounds, and
# each round can cost a time slice if other work runs on the cores.
_LARGEST_SLOT = 512 * 1024
_SMALLEST_SLOT = 16 * 1024

_LARGEST_RING = 256 * 1024
_ALL_SLOTS = 16 * 1024 * 1024
_ALL_RINGS = 8 * 1024 * 1024
_PAGE = 4096


@dataclass(frozen=True)
class Geometry:
    """How the memory of a group is divided."""

    slot_bytes: int
    ring_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class SharedMemory:
    """An anonymous file (memfd) that the ranks of one host map."""

    descriptor: int
    process: int
    token: str
    geometry: Geometry

    def close(self) -> None:
        """Closes the descriptor; mappings stay valid."""
        os.close(self.descriptor)


def geometries(ranks: int, limit: int, total_bytes: Callable[[int, int, int], int]) -> list[Geometry]:
    """Returns the possible buffer sizes of a group, best first; empty if all exceed the limit.

    Args:
        ranks: the number of ranks.
        limit: the most bytes that the group may take.
        total_bytes: computes the bytes that a group needs from its ranks, slot bytes and ring bytes.
    """
    slot = _power_of_two(_ALL_SLOTS // (4 * ranks), _SMALLEST_SLOT, _LARGEST_SLOT)
    ring = _power_of_two(_ALL_RINGS // ranks**2, _PAGE, _LARGEST_RING)
    found = []
    while slot >= _SMALLEST_SLOT:
        total = total_bytes(ranks, slot, ring)
        if total <= limit:
            found.append(Geometry(slot, ring, total))
        slot //= 2
        ring = max(_PAGE, ring // 2)
    return found


def _power_of_two(wanted: int, smallest: int, largest: int) -> int:
    return max(smallest, min(largest, 1 << max(0, wanted.bit_length() - 1)))


def make(candidates: list[Geometry]) -> SharedMemory:
    """Allocates the memory of the first candidate that the system grants.

    Raises:
        OSError: the system grants none.
    """
    refusal = OSError(errno.ENOMEM, "too little memory for the smallest buffers")
    for geometry in candidates:
        try:
            return _make(geometry)
        except OSError as error:
            refusal = error
    raise refusal


def _make(geometry: Geometry) -> SharedMemory:
    descriptor = os.memfd_create("acclimate-comm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, geometry.total_bytes)
        # Allocate all pages now: a page that is not available later would kill the process that touches it.
        os.posix_fallocate(descriptor, 0, geometry.total_bytes)
        token = secrets.token_bytes(_TOKEN_BYTES)
        os.pwrite(descriptor, token, 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
    except OSError:
        os.close(descriptor)
        raise
    return SharedMemory(descriptor, os.getpid(), token.hex(), geometry)


def open_made(process: int, descriptor: int, token: str, geometry: Geometry) -> SharedMemory:
    """Opens the memory that another process created.

    Raises:
        OSError: the file does not exist, has another token, or belongs to another user.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _seals() != _seals():
            raise OSError(errno.EPERM, "its size is not sealed", path)
        if os.pread(opened, _TOKEN_BYTES, 0).hex() != token:
            raise OSError(errno.ESTALE, "it belongs to another group", path)
        if os.fstat(opened).st_size != geometry.total_bytes:
            raise OSError(errno.EINVAL, "its size is not the size that rank 0 sent", path)
    except OSError:
        os.close(opened)
        raise
    return SharedMemory(opened, process, token, geometry)


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
