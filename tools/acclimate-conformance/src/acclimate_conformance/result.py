"""The results of the checks, as data. Does not import torch, so a report survives any fault of a device."""

from __future__ import annotations

import json
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
    weights: tuple[float, ...] = ()
    """How much speaks for each of these."""
    cleared: tuple[str, ...] = ()
    """The names on which an observation of the check depended that was as promised."""
    cause: str = ""
    """If it failed, what it has in common with other failures: an error, or the likeliest cause."""

    @property
    def name(self) -> str:
        """Its name within the category."""
        return self.check.partition("/")[2]

    def text(self) -> str:
        """A failure as lines: what was observed, promised and documented, and where to change it."""
        changes = [f"to change: {self.changes[0]}"] if self.changes else []
        return "\n".join([self.reason, f"promised: {self.promise}", *changes, *self.rules, self.detail])

    def as_json(self) -> str:
        """The same as text of ASCII characters, whatever a vendor's message has."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Result:
        """What :meth:`as_json` has written."""
        told: dict[str, Any] = json.loads(text)
        lists: dict[str, Any] = {
            name: tuple(value) for name, value in told.items() if isinstance(value, list)
        }
        return cls(**{**told, **lists})


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
        return self.passed / self.applicable if self.applicable else None

    @property
    def applicable(self) -> int:
        """The number that passed or failed."""
        return self.passed + self.failed

    @property
    def percent(self) -> str:
        """The score as text, rounded down so that 100 % means all."""
        return "-" if self.score is None else f"{int(self.score * 100)} %"


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
    timeout_s: float

    @property
    def name(self) -> str:
        """Its name within the category."""
        return self.id.partition("/")[2]

    def failed(self, reason: str, detail: str) -> Result:
        """The result of a check that ended its process, or could not be run."""
        return Result(self.id, self.category, self.promise, "failed", reason, self.rules, 0.0, detail)


@dataclass(frozen=True)
class Report:
    """All results of one run."""

    about: About
    results: list[Result]
    seconds: float
    not_run: list[Planned] = field(default_factory=list)
    """The checks that an interrupted run did not reach."""
    junit: bytes = b""
    """The same as JUnit XML, as pytest writes it."""
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

    @property
    def causes(self) -> list[tuple[str, list[Result]]]:
        """The failures, grouped by what they have in common; the largest group first."""
        groups: dict[str, list[Result]] = {}
        for result in self.with_outcome("failed"):
            groups.setdefault(result.cause or result.check, []).append(result)
        return sorted(groups.items(), key=lambda group: -len(group[1]))

    def as_dict(self) -> dict[str, Any]:
        """The same as nested dicts and lists, for JSON."""
        return {
            "about": asdict(self.about),
            "seconds": round(self.seconds, 3),
            "total": _scored(self.total),
            "categories": [_scored(tally) for tally in self.tallies],
            "causes": [
                {"cause": cause, "checks": [result.check for result in failures]}
                for cause, failures in self.causes
            ],
            "results": [asdict(result) for result in self.results],
            "not_run": [check.id for check in self.not_run],
        }


def _tally(category: str, results: Iterable[Result]) -> Tally:
    outcomes = [result.outcome for result in results]
    return Tally(category, outcomes.count("passed"), outcomes.count("failed"), outcomes.count("not offered"))


def _scored(tally: Tally) -> dict[str, Any]:
    return {**asdict(tally), "score": tally.score}
