"""The resident set of this process and its peak.

Linux keeps a high-water mark of the resident set and lets a process reset its own, so no peak between two
readings is missed. On other systems, and if a sandbox forbids the reset, the peak is the largest reading.
"""

from __future__ import annotations

import os
import threading

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_RESET_PEAK = b"5"  # proc(5), clear_refs: "reset the peak resident set size to the process's current one"


class _Sampled:
    """The largest reading since the last reset."""

    def __init__(self) -> None:
        self.peak = 0
        self._lock = threading.Lock()

    def see(self, size: int) -> None:
        if size > self.peak:
            with self._lock:
                self.peak = max(self.peak, size)

    def reset(self) -> None:
        self.peak = 0


class _Statm:
    """``/proc/self/statm``, kept open, which makes a reading four times as fast.

    The file shows the process that opened it, so a forked child opens its own. A program may also close all
    descriptors, and another file may get the number, so the file is checked before each reading.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._pid = 0
        self._identity: tuple[int, int] | None = None

    def resident_bytes(self) -> int:
        if self._pid != os.getpid() or not self._is_ours():
            self._open()
        return int(os.pread(self._fd, 128, 0).split(None, 2)[1]) * _PAGE

    def _is_ours(self) -> bool:
        try:
            status = os.fstat(self._fd)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def _open(self) -> None:
        if self._fd >= 0 and self._is_ours():
            os.close(self._fd)
        self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        self._pid, self._identity = os.getpid(), (status.st_dev, status.st_ino)


_sampled = _Sampled()
_statm = _Statm()
if hasattr(os, "register_at_fork"):
    # A child has its own peak, and would inherit a lock that another thread held.
    os.register_at_fork(after_in_child=lambda: globals().update(_sampled=_Sampled()))


def resident_bytes() -> int:
    """Returns the resident set of this process in bytes."""
    try:
        size = _statm.resident_bytes()
    except OSError:  # no /proc: not Linux
        import psutil

        size = int(psutil.Process().memory_info().rss)
    _sampled.see(size)
    return size


def peak_resident_bytes() -> int:
    """Returns the largest resident set since the start or the last reset, in bytes."""
    now = resident_bytes()
    return max(_kernel_peak() or _sampled.peak, now)


def reset_peak() -> None:
    """Resets the peak to the present resident set."""
    _sampled.reset()
    global _kernel_peak_is_reset
    try:
        with open("/proc/self/clear_refs", "wb", buffering=0) as clear_refs:
            clear_refs.write(_RESET_PEAK)
        _kernel_peak_is_reset = True
    except OSError:  # no /proc, or a sandbox forbids it: from now on the peak is the largest reading
        _kernel_peak_is_reset = False
    resident_bytes()


_kernel_peak_is_reset = True
"""False once a reset has failed: the kernel's mark may then be from before the reset."""


def _kernel_peak() -> int | None:
    if not _kernel_peak_is_reset:
        return None
    try:
        with open("/proc/self/status", "rb", buffering=0) as status:
            text = status.read()
    except OSError:
        return None
    _, mark, rest = text.partition(b"VmHWM:")
    return int(rest.split(None, 1)[0]) * 1024 if mark else None
