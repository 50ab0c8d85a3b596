"""Carries output from pipes to the launcher's own streams, at the pace of whoever reads those."""

from __future__ import annotations

import os
import selectors
import sys
from collections.abc import Callable, Mapping
from functools import partial

from acclimate.launch.event_loop import EventLoop
from acclimate.launch.output.views import Source, View
from acclimate.launch.output.writer import Writer

STREAM_NAMES = {1: "output", 2: "error"}


class OutputPump:
    """Feeds views from pipes. Reads no pipe while the reader of the launcher's own stream is far behind.

    Args:
        loop: waits on the pipes, and on a stream that is behind.
        views: for the launcher's streams 1 and 2.
        on_error: called once for each stream that cannot be written any more; what comes for it is dropped.
    """

    def __init__(
        self, loop: EventLoop, views: Mapping[int, View], on_error: Callable[[int, OSError], None]
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._loop, self._views, self._on_error = loop, views, on_error
        self._pipes: dict[int, tuple[View, Callable[[], None]]] = {}
        self._draining: set[View] = set()
        self._paused: set[View] = set()
        self._failed: set[View] = set()

    def read_from(self, pipe: int, stream: int, react: Callable[[], None]) -> None:
        """Calls back when there is something in a pipe and room for it on a stream."""
        view = self._views[stream]
        self._pipes[pipe] = view, react
        if view not in self._paused:
            self._loop.watch(pipe, react)

    def forget(self, pipe: int) -> None:
        """A pipe is at its end."""
        view, _ = self._pipes.pop(pipe)
        if view not in self._paused:
            self._loop.forget(pipe)

    def feed(self, stream: int, source: Source, data: bytes) -> None:
        """Shows what a source wrote."""
        self._views[stream].feed(source, data)
        self._settle(stream)

    def end(self, stream: int, source: Source) -> None:
        """Shows what is left of a source that writes no more."""
        self._views[stream].end(source)
        self._settle(stream)

    def flush(self) -> float | None:
        """Shows what has been waiting long enough; returns in how many seconds to call again."""
        delays = [view.flush() for view in self._streams()]
        for stream in self._streams().values():
            self._settle(stream)
        return min((delay for delay in delays if delay is not None), default=None)

    @property
    def waiting(self) -> bool:
        """Whether a reader has not taken everything yet."""
        return any(view.writer.waiting for view in self._streams())

    def _streams(self) -> dict[View, int]:
        """Each view with its stream; one that has both counts as output."""
        return {self._views[stream]: stream for stream in (2, 1)}

    def _settle(self, stream: int) -> None:
        """After something was written: pauses and resumes pipes, waits for a reader that is behind."""
        view = self._views[stream]
        writer = view.writer
        if writer.error is not None and view not in self._failed:
            self._failed.add(view)
            self._on_error(self._streams()[view], writer.error)
        if writer.waiting and view not in self._draining:
            self._draining.add(view)
            self._loop.watch(writer.descriptor, partial(self._drain, stream), selectors.EVENT_WRITE)
        elif not writer.waiting and view in self._draining:
            self._draining.discard(view)
            self._loop.forget(writer.descriptor)
        if writer.waiting >= Writer.FULL and view not in self._paused:
            self._paused.add(view)
            for pipe in self._pipes_of(view):
                self._loop.forget(pipe)
        elif writer.waiting < Writer.FULL // 2 and view in self._paused:
            self._paused.discard(view)
            for pipe, react in self._pipes_of(view).items():
                self._loop.watch(pipe, react)

    def _pipes_of(self, view: View) -> dict[int, Callable[[], None]]:
        return {pipe: react for pipe, (shown_by, react) in self._pipes.items() if shown_by is view}

    def _drain(self, stream: int) -> None:
        self._views[stream].writer.drain()
        self._settle(stream)


def own_streams(make: Callable[[Writer], View]) -> dict[int, View]:
    """A view for each of the launcher's streams 1 and 2; one for both where they are the same file."""
    first = make(Writer(1))
    return {1: first, 2: first if os.path.sameopenfile(1, 2) else make(Writer(2))}
