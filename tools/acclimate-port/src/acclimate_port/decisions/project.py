"""Joins what the files of a project have in common: which edits rely on code of other files that stays."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from acclimate_port.decisions.symbols import Facts, Kind, Symbol

_REASONS = {
    Kind.FLAG: "{place}, which the same flag decides about, stays as it is",
    Kind.DEVICE: "{place}, which compares the name of this device, stays as it is",
    Kind.TENSOR: "{place}, which asks for the device of this tensor, stays as it is",
    Kind.OBJECT: "{place}, which chooses the device of the same object, stays as it is",
    Kind.CODE: "it decides about code that needs CUDA at {place}, which stays as it is",
}
_FARTHEST = {Kind.CODE: 3}
"""How many calls away code that needs CUDA is looked for; a device is followed to the end."""
_END = 20

_Known = tuple[Kind, str]
"""A symbol whose text means the same in all files."""


class Project:
    """What the files of a project define.

    Args:
        facts: what is known of each file.
    """

    def __init__(self, facts: Mapping[Path, Facts]) -> None:
        self._facts = facts
        self._homes: dict[str, list[Path]] = defaultdict(list)
        """The files that define each name."""
        for path, known in facts.items():
            for name in known.defines:
                self._homes[name].append(path)
        self._parents: dict[str, str] = {}
        """One of the classes that each class is related to, up to one for each family."""
        self._resolved: dict[tuple[Path, str], str] = {}
        for path, known in facts.items():
            for name, base in known.bases:
                related = self._name(path, base)
                if related:
                    self._parents[self._family(f"{path}:{name}")] = self._family(related)

    def doubts(self) -> dict[Path, dict[Symbol, str]]:
        """For each file, the symbols that its edits rely on and that stay in another, with the reasons."""
        stays = self._stays()
        found: dict[Path, dict[Symbol, str]] = {}
        for path, known in self._facts.items():
            own: dict[Symbol, str] = {}
            for symbol in sorted(known.relies, key=lambda one: (one.kind.value, one.text)):
                meant = self._known(path, symbol)
                places = stays.get(meant, {}) if meant is not None else {}
                place = next(
                    (place for place in places.items() if self._is_apart(path, place[0], symbol)), None
                )
                if place is not None:
                    where = f"line {place[1]}" if place[0] == path else f"{place[0]}:{place[1]}"
                    own[symbol] = _REASONS[symbol.kind].format(place=where)
            if own:
                found[path] = own
        return found

    @staticmethod
    def _is_apart(path: Path, other: Path, symbol: Symbol) -> bool:
        """Whether code that stays is not what the joins inside one file have looked at already."""
        return path != other or symbol.kind in (Kind.CODE, Kind.TENSOR)

    def _stays(self) -> dict[_Known, dict[Path, int]]:
        """The symbols that stay, also those that others imply, with the places that do."""
        following: dict[_Known, set[_Known]] = defaultdict(set)
        found: dict[_Known, dict[Path, int]] = defaultdict(dict)
        for path, known in self._facts.items():
            for first, second in known.implies:
                one, other = self._known(path, first), self._known(path, second)
                if one is not None and other is not None:
                    following[one].add(other)
        waiting: deque[tuple[_Known, Path, int, int]] = deque()
        for path, known in self._facts.items():
            for symbol, line in known.stays.items():
                meant = self._known(path, symbol)
                if meant is not None:
                    waiting.append((meant, path, line, 0))
        while waiting:
            meant, path, line, far = waiting.popleft()
            places = found[meant]
            if path in places or len(places) == 2:
                continue
            places[path] = line
            if far < _FARTHEST.get(meant[0], _END):
                waiting += ((one, path, line, far + 1) for one in following.get(meant, ()))
        return found

    # -- names -------------------------------------------------------------------------------------------

    def _known(self, path: Path, symbol: Symbol) -> _Known | None:
        name = self._name(path, symbol.text)
        return (symbol.kind, name) if name else None

    def _name(self, path: Path, text: str) -> str:
        """A symbol's text with the file or family of classes that it belongs to; ``""`` if it is unknown."""
        key = (path, text)
        if key not in self._resolved:
            self._resolved[key] = self._resolve(path, text)
        return self._resolved[key]

    def _resolve(self, path: Path, text: str) -> str:
        kind, _, name = text.partition(":")
        name, bracket, parameter = name.partition("(")
        end = bracket + parameter
        if kind == "here":
            return f"{path}:{name}{end}"
        if kind == "any":
            return f"{text}"
        owner, _, attribute = name.rpartition(".")
        if kind == "self":
            return f"{self._family(f'{path}:{owner}')}.{attribute}{end}"
        if kind == "of":
            made = self._name(path, owner)
            return f"{self._family(made)}.{attribute}{end}" if made else ""
        home = self._home(path, owner, attribute)
        return f"{home}:{attribute}{end}" if home is not None else ""

    def _home(self, path: Path, module: str, name: str) -> Path | None:
        """The file that defines a name which another imports from its module or its package."""
        homes = self._homes.get(name, [])
        if not homes:
            return None
        parts = module.lstrip(".").split(".") if module.strip(".") else []
        level = len(module) - len(module.lstrip("."))
        if level:
            folder = path.parents[level - 1] if level <= len(path.parents) else path.parent
            wanted = folder.joinpath(*parts)
            exact = [home for home in homes if _module(home) == wanted]
            inside = [home for home in homes if wanted in home.parents]
            return next(iter(exact), inside[0] if len(inside) == 1 else None)
        exact = [home for home in homes if _module(home).parts[-len(parts) :] == tuple(parts)]
        if len(exact) == 1:
            return exact[0]
        nearest = [home for home in exact if home.parent == path.parent]
        if exact:
            return nearest[0] if len(nearest) == 1 else None
        inside = [home for home in homes if parts[0] in home.parts]
        return inside[0] if len(inside) == 1 else None

    def _family(self, name: str) -> str:
        """The class that stands for a class and those that it is related to."""
        at = name
        while at in self._parents and self._parents[at] != at:
            at = self._parents[at]
        for one in self._way(name):
            if one != at:
                self._parents[one] = at
        return at

    def _way(self, name: str) -> Iterator[str]:
        at = name
        seen = []
        while at in self._parents and at not in seen:
            seen.append(at)
            at = self._parents[at]
        return iter(seen)


def _module(path: Path) -> Path:
    """A file without its suffix; a package's folder in place of its ``__init__.py``."""
    return path.parent if path.name == "__init__.py" else path.with_suffix("")
