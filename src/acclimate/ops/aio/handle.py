"""The handle through which tensors are read from files and written to them."""

from __future__ import annotations

import operator
import os
import stat
import threading
import weakref
from types import TracebackType
from typing import Literal

import torch

from acclimate.errors import AsyncIOError, AsyncIOSettingError
from acclimate.ops.aio import failures
from acclimate.ops.aio.buffers import LockedMemory, host_buffer
from acclimate.ops.aio.engines import Settings
from acclimate.ops.aio.files import Name, Replacement, open_file, path_of
from acclimate.ops.aio.graphs import outside_graphs, read_in_graph, register, write_in_graph
from acclimate.ops.aio.session import Session, Transfer

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

# What DeepSpeed answers per thread: the sector size its O_DIRECT transfers have to be a multiple of.
_SECTOR_BYTES = 512
_LARGEST_OFFSET = 2**63 - 1  # of the kernel's off_t
_Awaited = Literal["nothing", "this", "own"]
"""Which transfers a call waits for: none, its own, or also the earlier ones of its thread."""
_locked_memory = LockedMemory()

_fork_lock = threading.Lock()


def _renew_fork_lock() -> None:
    global _fork_lock
    _fork_lock = threading.Lock()  # a thread that the child does not have may hold the old one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_fork_lock)


class AsyncIOHandle:
    """Reads tensors from files and writes them, past the page cache and many blocks at a time.

    Takes DeepSpeed's ``aio_handle`` arguments and has its methods. A transfer is cut into blocks, of which
    up to ``queue_depth`` per worker are on their way at once, through io_uring, Linux AIO, or a pool of
    threads: the first that the machine allows, or what ``ACCLIMATE_AIO`` names (``io_uring``, ``aio``,
    ``threads``, ``python``). The file is opened with O_DIRECT where its file system has that. Any size, file
    offset and memory alignment will do, but a block whose memory or offset the device cannot take as it is
    costs a copy: tensors of :meth:`new_cpu_locked_tensor` at offsets that are whole pages cost none.

    Buffers are contiguous tensors of any shape and dtype, on the host or on the accelerator; the latter go
    through page-locked host memory. While a request is on its way its tensor must not be changed; after a
    failed read its content is undefined. In compiled code, transfers that are waited for are part of the
    graph, and the others run between graphs (docs/ops.md).

    Threads may share a handle: each call waits for its own thread's requests and raises their errors alone;
    :meth:`wait` also waits for other threads' requests. A forked child that uses its parent's handle gets an
    engine of its own, without the parent's pending requests.

    Args:
        block_size: bytes per request to the kernel, at least 1. More than 1 GiB counts as 1 GiB.
        queue_depth: blocks on their way at once, per worker, at least 1.
        single_submit: hand each block to the kernel by itself, not as many as are ready at once.
        overlap_events: kept for code that gives it. Completions always overlap with submissions here, as
            waiting for whole batches is never faster.
        intra_op_parallelism: workers, each with a queue and a thread of its own, at least 1.

    Raises:
        AsyncIOSettingError: a number below 1.
        AsyncIOEngineError: ``ACCLIMATE_AIO`` names no engine, or one that is refused here.
    """

    @outside_graphs
    def __init__(
        self,
        block_size: int = 1024 * 1024,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        numbers = {
            "block_size": block_size,
            "queue_depth": queue_depth,
            "intra_op_parallelism": intra_op_parallelism,
        }
        for name, value in numbers.items():
            if not isinstance(value, int) or value < 1:
                raise AsyncIOSettingError(f"{name} has to be a whole number from 1 on, not {value!r}.")
        self._settings = Settings(
            block_size, queue_depth, bool(single_submit), bool(overlap_events), intra_op_parallelism
        )
        self._number = register(self)
        self._open_session()

    # -- settings --------------------------------------------------------------------------------

    def get_block_size(self) -> int:
        """Bytes per request to the kernel."""
        return self._settings.block_size

    def get_queue_depth(self) -> int:
        """Blocks on their way at once, per worker."""
        return self._settings.queue_depth

    def get_single_submit(self) -> bool:
        """Whether each block is handed to the kernel by itself."""
        return self._settings.single_submit

    def get_overlap_events(self) -> bool:
        """What the handle was made with."""
        return self._settings.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """How many workers there are."""
        return self._settings.intra_op_parallelism

    def get_alignment(self) -> int:
        """The bytes that DeepSpeed's handle needs a transfer to be a multiple of. Any number will do here."""
        return self._settings.intra_op_parallelism * _SECTOR_BYTES

    @property
    def engine(self) -> str:
        """What moves the bytes: ``"io_uring"``, ``"aio"``, ``"threads"`` or ``"python"``."""
        return self._session.engine.name

    # -- one transfer, waited for ----------------------------------------------------------------

    def read(self, buffer: torch.Tensor, filename: Path, validate: bool = False, file_offset: int = 0) -> int:
        """Reads a file from ``file_offset`` to its end, which has to be as long as the buffer. Returns 0.

        Args:
            buffer: is filled.
            filename: of the file.
            validate: read a second time, through the page cache, and compare.
            file_offset: in bytes.

        Raises:
            BufferTooSmallError: the rest of the file is longer than the buffer.
            ShortFileError: it is shorter.
            AsyncIOError: of the type for the errno: missing file, directory, no permission, a device's error.
            InvalidBufferError: the tensor is not contiguous.
        """
        if torch.compiler.is_compiling():
            read_in_graph(self._number, buffer, filename, file_offset, validate, whole_rest=True)
            return 0
        self._move(buffer, path_of(filename), file_offset, False, validate, whole_rest=True, waits_for="this")
        return 0

    def write(
        self, buffer: torch.Tensor, filename: Path, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Writes a tensor to a file, which is made if it is missing and never cut. Returns 0.

        Arguments and errors as for :meth:`pwrite`.
        """
        if torch.compiler.is_compiling():
            write_in_graph(self._number, buffer, filename, file_offset, validate, wait_all=False)
            return 0
        self._move(buffer, path_of(filename), file_offset, True, validate, waits_for="this")
        return 0

    # -- many transfers --------------------------------------------------------------------------

    def pread(
        self,
        buffer: torch.Tensor,
        filename: Path,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
        **keyword_async: bool,
    ) -> int:
        """Reads as many bytes as the buffer has.

        Args:
            buffer: is filled.
            filename: of the file.
            validate: read a second time, through the page cache, and compare.
            async_op: return at once; :meth:`wait` reports how it ended. Also taken under DeepSpeed's name
                ``async``, which Python keeps for itself: by position or as ``**{"async": True}``.
            file_offset: in bytes.
            keyword_async: ``async`` alone.

        Returns:
            0 if ``async_op``, else how many of the calling thread's requests have ended since it last waited:
            this one, and those before it, which this call waits for too.

        Raises:
            ShortFileError: the file ends before the buffer is full.
            AsyncIOError: of the type for the errno: missing file, directory, no permission, a device's error.
            InvalidBufferError: the tensor is not contiguous.
        """
        async_op = _async_keyword("pread", keyword_async, async_op)
        if not async_op and torch.compiler.is_compiling():
            read_in_graph(self._number, buffer, filename, file_offset, validate, whole_rest=False)
            return 1
        waits_for: _Awaited = "nothing" if async_op else "own"
        return self._move(buffer, path_of(filename), file_offset, False, validate, waits_for=waits_for)

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: Path,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
        *,
        atomic: bool = False,
        **keyword_async: bool,
    ) -> int:
        """Writes a tensor at an offset of a file, which is made if it is missing and never cut.

        Args:
            buffer: is written.
            filename: of the file.
            validate: read it back, through the page cache, and compare.
            async_op: return at once; :meth:`wait` reports how it ended. Also taken as ``async``.
            file_offset: in bytes.
            atomic: the tensor becomes the file's whole content, and whoever opens the file, also after a
                crash, finds the old content or the new one, never a part: written beside it, brought to the
                disk, renamed. With ``async_op`` the new content appears in :meth:`wait`.
            keyword_async: ``async`` alone.

        Returns:
            0 if ``async_op``, else how many of the calling thread's requests have ended since it last waited:
            this one, and those before it, which this call waits for too.

        Raises:
            AsyncIOError: of the type for the errno: no such folder, directory, read-only, disk full.
            AsyncIOSettingError: ``atomic`` with an offset, with a descriptor, or for a device or a pipe.
            InvalidBufferError: the tensor is not contiguous.
        """
        async_op = _async_keyword("pwrite", keyword_async, async_op)
        if not async_op and torch.compiler.is_compiling():
            write_in_graph(
                self._number, buffer, filename, file_offset, validate, atomic=atomic, wait_all=True
            )
            return 1
        if atomic and file_offset:
            raise AsyncIOSettingError(
                f"atomic=True replaces the whole file, so file_offset has to be 0, not {file_offset}."
            )
        waits_for: _Awaited = "nothing" if async_op else "own"
        name = path_of(filename)
        return self._move(buffer, name, file_offset, True, validate, atomic=atomic, waits_for=waits_for)

    def sync_pread(self, buffer: torch.Tensor, filename: Path, file_offset: int = 0) -> int:
        """:meth:`pread` that waits."""
        return self.pread(buffer, filename, file_offset=file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: Path, file_offset: int = 0) -> int:
        """:meth:`pwrite` that waits."""
        return self.pwrite(buffer, filename, file_offset=file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: Path, file_offset: int = 0) -> int:
        """:meth:`pread` that does not wait. Returns 0."""
        return self.pread(buffer, filename, async_op=True, file_offset=file_offset)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: Path | int | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """:meth:`pwrite` that does not wait. Returns 0.

        Args:
            buffer: is written.
            filename: of the file, or the descriptor of a file open for writing, which stays the caller's
                and may be closed at once.
            file_offset: in bytes, also for a descriptor.
            fd: the descriptor by name.
        """
        if (filename is None) == (fd is None):
            raise TypeError("async_pwrite takes a filename or a descriptor (fd), and one of them.")
        name = path_of(fd if filename is None else filename)
        return self._move(buffer, name, file_offset, True, False, waits_for="nothing")

    @outside_graphs
    def wait(self) -> int:
        """Waits until every request that was submitted before has ended, whichever thread submitted it.

        Returns how many of the calling thread's requests ended since it last waited. What another thread
        submitted is counted in that thread's ``wait()``, and its errors are raised there; but what a thread
        submitted that has ended, or that Python did not start (autograd's), counts for the next caller.

        Other Python threads run meanwhile. Ctrl-C ends the wait, not the requests; they can be waited for
        again.

        Raises:
            AsyncIOError: requests failed. Of several, ``errors`` holds each one. All others have ended well.
        """
        return self._current_session(None).wait()

    @outside_graphs
    def close(self) -> None:
        """Waits for all requests and frees the engine. A handle that is not closed is when it is freed.

        From its beginning on, other threads' calls raise :class:`ClosedHandleError`; those on their way end
        as if there were no ``close()``.

        Raises:
            AsyncIOError: requests of any thread failed, and no call was waiting for them.
        """
        if self._release.alive:
            try:
                self._session.close()
            except AsyncIOError:
                self._release.detach()
                raise
            self._release.detach()

    def __enter__(self) -> AsyncIOHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()  # the errors of transfers would hide the one on its way

    # -- page-locked memory ----------------------------------------------------------------------

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised one-dimensional tensor on the host, of the example's dtype, that transfers use as
        it is: page-aligned, and locked in memory as far as the process may (``ulimit -l``).

        Args:
            num_elem: how many elements.
            example_tensor: whose dtype to take.

        Raises:
            AsyncIOSettingError: a negative number.
            AsyncIOError: there is not so much memory (``ENOMEM``).
        """
        if num_elem < 0:
            raise AsyncIOSettingError(f"num_elem has to be a whole number from 0 on, not {num_elem}.")
        return _locked_memory.allocate(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Unlocks the memory of a tensor of :meth:`new_cpu_locked_tensor`; whether it was one.

        The memory itself is freed with the last view of it, so a tensor that is still in use stays valid.
        """
        return _locked_memory.release(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether a tensor is page-locked, by the accelerator or by :meth:`new_cpu_locked_tensor`."""
        return bool(buffer.is_pinned()) or _locked_memory.holds(buffer)

    # -- within ----------------------------------------------------------------------------------

    def _open_session(self) -> None:
        self._session = Session(self._settings)
        self._release = weakref.finalize(self, self._session.release)

    def _current_session(self, name: Name | None) -> Session:
        if self._session.process != os.getpid():
            self._leave_parents_session()
        if not self._release.alive:
            raise failures.closed_handle(name)
        return self._session

    def _leave_parents_session(self) -> None:
        with _fork_lock:  # of a child's threads, one does it
            if self._session.process != os.getpid() and self._release.detach():
                self._session.abandon()
                self._open_session()

    @outside_graphs
    def _move(
        self,
        buffer: torch.Tensor,
        name: Name,
        offset: int,
        writes: bool,
        validates: bool,
        *,
        waits_for: _Awaited,
        atomic: bool = False,
        whole_rest: bool = False,
    ) -> int:
        """Starts a transfer and waits as told; returns how many have ended."""
        session = self._current_session(name)
        source = host_buffer(buffer, writes)
        offset, length = operator.index(offset), source.length
        if not 0 <= offset <= _LARGEST_OFFSET - length:
            raise failures.bad_offset(name, offset)
        try:
            replacement = Replacement(name, length) if atomic else None
            file = replacement.file if replacement else open_file(name, writes, length)
        except OSError as error:
            raise failures.failed_call(name, error, offset, length, writes) from error
        transfer = Transfer(source, file, offset, writes, validates, replacement)
        try:
            if not writes:
                _require_size(transfer, whole_rest)
        except BaseException:
            transfer.discard()
            raise
        if waits_for == "nothing":
            session.start(transfer)
            return 0
        return session.run(transfer, finishes_own=waits_for == "own")


def _require_size(transfer: Transfer, whole_rest: bool) -> None:
    """Refuses a read that the size of the file shows to be wrong. Some files, as in /proc, tell no size."""
    status, length, offset = transfer.file.status, transfer.buffer.length, transfer.offset
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        return
    if offset + length > status.st_size:
        raise failures.short_file(transfer.name, status.st_size, offset, length)
    if whole_rest and offset + length < status.st_size:
        raise failures.buffer_too_small(transfer.name, status.st_size, offset, length)


def _async_keyword(method: str, keywords: dict[str, bool], async_op: bool) -> bool:
    unknown = sorted(set(keywords) - {"async"})
    if unknown:
        raise TypeError(f"{method}() got an unexpected keyword argument {unknown[0]!r}")
    if keywords and async_op and not keywords["async"]:
        raise TypeError(f"{method}() got async=False and async_op=True")
    return keywords.get("async", async_op)
