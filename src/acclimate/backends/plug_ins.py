"""Finds and checks third parties' records (entry points), so that a broken plug-in affects no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from acclimate.backends import BUILTIN
from acclimate.backends.record import Backend
from acclimate.errors import InvalidBackendError
from acclimate.imports import VendorCodeError, contained, output_to_stderr

ENTRY_POINT_GROUP = "acclimate.backends"


def find_plug_ins() -> tuple[list[Backend], dict[str, str]]:
    """Returns the usable records, and the reason for each plug-in that failed, by entry-point name."""
    records, broken = [], {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            with contained(), output_to_stderr():
                records.append(_checked(point.load(), point.value))
        except VendorCodeError as error:
            broken[point.name] = str(error)
    return records, broken


def _checked(record: object, source: str) -> Backend:
    """Returns a plug-in's record with checked values, whose functions raise only InvalidBackendError.

    Args:
        record: the object that the plug-in registered.
        source: its location, for messages.

    Raises:
        InvalidBackendError: it is not a record, or a field has the wrong type.
    """
    if not isinstance(record, Backend):
        raise InvalidBackendError(f"{source} is a {type(record).__name__}, not an acclimate.Backend.")
    values: dict[str, Any] = {}
    for name, rule in _FIELDS.items():
        value = getattr(record, name)  # a property of a subclass may raise
        try:
            values[name] = rule.read(value)
        except (ValueError, TypeError):
            raise InvalidBackendError(
                f"{source}: {name} is {_shown(value)}, but must be {rule.expected}."
            ) from None
    if any(values["name"] == builtin.name for builtin in BUILTIN):
        raise InvalidBackendError(f'{source} takes the name "{values["name"]}", which is built in.')
    for name, rule in _ANSWERS.items():
        values[name] = _checked_answer(values[name], f"{source}: {name}", rule)
    return Backend(**values)


@dataclass(frozen=True)
class _Rule:
    """The type of a value."""

    expected: str
    read: Callable[[Any], Any]
    """Returns the value; raises ValueError or TypeError if it has another type."""


def _of_type(kind: type, accepted: Callable[[Any], bool] = lambda value: True) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        # In Python a bool is an int.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)) or not accepted(value):
            raise ValueError
        return value

    return read


def _callable(value: Any) -> Any:
    if not callable(value):
        raise ValueError
    return value


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise ValueError
    return tuple(value)


_VARIABLE = re.compile(r"[^=\0\s]+\Z")
_TEXT = _Rule("a string", _of_type(str))
_FLAG = _Rule("True or False", _of_type(bool))
_NAMES = _Rule("a sequence of strings", _names)
_FUNCTION = _Rule("a function", _callable)
_FIELDS = {
    "name": _Rule("a string of one word", _of_type(str, lambda name: len(name.split()) == 1)),
    "target": _Rule('a string such as "module:Class"', _of_type(str)),
    "probe": _FUNCTION,
    "rank": _Rule("a whole number", _of_type(int)),
    "device_count": _FUNCTION,
    "device_type": _TEXT,
    "auto_detect": _FLAG,
    "yields_to": _NAMES,
    "is_fallback": _FLAG,
    "remedy": _TEXT,
    "is_installed": _FUNCTION,
    "visible_devices_variable": _FUNCTION,
    "exported_variable_prefixes": _NAMES,
}
_ANSWERS = {
    "probe": _Rule(
        "None if the accelerator can be used, else a sentence that says why not",
        lambda reason: None if reason is None else _of_type(str, lambda text: bool(text.strip()))(reason),
    ),
    "device_count": _Rule("a whole number of at least 0", _of_type(int, lambda count: count >= 0)),
    "is_installed": _FLAG,
    "visible_devices_variable": _Rule(
        "None or the name of an environment variable",
        lambda name: None if name is None else _of_type(str, lambda text: bool(_VARIABLE.match(text)))(name),
    ),
}
"""The results of a record's functions."""


def _checked_answer(function: Callable[[], Any], place: str, rule: _Rule) -> Callable[[], Any]:
    def ask() -> Any:
        try:
            with contained(), output_to_stderr():
                answer = function()
        except VendorCodeError as error:
            raise InvalidBackendError(f"{place} failed: {error}") from error
        try:
            return rule.read(answer)
        except (ValueError, TypeError):
            raise InvalidBackendError(f"{place} returned {_shown(answer)}, not {rule.expected}.") from None

    return ask


def _shown(value: object) -> str:
    try:
        return repr(value)[:80]
    except Exception:  # noqa: BLE001 - a plug-in's __repr__ may raise anything
        return f"a {type(value).__name__}"
