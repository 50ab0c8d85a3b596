"""Moves output from pipes to the launcher's own streams, and waits for their slow readers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial

from acclimate.launch.event_loop import EventLoop
from acclimate.launch.output.views import Source, View
from acclimate.launch.output.writer import StreamWriter, Writer

_STREAM_NAMES = {1: "output", 2: "error"}


class OutputPump:
    """Feeds views from pipes. Stops reading pipes while the reader of the launcher's stream lags behind.

    Args:
        loop: waits on the pipes, and on a stream that is behind.
        views: for the launcher's streams 1 and 2.
        on_error: called once for each stream that can no longer be written; its later output is dropped.
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
        self._held_back: dict[View, list[Callable[[], object]]] = {}

    def read_from(self, pipe: int, stream: int, react: Callable[[], None]) -> None:
        """Calls back when a pipe is readable and there is room on its stream."""
        view = self._views[stream]
        self._pipes[pipe] = view, react
        if view not in self._paused:
            self._loop.watch(pipe, react)

    def forget(self, pipe: int) -> None:
        """Stops watching a pipe that has ended."""
        view, _ = self._pipes.pop(pipe)
        if view not in self._paused:
            self._loop.forget(pipe)

    def feed(self, stream: int, source: Source, data: bytes) -> None:
        """Shows output of a source."""
        self._views[stream].feed(source, data)
        self._settle(stream)

    def end(self, stream: int, source: Source) -> None:
        """Shows the rest of a source that has ended."""
        self._views[stream].end(source)
        self._settle(stream)

    def when_room(self, stream: int, act: Callable[[], object]) -> None:
        """Calls back once there is room on a stream: now, or when its reader no longer lags behind."""
        view = self._views[stream]
        if view in self._paused:
            self._held_back.setdefault(view, []).append(act)
        else:
            act()

    def flush(self) -> float | None:
        """Shows output that has waited long enough; returns the seconds until the next call."""
        delays = [view.flush() for view in self._streams() if view not in self._paused]
        for stream in self._streams().values():
            self._settle(stream)
        return min((delay for delay in delays if delay is not None), default=None)

    @property
    def waiting(self) -> bool:
        """Whether output is still waiting for a reader."""
        return any(view.writer.waiting for view in self._streams())

    def _streams(self) -> dict[View, int]:
        """Returns each view with its stream; a view of both streams counts as output."""
        return {self._views[stream]: stream for stream in (2, 1)}

    def _settle(self, stream: int) -> None:
        """Pauses or resumes pipes after a write, and waits for a reader that lags behind."""
        view = self._views[stream]
        writer = view.writer
        if writer.error is not None and view not in self._failed:
            self._failed.add(view)
            self._on_error(self._streams()[view], writer.error)
        if writer.waiting and view not in self._draining:
            self._draining.add(view)
            writer.watch(self._loop, partial(self._drain, stream))
        elif not writer.waiting and view in self._draining:
            self._draining.discard(view)
            writer.unwatch(self._loop)
        if writer.waiting >= Writer.FULL and view not in self._paused:
            self._paused.add(view)
            for pipe in self._pipes_of(view):
                self._loop.forget(pipe)
        elif writer.waiting < Writer.FULL // 2 and view in self._paused:
            self._paused.discard(view)
            view.resume()
            for pipe, react in self._pipes_of(view).items():
                self._loop.watch(pipe, react)
            for act in self._held_back.pop(view, ()):
                act()

    def _pipes_of(self, view: View) -> dict[int, Callable[[], None]]:
        return {pipe: react for pipe, (shown_by, react) in self._pipes.items() if shown_by is view}

    def _drain(self, stream: int) -> None:
        self._views[stream].writer.drain()
        self._settle(stream)


def own_streams(make: Callable[[Writer], View]) -> dict[int, View]:
    """Returns a view for each of the launcher's streams 1 and 2; one for both if they are the same file."""
    first = make(StreamWriter(1))
    return {1: first, 2: first if os.path.sameopenfile(1, 2) else make(StreamWriter(2))}


def stream_failure(stream: int, error: OSError) -> str:
    """Returns a sentence on a stream that can no longer be written, and on what becomes of the ranks."""
    name = _STREAM_NAMES[stream]
    if isinstance(error, BrokenPipeError):
        return f"the reader of standard {name} has exited, so the ranks were ended."
    return f"standard {name} cannot be written ({error.strerror}); the ranks continue."


def missing_output(stream: int, error: OSError) -> tuple[str, ...]:
    """Returns what the ranks' output lacks after a failure; messages on standard error may be dropped."""
    return (f"standard output cannot be written ({error.strerror})",) if stream == 1 else ()
