"""Declares an option of ``acclimate run`` as a field of a dataclass, and converts its text."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any

from acclimate.errors import excerpt


def whole(least: int, most: int = 999_999_999) -> Callable[[str], int]:
    """Returns a converter to a whole number in this range."""

    def whole_number(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,20}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f'"{excerpt(text)}" must be a whole number of at least {least}')
        if int(text) > most:
            raise argparse.ArgumentTypeError(f"{int(text)} is too large; it may be at most {most}")
        return int(text)

    return whole_number


def port(text: str) -> int:
    """Converts the number of a port."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f'"{excerpt(text)}" must be a port: a whole number from 1 to 65535')
    return int(text)


def seconds(text: str) -> float:
    """Converts a number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f'"{excerpt(text)}" must be a number of seconds, 0 or more')
    return seconds


def address(text: str) -> str:
    """Converts an address or the name of a host."""
    if not re.fullmatch(r"[\w.:%-]{1,253}", text):
        raise argparse.ArgumentTypeError(f'"{excerpt(text)}" must be an address or the name of a host')
    return text


def words(text: str) -> tuple[str, ...]:
    """Splits text into words like a shell."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'"{excerpt(text)}": {error}') from None


def option(group: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """Returns a field for an option.

    Args:
        group: the heading in the help under which the option is listed.
        names: the option's spellings, with underscores.
        default: the field's value if the option is not given.
        settings: arguments for argparse, such as ``help``.
    """
    metadata = {"group": group, "names": names, "settings": settings}
    return field(default=default, metadata=metadata)


ranks_option, binding_option = partial(option, "ranks"), partial(option, "binding")
hosts_option, supervision_option = partial(option, "many hosts"), partial(option, "supervision")


def flag(option: Callable[..., Any], *names: str, **settings: Any) -> Any:
    """Returns a field for an option without a value."""
    return option(*names, default=False, action="store_true", **settings)
