"""Two hosts for ranks: network namespaces with a cable between them."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from pathlib import Path

ADDRESSES = ("10.213.78.1", "10.213.78.2")
_CLONE_NEWNET = 0x40000000


def why_not() -> str | None:
    """Why there can be no hosts here; None where there can."""
    missing = [program for program in ("unshare", "nsenter", "ip") if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    asked = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"the kernel refuses: {asked.stderr.strip()}" if asked.returncode else None


class NetworkHosts:
    """The hosts; they end with the test's process, or when closed."""

    def __init__(self) -> None:
        self._holders = [
            subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "ip link set lo up; echo up; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in ADDRESSES
        ]
        for holder in self._holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "up\n"
        first, second = (holder.pid for holder in self._holders)
        script = [
            "set -e",
            f"ip link add ends{first} netns {first} type veth peer name ends{second} netns {second}",
        ]
        for process, address in zip((first, second), ADDRESSES, strict=True):
            enter = f"nsenter --target={process} --net ip"
            script += [
                f"{enter} address add {address}/24 dev ends{process}",
                f"{enter} link set ends{process} up",
            ]
        subprocess.run(["sh", "-c", "\n".join(script)], check=True)
        self.places = [f"/proc/{holder.pid}/ns/net" for holder in self._holders]

    def close(self) -> None:
        """Ends the hosts."""
        for holder in self._holders:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            for stream in (holder.stdin, holder.stdout):
                if stream is not None:
                    stream.close()


def enter(place: str) -> None:
    """Moves the calling process to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(place, os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns", place)
    finally:
        os.close(descriptor)


def exists(place: str) -> bool:
    """Whether a host is still there."""
    return Path(place).exists()
