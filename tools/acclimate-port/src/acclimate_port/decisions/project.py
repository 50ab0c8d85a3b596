"""Joins what the files of a project have in common: which edits rely on code of other files that stays."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
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

_FEW = 2
"""The most files that are kept of those in which a symbol stays: a file asks for one that is not itself."""

_Known = tuple[Kind, str]
"""A symbol whose text means the same in all files."""


class Project:
    """What the files of a project define.

    Args:
        facts: what is known of each file; nothing of those without code for one kind of device.
    """

    def __init__(self, facts: Mapping[Path, Facts]) -> None:
        self._facts = facts
        self._homes: dict[str, list[Path]] = defaultdict(list)
        """The files that define each name."""
        for path, known in facts.items():
            for name in known.defines:
                self._homes[name].append(path)
        self._modules: dict[str, list[Path]] = defaultdict(list)
        """The files of each module's name."""
        for path in facts:
            self._modules[_module(path).name].append(path)
        self._imports: dict[Path, set[Path]] = {}
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
                concerned = (place for place in places.items() if self._concerns(path, place[0], symbol))
                place = next(concerned, None)
                if place is not None:
                    where = f"line {place[1]}" if place[0] == path else f"{place[0]}:{place[1]}"
                    own[symbol] = _REASONS[symbol.kind].format(place=where)
            if own:
                found[path] = own
        return found

    def _concerns(self, path: Path, other: Path, symbol: Symbol) -> bool:
        """Whether code that stays in a file concerns edits that rely on a symbol.

        The joins inside one file have looked at what it holds. An attribute of an object of unknown class is
        the same in files that import each other.
        """
        if path == other:
            return symbol.kind in (Kind.CODE, Kind.TENSOR)
        return (
            not symbol.text.startswith("any:")
            or other in self._imported(path)
            or path in self._imported(other)
        )

    def _imported(self, path: Path) -> set[Path]:
        """The files of the project that a file imports."""
        if path not in self._imports:
            modules = (self._files_of(path, module) for module in self._facts[path].imports)
            self._imports[path] = {found for files in modules for found in files}
        return self._imports[path]

    def _files_of(self, path: Path, module: str) -> list[Path]:
        """The files that may be a module that a file imports."""
        wanted = _parts(path, module)
        name = wanted[-1] if wanted else ""
        return [one for one in self._modules.get(name, ()) if _module(one).parts[-len(wanted) :] == wanted]

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
            if path in places or (len(places) == _FEW and not meant[1].startswith("any:")):
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
            return text
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
        homes, named = self._homes.get(name, []), self._files_of(path, module)
        found = [home for home in named if home in homes or not self._facts[home].defines]
        if len(found) > 1:
            found = [home for home in found if home.parent == path.parent]
        elif not found and (package := _parts(path, module)[:1]):  # the package gives it on
            found = [home for home in homes if package[0] in home.parts]
        return found[0] if len(found) == 1 else None

    def _family(self, name: str) -> str:
        """The class that stands for a class and those that it is related to."""
        way = [name]
        while (above := self._parents.get(way[-1], way[-1])) != way[-1]:
            way.append(above)
        for one in way[:-1]:
            self._parents[one] = way[-1]
        return way[-1]


def _parts(path: Path, module: str) -> tuple[str, ...]:
    """The parts of a module's name; of a relative one, those of its path."""
    parts = tuple(part for part in module.split(".") if part)
    level = len(module) - len(module.lstrip("."))
    if not level:
        return parts
    folder = path.parents[level - 1] if level <= len(path.parents) else path.parent
    return (*folder.parts, *parts)


def _module(path: Path) -> Path:
    """A file without its suffix; a package's folder in place of its ``__init__.py``."""
    return path.parent if path.name == "__init__.py" else path.with_suffix("")
