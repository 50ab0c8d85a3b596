"""Checks of asynchronous I/O by its arguments: every method, offset, size, setting and kind of tensor."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import exactly, require, short
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.ops.aio import SECTORS, aio_module, require_bytes, require_equal

_Transfer = Callable[[Any, torch.Tensor, Any, int], object]


def _call(method: str, *flags: bool, names_offset: bool = False) -> _Transfer:
    """A call of a handle's method with flags between file and offset, or with the offset by name."""

    def transfer(handle: Any, buffer: torch.Tensor, file: Any, offset: int) -> object:
        call = getattr(handle, method)
        return call(buffer, file, file_offset=offset) if names_offset else call(buffer, file, *flags, offset)

    return transfer


_READS = {
    "sync_pread()": _call("sync_pread"),
    "sync_pread(file_offset=…)": _call("sync_pread", names_offset=True),
    "pread()": _call("pread", False, False),
    "pread(validate=True)": _call("pread", True, False),
    "async_pread()": _call("async_pread"),
    "async_pread(file_offset=…)": _call("async_pread", names_offset=True),
    "pread(async=True)": _call("pread", False, True),
    "pread(validate=True, async=True)": _call("pread", True, True),
}
_WRITES = {
    "sync_pwrite()": _call("sync_pwrite"),
    "sync_pwrite(file_offset=…)": _call("sync_pwrite", names_offset=True),
    "write()": _call("write", False),
    "write(validate=True)": _call("write", True),
    "pwrite()": _call("pwrite", False, False),
    "pwrite(validate=True)": _call("pwrite", True, False),
    "async_pwrite()": _call("async_pwrite"),
    "async_pwrite(file_offset=…)": _call("async_pwrite", names_offset=True),
    "pwrite(async=True)": _call("pwrite", False, True),
    "pwrite(validate=True, async=True)": _call("pwrite", True, True),
}
_PARTS = ((0, 1), (4, 1), (1, 2), (5, 3))
"""Offsets and lengths of transfers in one file, in sectors; they do not overlap."""
_LENGTH = 8 * SECTORS
_SETTINGS: tuple[tuple[int, int, bool, bool, int], ...] = (
    (SECTORS, 1, False, False, 1),
    (3 * SECTORS, 5, True, False, 2),
    (1 << 20, 32, False, True, 4),
    (2 * SECTORS, 2, True, True, 1),
)
"""Block size, queue depth, single_submit, overlap_events and intra_op_parallelism of handles."""
_GETTERS = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")


def _numbers(seed: int, length: int = _LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator, dtype=torch.uint8)


@contextmanager
def _files(count: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Files with different bytes, and these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        files = [(str(Path(folder) / f"part{number}"), _numbers(number)) for number in range(count)]
        for path, content in files:
            Path(path).write_bytes(content.numpy().tobytes())
        yield files


@check(
    "create_op_builder", "op_builders",
    promise="Each way to read and to write transfers the bytes at its offset, several files at a time; each "
    "read reports a file that is too short.",
    timeout_s=600, once=True,
)  # fmt: skip
def asynchronous_io_at_every_offset(accelerator: Accelerator) -> None:
    handle = aio_module(accelerator).aio_handle(SECTORS, 8, False, True, 1)
    with _files(2) as files:
        for what, read in _READS.items():
            _require_reads(handle, what, read, files)
        before = dict(files)
        for number, (what, write) in enumerate(_WRITES.items()):
            _require_writes(handle, what, write, before, number)
        _require_rest_is_read(handle, before)
        _require_ends_are_told(handle, next(iter(before.items())))
        _require_descriptor_is_written(handle, before)


def _require_reads(handle: Any, what: str, read: _Transfer, files: list[tuple[str, torch.Tensor]]) -> None:
    """Reads parts of several files before it waits for any."""
    parts = [(path, content, *part) for part in _PARTS for path, content in files]
    buffers = [torch.zeros(sectors * SECTORS, dtype=torch.uint8) for *_, sectors in parts]
    for (path, _, place, _), buffer in zip(parts, buffers, strict=True):
        read(handle, buffer, path, place * SECTORS)
    if "async" in what:
        _require_count(handle, len(parts), what)
    for (_, content, place, _), buffer in zip(parts, buffers, strict=True):
        start = place * SECTORS
        require_equal(buffer, content[start : start + len(buffer)], f"{what} at {start}")


def _require_writes(
    handle: Any, what: str, write: _Transfer, files: dict[str, torch.Tensor], number: int
) -> None:
    """Writes parts of several files before it waits for any; ``files`` holds what they then contain."""
    sent: list[torch.Tensor] = []  # pending requests need their tensors
    for (place, sectors), path in itertools.product(_PARTS, files):
        sent.append(_numbers(100 * number + len(sent), sectors * SECTORS))
        start = place * SECTORS
        files[path] = files[path].clone()
        files[path][start : start + len(sent[-1])] = sent[-1]
        write(handle, sent[-1], path, start)
    if "async" in what:
        _require_count(handle, len(sent), what)
    for path, content in files.items():
        require_bytes(path, content, f"{what} at several offsets")


def _require_count(handle: Any, wanted: int, what: str) -> None:
    ended = handle.wait()
    require(ended == wanted, f"wait() returns {ended} after {wanted} requests with {what}")


def _require_rest_is_read(handle: Any, files: dict[str, torch.Tensor]) -> None:
    """``read()`` reads from its offset to the end of the file."""
    for path, content in files.items():
        for offset, validate in itertools.product((0, SECTORS, 7 * SECTORS), (False, True)):
            buffer = torch.zeros(_LENGTH - offset, dtype=torch.uint8)
            handle.read(buffer, path, validate, offset)
            require_equal(buffer, content[offset:], f"read(validate={validate}) at {offset}")


def _require_ends_are_told(handle: Any, file: tuple[str, torch.Tensor]) -> None:
    """Each way to read reports that a file ends before the buffer is full, and works again after that."""
    path, content = file
    reads = {**_READS, "read()": _call("read", False), "read(validate=True)": _call("read", True)}
    for what, read in reads.items():
        for offset, length in ((0, _LENGTH + SECTORS), (7 * SECTORS, 2 * SECTORS), (_LENGTH, SECTORS)):
            buffer = torch.zeros(length, dtype=torch.uint8)
            try:
                told = (read(handle, buffer, path, offset) or 0, handle.wait() if "async" in what else 0)
                is_told = any(
                    isinstance(number, int) and number < 0 for number in told
                )  # as DeepSpeed's does
            except Exception:  # noqa: BLE001 - each handle raises its own type
                is_told = True
            require(is_told, f"{what} of {length} bytes at {offset} of a file of {_LENGTH} reports no error")
        whole = torch.zeros_like(content)
        read(handle, whole, path, 0)
        if "async" in what:
            handle.wait()
        require_equal(whole, content, f"{what} after one beyond the end of the file")


def _require_descriptor_is_written(handle: Any, files: dict[str, torch.Tensor]) -> None:
    path, content = next(iter(files.items()))
    wanted = content.clone()
    inserted = _numbers(7777, SECTORS)
    wanted[3 * SECTORS : 4 * SECTORS] = inserted
    with Path(path).open("r+b") as file:
        handle.async_pwrite(inserted, file.fileno(), 3 * SECTORS)
        handle.wait()
    require_bytes(path, wanted, f"async_pwrite() to a descriptor at {3 * SECTORS}")


@check(
    "create_op_builder", "op_builders",
    promise="A handle keeps its settings, and transfers correctly with any settings and any tensors.",
    timeout_s=600, once=True,
)  # fmt: skip
def asynchronous_io_with_every_setting(accelerator: Accelerator) -> None:
    module = aio_module(accelerator)
    with _files(1) as files:
        path, content = files[0]
        for settings in _SETTINGS:
            handle = module.aio_handle(*settings)
            for name, given in zip(_GETTERS, settings, strict=True):
                found = getattr(handle, f"get_{name}")()
                require(found == given, f"get_{name}() of aio_handle{settings} is {found!r}")
            read = torch.zeros_like(content)
            handle.sync_pread(read, path, 0)
            require_equal(read, content, f"sync_pread() of aio_handle{settings}")
            content = content.flip(0)
            handle.sync_pwrite(content, path, 0)
            require_bytes(path, content, f"sync_pwrite() of aio_handle{settings}")
            for validate in (False, True):
                arguments = (*settings[:4], validate)
                read = torch.zeros_like(content)
                module.aio_read(read, path, *arguments)
                require_equal(read, content, f"aio_read(…, {arguments})")
                content = content.roll(5)
                module.aio_write(content, path, *arguments)
                require_bytes(path, content, f"aio_write(…, {arguments})")
        named = module.aio_handle(block_size=4 * SECTORS, queue_depth=7, intra_op_parallelism=2)
        stated = tuple(getattr(named, f"get_{name}")() for name in _GETTERS)
        wanted = (4 * SECTORS, 7, False, False, 2)
        require(stated == wanted, f"the settings of a handle made by keywords are {stated}, not {wanted}")
        exactly(named.get_alignment(), int, "get_alignment()")
        _require_kinds_of_tensors(named, path)
    _require_memory(module, named)


def _require_kinds_of_tensors(handle: Any, path: str) -> None:
    """Tensors of any dtype and number of dimensions, which may be a part of a larger one."""
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.uint8):
        numbers = (_numbers(3) % 7).to(dtype).view(2, 4, -1)
        file = f"{path} of {short(dtype)}"
        handle.sync_pwrite(numbers, file, 0)
        require_bytes(file, numbers.flatten().view(torch.uint8), f"sync_pwrite() of {dtype}")
        for what in ("sync_pread()", "async_pread()"):
            around = torch.full((4, *numbers.shape[1:]), 9, dtype=dtype)
            _READS[what](handle, around[1:3], file, 0)
            if "async" in what:
                handle.wait()
            same = torch.equal(around[1:3], numbers)
            require(same, f"{what} of a part of a tensor of {dtype} gives other numbers")
            untouched = bool((around[0] == 9).all() and (around[3] == 9).all())
            require(untouched, f"{what} of a part of a tensor changes what is beside it")


def _require_memory(module: Any, handle: Any) -> None:
    for count, dtype in ((SECTORS, torch.uint8), (3 * SECTORS, torch.float32), (100, torch.int64)):
        locked = handle.new_cpu_locked_tensor(count, torch.empty(0, dtype=dtype))
        require(
            locked.numel() == count and locked.dtype == dtype,
            f"new_cpu_locked_tensor({count}) of {dtype} has {locked.numel()} elements of {locked.dtype}",
        )
        require(bool(handle.is_pinned(locked)), "is_pinned() of a tensor of new_cpu_locked_tensor() is False")
        require(
            bool(handle.free_cpu_locked_tensor(locked)), "free_cpu_locked_tensor() of its tensor is False"
        )
    plain = torch.empty(SECTORS)
    require(not handle.is_pinned(plain), "is_pinned() of an ordinary tensor is True")
    require(
        not handle.free_cpu_locked_tensor(plain), "free_cpu_locked_tensor() of an ordinary tensor is True"
    )
    for count in (1, 1000, 300_001):
        copied = torch.zeros(count)
        module.deepspeed_memcpy(copied, torch.arange(float(count)))
        require(
            torch.equal(copied, torch.arange(float(count))), f"deepspeed_memcpy() of {count} numbers is wrong"
        )


_TAILS = (1, 7, 1003, SECTORS - 1, SECTORS + 1, 3 * SECTORS + 77)
"""Lengths in bytes that are no multiple of a sector or a block."""
_ODD = (1, 100, 511, 512, SECTORS + 1, 2 * SECTORS - 3)
"""Offsets in bytes that are no multiple of a sector."""


@check(
    "create_op_builder", "op_builders",
    promise="Files whose last block is not full, and parts at any offset, are read and written; or refused.",
    timeout_s=600, once=True,
)  # fmt: skip
def asynchronous_io_of_any_length(accelerator: Accelerator) -> str | None:
    handle = aio_module(accelerator).aio_handle(SECTORS, 4, False, True, 2)
    refused: dict[str, str] = {}
    for length in _TAILS:
        content = _numbers(length, length)
        for what in ("sync_pwrite()", "async_pwrite()", "write()"):
            read = _READS["async_pread()" if "async" in what else "sync_pread()"]
            try:
                _require_round(handle, _WRITES[what], read, content, f"{what} of {length} bytes")
            except (RuntimeError, ValueError, OSError) as error:
                refused[f"of {length} bytes"] = str(error)
    for offset, length in itertools.product(_ODD, _TAILS):
        try:
            _require_part(handle, offset, length)
        except (RuntimeError, ValueError, OSError) as error:
            refused[f"at {offset}"] = str(error)
    return f"it refuses transfers {', '.join(refused)}" if refused else None


def _require_part(handle: Any, offset: int, length: int) -> None:
    """Reads and writes bytes in the middle of a file, whose other bytes stay."""
    with _files(1) as files:
        path, content = files[0]
        for what in ("sync_pread()", "async_pread()"):
            found = torch.zeros(length, dtype=torch.uint8)
            told = _READS[what](handle, found, path, offset)
            if "async" in what:
                told = handle.wait()
            _require_not_refused(told)
            require_equal(found, content[offset : offset + length], f"{what} of {length} bytes at {offset}")
        for number, what in enumerate(("sync_pwrite()", "async_pwrite()")):
            content[offset : offset + length] = given = _numbers(length + number, length)
            told = _WRITES[what](handle, given, path, offset)
            if "async" in what:
                told = handle.wait()
            _require_not_refused(told)
            require_bytes(path, content, f"{what} of {length} bytes at {offset}")


def _require_not_refused(told: object) -> None:
    if isinstance(told, int) and told < 0:  # DeepSpeed's handle returns -1
        raise ValueError(f"it returns {told}")


def _require_round(handle: Any, write: _Transfer, read: _Transfer, content: torch.Tensor, what: str) -> None:
    """Writes a file, reads it into a part of a tensor, and looks at what is beside that too."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "file")
        write(handle, content, path, 0)
        if "async" in what:
            handle.wait()
        require_bytes(path, content, what)
        around = torch.full((len(content) + 2,), 9, dtype=torch.uint8)
        read(handle, around[1:-1], path, 0)
        if "async" in what:
            handle.wait()
        require_equal(around[1:-1], content, f"{'async' if 'async' in what else 'sync'}_pread() after {what}")
        beside = around[0].item(), around[-1].item()
        require(
            beside == (9, 9), f"sync_pread() of {len(content)} bytes changes what is beside them to {beside}"
        )
