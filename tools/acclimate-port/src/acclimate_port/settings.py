"""``[tool.acclimate.port]`` of the nearest ``pyproject.toml``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acclimate_port.engine import unknown_rules
from acclimate_port.errors import InvalidPortSettingsError, excerpt

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TARGETS = ("acclimate", "torch")


@dataclass(frozen=True)
class ProjectSettings:
    """A project's settings for ``acclimate port``."""

    target: str | None = None
    unsafe: bool = False
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


def read_settings(path: Path) -> ProjectSettings:
    """The settings for a file or folder.

    Raises:
        InvalidPortSettingsError: the file is not TOML, or has an unknown setting or value.
    """
    here = path.resolve() if path.exists() else Path.cwd()
    for folder in (here, *here.parents):
        found = folder / "pyproject.toml"
        if found.is_file():
            return _read(found)
    return ProjectSettings()


def _read(path: Path) -> ProjectSettings:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidPortSettingsError(f"{path} cannot be read: {error}") from error
    table: Any = data
    for key in ("tool", "acclimate", "port"):
        table = table.get(key, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise InvalidPortSettingsError(f"{path}: tool.acclimate.port must be a table")
    known = {"to": str, "unsafe": bool, "select": list, "ignore": list, "exclude": list}
    for key, value in table.items():
        kind = known.get(key)
        if kind is None:
            raise InvalidPortSettingsError(
                f'{path}: tool.acclimate.port has no setting "{excerpt(key)}"; it has {", ".join(known)}'
            )
        is_right = isinstance(value, kind)
        if not is_right or (kind is list and not all(isinstance(item, str) for item in value)):
            wanted = "a list of strings" if kind is list else kind.__name__
            raise InvalidPortSettingsError(f"{path}: tool.acclimate.port.{key} must be {wanted}")
    target = table.get("to")
    if target is not None and target not in TARGETS:
        raise InvalidPortSettingsError(
            f'{path}: "to" must be one of {", ".join(TARGETS)}, not "{excerpt(target)}"'
        )
    settings = ProjectSettings(
        target,
        table.get("unsafe", False),
        tuple(table.get("select", ())),
        tuple(table.get("ignore", ())),
        tuple(table.get("exclude", ())),
    )
    check_rules((*settings.select, *settings.ignore), str(path))
    return settings


def check_rules(names: tuple[str, ...], where: str) -> None:
    """Checks that every name is a rule's.

    Raises:
        InvalidPortSettingsError: no rule has one of the names.
    """
    wrong = unknown_rules(names)
    if wrong:
        raise InvalidPortSettingsError(
            f'{where}: there is no rule "{excerpt(wrong[0])}"; docs/port/ lists them'
        )
