"""Faults planted in the CPU accelerator at edges: tails, options, figures that mostly agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from acclimate.accelerator import Accelerator, DeviceLike
from acclimate.accelerator.recorded_graph import RecordedGraph
from acclimate.backends.cpu import CPUAccelerator
from acclimate.llm.kernels import PackedWeight
from acclimate.llm.kernels.builder import CPUInferenceBuilder
from acclimate.ops import CPULion
from acclimate.ops.aio import AsyncIOHandle
from acclimate.ops.aio.builder import AsyncIOBuilder


def _with(name: str, builder: str) -> dict[str, str]:
    return {**CPUAccelerator.op_builders, name: f"{__name__}:{builder}"}


class PinsWholeVectors(CPUAccelerator):
    """pin_memory copies whole vectors of 8 elements, and leaves the rest 0."""

    def pin_memory(self, tensor: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
        pinned = super().pin_memory(tensor, *options, **named).clone()
        if pinned.dim() == 1 and pinned.dtype == torch.int32:
            pinned[len(pinned) // 8 * 8 :] = 0
        return pinned


class OthersMemoryIsFree(CPUAccelerator):
    """available_memory falls only with what this process allocates."""

    def available_memory(self, device_index: DeviceLike = None) -> int:
        if not hasattr(self, "_first"):
            self._first = super().available_memory(device_index) + self.memory_allocated()
        return self._first - self.memory_allocated()


class ThreeQuartersAreFree(CPUAccelerator):
    """mem_get_info says that three quarters of the free memory are free."""

    def mem_get_info(self, device: DeviceLike = None) -> tuple[int, int]:
        free, total = super().mem_get_info(device)
        return free * 3 // 4, total


class VersionIsAWord(CPUAccelerator):
    """toolkit_version is "unknown"."""

    def toolkit_version(self) -> str | None:
        return "unknown"


class EmulationExcludesHardware(CPUAccelerator):
    """is_bf16_supported(including_emulation=True) is False if the hardware has bfloat16."""

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return not including_emulation


class _NoBias:
    def __init__(self, packed: PackedWeight) -> None:
        self._packed, self.dequantize = packed, packed.dequantize

    @staticmethod
    def dense(weight: torch.Tensor) -> _NoBias:
        return _NoBias(PackedWeight.dense(weight))

    @staticmethod
    def quantize(weight: torch.Tensor, weight_format: str) -> _NoBias:
        return _NoBias(PackedWeight.quantize(weight, weight_format))

    def to(self, device: str) -> _NoBias:
        return self

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._packed.linear(x)


class BuilderWithoutBias(CPUInferenceBuilder):
    def load(self, *options: Any, **named: Any) -> Any:
        return SimpleNamespace(**{**vars(super().load(*options, **named)), "PackedWeight": _NoBias})


class BiasForgotten(CPUAccelerator):
    """PackedWeight.linear ignores a bias."""

    op_builders = _with("InferenceBuilder", "BuilderWithoutBias")


class _FewOrMany(_NoBias):
    """A kernel for 5 to 8 rows that leaves out the last column."""

    @staticmethod
    def dense(weight: torch.Tensor) -> _FewOrMany:
        return _FewOrMany(PackedWeight.dense(weight))

    @staticmethod
    def quantize(weight: torch.Tensor, weight_format: str) -> _FewOrMany:
        return _FewOrMany(PackedWeight.quantize(weight, weight_format))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        result = self._packed.linear(x, bias)
        if x.dim() == 2 and 5 <= len(x) <= 8:
            result[:, -1] = 0
        return result


class _RowsInOrderOfMemory(_NoBias):
    """Rows are looked up by numbers in the order of memory."""

    @staticmethod
    def dense(weight: torch.Tensor) -> _RowsInOrderOfMemory:
        return _RowsInOrderOfMemory(PackedWeight.dense(weight))

    @staticmethod
    def quantize(weight: torch.Tensor, weight_format: str) -> _RowsInOrderOfMemory:
        return _RowsInOrderOfMemory(PackedWeight.quantize(weight, weight_format))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._packed.linear(x, bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        ordered = ids if ids.is_contiguous() else ids.t().contiguous().view(ids.shape)
        return self._packed.rows(ordered)


class BuilderOfRows(CPUInferenceBuilder):
    def load(self, *options: Any, **named: Any) -> Any:
        return SimpleNamespace(
            **{**vars(super().load(*options, **named)), "PackedWeight": _RowsInOrderOfMemory}
        )


class RowsInOrderOfMemory(CPUAccelerator):
    """PackedWeight.rows reads numbers in the order of memory."""

    op_builders = _with("InferenceBuilder", "BuilderOfRows")


class _WholeBlocks(_RowsInOrderOfMemory):
    """A product that leaves out the columns after the last whole block of 32."""

    @staticmethod
    def dense(weight: torch.Tensor) -> _WholeBlocks:
        return _WholeBlocks(PackedWeight.dense(weight))

    @staticmethod
    def quantize(weight: torch.Tensor, weight_format: str) -> _WholeBlocks:
        return _WholeBlocks(PackedWeight.quantize(weight, weight_format))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = x.clone()
        x[..., x.shape[-1] // 32 * 32 :] = 0
        return self._packed.linear(x, bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._packed.rows(ids)


class BuilderOfWholeBlocks(CPUInferenceBuilder):
    def load(self, *options: Any, **named: Any) -> Any:
        return SimpleNamespace(**{**vars(super().load(*options, **named)), "PackedWeight": _WholeBlocks})


class WholeBlocksOnly(CPUAccelerator):
    """PackedWeight.linear leaves out the columns after the last whole block."""

    op_builders = _with("InferenceBuilder", "BuilderOfWholeBlocks")


class BuilderOfFewOrMany(CPUInferenceBuilder):
    def load(self, *options: Any, **named: Any) -> Any:
        return SimpleNamespace(**{**vars(super().load(*options, **named)), "PackedWeight": _FewOrMany})


class SomeRowsLoseAColumn(CPUAccelerator):
    """PackedWeight.linear of 5 to 8 rows leaves out the last column."""

    op_builders = _with("InferenceBuilder", "BuilderOfFewOrMany")


class _WholeSectors(AsyncIOHandle):
    def sync_pwrite(self, buffer: torch.Tensor, file: Any, file_offset: int = 0) -> int:
        sectors = buffer.numel() * buffer.element_size() // 512 * 512
        return super().sync_pwrite(
            buffer.view(torch.uint8)[:sectors] if sectors else buffer, file, file_offset
        )


class BuilderOfWholeSectors(AsyncIOBuilder):
    def load(self, *options: Any, **named: Any) -> Any:
        return SimpleNamespace(**{**vars(super().load(*options, **named)), "aio_handle": _WholeSectors})


class WritesWholeSectors(CPUAccelerator):
    """sync_pwrite writes only whole sectors of 512 bytes."""

    op_builders = _with("AsyncIOBuilder", "BuilderOfWholeSectors")


class _ReadsWholeBlocks(AsyncIOHandle):
    def sync_pread(self, buffer: torch.Tensor, filename: Any, file_offset: int = 0) -> int:
        return super().sync_pread(buffer, filename, file_offset // 512 * 512)


class BuilderOfBlockReads(AsyncIOBuilder):
    def module(self) -> Any:
        return SimpleNamespace(**{**vars(super().module()), "aio_handle": _ReadsWholeBlocks})


class ReadsFromTheBlock(CPUAccelerator):
    """sync_pread reads from the beginning of the block of 512 bytes that its offset is in."""

    op_builders = _with("AsyncIOBuilder", "BuilderOfBlockReads")


class LionMinimizes(CPUAccelerator):
    """CPULion ignores maximize."""

    def __init__(self) -> None:
        super().__init__()
        self._init = init = CPULion.__init__

        def ignoring(optimizer: CPULion, *given: Any, maximize: bool = False, **named: Any) -> None:
            init(optimizer, *given, **named)

        CPULion.__init__ = ignoring  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """Puts the optimizer's own method back."""
        CPULion.__init__ = self._init  # type: ignore[method-assign]


class BuilderOfShortRows:
    """A builder of an op that normalises rows by their first 1024 columns."""

    def is_compatible(self, verbose: bool = True) -> bool:
        return True

    def load(self, verbose: bool = True) -> Any:
        return SimpleNamespace(rms_norm=self._rms_norm)

    @staticmethod
    def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide[..., :1024].square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)


class NormalisesByTheFirstColumns(CPUAccelerator):
    """rms_norm takes the mean over the first 1024 columns."""

    op_builders = _with("RMSNormBuilder", "BuilderOfShortRows")


class _WithoutLists(RecordedGraph):
    def replay(self) -> None:
        self._calls = [call for call in self._calls if "_foreach" not in call.operator._schema.name]
        super().replay()


class ReplaysNoLists(CPUAccelerator):
    """A replay leaves out operators on lists of tensors."""

    def create_graph(self) -> Any:
        return _WithoutLists()


class DropoutRepeats(CPUAccelerator):
    """The mask of dropout repeats after 65,536 elements."""

    def __init__(self) -> None:
        super().__init__()
        self._dropout = dropout = torch.nn.functional.dropout

        def repeated(x: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
            dropped = dropout(x, *options, **named)
            if x.dim() == 1 and len(x) > 2**16:
                dropped = dropped[: 2**16].repeat(len(x) // 2**16 + 1)[: len(x)]
            return dropped

        torch.nn.functional.dropout = repeated

    def uninstall(self) -> None:
        """Puts torch's own function back."""
        torch.nn.functional.dropout = self._dropout


class OneDeviationForAll(CPUAccelerator):
    """torch.normal draws with the first of several deviations."""

    def __init__(self) -> None:
        super().__init__()
        self._normal = normal = torch.normal

        def of_the_first(mean: Any, std: Any, *options: Any, **named: Any) -> torch.Tensor:
            tensors = isinstance(mean, torch.Tensor) and isinstance(std, torch.Tensor)
            first = std.flatten()[:1].expand_as(std) if tensors else std
            return normal(mean, first, *options, **named)

        torch.normal = of_the_first  # type: ignore[assignment]

    def uninstall(self) -> None:
        """Puts torch's own function back."""
        torch.normal = self._normal


class _LargestLast(_NoBias):
    @staticmethod
    def dense(weight: torch.Tensor) -> _LargestLast:
        return _LargestLast(PackedWeight.dense(weight))

    @staticmethod
    def quantize(weight: torch.Tensor, weight_format: str) -> _LargestLast:
        return _LargestLast(PackedWeight.quantize(weight, weight_format))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._packed.linear(x, bias)

    def top(self, x: torch.Tensor, count: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = self._packed.top(x, count)
        return values.flip(-1), places.flip(-1)


class BuilderOfLargestLast(CPUInferenceBuilder):
    def load(self, *options: Any, **named: Any) -> Any:
        return SimpleNamespace(**{**vars(super().load(*options, **named)), "PackedWeight": _LargestLast})


class TopEndsWithTheLargest(CPUAccelerator):
    """PackedWeight.top gives the largest last."""

    op_builders = _with("InferenceBuilder", "BuilderOfLargestLast")


class CaptureKeepsGradientsOff(CPUAccelerator):
    """A capture leaves recording of gradients off."""

    def capture_to_graph(
        self, graph: Any, pool: Any | None = None, stream: Any | None = None
    ) -> AbstractContextManager[Any]:
        @contextmanager
        def capture() -> Iterator[None]:
            with super(CaptureKeepsGradientsOff, self).capture_to_graph(graph, pool, stream):
                yield
            torch.set_grad_enabled(False)

        return capture()


class ReplaysNotEachTime(CPUAccelerator):
    """Each 50th replay of a graph does nothing."""

    _replays = 0

    def replay_graph(self, graph: Any) -> None:
        self._replays += 1
        if self._replays % 50:
            super().replay_graph(graph)


class PinsNotEachTime(CPUAccelerator):
    """Each 30th tensor that is pinned has zeros."""

    _pinned = 0

    def pin_memory(self, tensor: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
        self._pinned += 1
        pinned = super().pin_memory(tensor, *options, **named)
        return pinned if self._pinned % 30 else torch.zeros_like(pinned)


CAUGHT_BY: dict[type[Accelerator], str] = {
    PinsWholeVectors: "pinning/any_length_is_pinned",
    OthersMemoryIsFree: "memory/other_processes_count",
    ThreeQuartersAreFree: "memory/capacity_of_a_host",
    VersionIsAWord: "ops/toolkit",
    EmulationExcludesHardware: "dtypes/list_of_dtypes",
    RowsInOrderOfMemory: "ops/packed_weights_multiply",
    WholeBlocksOnly: "ops/packed_weights_multiply",
    BiasForgotten: "ops/packed_weights_multiply",
    WritesWholeSectors: "ops/asynchronous_io_of_any_length",
    ReadsFromTheBlock: "ops/asynchronous_io_of_any_length",
    OneDeviationForAll: "random/distributions",
    TopEndsWithTheLargest: "ops/packed_weights_multiply",
    LionMinimizes: "ops/optimizers_obey_their_options",
    NormalisesByTheFirstColumns: "ops/normalising_ops_compute",
    ReplaysNoLists: "graphs/every_kind_of_write_is_repeated",
    DropoutRepeats: "random/draws_are_independent",
    CaptureKeepsGradientsOff: "graphs/replays_keep_their_state",
    SomeRowsLoseAColumn: "ops/packed_weights_multiply",
    ReplaysNotEachTime: "graphs/replay_repeats_updates",
    PinsNotEachTime: "pinning/memory_is_pinned_each_time",
}
