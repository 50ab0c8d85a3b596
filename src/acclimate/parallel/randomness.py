"""Random numbers of a split model that trains with dropout.

Where all ranks have the same numbers, dropout must drop the same ones on all of them. Between columns and
rows each rank has its own heads or hidden columns, which need random numbers of their own. Ranks also draw
different amounts there, which would leave their generators in different states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from acclimate.selection import get_accelerator


class RankRandomness:
    """Gives a rank random numbers of its own between columns and rows, and the common ones elsewhere.

    All ranks must have equal generators when the model is called. Does nothing in evaluation.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._rank = rank
        self._open: set[str] = set()
        self._common: tuple[Any, Any] | None = None
        model.register_forward_pre_hook(self._begin)

    def enter(self, module: nn.Module, region: str) -> None:
        """The columns of a region are about to be computed."""
        if not module.training or not region or region in self._open:
            return
        if not self._open:
            # One number, so that what is drawn after the region is not what was drawn in it.
            seed = int(torch.randint(1 << 62, ()))
            accelerator = get_accelerator()
            self._common = torch.get_rng_state(), accelerator.get_rng_state()
            torch.manual_seed(seed + self._rank)
            accelerator.manual_seed(seed + self._rank)
        self._open.add(region)

    def leave(self, region: str) -> None:
        """The rows of a region have been computed."""
        if region not in self._open:
            return
        self._open.remove(region)
        if not self._open:
            self._restore()

    def _begin(self, *_: object) -> None:
        """Drops what a call that raised in the middle of a region left."""
        if self._open:
            self._open.clear()
            self._restore()

    def _restore(self) -> None:
        if self._common is not None:
            host, device = self._common
            torch.set_rng_state(host)
            get_accelerator().set_rng_state(device)
            self._common = None
