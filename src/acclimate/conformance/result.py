"""What came of the checks, as data: nothing here imports torch, so that a report outlives any device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Outcome: TypeAlias = Literal["passed", "failed", "not offered"]


@dataclass(frozen=True)
class Result:
    """What came of one check."""

    check: str
    """``category/name``."""
    category: str
    promise: str
    """What was looked at, as a sentence."""
    outcome: Outcome
    reason: str
    """Why it failed or is not offered; for one that passed, a note or nothing."""
    rules: tuple[str, ...]
    """What the interface says: a name and the first sentence of its documentation, each."""
    seconds: float
    detail: str = ""
    """A traceback, or the end of what a process that crashed wrote."""
    calls: tuple[str, ...] = ()
    """For one that failed, its latest calls of the interface; the last is the one that went wrong."""
    place: str = ""
    """For one that failed, the line of the check that saw it."""
    changes: tuple[str, ...] = ()
    """For one that failed, whose code answers for each name of the interface, the likeliest first."""


@dataclass(frozen=True)
class Tally:
    """How many checks of one category came out how."""

    category: str
    passed: int
    failed: int
    not_offered: int

    @property
    def score(self) -> float | None:
        """The share of the checks that apply which passed, 0 to 1; ``None`` where none applies."""
        applicable = self.passed + self.failed
        return self.passed / applicable if applicable else None


@dataclass(frozen=True)
class About:
    """What was checked, and with what."""

    accelerator: str
    """The accelerator's name."""
    implementation: str
    """Its class, as ``module:Class``."""
    devices: tuple[str, ...]
    """Each device as torch takes it, and as its vendor calls it."""
    acclimate: str
    torch: str
    python: str
    system: str


@dataclass(frozen=True)
class Planned:
    """What is known of a check outside the worker."""

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
    """What a run that was cut off did not come to."""
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
        """The results that came out so."""
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
