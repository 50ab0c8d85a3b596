"""The errors that a user of acclimate-port can cause, and how their messages show a value."""

from __future__ import annotations


def excerpt(text: str, longest: int = 100) -> str:
    """Returns a value for a message: on one line, without control characters, cut if it is long."""
    shown = text[:longest]
    if not shown.isprintable():
        shown = shown.encode("unicode_escape", "surrogatepass").decode()
    return shown if len(text) <= longest else f"{shown}…"


class PortError(Exception):
    """The base of all errors that acclimate-port raises on purpose."""


class InvalidPortSettingsError(PortError, ValueError):
    """An option or a setting of ``acclimate port`` is unknown, or conflicts with another."""
