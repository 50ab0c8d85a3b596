"""Checks of asynchronous I/O, called as DeepSpeed calls it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import MIB, NotOfferedError, equal, require
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.ops.builders import builder_of
from acclimate_conformance.checks.target import Subject

_BLOCK = 256 << 10
SECTORS = 4096
"""Offsets and lengths of transfers are multiples of this, as O_DIRECT may require."""


def aio_module(accelerator: Accelerator) -> Any:
    """The module that the accelerator's builder loads; ends the check if no builder works here."""
    if "AsyncIOBuilder" not in accelerator.op_builders:
        raise NotOfferedError("it has no AsyncIOBuilder")
    if not builder_of(accelerator, "AsyncIOBuilder").is_compatible(verbose=False):
        raise NotOfferedError("its AsyncIOBuilder cannot be built here")
    return builder_of(accelerator, "AsyncIOBuilder").load()


@check(
    "create_op_builder", "op_builders",
    promise="Asynchronous I/O transfers every byte, leaves the rest of a file unchanged, and reports errors.",
    timeout_s=600, once=True,
)  # fmt: skip
def asynchronous_io_moves_bytes(subject: Subject) -> None:
    accelerator = subject.accelerator
    module = aio_module(accelerator)
    handle = module.aio_handle(_BLOCK, 8, False, True, 1)
    generator = torch.Generator().manual_seed(5)
    sizes = (SECTORS, MIB, 3 * MIB + SECTORS)
    contents = [torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8) for size in sizes]
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / f"part{number}") for number in range(len(sizes))]
        for path, content in zip(paths, contents, strict=True):
            handle.sync_pwrite(content.clone(), path, 0)
            require_bytes(path, content, "sync_pwrite()")
        buffers = [torch.zeros_like(content) for content in contents]
        for path, buffer in zip(paths, buffers, strict=True):
            handle.async_pread(buffer, path, 0)
        ended = handle.wait()
        require(ended == len(sizes), f"wait() returns {ended} after {len(sizes)} requests")
        for buffer, content in zip(buffers, contents, strict=True):
            require_equal(buffer, content, "async_pread() and wait()")
        for path, content in zip(paths, contents, strict=True):
            handle.async_pwrite(content.flip(0).contiguous(), path, 0)
        handle.wait()
        for path, content in zip(paths, contents, strict=True):
            require_bytes(path, content.flip(0), "async_pwrite() and wait()")
            whole = torch.zeros_like(content)
            module.aio_read(whole, path, _BLOCK, 8, False, True, False)
            require_equal(whole, content.flip(0), "aio_read()")
        _check_offsets(handle, paths[-1], contents[-1].flip(0))
        _check_errors(handle, folder, paths[0], contents[0].flip(0))
        _check_device(subject, handle, paths[1], contents[1])


def _check_offsets(handle: Any, path: str, content: torch.Tensor) -> None:
    for offset in (SECTORS, MIB, 2 * MIB + SECTORS):
        part = torch.zeros(MIB // 2, dtype=torch.uint8)
        handle.sync_pread(part, path, offset)
        require_equal(part, content[offset : offset + len(part)], f"sync_pread() at {offset}")
    expected = content.clone()
    for number, offset in enumerate((MIB, 0, len(content) - SECTORS)):  # the rest of the file is unchanged
        inserted = torch.full((SECTORS,), 9 + number, dtype=torch.uint8)
        expected[offset : offset + SECTORS] = 9 + number
        handle.sync_pwrite(inserted, path, offset)
        require_bytes(path, expected, f"sync_pwrite() of {SECTORS} bytes at {offset}")
        inserted.add_(100)
        expected[offset : offset + SECTORS] = 109 + number
        handle.async_pwrite(inserted, path, offset)
        handle.wait()
        require_bytes(path, expected, f"async_pwrite() of {SECTORS} bytes at {offset}")


def _check_errors(handle: Any, folder: str, path: str, content: torch.Tensor) -> None:
    """Errors are reported: by the request, or by wait()."""
    absent = str(Path(folder) / "no such folder" / "file")
    longer = torch.zeros(len(content) + SECTORS, dtype=torch.uint8)
    requests: dict[str, Callable[[], int]] = {
        "async_pread() of a file that does not exist": lambda: handle.async_pread(longer, absent, 0),
        "async_pread() past the end of a file": lambda: handle.async_pread(longer, path, 0),
        "async_pwrite() to a folder that does not exist": lambda: handle.async_pwrite(longer, absent, 0),
    }
    if Path("/dev/full").is_char_device():  # takes a request, and fails when it is carried out
        requests["async_pwrite() to a full device"] = lambda: handle.async_pwrite(longer, "/dev/full", 0)
        requests["async_pread() of an empty device"] = lambda: handle.async_pread(longer, "/dev/null", 0)
    for what, request in requests.items():
        try:
            told = (request() or 0) < 0 or handle.wait() < 0  # DeepSpeed's handle returns -1
        except Exception:  # noqa: BLE001 - each handle raises its own type
            told = True
        require(told, f"{what} and wait() raise nothing")
        back = torch.zeros_like(content)
        handle.async_pread(back, path, 0)
        handle.wait()
        require_equal(back, content, f"async_pread() after the failed {what}")


def _check_device(subject: Subject, handle: Any, path: str, content: torch.Tensor) -> None:
    accelerator = subject.accelerator
    device = accelerator.current_device_name()
    numbers = content.to(device).view(torch.float32) if device == "cpu" else content.to(device)
    handle.sync_pwrite(numbers, path, 0)
    require_bytes(path, content, f"sync_pwrite() from {device}")
    there = torch.zeros_like(numbers)
    handle.sync_pread(there, path, 0)
    accelerator.synchronize()
    require_equal(there.cpu().view(torch.uint8), content, f"sync_pread() to {device}")
    locked = handle.new_cpu_locked_tensor(len(content), torch.empty(0, dtype=torch.uint8))
    handle.sync_pread(locked, path, 0)
    require_equal(locked, content, "sync_pread() to a tensor of new_cpu_locked_tensor()")
    handle.free_cpu_locked_tensor(locked)
    _check_part_of_a_sector(handle, path, device)
    _check_atomic(handle, path, content)


def _check_part_of_a_sector(handle: Any, path: str, device: str) -> None:
    """A handle may refuse lengths that are no multiple of a sector; else it transfers every byte."""
    content = (torch.arange(SECTORS + 907) % 251).to(torch.uint8)
    Path(path).write_bytes(content.numpy().tobytes())
    there = torch.zeros(len(content), dtype=torch.uint8, device=device)
    try:
        read = handle.sync_pread(there, path, 0)
    except Exception:  # noqa: BLE001 - each handle raises its own type
        return
    if read is None or read >= 0:  # DeepSpeed's handle returns -1
        require_equal(there.cpu(), content, f"sync_pread() of {len(content)} bytes to {device}")


def _check_atomic(handle: Any, path: str, content: torch.Tensor) -> None:
    """A file that is replaced as a whole, which not every handle can do, keeps its mode."""
    folder = Path(path).parent
    Path(path).chmod(0o640)
    names = sorted(folder.iterdir())
    try:
        handle.pwrite(content, path, atomic=True)
    except TypeError:  # a handle without it, such as DeepSpeed's
        return
    require_bytes(path, content, "pwrite(atomic=True)")
    mode = Path(path).stat().st_mode & 0o777
    require(mode == 0o640, f"pwrite(atomic=True) gives a file of the mode 0o640 the mode {mode:#o}")
    require(sorted(folder.iterdir()) == names, "pwrite(atomic=True) leaves another file behind")


def require_bytes(path: str, content: torch.Tensor, what: str) -> None:
    """Fails the check if a file does not hold these bytes."""
    found = torch.frombuffer(bytearray(Path(path).read_bytes() or b"\0"), dtype=torch.uint8)
    require_equal(found, content, f"the file after {what}")


def require_equal(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Fails the check if bytes differ, with the place of the first."""
    if found.shape == wanted.shape and not equal(found, wanted):
        first = int((found != wanted).nonzero()[0])
        require(False, f"{what}: of {len(wanted)} bytes the one at {first} is the first that is wrong")
    require(found.shape == wanted.shape, f"{what}: {found.numel()} bytes instead of {len(wanted)}")
