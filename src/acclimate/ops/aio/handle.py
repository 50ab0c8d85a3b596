"""The handle that reads tensors from files and writes them, and DeepSpeed's functions for it."""

from __future__ import annotations

import operator
import os
import stat
import weakref

import torch

from acclimate.errors import AsyncIOError, AsyncIOSettingError, excerpt
from acclimate.imports import ForkSafeLock
from acclimate.ops.aio import failures
from acclimate.ops.aio.buffers import LockedMemory, host_buffer
from acclimate.ops.aio.engines import Settings
from acclimate.ops.aio.files import Name, Replacement, open_file, path_of
from acclimate.ops.aio.graphs import Awaited, outside_graphs, register, transfer_in_graph
from acclimate.ops.aio.session import Session, Transfer

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

# DeepSpeed's transfers must be a multiple of this sector size for each thread.
_SECTOR_BYTES = 512
_LARGEST_OFFSET = 2**63 - 1  # the kernel's off_t

_locked_memory = LockedMemory()

_fork_lock = ForkSafeLock()


class AsyncIOHandle:
    """Reads tensors from files and writes them, bypassing the page cache, many blocks at a time.

    Has the arguments and methods of DeepSpeed's ``aio_handle``. A transfer is divided into blocks. Each
    worker has up to ``queue_depth`` blocks in flight, through io_uring, Linux AIO, or a pool of threads: the
    first that the machine allows, or the one in ``ACCLIMATE_AIO`` (``io_uring``, ``aio``, ``threads``,
    ``python``). Files are opened with O_DIRECT if their file system supports it. Any size, file offset and
    memory alignment works, but a block that the device cannot transfer directly costs a copy. Tensors from
    :meth:`new_cpu_locked_tensor` at page-aligned offsets need no copy.

    Buffers are contiguous tensors of any shape and dtype, on the host or on the accelerator; those on the
    accelerator are copied through page-locked host memory. A tensor must not be changed while its request is
    pending; after a failed read its content is undefined. In compiled code, blocking transfers are part of
    the graph, and the others run between graphs (docs/ops.md).

    Threads may share a handle: each call waits for its own thread's requests and raises only their errors;
    :meth:`wait` also waits for other threads' requests. A forked child that uses its parent's handle gets its
    own engine, without the parent's pending requests.

    Args:
        block_size: bytes per request to the kernel, at least 1; at most 1 GiB is used.
        queue_depth: blocks in flight per worker, at least 1.
        single_submit: submits each block to the kernel separately, instead of all that are ready.
        overlap_events: has no effect: completions always overlap with submissions, since waiting for whole
            batches is never faster.
        intra_op_parallelism: the number of workers, each with its own queue and thread, at least 1.

    Raises:
        AsyncIOSettingError: a number is below 1.
        InvalidEnvironmentError: ``ACCLIMATE_AIO`` names no engine, or one that this machine refuses.
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
                raise AsyncIOSettingError(
                    f"{name} must be a whole number of at least 1, not {excerpt(repr(value))}."
                )
        self._settings = Settings(
            block_size, queue_depth, bool(single_submit), bool(overlap_events), intra_op_parallelism
        )
        self._number = register(self)
        self._open_session()

    # -- settings --------------------------------------------------------------------------------

    def get_block_size(self) -> int:
        """Returns the bytes per request to the kernel."""
        return self._settings.block_size

    def get_queue_depth(self) -> int:
        """Returns the number of blocks in flight per worker."""
        return self._settings.queue_depth

    def get_single_submit(self) -> bool:
        """Returns whether each block is submitted to the kernel separately."""
        return self._settings.single_submit

    def get_overlap_events(self) -> bool:
        """Returns ``overlap_events`` as given to the handle."""
        return self._settings.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Returns the number of workers."""
        return self._settings.intra_op_parallelism

    def get_alignment(self) -> int:
        """Returns the multiple of bytes that DeepSpeed's transfers need; here any size works."""
        return self._settings.intra_op_parallelism * _SECTOR_BYTES

    @property
    def engine(self) -> str:
        """The engine's name: ``"io_uring"``, ``"aio"``, ``"threads"`` or ``"python"``."""
        return self._session.engine.name

    # -- one blocking transfer -------------------------------------------------------------------

    def read(self, buffer: torch.Tensor, filename: Path, validate: bool = False, file_offset: int = 0) -> int:
        """Reads a file from ``file_offset`` to its end, which must be as long as the buffer. Returns 0.

        Arguments as for :meth:`pread`.

        Raises:
            BufferTooSmallError: the rest of the file is longer than the buffer.
            ShortFileError: the rest of the file is shorter than the buffer.
            AsyncIOError: as the errno says: a missing file, a directory, no permission, a device's error.
            AsyncIOSettingError: the tensor is not contiguous.
        """
        self.transfer(buffer, filename, file_offset, False, validate, "this", whole_rest=True)
        return 0

    def write(
        self, buffer: torch.Tensor, filename: Path, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Writes a tensor to a file, which is created if missing and never truncated. Returns 0.

        Arguments and errors as for :meth:`pwrite`.
        """
        self.transfer(buffer, filename, file_offset, True, validate, "this")
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
        """Fills the buffer from a file.

        Args:
            buffer: the tensor to fill.
            filename: the file.
            validate: reads the file a second time, through the page cache, and compares.
            async_op: returns at once; :meth:`wait` reports errors. DeepSpeed's name for it is ``async``, a
                keyword of Python: pass it by position or as ``**{"async": True}``.
            file_offset: in bytes.
            keyword_async: only ``async``.

        Returns:
            0 if ``async_op``, else how many of the calling thread's requests have ended since it last waited:
            this one and earlier ones, for which this call waits too.

        Raises:
            ShortFileError: the file ends before the buffer is full.
            AsyncIOError: as the errno says: a missing file, a directory, no permission, a device's error.
            AsyncIOSettingError: the tensor is not contiguous.
        """
        async_op = _async_keyword("pread", keyword_async, async_op)
        waits_for: Awaited = "nothing" if async_op else "own"
        return self.transfer(buffer, filename, file_offset, False, validate, waits_for)

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
        """Writes a tensor at an offset of a file, which is created if missing and never truncated.

        Args:
            buffer: the tensor to write.
            filename: the file.
            validate: reads the file back, through the page cache, and compares.
            async_op: returns at once; :meth:`wait` reports errors. Also accepted as ``async``.
            file_offset: in bytes.
            atomic: the tensor becomes the file's whole content. It is written to a temporary file, synced to
                the disk and renamed, so readers find the old content or the new, even after a crash. With
                ``async_op`` the new content appears in :meth:`wait`.
            keyword_async: only ``async``.

        Returns:
            As for :meth:`pread`.

        Raises:
            AsyncIOError: as the errno says: a missing folder, a directory, no permission, a full disk.
            AsyncIOSettingError: ``atomic`` with an offset, with a descriptor, or for a device or a pipe.
            AsyncIOSettingError: the tensor is not contiguous.
        """
        async_op = _async_keyword("pwrite", keyword_async, async_op)
        waits_for: Awaited = "nothing" if async_op else "own"
        return self.transfer(
            buffer, filename, file_offset, True, validate, waits_for=waits_for, atomic=atomic
        )

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
            buffer: the tensor to write.
            filename: the file, or a descriptor open for writing, which the caller may close at once.
            file_offset: in bytes, also for a descriptor.
            fd: the descriptor, as a keyword.
        """
        target = filename if fd is None else fd
        if target is None or (filename is not None and fd is not None):
            raise TypeError("async_pwrite takes either a filename or a descriptor (fd).")
        return self.transfer(buffer, target, file_offset, True, False, "nothing")

    @outside_graphs
    def wait(self) -> int:
        """Waits until all requests submitted so far, by any thread, have ended.

        Returns how many of the calling thread's requests have ended since it last waited. Requests of other
        threads are counted, and their errors raised, in those threads' own ``wait()``. Requests of threads
        that have ended, or that Python did not start (autograd's), are reported to the next caller.

        Other Python threads run meanwhile. Ctrl-C ends the wait but not the requests; a later call can wait
        for them again.

        Raises:
            AsyncIOError: requests failed; ``errors`` holds the error of each. All others have succeeded.
        """
        return self._current_session(None).wait()

    @outside_graphs
    def close(self) -> None:
        """Waits for all requests and frees the engine. Garbage collection closes an open handle.

        Calls from other threads that begin after this one raise :class:`ClosedHandleError`; earlier ones end
        normally.

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._release()  # errors of transfers would hide the present one

    # -- page-locked memory ----------------------------------------------------------------------

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Returns an uninitialised host tensor of shape ``(num_elem,)`` that transfers use without a copy.

        It is page-aligned, and locked in memory up to the process's limit (``ulimit -l``).

        Args:
            num_elem: the number of elements.
            example_tensor: a tensor with the dtype to use.

        Raises:
            AsyncIOSettingError: the number is negative.
            AsyncIOError: there is not enough memory (``ENOMEM``).
        """
        if num_elem < 0:
            raise AsyncIOSettingError(f"num_elem must be a whole number of at least 0, not {num_elem}.")
        return _locked_memory.allocate(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Unlocks the memory of a tensor from :meth:`new_cpu_locked_tensor`; returns whether it was one.

        The memory is freed with its last view, so a tensor that is still in use stays valid.
        """
        return _locked_memory.release(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Returns whether the accelerator or :meth:`new_cpu_locked_tensor` page-locked a tensor."""
        return bool(buffer.is_pinned()) or _locked_memory.holds(buffer)

    # -- internals -------------------------------------------------------------------------------

    def transfer(
        self,
        buffer: torch.Tensor,
        filename: Path | int,
        offset: int,
        writes: bool,
        validates: bool,
        waits_for: Awaited,
        **options: bool,
    ) -> int:
        """Carries out a transfer, or adds it to the graph that is being traced; returns how many ended."""
        if waits_for == "nothing" or isinstance(filename, int) or not torch.compiler.is_compiling():
            return self._move(buffer, filename, offset, writes, validates, waits_for, **options)
        if writes:
            options["wait_all"] = waits_for == "own"
        transfer_in_graph(self._number, buffer, filename, offset, writes, validates, **options)
        return 1

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
        with _fork_lock:  # only one of the child's threads does it
            if self._session.process != os.getpid() and self._release.detach():
                self._session.abandon()
                self._open_session()

    @outside_graphs
    def _move(
        self,
        buffer: torch.Tensor,
        filename: Path | int,
        offset: int,
        writes: bool,
        validates: bool,
        waits_for: Awaited,
        atomic: bool = False,
        whole_rest: bool = False,
    ) -> int:
        """Starts a transfer, waits as ``waits_for`` says, and returns how many transfers have ended."""
        name = path_of(filename)
        if atomic and offset:
            raise AsyncIOSettingError(
                f"atomic=True replaces the whole file, so file_offset must be 0, not {offset}."
            )
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
    """Refuses a read that does not fit the file's size; files in /proc and the like show no size."""
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


aio_handle = AsyncIOHandle


def aio_read(
    buffer: torch.Tensor,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Reads a whole file, which must be as long as the buffer. Returns 0.

    Arguments and errors as for :class:`AsyncIOHandle` and its ``read``.
    """
    with AsyncIOHandle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Writes a tensor to the beginning of a file. Returns 0.

    Arguments and errors as for :class:`AsyncIOHandle` and its ``write``.
    """
    with AsyncIOHandle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copies a host tensor to another with as many elements, on all of torch's threads. Returns 0.

    Raises:
        AsyncIOSettingError: the numbers of elements differ.
    """
    if dest.numel() != src.numel():
        raise AsyncIOSettingError(f"{src.numel()} elements do not fit a tensor of {dest.numel()}.")
    with torch.no_grad():
        dest.copy_(src.reshape(dest.shape))
    return 0
