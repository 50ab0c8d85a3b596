"""``simccl``: torch's collectives on sim tensors."""

from __future__ import annotations

NAME = "simccl"


def register() -> None:
    """Makes ``simccl`` known to ``torch.distributed``."""
