"""One of several communicating processes: its tensors, and what it saw."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from acclimate.accelerator import Accelerator
from acclimate.imports import describe

# The errors of a backend for a collective that it lacks.
_LACKING = (NotImplementedError, RuntimeError, ValueError)


class Observer:
    """One rank: its tensors, and its observations.

    Nothing is raised between collectives, as the other rank would then wait for this one.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        number: int,
        count: int,
        folder: Path,
        offered: dict[str, str] | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.number, self.count = number, count
        self.ranks: Sequence[int] = range(count)
        self.folder = folder
        self.group: Any = None
        """The process group of its ranks; ``None`` for the default one."""
        self.last_act: Callable[[], object] | None = None
        """What this process does before it ends at once; ``None`` if it goes on."""
        self.offered = {} if offered is None else offered
        """By collective and dtype, as "reduce of float32": empty if a form has worked, else an error."""
        self.broken: list[str] = []
        self.lacking: list[str] = []

    @property
    def place(self) -> int:
        """Its rank in the group."""
        return self.ranks.index(self.number)

    def within(self, group: Any, ranks: Sequence[int]) -> Observer:
        """The same process as one of the ranks of a group; it notes what it sees in the same lists."""
        member = copy.copy(self)
        member.group, member.ranks, member.count = group, ranks, len(ranks)
        return member

    @property
    def is_of_a_vendor(self) -> bool:
        """Whether the backend is a vendor's: named as the first of them, NCCL, and not made of gloo.

        They may lack tags of messages, and end the process when a collective takes too long.
        """
        if not self.accelerator.communication_backend.endswith("cl"):
            return False
        everyone: Any = distributed.group.WORLD
        device = torch.device(self.accelerator.current_device_name())
        gloo = getattr(distributed, "ProcessGroupGloo", ())
        return not isinstance(everyone._get_backend(device), gloo)

    @property
    def tells_all_ranks(self) -> bool:
        """Whether an error of one rank's arguments is an error of all, as in acclimate's own backends."""
        return self.accelerator.communication_backend in ("shm", "staged")

    def tensor(self, *values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor on this rank's device."""
        return torch.tensor(values, dtype=dtype).to(self.accelerator.current_device_name())

    def full(self, length: int, value: float) -> torch.Tensor:
        """A long tensor on this rank's device."""
        return torch.full((length,), float(value), device=self.accelerator.current_device_name())

    def same(self, found: torch.Tensor, expected: torch.Tensor | Sequence[float], what: str) -> None:
        """Notes a result that differs from the expected one."""
        # Integers as integers: float64 has 53 bits.
        dtype = torch.float64 if found.is_floating_point() else torch.int64
        actual = found.detach().cpu().to(dtype)
        wanted = torch.as_tensor(expected, dtype=None if torch.is_tensor(expected) else dtype).cpu().to(dtype)
        if actual.shape != wanted.shape:
            self.broken.append(f"{what} gives the shape {tuple(actual.shape)}, not {tuple(wanted.shape)}")
        elif not torch.equal(actual, wanted):
            place = int((actual != wanted).flatten().nonzero()[0])
            many = f" of {actual.numel()} elements, at {place}," if actual.numel() > 8 else ""
            seen, want = (t.flatten()[place].item() if many else t.tolist() for t in (actual, wanted))
            self.broken.append(f"{what} on {self.count} ranks gives{many} {seen}, not {want}")

    def holds(self, condition: bool, seen: str) -> None:
        """Notes ``seen`` unless a condition holds."""
        if not condition:
            self.broken.append(seen)

    def runs(self, name: str, collective: Callable[[], None]) -> None:
        """Runs a collective that no backend may refuse; all ranks then notice at once."""
        try:
            collective()
        except _LACKING as error:
            self.broken.append(f"{name} raises {describe(error, whole=True)}")

    def optional(self, name: str, collective: Callable[[], None]) -> None:
        """Runs a collective that a backend may lack; all ranks then notice at once."""
        try:
            collective()
        except _LACKING as error:
            self._lacks(name, error)

    def form(self, collective: str, told: str, run: Callable[[], object]) -> None:
        """Runs a form of a collective of :attr:`offered`, which a backend may lack in all its forms only."""
        try:
            run()
        except _LACKING as error:
            raises = f"{told} raises {describe(error, whole=True)}"
            if collective not in self.offered:
                self._lacks(collective, error)
                self.offered[collective] = raises
            elif not self.offered[collective]:
                self.broken.append(f"{raises}, and other forms of {collective} work")
        else:
            raised = self.offered.get(collective)
            self.holds(not raised, f"{raised}, and other forms of {collective} work")
            self.offered[collective] = ""

    def _lacks(self, name: str, error: Exception) -> None:
        lacking = f"{name} ({describe(error, whole=True)})"
        self.lacking += [] if lacking in self.lacking else [lacking]
