"""Test doubles for views: ranks, a writer that keeps its input, and bytes that count copies."""

from __future__ import annotations

from collections.abc import Callable

from acclimate.launch.event_loop import EventLoop
from acclimate.launch.output.views import Source
from acclimate.launch.output.writer import Writer

RANKS = [Source(f"[rank {rank}] ", stream) for rank in range(3) for stream in (1, 2)]


class Paper(Writer):
    """A writer that keeps all."""

    def __init__(self) -> None:
        super().__init__()  # no terminal, so a width of 80 is assumed
        self.written = bytearray()

    def write(self, data: bytes | bytearray) -> None:
        self.written += data

    def drain(self) -> None:
        """Nothing ever waits."""

    def watch(self, loop: EventLoop, react: Callable[[], None]) -> None:
        raise AssertionError("nothing ever waits")

    def unwatch(self, loop: EventLoop) -> None:
        raise AssertionError("nothing ever waits")


class Counted(bytes):
    """Bytes that count how many of them are copied when they are put together with others and split."""

    copied = 0

    def __add__(self, other: object) -> Counted:
        return self._count(bytes(self) + bytes(other))  # type: ignore[call-overload]

    def __radd__(self, other: object) -> Counted:
        return self._count(bytes(other) + bytes(self))  # type: ignore[call-overload]

    def split(self, *arguments: object) -> list[bytes]:  # type: ignore[override]
        return [self._count(part) for part in bytes(self).split(*arguments)]  # type: ignore[arg-type]

    def _count(self, result: bytes) -> Counted:
        Counted.copied += len(result)
        return Counted(result)
