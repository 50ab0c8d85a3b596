"""The results of the checks, as data. Does not import torch, so a report survives any fault of a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Outcome: TypeAlias = Literal["passed", "failed", "not offered"]


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    check: str
    """``category/name``."""
    category: str
    promise: str
    """The promise that was checked, as a sentence."""
    outcome: Outcome
    reason: str
    """Why it failed or is not offered; if it passed, a note or nothing."""
    rules: tuple[str, ...]
    """The interface's documentation: each entry is a name and its first sentence."""
    seconds: float
    detail: str = ""
    """A traceback, or the last output of a process that crashed."""
    calls: tuple[str, ...] = ()
    """If it failed, its latest calls of the interface; the last one went wrong."""
    place: str = ""
    """If it failed, the line of the check that noticed."""
    changes: tuple[str, ...] = ()
    """If it failed, where each name of the interface is implemented, the likeliest cause first."""


@dataclass(frozen=True)
class Tally:
    """The numbers of checks of one category that passed, failed, or are not offered."""

    category: str
    passed: int
    failed: int
    not_offered: int

    @property
    def score(self) -> float | None:
        """The share that passed of those that passed or failed, 0 to 1; ``None`` if there are none."""
        applicable = self.passed + self.failed
        return self.passed / applicable if applicable else None


@dataclass(frozen=True)
class About:
    """The accelerator that was checked, and the versions of the software."""

    accelerator: str
    """The accelerator's name."""
    implementation: str
    """Its class, as ``module:Class``."""
    devices: tuple[str, ...]
    """Each device's name in torch, and its vendor's name."""
    acclimate: str
    torch: str
    python: str
    system: str


@dataclass(frozen=True)
class Planned:
    """A check as it is known outside the worker."""

    id: str
    category: str
    promise: str
    rules: tuple[str, ...]
    timeout_s: int


@dataclass(frozen=True)
class Report:
    """All results of one run."""

    about: About
    results: list[Result]
    seconds: float
    not_run: list[Planned] = field(default_factory=list)
    """The checks that an interrupted run did not reach."""
    tallies: list[Tally] = field(init=False)
    """By category, in the order of the run."""

    def __post_init__(self) -> None:
        categories = dict.fromkeys(result.category for result in self.results)
        tallies = [_tally(name, (r for r in self.results if r.category == name)) for name in categories]
        object.__setattr__(self, "tallies", tallies)

    @property
    def total(self) -> Tally:
        """Over all categories."""
        return _tally("all", self.results)

    def with_outcome(self, outcome: Outcome) -> list[Result]:
        """The results with this outcome."""
        return [result for result in self.results if result.outcome == outcome]

    def as_dict(self) -> dict[str, Any]:
        """The same as nested dicts and lists, for JSON."""
        return {
            "about": asdict(self.about),
            "seconds": round(self.seconds, 3),
            "total": _scored(self.total),
            "categories": [_scored(tally) for tally in self.tallies],
            "results": [asdict(result) for result in self.results],
            "not_run": [check.id for check in self.not_run],
        }


def _tally(category: str, results: Iterable[Result]) -> Tally:
    outcomes = [result.outcome for result in results]
    return Tally(category, outcomes.count("passed"), outcomes.count("failed"), outcomes.count("not offered"))


def _scored(tally: Tally) -> dict[str, Any]:
    return {**asdict(tally), "score": tally.score}
