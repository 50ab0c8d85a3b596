"""Binds this process to cores and memory nodes by system call; no ``numactl`` is needed.

The kernel keeps both over ``exec`` and children inherit them, so the launcher sets them in the forked child,
before the rank's interpreter starts. C functions are looked up at import, before the fork.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Sequence

from acclimate.launch.binding.cores import RankBinding

# From the kernel's tables of system calls; glibc has no function of its own for this one. 64-bit only: a
# 32-bit process on the same kernel has other numbers.
_SET_MEMPOLICY = {
    "x86_64": 238,
    "aarch64": 237,
    "riscv64": 237,
    "loongarch64": 237,
    "ppc64": 261,
    "ppc64le": 261,
    "s390x": 270,
}
# include/uapi/linux/mempolicy.h
_PREFERRED, _BIND = 1, 2

_IS_LINUX = sys.platform.startswith("linux")
_IS_64_BIT = ctypes.sizeof(ctypes.c_void_p) == 8
_LIBC = ctypes.CDLL(None, use_errno=True) if _IS_LINUX else None
_CALL_NUMBER = _SET_MEMPOLICY.get(platform.machine()) if _IS_LINUX and _IS_64_BIT else None
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def apply_binding(binding: RankBinding) -> str | None:
    """Binds this process and the program that it will execute, as far as the system allows.

    Returns a message about the refused calls, else ``None``. The message is the same for every rank, so the
    launcher prints it once. Does not raise, since an unbound rank still works.
    """
    if not hasattr(os, "sched_setaffinity"):
        return f"ranks are not bound to cores: {platform.system()} does not let a process choose its cores"
    refused = []
    try:
        os.sched_setaffinity(0, binding.cpus)
    except (OSError, ValueError) as error:
        refused.append(f"ranks are not bound to cores: sched_setaffinity is refused ({_reason(error)})")
    try:
        if binding.preferred_memory_node is not None:
            _set_policy(_PREFERRED, [binding.preferred_memory_node])
        elif binding.memory_nodes:
            _set_policy(_BIND, binding.memory_nodes)
    except OSError as error:
        refused.append(f"memory is not bound to memory nodes: set_mempolicy is refused ({_reason(error)})")
    if not refused:
        return None
    remedy = "; containers need CAP_SYS_NICE for it (docker run --cap-add SYS_NICE)"
    return "; ".join(refused) + (remedy if "Operation not permitted" in refused[-1] else "")


def _set_policy(mode: int, nodes: Sequence[int]) -> None:
    """Sets the memory policy of this process; raises OSError if the kernel refuses."""
    if _LIBC is None or _CALL_NUMBER is None:
        raise OSError(errno.ENOSYS, f"not implemented for {platform.machine()}")
    words = max(nodes) // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    # The kernel subtracts one from the number of bits (get_nodes in mm/mempolicy.c).
    bits = ctypes.c_ulong(words * _WORD_BITS + 1)
    if _LIBC.syscall(ctypes.c_long(_CALL_NUMBER), ctypes.c_long(mode), mask, bits) == 0:
        return
    code = ctypes.get_errno()
    # A kernel without memory nodes has no such call, and all memory is equally near.
    if code != errno.ENOSYS or os.path.isdir("/sys/devices/system/node"):
        raise OSError(code, os.strerror(code))


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)
