"""Random numbers of a split model that trains with dropout.

Dropout on a tensor that all ranks have whole must drop the same elements on every rank. Between columns and
rows each rank has its own heads or hidden columns, which need different random numbers. Ranks also draw
different amounts there, which would leave their generators in different states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from acclimate.selection import get_accelerator

_HOST = torch.device("cpu")


class RankRandomness:
    """Gives each rank different random numbers between columns and rows, and the same ones elsewhere.

    All ranks must have equal generator states when the model is called. Does nothing in eval mode.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._rank = rank
        self._open: set[str] = set()
        self._common: tuple[torch.Tensor, torch.device, torch.Tensor | None] | None = None
        model.register_forward_pre_hook(self._begin)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankRandomness:
        """Returns itself: a copy of the model has the same hooks, and so the same state."""
        return self

    def enter(self, module: nn.Module, region: str) -> None:
        """Called before the columns of a region are computed."""
        if not module.training or not region or region in self._open:
            return
        if not self._open:
            # Draw one number, so that numbers after the region differ from those in it.
            seed = int(torch.randint(1 << 62, ())) + self._rank
            # Of the module's device, which need not be the current one.
            device = next((weight.device for weight in module.parameters()), _HOST)
            host = torch.get_rng_state()
            # Not torch.manual_seed(), which seeds devices whose state is not kept.
            torch.default_generator.manual_seed(seed)
            accelerator = get_accelerator()
            if device.type == accelerator.device_type != _HOST.type:
                self._common = host, device, accelerator.get_rng_state(device)
                with accelerator.device(device):
                    accelerator.manual_seed(seed)
            else:
                self._common = host, device, None
        self._open.add(region)

    def leave(self, region: str) -> None:
        """Called after the rows of a region were computed."""
        if region not in self._open:
            return
        self._open.remove(region)
        if not self._open:
            self._restore()

    def _begin(self, *_: object) -> None:
        """Drops the state of an earlier call that raised inside a region."""
        if self._open:
            self._open.clear()
            self._restore()

    def _restore(self) -> None:
        if self._common is not None:
            host, device, state = self._common
            torch.set_rng_state(host)
            if state is not None:
                get_accelerator().set_rng_state(state, device)
            self._common = None
