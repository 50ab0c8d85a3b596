"""Binds this process to cores and memory nodes by system call; no numactl is needed."""

from __future__ import annotations

from acclimate.launch.binding import RankBinding


def apply_binding(binding: RankBinding) -> str | None:
    """Binds this process; a sentence about what the system refused, or ``None``."""
    raise NotImplementedError
