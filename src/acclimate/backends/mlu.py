"""Cambricon MLUs, through torch_mlu."""

from __future__ import annotations

from acclimate.accelerator import Accelerator
from acclimate.backends import builtin


class MLUAccelerator(Accelerator):
    """Follows torch's device conventions; profiler marks go through CNPX."""

    device_type = "mlu"
    communication_backend = "cncl"
    _record = builtin("mlu")

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        self.torch_module.cnpx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        self.torch_module.cnpx.range_pop()
