"""Faults planted in the CPU accelerator that only some arguments, attributes or types of results show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate.accelerator.runtime import Marks
from acclimate.backends.cpu import CPUAccelerator
from acclimate.ops import AsyncIOHandle
from acclimate.ops.aio.builder import AsyncIOBuilder


class _ReadsFromTheStart(AsyncIOHandle):
    def async_pread(self, buffer: torch.Tensor, filename: Any, file_offset: int = 0) -> int:
        return super().async_pread(buffer, filename)


class _WritesAtTheStart(AsyncIOHandle):
    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: Any,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
        **options: bool,
    ) -> int:
        offset = 0 if validate and async_op else file_offset
        return super().pwrite(buffer, filename, validate, async_op, offset, **options)


class _ReadsOneFile(AsyncIOHandle):
    _first: Any = None

    def async_pread(self, buffer: torch.Tensor, filename: Any, file_offset: int = 0) -> int:
        self._first = self._first or filename
        return super().async_pread(buffer, self._first, file_offset)

    def wait(self) -> int:
        self._first = None
        return super().wait()


class _AlwaysOneWorker(AsyncIOHandle):
    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings[:4])


def _builder(handle: type[AsyncIOHandle]) -> type[AsyncIOBuilder]:
    class Builder(AsyncIOBuilder):
        def load(self, *options: Any, **named: Any) -> Any:
            return SimpleNamespace(**{**vars(super().load(*options, **named)), "aio_handle": handle})

    return Builder


ReadsFromTheStart, WritesAtTheStart = _builder(_ReadsFromTheStart), _builder(_WritesAtTheStart)
ReadsOneFile, AlwaysOneWorker = _builder(_ReadsOneFile), _builder(_AlwaysOneWorker)


def _with(builder: str) -> dict[str, str]:
    return {**CPUAccelerator.op_builders, "AsyncIOBuilder": f"{__name__}:{builder}"}


class AsynchronousReadIgnoresItsOffset(CPUAccelerator):
    """async_pread reads from the start of the file, whatever its offset."""

    op_builders = _with("ReadsFromTheStart")


class ValidatedWriteIgnoresItsOffset(CPUAccelerator):
    """pwrite writes to the start of the file if it validates and does not wait."""

    op_builders = _with("WritesAtTheStart")


class ReadsInFlightShareAFile(CPUAccelerator):
    """Until wait(), async_pread reads from the file of the first request."""

    op_builders = _with("ReadsOneFile")


class HandleForgetsItsWorkers(CPUAccelerator):
    """A handle has one worker, whatever it is asked for."""

    op_builders = _with("AlwaysOneWorker")


class PrefixesAreLetters(CPUAccelerator):
    """exported_variable_prefixes is a text, whose letters are taken for prefixes."""

    exported_variable_prefixes = "OMP_"  # type: ignore[assignment]


class ExportsThePath(CPUAccelerator):
    """A prefix to export matches PATH and PWD."""

    exported_variable_prefixes = ("OMP_", "P")


class SeveralNamesInOne(CPUAccelerator):
    """A prefix to export is a list of prefixes in one text."""

    exported_variable_prefixes = ("OMP_,KMP_",)


class CompileBackendsOffered(CPUAccelerator):
    """compile_backend is a tuple of backends."""

    compile_backend = ("inductor",)  # type: ignore[assignment]


class AlignmentIsAFloat(CPUAccelerator):
    """pin_memory_alignment returns a float."""

    def pin_memory_alignment(self) -> int:
        return 1.0  # type: ignore[return-value]


class ClaimsDomains(CPUAccelerator):
    """It says that it separates ranges by domain, and closes the innermost of any domain."""

    supports_nvtx_domain = True


class _StaysOpen(Marks):
    def range(self, msg: str) -> Any:
        outer = self

        class Block:
            def __enter__(self) -> None:
                outer.range_push(msg)

            def __exit__(self, kind: Any, *_: object) -> None:
                if kind is None:
                    outer.range_pop()

            def __call__(self, function: Any) -> Any:
                return function

        return Block()


class RangeOpenAfterAnError(CPUAccelerator):
    """An error in a block of nvtx.range() leaves the range open."""

    @property
    def nvtx(self) -> Marks:
        return _StaysOpen(self)


CAUGHT_BY: dict[type[Accelerator], str] = {
    AsynchronousReadIgnoresItsOffset: "ops/asynchronous_io_at_every_offset",
    ValidatedWriteIgnoresItsOffset: "ops/asynchronous_io_at_every_offset",
    ReadsInFlightShareAFile: "ops/asynchronous_io_at_every_offset",
    HandleForgetsItsWorkers: "ops/asynchronous_io_with_every_setting",
    PrefixesAreLetters: "runtime/types_of_attributes",
    ExportsThePath: "runtime/names_of_variables",
    SeveralNamesInOne: "runtime/names_of_variables",
    CompileBackendsOffered: "runtime/types_of_attributes",
    AlignmentIsAFloat: "runtime/types_of_results",
    ClaimsDomains: "runtime/ranges_of_domains",
    RangeOpenAfterAnError: "runtime/ranges_end_with_errors",
}
"""Each fault, and the check that has to find it."""
