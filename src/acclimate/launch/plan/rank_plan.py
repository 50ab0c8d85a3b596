"""One rank of this host, ready to be started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from acclimate.launch.binding.cores import RankBinding


@dataclass(frozen=True)
class RankPlan:
    """What the supervisor starts."""

    rank: int
    local_rank: int
    command: tuple[str, ...]
    """Program and arguments; the program is looked up in the environment's ``PATH``."""
    environment: Mapping[str, str]
    """All of it: nothing else is inherited."""
    binding: RankBinding | None = None
    """Cores and memory nodes; ``None`` leaves the rank where the launcher may run."""
    log_path: Path | None = None
    """A file that the rank's output is appended to, besides being shown."""
