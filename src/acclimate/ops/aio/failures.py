"""Turns a failed transfer into an exception that names the file and the offset."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from acclimate.errors import (
    AsyncIOError,
    AsyncIOFileNotFoundError,
    AsyncIOIsADirectoryError,
    AsyncIOPermissionError,
    BufferTooSmallError,
    ClosedHandleError,
    ShortFileError,
)
from acclimate.ops.aio.engines import END_OF_FILE, Outcome
from acclimate.ops.aio.files import Name

_TYPES: dict[int, type[AsyncIOError]] = {
    errno.ENOENT: AsyncIOFileNotFoundError,
    errno.EACCES: AsyncIOPermissionError,
    errno.EPERM: AsyncIOPermissionError,
    errno.EISDIR: AsyncIOIsADirectoryError,
    END_OF_FILE: ShortFileError,
}


def failed_transfer(name: Name, outcome: Outcome, offset: int, length: int, writes: bool) -> AsyncIOError:
    """Returns the error for a transfer with an outcome other than success."""
    action = f"{'writing' if writes else 'reading'} {length} bytes from offset {offset} on"
    if outcome.error == END_OF_FILE:
        return short_file(name, outcome.offset, offset, length)
    reason = f"{os.strerror(outcome.error)} at offset {outcome.offset}, {action}"
    return _error(outcome.error, reason, name, outcome.offset)


def failed_call(name: Name, error: OSError, offset: int, length: int, writes: bool) -> AsyncIOError:
    """Returns the error for a transfer that could not start, or whose file could not be completed."""
    code = error.errno or errno.EIO
    action = f"{'writing' if writes else 'reading'} {length} bytes from offset {offset} on"
    return _error(code, f"{error.strerror or os.strerror(code)}, {action}", name, offset)


def short_file(name: Name, end: int, offset: int, length: int) -> AsyncIOError:
    """Returns the error for a file that ends at ``end``, before the requested bytes do."""
    reason = f"The file ends at offset {end}, reading {length} bytes from offset {offset} on"
    return _error(END_OF_FILE, reason, name, end, ShortFileError)


def buffer_too_small(name: Name, size: int, offset: int, length: int) -> AsyncIOError:
    """Returns the error for a tensor of ``length`` bytes that is too small for the rest of a file."""
    reason = f"The buffer has {length} bytes and the file {size - offset} from offset {offset} on"
    return _error(errno.ENOBUFS, reason, name, offset, BufferTooSmallError)


def bad_offset(name: Name, offset: int) -> AsyncIOError:
    """Returns the error for an invalid offset."""
    return _error(
        errno.EINVAL,
        f"a transfer must lie between the file offsets 0 and 2**63 - 1; file_offset is {offset}",
        name,
        offset,
    )


def differing_data(name: Name, at: int) -> AsyncIOError:
    """Returns the error for data that differs when it is read again."""
    return _error(errno.EIO, f"Validation found other data in the file at offset {at}", name, at)


def closed_handle(name: Name | None) -> AsyncIOError:
    """Returns the error for using a handle after ``close()``."""
    return _error(errno.EBADF, "This I/O handle is closed", name, None, ClosedHandleError)


def together(errors: Sequence[AsyncIOError]) -> AsyncIOError:
    """Returns one error for several; a single error is returned unchanged."""
    if len(errors) == 1:
        return errors[0]
    listed = "; ".join(str(error) for error in errors)
    first = errors[0]
    error = AsyncIOError(first.errno, f"{len(errors)} requests failed: {listed}")
    error.offset = first.offset
    error.errors = tuple(errors)
    return error


def _error(
    code: int, reason: str, name: Name | None, offset: int | None, kind: type[AsyncIOError] | None = None
) -> AsyncIOError:
    kind = kind or _TYPES.get(code, AsyncIOError)
    error = kind(code, reason) if name is None else kind(code, reason, name)
    error.offset = offset
    error.errors = (error,)
    return error
