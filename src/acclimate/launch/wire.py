"""Messages between the processes of a job: one JSON object a line, of bounded length and checked types."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from acclimate.errors import LaunchProtocolError

Message = dict[str, Any]

_LARGEST_INT = 1 << 63


def encode(message: Mapping[str, object]) -> bytes:
    """Returns a message as a line."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes, kinds: Mapping[str, object]) -> Message:
    """Returns the known fields of a message, each with its type checked.

    Args:
        line: the received line.
        kinds: the type of each field: ``str``, ``bool``, ``int``, ``float``, ``X | None``, ``tuple[X, ...]``,
            ``Mapping[str, X]``, or a dataclass whose fields have such types. Other fields are ignored.

    Raises:
        LaunchProtocolError: it is not a JSON object, or a field has the wrong type.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LaunchProtocolError(f"A message is not JSON ({error}).") from None
    if not isinstance(message, dict):
        raise LaunchProtocolError("A message is not a JSON object.")
    return {name: _read(kinds[name], value, name) for name, value in message.items() if name in kinds}


def _read(kind: Any, value: object, where: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise LaunchProtocolError(
                f"{where} has the fields of another release. Install the same acclimate on all hosts."
            )
        return kind(**{name: _read(hints[name], value[name], f"{where}.{name}") for name in hints})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not NoneType)
        return _read(kind, value, where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_read(arguments[0], item, where) for item in value)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        return {str(name): _read(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if kind is float and _is_number(value):
        return float(cast(float, value))
    if kind is int and _is_number(value) and isinstance(value, int):
        return value
    if kind in (str, bool) and isinstance(value, kind):
        return value
    raise LaunchProtocolError(f"{where} is of type {type(value).__name__}, or out of range.")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < _LARGEST_INT if isinstance(value, int) else math.isfinite(value)


@cache
def _hints(kind: type) -> dict[str, object]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


class LineBuffer:
    """Assembles lines of at most ``limit`` bytes from pieces, in linear time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rest = bytearray()

    @property
    def rest(self) -> bytes:
        """The line that is still without its newline."""
        return bytes(self._rest)

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the lines that this piece completes, without newlines.

        Raises:
            LaunchProtocolError: a line is longer than the limit.
        """
        *whole, rest = piece.split(b"\n")
        lines = []
        for line in whole:
            self._add(line)
            lines.append(bytes(self._rest))
            self._rest.clear()
        self._add(rest)
        return lines

    def _add(self, part: bytes) -> None:
        self._rest += part
        if len(self._rest) > self.limit:
            raise LaunchProtocolError(f"A message is longer than {self.limit} bytes.")
