"""What tests port, and how."""

from __future__ import annotations

from acclimate_port.engine import Settings, port_text


def ported_once_for_all(source: str, target: str) -> str:
    """A text with all edits; fails where another run would edit it again."""
    settings = Settings(target, unsafe=True)
    once = port_text(source, settings).text
    assert port_text(once, settings).text == once
    return once
