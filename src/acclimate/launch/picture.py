"""What ``acclimate run --show_binding`` draws."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from acclimate.launch.binding import RankBinding
from acclimate.topology import Topology


def show_binding(topology: Topology, bindings: Sequence[RankBinding], console: Console) -> None:
    """Draws which cores each rank gets."""
    raise NotImplementedError
