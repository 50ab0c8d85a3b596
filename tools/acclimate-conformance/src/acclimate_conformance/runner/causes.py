"""Which method is most likely at fault, from all results of a run, and what failures have in common."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from acclimate_conformance.result import Result


def ranked(results: list[Result]) -> list[Result]:
    """The results, each failure with its likeliest cause first.

    Besides what speaks for a method in its own check, the likeliest is the one on which failing observations
    depend and others do not. A method that one check proves to be at fault explains failures of others that
    use it, unless one of their own is proven too.
    """
    failing = Counter(name for result in results for name in map(_name, result.changes))
    kept = Counter(name for result in results for name in result.cleared)
    proofs = {
        change
        for result in results
        for change, weight in zip(result.changes, result.weights, strict=True)
        if weight >= _PROOF
    }
    proven = {_name(change) for change in proofs}
    # How much speaks for a name in all checks: in each at most as much as a text that names it.
    spoken: dict[str, float] = defaultdict(float)
    for result in results:
        for change, weight in zip(result.changes, result.weights, strict=True):
            spoken[_name(change)] += min(weight, 1.0)
    errors = Counter(_shape(result.cause) for result in results if result.cause)

    def placed(result: Result) -> Result:
        weights = {
            change: weight
            + _suspicion(failing[_name(change)], kept[_name(change)])
            + _support(spoken[_name(change)] - min(weight, 1.0), kept[_name(change)]) * (weight >= _DEPENDS)
            for change, weight in zip(result.changes, result.weights, strict=True)
        }
        own = [
            change
            for change, weight in zip(result.changes, result.weights, strict=True)
            if weight >= 1.0 and _name(change) in proven
        ]
        for change in own or weights:
            weights[change] += _EXPLAINS if _name(change) in proven else 0.0
        return replace(
            result, changes=tuple(sorted(weights, key=lambda change: -weights[change])), weights=()
        )

    def caused(result: Result) -> Result:
        shared = errors[_shape(result.cause)] > 1
        cause = result.cause if shared else (result.changes or (result.check,))[0]
        return replace(result, cause=cause)

    found = [placed(result) if result.outcome == "failed" else result for result in results]
    first_ones = Counter(_name(result.changes[0]) for result in found if result.changes)
    found = [_by_most(result, first_ones, proofs) for result in found]
    found = [_behind(result, first_ones) for result in found]
    found = [caused(result) if result.outcome == "failed" else result for result in found]
    # One wording for errors that differ in numbers only.
    first: dict[str, str] = {}
    return [replace(r, cause=first.setdefault(_shape(r.cause), r.cause), cleared=()) for r in found]


_PROOF = 3.0
"""How much speaks for a method that raises an error, or is named and the only one of the vendor's."""
_EXPLAINS = 3.0
"""How much it speaks for a method in other checks that another one proves it to be at fault."""


def _by_most(result: Result, first_ones: Mapping[str, int], proofs: Collection[str]) -> Result:
    """The result with its second likeliest cause first, if more failures name that one first."""
    if len(result.changes) < 2 or result.changes[0] in proofs:
        return result
    first, second, *others = result.changes
    has_more = first_ones[_name(second)] > first_ones[_name(first)]
    return replace(result, changes=(second, first, *others)) if has_more else result


def _behind(result: Result, first_ones: Collection[str]) -> Result:
    """The result with the method before the default that only calls it, if another failure names it first."""
    default = _CALLS.match(result.changes[0]) if result.changes else None
    called = re.findall(r"(?<![\w.])\w+(?!\.)", default[1]) if default else []
    behind = [change for change in result.changes if _name(change) in called and _name(change) in first_ones]
    others = [change for change in result.changes if change not in behind]
    return replace(result, changes=(*behind, *others)) if behind else result


_CALLS = re.compile(r"\w+: acclimate's default, which calls (.*?)(?:, else .*)?; fix that")
"""A default of acclimate's, and what it calls: names with a dot are functions of torch's."""


def _suspicion(failing: int, kept: int) -> float:
    """How much it speaks for a method that so many checks fail and keep their promises with it.

    What fails twice may be by chance; what fails each time is more than a method that one text names.
    """
    return failing / (failing + kept) * (1 + 2.5 * max(0.0, 1 - 2 / failing))


_DEPENDS = 0.4
"""How much speaks for a method that a check calls for what it then observes."""


def _support(spoken: float, kept: int) -> float:
    """How much it speaks for a method that so much speaks for it in other checks.

    One fault explains several failures: the method that all of them use is likelier than that of each alone.
    """
    return 0.5 * min(spoken, 3.0) * spoken / (spoken + kept) if spoken else 0.0


def _name(change: str) -> str:
    return change.partition(":")[0]


def _shape(cause: str) -> str:
    """An error's text without its numbers, or the name at the start of a cause.

    Of what is at fault among a device's operators or tensors, the name is the operator or what is wrong: a
    device has hundreds of operators, of which several may be at fault.
    """
    if _IS_ERROR.match(cause):
        return re.sub(r"\d+", "0", cause)
    which = _OF_A_DEVICE.match(cause)
    return f"{which[1]}{_DETAILS.sub('0', which[2])}" if which else _name(cause)


_OF_A_DEVICE = re.compile(r"(\w+ on \w+: )(\w+(?=, in )|.*)", re.DOTALL)
"""Operators, or tensors, of a type of device, and the operator or else the text of what was observed."""
_DETAILS = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")
_IS_ERROR = re.compile(r"\w*(Error|Exception|Exit|Interrupt): ")
