"""Each failure of asynchronous I/O is a Python exception that says what, in which file, and where."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from aio_files import ENGINES, content_of, make_handle, random_bytes

from acclimate.errors import (
    AsyncIOError,
    AsyncIOFileNotFoundError,
    AsyncIOIsADirectoryError,
    AsyncIOPermissionError,
    AsyncIOSettingError,
    BufferTooSmallError,
    ClosedHandleError,
    ShortFileError,
)
from acclimate.ops import AsyncIOHandle


@pytest.fixture(params=ENGINES)
def handle(request: pytest.FixtureRequest) -> Iterator[AsyncIOHandle]:
    handle = make_handle(request.param, block_size=65536, queue_depth=8)
    yield handle
    handle.close()


def failure_of(call: object, *arguments: object) -> AsyncIOError:
    assert callable(call)
    with pytest.raises(AsyncIOError) as caught:
        call(*arguments)
    return caught.value


def test_a_missing_file(handle: AsyncIOHandle, tmp_path: Path) -> None:
    path = tmp_path / "missing"
    error = failure_of(handle.sync_pread, torch.zeros(9), path)
    assert isinstance(error, FileNotFoundError)
    assert type(error) is AsyncIOFileNotFoundError
    assert (error.errno, error.filename, error.offset) == (errno.ENOENT, str(path), 0)
    assert str(error) == (f"[Errno 2] No such file or directory, reading 36 bytes from offset 0 on: '{path}'")
    assert not path.exists()


def test_a_missing_folder(handle: AsyncIOHandle, tmp_path: Path) -> None:
    for atomic in (False, True):
        with pytest.raises(AsyncIOFileNotFoundError):
            handle.pwrite(torch.zeros(9), tmp_path / "missing" / "x", atomic=atomic)


def test_a_directory(handle: AsyncIOHandle, tmp_path: Path) -> None:
    for call in (handle.sync_pread, handle.sync_pwrite, handle.async_pread, handle.async_pwrite):
        assert type(failure_of(call, torch.zeros(9), tmp_path)) is AsyncIOIsADirectoryError
    with pytest.raises(IsADirectoryError):
        handle.pwrite(torch.zeros(9), tmp_path, atomic=True)


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Root may read and write everything, so it steps back for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_files_and_folders_that_are_not_ours_to_use(handle: AsyncIOHandle) -> None:
    with tempfile.TemporaryDirectory() as name:  # everyone may enter it, unlike pytest's own
        folder, path = Path(name), Path(name) / "x"
        path.write_bytes(b"old")
        path.chmod(0)
        folder.chmod(0o555)
        with without_privileges():
            for call in (handle.sync_pread, handle.sync_pwrite):
                error = failure_of(call, torch.zeros(9), path)
                assert isinstance(error, PermissionError)
                assert type(error) is AsyncIOPermissionError
                assert (error.errno, error.filename) == (errno.EACCES, str(path))
            assert failure_of(handle.sync_pwrite, torch.zeros(9), folder / "new").errno == errno.EACCES
            with pytest.raises(AsyncIOPermissionError):
                handle.pwrite(torch.zeros(9), folder / "new", atomic=True)
        folder.chmod(0o755)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk(handle: AsyncIOHandle) -> None:
    error = failure_of(handle.sync_pwrite, random_bytes(200_000), "/dev/full", 4096)
    assert (error.errno, error.filename) == (errno.ENOSPC, "/dev/full")
    assert error.offset is not None
    assert 4096 <= error.offset < 204_096
    assert "at offset 4096, writing 200000 bytes from offset 4096 on" in str(error)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no /proc on this system")
def test_an_io_error(handle: AsyncIOHandle) -> None:
    error = failure_of(handle.sync_pread, torch.zeros(2000), "/proc/self/mem")
    assert (error.errno, error.filename, error.offset) == (errno.EIO, "/proc/self/mem", 0)
    assert "Input/output error at offset 0" in str(error)


def test_a_file_that_may_not_grow(handle: AsyncIOHandle, tmp_path: Path) -> None:
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        error = failure_of(handle.sync_pwrite, random_bytes(300_000), tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert error.errno == errno.EFBIG


def test_a_pipe_is_refused_and_nothing_waits_for_its_other_end(handle: AsyncIOHandle, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert failure_of(handle.sync_pread, torch.zeros(9), tmp_path / "pipe").errno == errno.ESPIPE
    assert failure_of(handle.sync_pwrite, torch.zeros(9), tmp_path / "pipe").errno == errno.ENXIO


def test_a_file_that_ends_too_early(handle: AsyncIOHandle, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(10_000))
    for call in (handle.sync_pread, handle.async_pread):
        error = failure_of(call, random_bytes(9000), path, 1001)
        assert isinstance(error, EOFError)
        assert (type(error), error.offset, error.filename) == (ShortFileError, 10_000, str(path))
        assert "The file ends at offset 10000, reading 9000 bytes from offset 1001 on" in str(error)


def test_a_file_that_is_cut_while_it_is_read_is_an_error_too(handle: AsyncIOHandle, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"")  # its size tells nothing, as in /proc
    error = failure_of(handle.sync_pread, random_bytes(9000), path)
    assert (type(error), error.offset) == (ShortFileError, 0)


def test_read_wants_a_buffer_of_the_files_size(handle: AsyncIOHandle, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(10_000))
    error = failure_of(handle.read, random_bytes(9999), path)
    assert type(error) is BufferTooSmallError
    assert "The buffer has 9999 bytes and the file 10000 from offset 0 on" in str(error)
    assert type(failure_of(handle.read, random_bytes(10_001), path)) is ShortFileError
    assert handle.read(random_bytes(9999), path, file_offset=1) == 0


def test_a_negative_offset(handle: AsyncIOHandle, tmp_path: Path) -> None:
    error = failure_of(handle.sync_pwrite, torch.zeros(9), tmp_path / "x", -1)
    assert (error.errno, error.offset) == (errno.EINVAL, -1)
    assert not (tmp_path / "x").exists()


def test_a_descriptor_that_is_not_open_for_writing(handle: AsyncIOHandle, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with (tmp_path / "x").open("rb") as file:
        assert failure_of(handle.async_pwrite, torch.zeros(9), file.fileno()).errno == errno.EBADF
    assert failure_of(handle.async_pwrite, torch.zeros(9), 12345).errno == errno.EBADF


def test_wait_tells_of_every_failed_request_and_finishes_the_others(
    handle: AsyncIOHandle, tmp_path: Path
) -> None:
    good, data = tmp_path / "good", random_bytes(100_000)
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    handle.async_pwrite(random_bytes(5000), "/dev/full")
    handle.async_pwrite(data, good)
    handle.async_pread(random_bytes(5000), empty)
    handle.async_pread(random_bytes(5000), "/proc/self/mem")
    error = failure_of(handle.wait)
    assert {failed.filename for failed in error.errors} == {"/dev/full", str(empty), "/proc/self/mem"}
    assert all(failed.filename in str(error) for failed in error.errors)
    assert str(error).startswith("[Errno 28] 3 requests failed: ")
    assert good.read_bytes() == content_of(data)
    assert handle.wait() == 0
    assert handle.sync_pread(data, good) == 1


def test_a_synchronous_call_tells_of_an_earlier_request_that_failed(
    handle: AsyncIOHandle, tmp_path: Path
) -> None:
    handle.async_pwrite(random_bytes(5000), "/dev/full")
    error = failure_of(handle.sync_pwrite, random_bytes(5000), tmp_path / "x")
    assert error.filename == "/dev/full"
    assert (tmp_path / "x").stat().st_size == 5000


def test_a_failed_atomic_write_leaves_the_old_content_and_nothing_else(
    handle: AsyncIOHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    assert failure_of(lambda: handle.pwrite(random_bytes(9000), path, atomic=True)).errno == errno.EIO
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_closed_handle(handle: AsyncIOHandle, tmp_path: Path) -> None:
    handle.close()
    handle.close()
    for call in (lambda: handle.sync_pwrite(torch.zeros(9), tmp_path / "x"), handle.wait):
        error = failure_of(call)
        assert isinstance(error, ValueError)
        assert (type(error), error.errno) == (ClosedHandleError, errno.EBADF)


def test_close_tells_of_requests_that_failed(handle: AsyncIOHandle) -> None:
    handle.async_pwrite(random_bytes(5000), "/dev/full")
    assert failure_of(handle.close).errno == errno.ENOSPC


def test_a_handle_that_is_freed_with_failed_requests_logs_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handle = AsyncIOHandle()
    handle.async_pwrite(random_bytes(5000), "/dev/full")
    with caplog.at_level(logging.WARNING, logger="acclimate"):
        del handle
    assert "freed before wait() was called for 1 requests" in caplog.text
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize("engine", ENGINES)
def test_no_descriptor_stays_open_after_any_end(engine: str, tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc on this system")
    make_handle(engine).close()
    before = descriptors()
    with make_handle(engine) as handle:
        open_by_engine = descriptors() - before
        for target in ("/dev/full", tmp_path, tmp_path / "x"):
            for atomic in (False, True):
                if target == "/dev/full" and atomic:
                    continue  # would make a file in /dev
                with contextlib.suppress(OSError):
                    handle.pwrite(random_bytes(50_000), target, True, atomic=atomic)
        assert descriptors() - before == open_by_engine
    assert descriptors() == before


@pytest.mark.parametrize("offset", [-1, 2**63 - 1, 2**63, 10**30])
def test_an_offset_that_no_file_has(handle: AsyncIOHandle, tmp_path: Path, offset: int) -> None:
    path = tmp_path / "file"
    for call in (handle.sync_pread, handle.async_pwrite):
        assert f"file_offset is {offset}" in str(failure_of(call, torch.zeros(9), path, offset))
    assert not path.exists()


def test_a_descriptor_beyond_what_a_descriptor_can_be(handle: AsyncIOHandle) -> None:
    assert failure_of(handle.async_pwrite, torch.zeros(9), 2**40).errno == errno.EBADF


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor(handle: AsyncIOHandle, tmp_path: Path) -> None:
    with pytest.raises(AsyncIOSettingError, match="nested"):
        handle.sync_pwrite(torch.nested.nested_tensor([torch.zeros(2)]), tmp_path / "file")


def test_more_locked_memory_than_there_is(handle: AsyncIOHandle) -> None:
    for count in (2**50, 2**62, 2**80):
        with pytest.raises(AsyncIOError, match="Not enough memory for ") as caught:
            handle.new_cpu_locked_tensor(count, torch.zeros(1))
        assert caught.value.errno == errno.ENOMEM


def test_numbers_of_settings_that_no_machine_word_holds(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    for engine in ENGINES:
        with make_handle(engine, block_size=2**70, queue_depth=2**64) as handle:
            handle.sync_pread(found := torch.zeros(3, dtype=torch.uint8), tmp_path / "file")
            assert content_of(found) == b"abc"


def test_async_said_twice_and_differently(handle: AsyncIOHandle, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="async=False and async_op=True"):
        handle.pwrite(torch.zeros(9), tmp_path / "file", async_op=True, **{"async": False})


def test_an_atomic_write_to_a_name_of_the_greatest_length(handle: AsyncIOHandle, tmp_path: Path) -> None:
    for name in ("n" * 255, "é" * 127):
        handle.pwrite(torch.zeros(2, dtype=torch.uint8), tmp_path / name, atomic=True)
        assert (tmp_path / name).read_bytes() == bytes(2)
    assert len(list(tmp_path.iterdir())) == 2
