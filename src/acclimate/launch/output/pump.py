"""What the ranks of many hosts wrote, on the launcher's own streams: whole lines, at their reader's pace."""

from __future__ import annotations

import selectors
import signal
import sys
from collections.abc import Callable

from acclimate.launch.output.writer import Writer
from acclimate.launch.remote.coordinator import Coordinator


class Streams:
    """The launcher's standard output (1) and standard error (2)."""

    def __init__(self, coordinator: Coordinator) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._coordinator = coordinator
        self._writers = {1: Writer(1), 2: Writer(2)}
        self._draining: set[int] = set()
        self._sources: dict[int, Callable[[], None]] = {}
        self._paused = False

    def read_from(self, descriptor: int, react: Callable[[], None]) -> None:
        """Watches a source of output, but not while the launcher's reader is far behind."""
        self._sources[descriptor] = react
        if not self._paused:
            self._coordinator.watch(descriptor, react)

    def forget(self, descriptor: int) -> None:
        """A source has ended."""
        del self._sources[descriptor]
        if not self._paused:
            self._coordinator.forget(descriptor)

    def write(self, stream: int, data: bytes) -> None:
        """Shows whole lines."""
        writer = self._writers[stream]
        writer.write(data)
        self._notice_abandonment(stream)
        if writer.waiting and stream not in self._draining:
            self._draining.add(stream)
            self._coordinator.watch(stream, lambda: self._drain(stream), selectors.EVENT_WRITE)
        if writer.waiting > Writer.FULL and not self._paused:
            self._paused = True
            for descriptor in self._sources:
                self._coordinator.forget(descriptor)

    def _drain(self, stream: int) -> None:
        writer = self._writers[stream]
        writer.drain()
        self._notice_abandonment(stream)
        if writer.waiting:
            return
        self._draining.discard(stream)
        self._coordinator.forget(stream)
        if self._paused and not self._draining:
            self._paused = False
            for descriptor, react in self._sources.items():
                self._coordinator.watch(descriptor, react)

    def _notice_abandonment(self, stream: int) -> None:
        if self._writers[stream].is_abandoned:
            name = {1: "output", 2: "error"}[stream]
            reason = f"nobody reads standard {name} any more, so the ranks were ended."
            self._coordinator.end(reason, 128 + signal.SIGPIPE)

    @property
    def waiting(self) -> bool:
        """Whether something is not written yet."""
        return bool(self._draining)


class HeldLines:
    """Holds a line back until it is whole, as other hosts write to the same terminal.

    A carriage return ends a line too, so that progress bars move on.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """What is whole by now."""
        self._rest += data
        end = max(self._rest.rfind(b"\n"), self._rest.rfind(b"\r")) + 1
        whole, self._rest = self._rest[:end], self._rest[end:]
        return whole

    def end(self) -> bytes:
        """What was left unfinished."""
        rest, self._rest = self._rest, b""
        return rest
