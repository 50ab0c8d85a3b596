"""Checks of context managers: each starts from the state in which it is entered, and restores it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeAlias

import torch

from acclimate.accelerator import Accelerator, HostStream
from acclimate_conformance.checks import ambient
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    device_names,
    new_stream,
    require,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import reduced_dtypes
from acclimate_conformance.checks.errors import DeliberateError

_Block: TypeAlias = Callable[[], AbstractContextManager[Any]]


@check(
    "device", "stream", "amp", "nvtx", "capture_to_graph", "current_device", "current_stream",
    promise="A context manager restores the state before it, wherever it was made, even after an error.",
)  # fmt: skip
def blocks_end_as_they_began(accelerator: Accelerator) -> None:
    devices = range(len(device_names(accelerator)))
    for what, make in _blocks(accelerator):
        for made_on in devices:
            for entered_on in devices:
                for error in (None, *_ERRORS):
                    if error is None or made_on == entered_on:
                        _require_unchanged(accelerator, what, make, made_on, entered_on, error)


_ERRORS: tuple[type[BaseException], ...] = (DeliberateError, KeyboardInterrupt, GeneratorExit)
"""With which blocks are left: by an error, by Ctrl-C, and as part of a generator that is not used up."""


def _require_unchanged(
    accelerator: Accelerator, what: str, make: _Block, made_on: int, entered_on: int,
    raised: type[BaseException] | None,
) -> None:  # fmt: skip
    several = len(device_names(accelerator)) > 1
    if several:
        accelerator.set_device(made_on)
    block = make()
    if several:
        accelerator.set_device(entered_on)
    around = new_stream(accelerator)
    with accelerator.stream(around):  # made on one stream, entered on another
        before = ambient.look(accelerator)
        with suppress(*_ERRORS), block:
            torch.ones(2, device=accelerator.device_type).add_(1)
            if raised is not None:
                raise raised
        change = ambient.changed(before, ambient.look(accelerator))
    where = f", made on device {made_on} and entered on {entered_on}," if several else ""
    error = f", left by a {raised.__name__}," if raised is not None else ""
    require(not change, f"a block of {what}{where}{error} changes {change}")


def _blocks(accelerator: Accelerator) -> Iterator[tuple[str, _Block]]:
    for index in range(len(device_names(accelerator))):
        yield f"device({index})", lambda index=index: accelerator.device(index)  # type: ignore[misc]
        if not issubclass(accelerator.Stream, HostStream):
            with accelerator.device(index):
                stream = new_stream(accelerator)
            yield f"stream(s), of device {index}", lambda s=stream: accelerator.stream(s)  # type: ignore[misc]
    yield "device(None)", lambda: accelerator.device(None)
    own = new_stream(accelerator)
    yield "stream(s)", lambda: accelerator.stream(own)
    yield "stream(None)", lambda: accelerator.stream(None)
    yield "nvtx.range()", lambda: accelerator.nvtx.range("acclimate block")
    yield "amp.autocast(enabled=False)", lambda: accelerator.amp.autocast(enabled=False)
    with suppress(NotOfferedError):
        dtype = reduced_dtypes(accelerator)[0]
        yield "amp.autocast(dtype)", lambda: accelerator.amp.autocast(dtype=dtype, cache_enabled=False)
