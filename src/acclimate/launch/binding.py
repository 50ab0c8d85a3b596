"""Which cores and memory nodes each rank of this host gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from acclimate.topology import LIVE, Topology


@dataclass(frozen=True)
class RankBinding:
    """Where one rank runs.

    ``cpus`` are its hardware threads, ascending, ``cores`` the physical cores among them.
    ``memory_nodes`` is what its memory is bound to; empty: the policy is left alone.
    ``preferred_memory_node`` is a fast node without cores (HBM in flat mode) to take memory from
    first, instead of binding; ``None`` where there is none.
    """

    cpus: tuple[int, ...]
    cores: int
    memory_nodes: tuple[int, ...]
    preferred_memory_node: int | None


def bind_ranks(
    topology: Topology,
    ranks: int,
    *,
    core_list: str | None = None,
    use_hyperthreads: bool = False,
    root: Path = LIVE,
) -> tuple[RankBinding, ...]:
    """Shares the cores that this process may use among ``ranks``."""
    raise NotImplementedError


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuses variables that would bind the threads of every rank to the same cores."""
    raise NotImplementedError
