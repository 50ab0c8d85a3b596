"""Intel Gaudi (Habana) HPUs, through SynapseAI's habana_frameworks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from acclimate.accelerator import Accelerator, DeviceLike
from acclimate.backends import builtin

_STATISTICS = {
    "allocated_bytes.all.current": "InUse",
    "allocated_bytes.all.peak": "MaxInUse",
    "reserved_bytes.all.current": "Limit",
    "reserved_bytes.all.peak": "Limit",
}
"""torch's names of allocator statistics, with those of torch.hpu."""


class HPUAccelerator(Accelerator):
    """A process has one HPU, which torch calls ``hpu`` for any index, and one generator."""

    device_type = "hpu"
    communication_backend = "hccl"
    _record = builtin("hpu")
    compile_backend = "hpu_backend"

    def resolves_data_dependency(self) -> bool:
        return True  # the graph compiler orders dependent work, also across streams

    def handles_memory_backpressure(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        return self.device_type  # as DeepSpeed's: a program may pass the rank, and the only index is 0

    def default_generator(self, device_index: DeviceLike = None) -> torch.Generator:
        self._index(device_index)
        generator: torch.Generator = self.torch_module.random.default_generators[0]
        return generator

    def get_rng_state(self, device_index: DeviceLike = None) -> torch.Tensor:
        return self.default_generator(device_index).get_state()  # torch.hpu refuses any index but 0

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceLike = None) -> None:
        self.default_generator(device_index).set_state(new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state()]

    def _statistics(self, index: int) -> dict[str, Any]:
        own = super()._statistics(index)
        return {**own, **{name: own[key] for name, key in _STATISTICS.items() if key in own}}

    def memory_summary(self, device: DeviceLike = None, abbreviated: bool = False) -> str:
        return str(self.torch_module.memory_summary(self._index(device)))

    def capture_to_graph(
        self, graph: Any, pool: Any | None = None, stream: Any | None = None
    ) -> AbstractContextManager[Any]:
        return super().capture_to_graph(graph, stream=stream)  # torch.hpu.graph has no pool
