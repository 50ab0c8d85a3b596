"""AsyncIOHandle reads and writes a file's bytes exactly, on every engine."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from aio_files import ENGINES, chosen, content_of, make_handle, random_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from acclimate import get_accelerator
from acclimate.errors import AsyncIOEngineError, AsyncIOSettingError, InvalidBufferError
from acclimate.ops import AsyncIOHandle
from acclimate.ops.aio import buffers
from acclimate.ops.aio.builder import AsyncIOBuilder

MEMORY = Path("/dev/shm")  # a file system without direct I/O


@pytest.fixture(params=ENGINES)
def handle(request: pytest.FixtureRequest) -> Iterator[AsyncIOHandle]:
    with make_handle(request.param, block_size=65536, queue_depth=8) as handle:
        yield handle


# -- the same bytes ----------------------------------------------------------------------------------

_names = itertools.count()


@pytest.mark.parametrize("engine", ENGINES)
@given(
    size=st.one_of(st.integers(0, 9000), st.integers(0, 300_000)),
    file_offset=st.one_of(st.integers(0, 9000), st.sampled_from([512, 4096, 65536])),
    memory_offset=st.one_of(st.integers(0, 4096), st.sampled_from([0, 512])),
    block_size=st.one_of(st.integers(1000, 70_000), st.sampled_from([512, 4096, 65536])),
    old_size=st.integers(0, 50_000),
    workers=st.integers(1, 3),
)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
def test_any_size_offset_alignment_and_block_moves_exactly_its_bytes(
    engine: str,
    tmp_path: Path,
    size: int,
    file_offset: int,
    memory_offset: int,
    block_size: int,
    old_size: int,
    workers: int,
) -> None:
    path = tmp_path / f"{next(_names)}.bin"
    old = content_of(random_bytes(old_size, seed=1))
    path.write_bytes(old)
    handle = make_handle(engine, block_size=block_size, queue_depth=4, intra_op_parallelism=workers)
    room = handle.new_cpu_locked_tensor(memory_offset + size + 64, torch.empty(0, dtype=torch.uint8))
    data = room[memory_offset : memory_offset + size]
    data.copy_(random_bytes(size))
    with handle:
        assert handle.sync_pwrite(data, path, file_offset) == 1
        expected = bytearray(old.ljust(file_offset + size, b"\0") if size else old)
        expected[file_offset : file_offset + size] = content_of(data)
        assert path.read_bytes() == expected

        if size:
            room.fill_(0xAA)
            assert handle.sync_pread(data, path, file_offset) == 1
            assert content_of(data) == expected[file_offset : file_offset + size]
            assert bool((room[:memory_offset] == 0xAA).all())
            assert bool((room[memory_offset + size :] == 0xAA).all())
    path.unlink()


@pytest.mark.parametrize(
    "name",
    ["float32", "bfloat16", "float16", "float64", "int64", "int8", "bool", "complex64", "float8_e4m3fn"],
)
def test_any_dtype_and_shape_comes_back(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    data = (random_bytes(3 * 5 * 7 * dtype.itemsize) % 2).view(dtype).reshape(3, 5, 7)
    found = torch.empty_like(data)
    with AsyncIOHandle() as handle:
        handle.sync_pwrite(data, tmp_path / "x")
        handle.sync_pread(found, tmp_path / "x")
        handle.sync_pwrite(data[1, 2, 3], tmp_path / "one")  # no dimension
    assert content_of(found) == content_of(data)
    assert (tmp_path / "one").read_bytes() == content_of(data[1, 2, 3])


def test_many_requests_at_once_to_parts_that_share_pages_lose_nothing(
    handle: AsyncIOHandle, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    data = random_bytes(1_000_000)
    cuts = [0, 1, 4095, 4097, 9000, 9001, 131_072, 131_073, 500_000, 777_777, 1_000_000]
    parts = [data[start:end] for start, end in itertools.pairwise(cuts)]
    for start, part in reversed(list(zip(cuts, parts, strict=False))):
        assert handle.async_pwrite(part, path, start) == 0
    assert handle.wait() == len(parts)
    assert path.read_bytes() == content_of(data)

    found = torch.zeros_like(data)
    for start, part in zip(cuts, parts, strict=False):
        assert handle.async_pread(found[start : start + len(part)], path, start) == 0
    assert handle.wait() == len(parts)
    assert torch.equal(found, data)


def test_a_file_system_without_direct_io_is_served(handle: AsyncIOHandle) -> None:
    if not MEMORY.is_dir():
        pytest.skip("no /dev/shm on this system")
    data = random_bytes(300_001)
    found = torch.empty_like(data)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        handle.sync_pwrite(data, f"{folder}/x", 17)
        handle.sync_pread(found, f"{folder}/x", 17)
    assert torch.equal(found, data)


def test_large_aligned_transfers_pass_the_page_cache_by(tmp_path: Path) -> None:
    handle = make_handle("threads", block_size=65536)
    path = tmp_path / "x"
    buffer = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0, dtype=torch.uint8))
    flags = []
    with handle:
        handle.async_pwrite(buffer, path)
        (transfer,) = handle._session._pending.values()
        if transfer.file.direct_fd < 0:
            pytest.skip("the folder for tests has no direct I/O")
        for line in Path(f"/proc/self/fdinfo/{transfer.file.direct_fd}").read_text().splitlines():
            flags += [int(line.split()[1], 8)] if line.startswith("flags") else []
        handle.wait()
    assert flags[0] & os.O_DIRECT


def test_a_write_never_cuts_a_longer_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old" * 10_000)
    with AsyncIOHandle() as handle:
        handle.sync_pwrite(random_bytes(8192), path)
    assert path.stat().st_size == 30_000


def test_validation_reads_again_and_finds_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "x"
    data = random_bytes(100_000)
    with AsyncIOHandle() as handle:
        assert handle.pwrite(data, path, True, True) == 0
        assert handle.wait() == 1
        assert handle.read(data, path, validate=True) == 0
        path.unlink()
        handle.pwrite(data, path, validate=True, async_op=True)
        while not _has_content(path, data):
            time.sleep(0.01)
        with path.open("r+b") as file:
            file.seek(77_777)
            file.write(bytes([int(data[77_777]) ^ 1]))
        with pytest.raises(OSError, match="Validation found other data in the file at offset 77777"):
            handle.wait()


def _has_content(path: Path, data: torch.Tensor) -> bool:
    return path.read_bytes() == content_of(data)


def test_a_gradient_sees_that_a_tensor_was_read_into(tmp_path: Path) -> None:
    weight = torch.ones(1024, requires_grad=True)
    square = weight * weight
    with AsyncIOHandle() as handle:
        handle.sync_pwrite(weight, tmp_path / "x")
        handle.sync_pread(weight, tmp_path / "x")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


# -- DeepSpeed's interface ---------------------------------------------------------------------------


def test_code_written_for_deepspeeds_handle_runs(tmp_path: Path) -> None:
    module = AsyncIOBuilder().load()
    handle = module.aio_handle(131072, 32, True, True, 2)
    getters = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
    assert [getattr(handle, f"get_{name}")() for name in getters] == [131072, 32, True, True, 2]
    assert handle.get_alignment() == 1024

    path = str(tmp_path / "x")
    buffer = handle.new_cpu_locked_tensor(4096, torch.empty(0, dtype=torch.bfloat16))
    assert (buffer.dtype, buffer.shape, buffer.data_ptr() % 4096) == (torch.bfloat16, (4096,), 0)
    assert handle.is_pinned(buffer[5:9])
    assert not handle.is_pinned(torch.empty(8))
    buffer.copy_(torch.randn(4096))
    assert handle.pwrite(buffer, path, False, True) == 0
    assert handle.wait() == 1
    assert handle.pwrite(buffer=buffer, filename=path, validate=False, file_offset=0, **{"async": True}) == 0
    assert handle.sync_pwrite(buffer, path) == 2  # the one on its way, too
    other = torch.empty_like(buffer)
    assert handle.read(other, path, False) == 0
    assert torch.equal(other, buffer)
    assert handle.write(buffer, path, False) == 0
    assert handle.free_cpu_locked_tensor(buffer)
    assert not handle.free_cpu_locked_tensor(buffer)
    assert not handle.is_pinned(buffer)

    assert module.aio_write(other, path, 131072, 8, False, False, True) == 0
    assert module.aio_read(buffer, path, 131072, 8, False, False, True) == 0
    assert module.deepspeed_memcpy(torch.empty(4096, dtype=torch.bfloat16), buffer) == 0


def test_a_descriptor_can_be_written_to_and_closed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x"
    data = random_bytes(70_000)
    with AsyncIOHandle() as handle:
        for flags, keyword in ((0, "fd"), (os.O_APPEND, "filename"), (os.O_DIRECT, "fd")):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | flags)
            assert handle.async_pwrite(data, **{keyword: fd, "file_offset": 3}) == 0
            os.close(fd)
            assert handle.wait() == 1
            assert path.read_bytes() == b"\0\0\0" + content_of(data)


def test_waiting_for_nothing_returns_at_once() -> None:
    with AsyncIOHandle() as handle:
        assert handle.wait() == 0


def test_the_handle_is_found_where_the_other_ops_are() -> None:
    assert AsyncIOBuilder().load().aio_handle is AsyncIOHandle
    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    assert builder is not None
    assert builder.load().aio_handle is AsyncIOHandle


# -- one file, whole or not --------------------------------------------------------------------------


def test_an_atomic_write_replaces_the_whole_file_and_keeps_its_mode(
    handle: AsyncIOHandle, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old" * 100_000)
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    data = random_bytes(12_345)
    assert handle.pwrite(data, link, atomic=True) == 1
    assert path.read_bytes() == content_of(data)
    assert path.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()

    assert handle.pwrite(data[:100], path, async_op=True, atomic=True) == 0
    assert path.stat().st_size == 12_345
    assert handle.wait() == 1
    assert path.read_bytes() == content_of(data[:100])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "x"]


def test_an_atomic_write_needs_no_unnamed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acclimate.ops.aio.files._UNNAMED", 0)  # as on NFS
    data = random_bytes(70_000)
    with AsyncIOHandle() as handle:
        handle.pwrite(data, tmp_path / "x", atomic=True)
        handle.pwrite(data, tmp_path / "x", True, atomic=True)
    assert (tmp_path / "x").read_bytes() == content_of(data)
    assert len(list(tmp_path.iterdir())) == 1


def test_an_atomic_write_at_an_offset_is_refused(tmp_path: Path) -> None:
    with (
        AsyncIOHandle() as handle,
        pytest.raises(AsyncIOSettingError, match="file_offset must be 0, not 5"),
    ):
        handle.pwrite(random_bytes(5), tmp_path / "x", file_offset=5, atomic=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("async_op", [False, True])
def test_an_atomic_write_to_what_has_no_name_to_give_is_refused(tmp_path: Path, async_op: bool) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    os.mkfifo(tmp_path / "pipe")
    with AsyncIOHandle() as handle, path.open("r+b") as file:
        for name, message in (
            (file.fileno(), "descriptor [0-9]+ has no name; give the path"),
            (tmp_path / "pipe", "pipe, which is a device, a pipe or a socket"),
            ("/dev/null", "would replace /dev/null"),
        ):
            with pytest.raises(AsyncIOSettingError, match=message):
                handle.pwrite(random_bytes(9), name, atomic=True, async_op=async_op)  # type: ignore[arg-type]
        assert handle.wait() == 0
    assert path.read_bytes() == b"old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["pipe", "x"]


# -- tensors on an accelerator -----------------------------------------------------------------------


def test_a_tensor_on_a_device_goes_through_the_accelerators_locked_memory(
    handle: AsyncIOHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The CPU's accelerator, on whose "device" the host's tensors lie, without the shortcut for the host.
    monkeypatch.setattr(buffers, "_is_on_host", lambda tensor: False)
    asked = []
    accelerator = type(get_accelerator())
    pin_empty = accelerator.pin_empty
    monkeypatch.setattr(
        accelerator, "pin_empty", lambda *args, **kwargs: asked.append(args[1]) or pin_empty(*args, **kwargs)
    )
    data = torch.randn(50_001, requires_grad=True)
    handle.async_pwrite(data, tmp_path / "x", 3)
    handle.wait()
    assert (tmp_path / "x").read_bytes()[3:] == content_of(data.detach())
    found = torch.zeros(50_001, requires_grad=True)
    handle.async_pread(found, tmp_path / "x", 3)
    assert not found.any()  # the data comes with wait()
    handle.wait()
    assert torch.equal(found, data)
    assert asked == [data.shape, data.shape]


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(4, 4).t(), r"shape \(4, 4\) and strides \(1, 4\) is not contiguous"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conjugate or negative view"),
        (torch.zeros(4).to_sparse(), "sparse_coo tensor has no plain memory"),
        (torch.zeros(4, device="meta"), "meta tensor has no plain memory"),
    ],
    ids=["transposed", "conjugated", "sparse", "meta"],
)
def test_a_tensor_whose_memory_is_not_its_elements_in_order_is_refused(
    buffer: torch.Tensor, message: str, tmp_path: Path
) -> None:
    with AsyncIOHandle() as handle, pytest.raises(InvalidBufferError, match=message):
        handle.sync_pwrite(buffer, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_handle_tells_the_settings_it_was_made_with() -> None:
    with AsyncIOHandle(8192, 7, True, True, 3) as handle:
        assert handle.get_block_size() == 8192
        assert handle.get_queue_depth() == 7
        assert handle.get_single_submit() is True
        assert handle.get_overlap_events() is True
        assert handle.get_intra_op_parallelism() == 3
        assert handle.get_alignment() == 3 * 512
    with AsyncIOHandle() as handle:
        assert handle.get_block_size() == 1024 * 1024
        assert handle.get_queue_depth() == 128
        assert handle.get_single_submit() is False
        assert handle.get_overlap_events() is False
        assert handle.get_intra_op_parallelism() == 1
        assert handle.get_alignment() == 512


@pytest.mark.parametrize("setting", ["block_size", "queue_depth", "intra_op_parallelism"])
def test_a_setting_below_one_is_refused(setting: str) -> None:
    with pytest.raises(AsyncIOSettingError, match=f"{setting} must be a whole number of at least 1, not 0"):
        AsyncIOHandle(**{setting: 0})


def test_an_engine_that_does_not_exist_is_refused_with_the_names_of_those_that_do() -> None:
    with chosen("uring"), pytest.raises(AsyncIOEngineError, match=r'one of io_uring, aio, .* Value "uring"'):
        AsyncIOHandle()


def test_wrong_arguments_are_type_errors(tmp_path: Path) -> None:
    with AsyncIOHandle() as handle:
        for call in (
            lambda: handle.sync_pwrite([1, 2], tmp_path / "x"),  # type: ignore[arg-type]
            lambda: handle.sync_pwrite(torch.zeros(1), 1.5),  # type: ignore[arg-type]
            lambda: handle.pread(torch.zeros(1), tmp_path / "x", asink=True),
            lambda: handle.async_pwrite(torch.zeros(1)),
        ):
            with pytest.raises(TypeError):
                call()
