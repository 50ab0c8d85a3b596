"""Records the calls of the interface that a check made, and finds the vendor's code behind a failure."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from acclimate.accelerator import CATEGORIES, Accelerator
from acclimate.imports import describe
from acclimate_conformance.checks import ambient
from acclimate_conformance.checks.assertions import kept_listeners
from acclimate_conformance.checks.check import Check

BEFORE_IT = "; before it: "
"""What follows in a text led to what is observed, and may be as it should be."""
_KEPT = 6
_LONGEST = 120
_HOME = Path(__file__).parent
_METHODS = tuple(
    name
    for category in CATEGORIES
    for name, member in vars(category).items()
    if not name.startswith("_") and inspect.isfunction(member)
)


class Calls:
    """The latest calls that a check made of an accelerator's methods, in the order in which they ended."""

    def __init__(self) -> None:
        self._latest: deque[tuple[str, str]] = deque(maxlen=4 * _KEPT)
        self.names: dict[str, None] = {}
        """The methods that were called, also by one another, in the order of their first call."""
        self._raised = ""
        self._error: BaseException | None = None
        self._windows: list[dict[str, None]] = [{}]
        self._open: list[str] = []
        self._inside: dict[str, dict[str, None]] = {}
        self.disturbance = ""
        """The first call that changed state that it must not change, as text."""
        self.disturber = ""
        """The function of torch's module, with a name of the interface, that did so within that call."""
        self.blocks: dict[str, None] = {}
        """The methods that returned a context manager, the last one called first."""

    @contextmanager
    def recorded(self, accelerator: Accelerator) -> Iterator[None]:
        """A block that records calls of the accelerator's methods, but not calls within these."""
        wrapped = []
        for name in _METHODS:
            # An attribute of the object hides the class's method; it is removed afterwards.
            if name not in getattr(accelerator, "__dict__", {name: None}):
                with suppress(Exception):  # a class may forbid it; the report then says less
                    setattr(accelerator, name, self._keeping(accelerator, name))
                    wrapped.append(name)
        kept_listeners.append(self._kept)
        try:
            yield
        finally:
            kept_listeners.remove(self._kept)
            for name in wrapped:
                accelerator.__dict__.pop(name, None)

    def ended_with(self, change: str) -> None:
        """All calls ended, and left state changed that each of them had left alone: a block did not end."""
        blocks = " or ".join(f"{name}()" for name in self.blocks) or "something that it returned"
        self.disturbance = self.disturbance or f"after a block of {blocks} there is a change of {change}"

    def raising(self, error: BaseException) -> tuple[str, ...]:
        """The innermost method out of which an error came, if it was one."""
        return (self._raised,) if error is self._error else ()

    def _kept(self) -> None:
        """An observation was as promised; what is called from now on is for the next one."""
        if self._windows[-1]:
            self._windows.append({})

    def suspected(self) -> tuple[str, ...]:
        """The methods on which the failing observation depends: those called since the one before it."""
        return tuple(self._windows[-1] or (self._windows[-2] if len(self._windows) > 1 else {}))

    def cleared(self, failed: bool) -> tuple[str, ...]:
        """The methods on which other observations depended."""
        last = len(self._windows) - (1 if self._windows[-1] else 2) if failed else len(self._windows)
        return tuple({name: None for window in self._windows[:last] for name in window})

    def within(self, names: Collection[str]) -> tuple[str, ...]:
        """The methods that were called within these, directly or not."""
        return tuple({inner: None for name in names for inner in self._inside.get(name, {})})

    def told(self, observed: Collection[str]) -> tuple[str, ...]:
        """The calls as text, up to the last call of an observed method, whose result the check judged."""
        calls = list(self._latest)
        while calls and calls[-1][0] not in observed and any(name in observed for name, _ in calls):
            calls.pop()
        return tuple(text for _, text in calls[-_KEPT:])

    def _keeping(self, accelerator: Accelerator, name: str) -> Callable[..., Any]:
        method = getattr(accelerator, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.names.setdefault(name)  # nested calls too, as one of them may cause the failure
            self._windows[-1].setdefault(name)
            for outer in self._open:
                self._inside.setdefault(outer, {}).setdefault(name)
            self._open.append(name)
            outcome = ""
            before = ambient.look(accelerator) if len(self._open) == 1 else None
            try:
                result = method(*args, **kwargs)
                outcome = f"-> {_short(result)}" if len(self._open) == 1 else ""
                if len(self._open) == 1 and _is_block(accelerator, result):
                    self.blocks = {name: None, **self.blocks}
                return result
            except BaseException as error:
                if error is not self._error:
                    self._error, self._raised = error, name
                outcome = f"raised {describe(error, whole=True)}"[:_LONGEST]
                raise
            finally:
                after = ambient.look(accelerator) if before is not None else None  # its calls do not count
                self._open.pop()
                if not self._open:
                    given = [_short(value) for value in args]
                    given += [f"{key}={_short(value)}" for key, value in kwargs.items()]
                    told = f"{name}({', '.join(given)})"
                    self._latest.append((name, f"{told} {outcome}"))
                    if before is not None and after is not None and not self.disturbance:
                        raised = outcome.startswith("raised")  # a call that raises may not change anything
                        change = ambient.changed(before, after, "" if raised else name)
                        if change:
                            self.disturbance = (
                                f"{told}{', which raises,' if raised else ''} changes {change}"
                                if raised or name != "set_device"
                                else ambient.follows(accelerator, before, after) or f"{told} changes {change}"
                            )
                            if not raised and name != "set_device":
                                again = functools.partial(method, *args, **kwargs)
                                self.disturber = _disturber(accelerator, again, before)
                            if self.disturber not in ("", name):
                                self.disturbance += f", within {self.disturber}() of torch's module"

        return call


def _disturber(accelerator: Accelerator, again: Callable[[], object], before: ambient.Ambient) -> str:
    """The innermost function of torch's module for the device that changes the current device within a call.

    One function that does so may be called by several others, each of which is seen to change it then.
    """
    module = accelerator.torch_module
    names = [name for name in _METHODS if name not in ("set_device", "device", "set_stream", "stream")]
    functions = {name: getattr(module, name, None) for name in names}
    entered: list[tuple[str, object]] = []
    found: list[str] = []

    def name_of(frame: FrameType) -> str:
        for name, function in functions.items():
            if getattr(function, "__code__", None) is frame.f_code and function is not None:
                cells = zip(frame.f_code.co_freevars, function.__closure__ or (), strict=False)
                if all(frame.f_locals.get(variable) is cell.cell_contents for variable, cell in cells):
                    return name
        return ""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return") or not (name := name_of(frame)):
            return
        device = ambient.device_of(accelerator)
        if event == "call":
            entered.append((name, device))
        elif entered and entered.pop()[1] != device:
            found.append(name)

    with suppress(Exception):
        ambient.return_to(accelerator, before)
        profile = sys.getprofile()
        sys.setprofile(note)
        try:
            again()
        finally:
            sys.setprofile(profile)
    return found[0] if found else ""


def _is_block(accelerator: Accelerator, result: object) -> bool:
    """Whether a result is a context manager; a stream is one too, but is used for other things as well."""
    return isinstance(result, AbstractContextManager) and not isinstance(
        result, (torch.Stream, accelerator.Stream)
    )


def _short(value: object) -> str:
    """A value as text; a tensor by shape and dtype, since showing its contents computes on the device."""
    kind = type(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"<{kind.__name__} {tuple(value.shape)} {value.dtype} on {getattr(value, 'device', '?')}>"
    try:
        if isinstance(value, (list, tuple)) and len(value) <= 8:
            return ("[{}]" if isinstance(value, list) else "({})").format(", ".join(map(_short, value)))
        text = repr(value)
    except Exception:  # noqa: BLE001 - a vendor's object may have a faulty __repr__
        text = f"<{kind.__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def raised_by(error: BaseException, accelerator: Accelerator) -> str:
    """The innermost method of an accelerator out of which an error came, where no calls are recorded."""
    methods = [
        frame.f_code.co_name
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name in _METHODS and frame.f_locals.get("self") is accelerator
    ]
    return methods[-1] if methods else ""


def place_of(error: BaseException) -> str:
    """The innermost line of a check in an error's traceback: file, number and text."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_HOME) and path.name not in {"assertions.py", "check.py", "calls.py"}:
            return f"{path.relative_to(_HOME.parents[1])}:{frame.lineno}: {frame.line}"
    return ""


def where_to_mend(
    accelerator: Accelerator,
    check: Check,
    calls: Calls,
    reason: str,
    at_fault: Collection[str],
    operator: str | None = None,
) -> dict[str, float]:
    """What may be at fault and where that is, as text, each with how much speaks for it in this check alone.

    Args:
        accelerator: the accelerator with the fault.
        check: the check that failed.
        calls: the calls that the check made.
        reason: what it observed.
        at_fault: names that are certainly at fault.
        operator: the first operator that differs from the host's; empty if each is right, ``None`` if that is
            not known.
    """
    observes = check.observes
    used = dict.fromkeys((*calls.names, *_delegates((*observes, *calls.names))))
    about = dict.fromkeys((*observes, *_delegates(observes), *calls.within(observes)))
    own = [name for name in about if _distance(accelerator, name) == 0]
    # Each method asks on its way what the device is; that is only at fault where it is looked at.
    own = [name for name in own if name in observes or not _CLAIM.match(name)]
    theirs = [name for name in used if _distance(accelerator, name) < _DEFAULT]
    told, _, history = reason.partition(BEFORE_IT)
    named = [
        called or begins
        for called, begins in _CALL_OR_BEGINNING.findall(told)
        if begins in observes or _implementer(accelerator, called)
    ]
    earlier = [name for name in _CALL.findall(history) if _implementer(accelerator, name)]
    # Without a call: names that are no words of English, such as IntTensor.
    named = named or [name for name in re.findall(r"\w+", told) if name in observes and _is_no_word(name)]
    drawn = {f"operators on {accelerator.device_type}: {name}": _DRAWN for name in _DRAW.findall(told)[:1]}
    told_of = {*observes, *named, *_delegates(named)}
    is_alone = len(own) == 1 and (not named or own[0] in told_of)
    weights: dict[str, float] = {}
    for names, weight in (
        (at_fault, 3.0), (named[:1], 1.0), (named[1:], 0.6), (earlier, 0.3), (own if is_alone else (), 2.0),
        (() if named or drawn else observes, 0.5), (filter(_acts, named) if len(set(named)) > 1 else (), 0.5),
        ((n for n in observes if n in _WORKS_ELSEWHERE and not named), 0.5),
        (calls.suspected(), 0.4), (observes, 0.2), (theirs, 0.0),
    ):  # fmt: skip
        for name in dict.fromkeys(names):
            weights[name] = weights.get(name, 0.0) + weight
    for name in named:  # a default of acclimate's does what the vendor's own methods tell it
        if _distance(accelerator, name) == _DEFAULT:
            called = [inner for inner in calls.within((name,)) if _distance(accelerator, inner) == 0]
            for delegate in dict.fromkeys((*_delegates((name,)), *called)):
                if delegate in theirs and (delegate in observes or not _CLAIM.match(delegate)):
                    weights[delegate] += weights[name]
    # A property that a vendor overrides gives an object with the vendor's code, such as amp with GradScaler.
    has_own_part = any(_is_own_property(accelerator, name) for name in observes)
    wrong = reason.partition(" is off by")[0]
    if operator:
        return {f"operators on {accelerator.device_type}: {operator}, in {wrong}": _TOLD} | {
            _owner(accelerator, name, reason): weight for name, weight in weights.items()
        }
    if check.of and not named and not at_fault and not has_own_part:
        # If each operator is right, what puts them together is not, such as a GradScaler.
        is_composed = operator == "" and "amp" in observes
        what = f"{check.of} on {accelerator.device_type}: {wrong}"
        return {what: _COMPOSED if is_composed else _PROVEN} | {
            _owner(accelerator, name, reason): weight for name, weight in weights.items()
        }
    elsewhere = (*_of_record(accelerator, reason), *_of_operator(accelerator, reason))
    return (
        drawn
        | _of_object(accelerator, told, history)
        | dict.fromkeys(elsewhere, _TOLD)
        | {_owner(accelerator, name, reason): weight for name, weight in weights.items()}
    )


def _acts(name: str) -> bool:
    """Whether a method changes something, which others then tell: these tell truly in many checks."""
    member = next((vars(category)[name] for category in CATEGORIES if name in vars(category)), None)
    returned = getattr(member, "__annotations__", {"return": "a property"}).get("return")
    return name in _SEEDS or returned in ("None", None)


_SEEDS = ("seed", "seed_all")
"""Methods that change something and tell it."""
_CLAIM = re.compile(r"(is|supports|use|handles|resolves)_")
"""The beginnings of names of methods that say what a device is."""
_CALL = re.compile(r"(?<!Event\.)(?<!Stream\.)(?<!Graph\.)(?<!Generator\.)(?<!torch\.)\b(\w+)\(")
"""A call that a text names, but for methods of objects that the interface makes, and torch's functions."""
_CALL_OR_BEGINNING = re.compile(rf"{_CALL.pattern}|(?:^|; )(\w+): ")
"""Such a call, or what an observation begins with, such as "OutOfMemoryError: "."""
_DRAW = re.compile(r"\bthe draw (?:torch\.)?(\w+)")
_DRAWN = 0.9
"""A draw that a text names, and how much speaks for it: what it changes is seen by the vendor's methods."""
_PROVEN, _COMPOSED = 3.0, 0.3
"""How much speaks for a device's operators, and for them if each is right by itself."""
_TOLD, _EARLIER = 4.0, 0.3
"""How much it speaks for something outside of the interface that a text names it, or as one before it."""


def _of_object(accelerator: Accelerator, told: str, history: str) -> dict[str, float]:
    """The method of a stream, event or generator that a text names first, or before it; graphs' anywhere."""
    weights = {}
    graph = re.search(r"\bGraph\.(\w+)\(", f"{told} {history}")
    if graph is not None:
        weights[f"Graph.{graph[1]}: of the objects that create_graph() makes"] = _TOLD
    for found in re.finditer(r"\b(Event|Stream|Generator)\.(\w+)\(", history):
        weights[_method_of(accelerator, found[1], found[2])] = _EARLIER
    call = re.compile(r"\b(?:(Event|Stream|Generator)\.)?(\w+)\(")
    first = call.search(told) or call.search(history)
    if first is not None and first[1]:
        weights[_method_of(accelerator, first[1], first[2])] = _TOLD
    return weights


def _method_of(accelerator: Accelerator, made: str, name: str) -> str:
    """A method of what the interface makes, and where it is."""
    if made == "Generator":
        return f"Generator.{name}: of the generators that torch.Generator and default_generator() give"
    kind = getattr(accelerator, made)
    owner = next((base for base in kind.__mro__ if name in vars(base)), kind)
    place = f"{owner.__module__}:{owner.__qualname__}{_line_of(vars(owner).get(name))}"
    return f"{made}.{name}: implemented by {place}"


def _of_record(accelerator: Accelerator, reason: str) -> Iterator[str]:
    """The field of the accelerator's record that a text names."""
    found = re.search(r"\bthe (\w+)\(\) of its record\b", reason)
    if found is not None:
        kind = type(accelerator)
        yield f"Backend.{found[1]}: in the record whose target is {kind.__module__}:{kind.__qualname__}"


def _of_operator(accelerator: Accelerator, reason: str) -> Iterator[str]:
    """The operator that a text names."""
    found = re.search(r"\bthe operator (\w+)\b", reason)
    if found is not None:
        yield f"operators on {accelerator.device_type}: {found[1]}"


def _delegates(names: Collection[str]) -> Iterator[str]:
    """The names of the interface to which others delegate, directly or not, by their documentation."""
    waiting, seen = list(names), set(names)
    while waiting:
        found = re.findall(r":(?:meth|attr):`~?(\w+)`", _delegation(waiting.pop(0)))
        for name in found:
            if name not in seen:
                seen.add(name)
                waiting.append(name)
                yield name


def _delegation(name: str) -> str:
    """The function to which a name delegates, by the interface's documentation."""
    member = next((vars(category)[name] for category in CATEGORIES if name in vars(category)), None)
    if not (callable(member) or isinstance(member, property)):
        return ""
    text = inspect.getdoc(member) or ""
    found = re.search(r"Delegates to: (.*?)(?:\n[A-Z]|\n\n|$)", text, re.DOTALL)
    return found[1] if found else ""


_COLLECTIVE = re.compile(
    r"\b(?:batch_)?(?:all_\w+|broadcast\w*|reduce\w*|gather|scatter|barrier|send|recv|isend\w*|monitored\w+)"
)
_OP = re.compile(r"\b\w+Builder\b|\b\w+_p(?:read|write)|\b\w+(?=\()")

_WORKS_ELSEWHERE: dict[str, Callable[[Accelerator, str], str]] = {
    "communication_backend": lambda accelerator, reason: (
        f'names the backend "{accelerator.communication_backend}" of torch.distributed, which communicates; '
        f"fix {_first(_COLLECTIVE, reason, 'that')} there, or name another"
    ),
    "op_builders": lambda accelerator, reason: (
        "names the op builders, whose classes do the work; "
        f"fix {_first(_OP, reason, 'these')} there, or name others"
    ),
    "compile_backend": lambda accelerator, reason: (
        f'names the backend "{accelerator.compile_backend}" of torch.compile, which compiles; '
        "fix that there, or name another"
    ),
}
"""For each attribute that only names another component: that component, which does the work."""


def _first(pattern: re.Pattern[str], text: str, otherwise: str) -> str:
    found = pattern.search(text)
    return found[0].strip() if found else otherwise


def _implementer(accelerator: Accelerator, name: str) -> type | None:
    """The class that defines a name of the interface."""
    return next((kind for kind in type(accelerator).__mro__ if name in vars(kind)), None)


def _is_no_word(name: str) -> bool:
    return "_" in name or not name.islower()


def _is_own_property(accelerator: Accelerator, name: str) -> bool:
    kind = _implementer(accelerator, name)
    return kind is not None and kind not in CATEGORIES and isinstance(vars(kind)[name], property)


_DEFAULT = 2


def _distance(accelerator: Accelerator, name: str) -> int:
    """0 for a name that the class itself defines, 1 for its vendor's bases, 2 for acclimate's defaults."""
    kind = _implementer(accelerator, name)
    if kind is type(accelerator):
        return 0
    return _DEFAULT if kind is None or kind in CATEGORIES else 1


def _owner(accelerator: Accelerator, name: str, reason: str) -> str:
    kind = _implementer(accelerator, name)
    if kind is None:
        return name
    member = vars(kind)[name]
    elsewhere = ""
    with suppress(Exception):  # a vendor's property may raise
        elsewhere = f"; it {_WORKS_ELSEWHERE[name](accelerator, reason)}" if name in _WORKS_ELSEWHERE else ""
    if kind not in CATEGORIES:
        place = f"{kind.__module__}:{kind.__qualname__}{_line_of(member)}"
        return f"{name}: implemented by {place}{elsewhere}"
    delegation = _delegation(name)
    if not delegation:
        return f"{name}: acclimate's default; override it in {type(accelerator).__qualname__}{elsewhere}"
    to = re.sub(r":\w+:`([^`]*)`", r"\1", " ".join(delegation.split()))
    to = to.replace("<device>", accelerator.device_type).replace("``", "")
    return f"{name}: acclimate's default, which calls {to.rstrip('.')}; fix that, or override {name}"


def _line_of(member: object) -> str:
    function = member.fget if isinstance(member, property) else member
    with suppress(TypeError, OSError):
        if function is not None:
            path, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]  # type: ignore[arg-type]
            return f", at {Path(path).name}:{line}" if path else ""
    return ""
