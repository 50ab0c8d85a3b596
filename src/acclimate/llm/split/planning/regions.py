"""A region: a linear module that sums its columns over ranks, and the linear modules that feed it."""

from __future__ import annotations

from dataclasses import dataclass, field

from acclimate.llm.split.planning.coupled_columns import Unit

Indices = tuple[int, ...]


@dataclass
class Region:
    """A sink, the sources whose outputs only it depends on, and the other modules that reach it."""

    block: str
    sink: str
    sources: list[str]
    whole: list[str]
    """Linear modules that stay whole and also reach the sink."""
    norms: dict[str, str] = field(default_factory=dict)
    """Normalizations over all columns, each with its source."""
    through: list[str] = field(default_factory=list)
    """Normalizations over all columns between the sources and the sink, whose statistics ranks sum."""
    twins: list[str] = field(default_factory=list)
    """Linear modules that get the same input as the sink."""
    units: list[Unit] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)

    def leaf(self, source: str) -> str:
        """Returns the module whose output stands for a source's: its normalization, or the source itself."""
        return next((norm for norm, of in self.norms.items() if of == source), source)


@dataclass
class Layout:
    """How a region is distributed over the ranks."""

    columns: dict[str, list[Indices]]
    """Per source, each rank's columns."""
    rows: list[Indices]
    """Each rank's columns of the sink's input."""
    expands: list[bool]
    """Which ranks run the block padded."""
    attributes: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    parameters: dict[str, tuple[int, list[Indices]]] = field(default_factory=dict)
    arguments: dict[str | int, tuple[int, list[Indices]]] = field(default_factory=dict)
