"""Joins what the files of a project have in common: which edits rely on code of other files that stays."""

from __future__ import annotations

import re
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from acclimate_port.decisions.fixtures import with_fixtures
from acclimate_port.decisions.guarded_tests import WITHIN
from acclimate_port.decisions.symbols import MODULE, TOGETHER, Facts, Kind, Symbol
from acclimate_port.source.float64 import REASON
from acclimate_port.source.known_packages import FOR_ANY, KEEP_SETTINGS
from acclimate_port.source.named_in_texts import Names, Text
from acclimate_port.source.outline import REGISTERS, Outline
from acclimate_port.source.settings_files import SUFFIXES, nearest

_REASONS = {
    Kind.FLAG: "{place}, which the same flag decides about, stays as it is",
    Kind.DEVICE: "{place}, which compares this device's name, looks it up or gives it away, stays as it is",
    Kind.TENSOR: "{place}, which moves the same object or asks for its device, stays as it is",
    Kind.NUMBER: "{place}, a device that gets its number from the same function, stays as it is",
    Kind.CODE: "it decides about code that needs CUDA at {place}, which stays as it is",
    Kind.PLACE: "{place}, which the same program runs on the same device, stays as it is",
    Kind.CAST: "{place}, an autocast or a scaler of the same program, stays as it is",
    Kind.STREAM: "{place}, which uses a stream or a graph of the same program, stays as it is",
    Kind.FIGURE: "{place}, a figure of memory of the same program, stays as it is",
    Kind.STATE: "{place}, a state of random numbers of the same program, stays as it is",
    Kind.REPORT: "it tells of the device of the program, and {place} stays as it is",
    Kind.ANSWER: "it tests a function that asks for CUDA at {place}, which stays as it is",
    Kind.TEST: "{place}, which the same guard of a test suite skips or decides about, stays as it is",
    Kind.WIDE: REASON,
    Kind.GROUP: "gloo takes tensors of CUDA and of the host only, as does MPI, and {place} exchanges some",
    Kind.KERNEL: "Apple's MPS has no kernel for a function of torch that {place} calls",
    Kind.BOUND: "{place} gives tensors on the device to code that takes them from CUDA alone",
    Kind.UNKNOWN: "{place} runs code of which nothing shows that it follows torch's devices",
    Kind.IMPORT: "{place}, without which this file cannot be imported, needs NVIDIA's GPUs or its compiler",
    Kind.BUILD: "{place}, which runs before it, runs NVIDIA's tools",
    Kind.SPLIT: "{place} reads the devices of a wrapped model, which has none on other accelerators",
    Kind.LOAD: "{place} loads a checkpoint to the device that it was saved on, which may be one of CUDA's",
    Kind.BACKEND: "{place}, which the same program exchanges tensors by, stays as it is",
}
_APART = "{place}, which a program that shares code with this one runs, stays as it is"
"""The reason if no program is known that runs both places."""
_UNUSED = "nothing of the project runs this, and its programs stay on CUDA: {place}"
_FARTHEST = {Kind.CODE: 3, **dict.fromkeys(TOGETHER, 1000)}
"""How many calls away code that needs CUDA is looked for; a device is followed to the end."""
_END = 20

_FEW = 2
"""The most files that are kept of those in which a symbol stays: a file asks for one that is not itself."""

_FEW_STEPS = 5
"""The most modules that give a name on, from the one that defines it."""

_OF_VALUES = (
    *(Kind.WIDE, Kind.GROUP, Kind.KERNEL, Kind.BOUND, Kind.UNKNOWN, Kind.FLOAT64, Kind.SPLIT, Kind.IMPORT),
    Kind.SENT,
)
"""What is known of each file that has been read, also if it was not ported."""
_ALSO_IN_ONE_FILE = (
    *(Kind.CODE, Kind.TENSOR, Kind.NUMBER, Kind.WIDE, Kind.GROUP, Kind.KERNEL, Kind.BOUND, Kind.LOAD),
    *(Kind.IMPORT, Kind.BUILD, Kind.ANSWER, Kind.UNKNOWN),
)
"""What the joins inside one file do not look for."""
_FOLLOWED = (Kind.PLACE, Kind.CAST, Kind.WIDE, Kind.GROUP, Kind.KERNEL, Kind.BOUND, Kind.UNKNOWN)
"""What is followed through all functions that a program calls."""
_LOOKS_UP = re.compile(r"(^|_)(build|create|get|make|lookup|load)(_|$)")
"""Names of functions of other packages that look something up in a registry."""
_RUN_BY_ITSELF = re.compile(r"^(test_|conftest$|setup$|__)|_tests?$")
"""Names of modules that no other imports."""
_RUNS = "(runs)"
"""Ends the symbol of what a function runs, also through others."""
_RUN_BY = "(run by)"
"""Ends the symbol of what runs a function, also through others."""

_OTHERS_KNOWN = (FOR_ANY | KEEP_SETTINGS | sys.stdlib_module_names) - {"subprocess"}
"""Packages that get no device, flag or number by which they choose CUDA."""

_Home = tuple[Path, str]
"""A file, and a name that it defines."""


@dataclass
class Lookups:
    """What the outlines of the files alone decide, which no edit changes: it is looked up once."""

    homes: dict[tuple[Path, str], _Home | None] = field(default_factory=dict)
    """The file that defines each name which a file uses, and the name there."""
    files: dict[tuple[Path, str], list[Path]] = field(default_factory=dict)
    """The files that may be each module, by the folder of the file that imports it."""
    run: dict[Path, tuple[list[tuple[str, _Home]], list[_Home]]] = field(default_factory=dict)
    """What the functions of each file run, each with its name, and what the file imports by name."""
    run_first: dict[Path, list[Path]] = field(default_factory=dict)
    """The files that run whenever each file is imported, as it imports them."""


_Known = tuple[Kind, str]
"""A symbol whose text means the same in all files."""
_Place = tuple[Path, int]


class Project:
    """What the files of a project define.

    Args:
        facts: what is known of each file; nothing of those without code for one kind of device.
        lookups: what is known from earlier projects of the same files; it is kept up to date.
    """

    def __init__(self, facts: Mapping[Path, Facts], lookups: Lookups | None = None) -> None:
        facts = with_fixtures(facts)
        self._facts = facts
        self._lookups = Lookups() if lookups is None else lookups
        self._homes: dict[str, list[Path]] = defaultdict(list)
        """The files that define each name."""
        for path, known in facts.items():
            for name in known.outline.defines:
                self._homes[name].append(path)
        self._modules: dict[str, list[Path]] = defaultdict(list)
        """The files of each module's name."""
        for path in facts:
            if path.suffix not in SUFFIXES:
                self._modules[_module(path).name].append(path)
        self._direct: dict[Path, list[Path]] = {}
        self._kinds = {symbol.kind for one in facts.values() for symbol in one.stays}
        self._kinds |= {second.kind for one in facts.values() for _, second in one.implies}
        """What may stay."""
        self._meant: dict[tuple[Path, Text], list[tuple[Path, str]]] = {}
        self._imports: dict[Path, set[Path]] = {}
        self._importing: dict[Path, list[Path]] = defaultdict(list)
        self._imported_by: dict[Path, set[Path]] = {}
        self._parents: dict[str, str] = {}
        """One of the classes that each class is related to, up to one for each family."""
        self._resolved: dict[tuple[Path, str], str] = {}
        self._placed: dict[Path, dict[str, dict[tuple[Kind, bool], None]]] = {}
        """The names in each file whose code is about a device: the kinds, and whether others need it."""
        for path, known in facts.items():
            for symbol in (*known.relies, *known.stays, *(second for _, second in known.implies)):
                if symbol.kind in TOGETHER:
                    name, bracket, _ = symbol.text.removeprefix("here:").partition("(")
                    own = self._placed.setdefault(path, {}).setdefault(name, {})
                    own[symbol.kind, not bracket] = None
        self._naming: dict[Path, dict[tuple[str, Path, str], None]] = defaultdict(dict)
        """The functions and classes of each file that mention one whose code is about a device."""
        self._place_what_mentions()
        self._names_placed = self._names_of_placed()
        for path, known in facts.items():
            for name, base in known.outline.bases:
                related = self._name(path, base)
                if related:
                    self._parents[self._family(f"{path}:{name}")] = self._family(related)

    def _names_of_placed(self) -> set[str]:
        """The names of what is placed, also those that imports give it: ``import _C as cfg``."""
        found = {name for own in self._placed.values() for name in own}
        imports = [pair for one in self._facts.values() for pair in one.outline.names.items()]
        return found | {name for name, full in imports if full.rpartition(".")[2] in found}

    def _place_what_mentions(self) -> None:
        """Places the functions and classes that mention what is placed, also through others."""
        mentioning: dict[str, list[tuple[Path, str, str]]] = defaultdict(list)
        for path, known in self._facts.items():
            for name, texts in known.outline.mentions.items():
                for text in texts:
                    mentioning[_parted(text)[1]].append((path, name, text))
        looking_up: dict[tuple[Path, str], dict[tuple[Path, str], None]] = defaultdict(dict)
        for path, known in self._facts.items():
            for name, texts_named in known.outline.looks_up.items():
                for meant in (one for text in texts_named for one in self._named_by(path, text)):
                    looking_up[meant][path, name] = None
        waiting = [(path, name) for path, own in self._placed.items() for name in own]
        while waiting:
            home, placed = waiting.pop()
            kinds = self._placed[home][placed]
            using = [*self._registries(home, placed)]
            using += [*looking_up.get((home, placed), ()), *looking_up.get((home, MODULE), ())]
            using += [
                (path, name)
                for path, name, text in mentioning.get(placed, ())
                if self._named(path, text) == (home, placed)
            ]
            for path, name in using:
                self._naming[path][name, home, placed] = None
                own = self._placed.setdefault(path, {}).setdefault(name, {})
                if kinds.keys() - own.keys():
                    own |= kinds
                    waiting.append((path, name))

    def _registries(self, path: Path, name: str) -> Iterator[tuple[Path, str]]:
        """What a function or class is registered in: a function that fills a table, the table, or an object.

        Of the project's own functions, those register that fill a table of a module; of an object's methods,
        those that are called so.
        """
        outline = self._facts[path].outline
        for one, table in outline.fills:
            held = self._named(path, table) if one == name else None
            yield from [held] if held is not None else []
        for one, function in outline.registered:
            if one != name:
                continue
            held = self._named(path, function)
            if held is not None and any(held[1] == by for by, _ in self._facts[held[0]].outline.fills):
                yield held
            elif "." in function and REGISTERS.search(function.rpartition(".")[2]):
                held = self._holder(path, _parted(function)[0])
                yield from [held] if held is not None else []

    @cached_property
    def _registered_outside(self) -> dict[str, list[_Home]]:
        """The functions and classes that are registered in another package, by the name of the package."""
        found: dict[str, list[_Home]] = defaultdict(list)
        for path, known in self._facts.items():
            for name, function in known.outline.registered:
                package, dot, rest = function.partition(".")
                is_known = not package or package in self._modules or name not in self._placed.get(path, {})
                if dot and not is_known and REGISTERS.search(rest.rpartition(".")[2]):
                    found[package].append((path, name))
        return found

    def _built_outside(self, path: Path) -> Iterator[_Home]:
        """What a file may make by a name that another package looks up: ``timm.create_model(name)``."""
        registered = self._registered_outside
        for full in self._facts[path].outline.uses if registered else ():
            package = full.partition(".")[0]
            if package in registered and _LOOKS_UP.search(full.rpartition(".")[2]):
                yield from registered[package]

    def _holder(self, path: Path, text: str) -> _Home | None:
        """What a name of the project holds in an attribute: ``Tables`` of ``pkg.tables.Tables.models``."""
        while text.strip("."):
            if (held := self._named(path, text)) is not None:
                return held
            text = _parted(text)[0] if "." in text.strip(".") else ""
        return None

    def _named(self, path: Path, text: str) -> tuple[Path, str] | None:
        """The file that defines what another names by a name of its own or by a full name, and the name."""
        key, homes = (path, text), self._lookups.homes
        if key not in homes:
            owner, name = _parted(text)
            homes[key] = self._home(path, owner, name) if owner else self._own_or_given(path, name)
        return homes[key]

    def _own_or_given(self, path: Path, name: str) -> _Home:
        """A name of a file, or of a module of which it imports all names."""
        known = self._facts[path].outline
        stars = known.stars if name not in known.defines else ()
        homes = (self._home(path, star, name) for star in stars)
        return next((home for home in homes if home is not None), (path, name))

    def doubts(self) -> dict[Path, dict[Symbol, str]]:
        """For each file, the symbols that its edits rely on and that stay in another, with the reasons."""
        stays = self._all_that_stays
        found: dict[Path, dict[Symbol, str]] = {}
        for path, known in self._facts.items():
            own: dict[Symbol, str] = {}
            for symbol in sorted(known.relies, key=lambda one: (one.kind.value, one.text)):
                meant = self._known(path, symbol)
                places = stays.get(meant, {}) if meant is not None else {}
                # Of several places, the reason names one of the file itself.
                own_first = sorted(places.items(), key=lambda one: one[1][0] != path)
                concerned = (one for by, one in own_first if self._concerns(path, by, one[0], symbol))
                place = next(concerned, None)
                if place is not None:
                    where = f"line {place[1]}" if place[0] == path else _shown(place)
                    own[symbol] = self._reason(path, symbol.kind, place[0]).format(place=where)
                elif symbol.kind is Kind.USE and self._is_run_by_none(path, symbol):
                    kept = self._program_that_stays
                    own |= {symbol: _UNUSED.format(place=_shown(kept))} if kept is not None else {}
            if own:
                found[path] = own
        return found

    def _is_run_by_none(self, path: Path, symbol: Symbol) -> bool:
        """Whether code is in a function or class that nothing of the project is known to use."""
        known, name = self._facts[path].outline, symbol.text.removeprefix("here:").partition("(")[0]
        is_run = name == MODULE or known.is_script or _RUN_BY_ITSELF.search(path.stem) is not None
        is_found = any(one == name for one, _ in known.registered) or name not in known.defines
        return not (is_run or is_found or self._run_by.get((path, name)))

    @cached_property
    def _program_that_stays(self) -> _Place | None:
        """A place of a program of the project that stays on CUDA."""
        programs = (path for path, known in self._facts.items() if known.outline.is_script)
        found = (self._all_that_stays.get((Kind.PLACE, f"{path}:"), {}) for path in programs)
        return next((place for places in found for place in places.values()), None)

    def _reason(self, path: Path, kind: Kind, other: Path) -> str:
        """Why edits in a file are unsafe, for what stays in another."""
        if kind is Kind.PLACE and other.suffix in SUFFIXES:
            return "{place}, which gives the same program its device or backend, stays as it is"
        is_apart = kind is Kind.PLACE and self._importers(path).isdisjoint(self._importers(other))
        return _APART if is_apart else _REASONS[kind]

    def _concerns(self, path: Path, by: Path, other: Path, symbol: Symbol) -> bool:
        """Whether code that stays in a file concerns edits that rely on a symbol.

        The joins inside one file have looked at what it holds. An attribute of an object of unknown class, or
        an option, is the same in files of which one imports the other, directly or through others.

        Args:
            path: the file of the edits.
            by: the file that says how the code has to do with the symbol.
            other: the file of the code.
            symbol: the symbol.
        """
        if symbol.kind is Kind.TEST:
            return True
        if path == other:
            is_by_another = symbol.kind is Kind.FLAG and by != path
            return is_by_another or symbol.kind in _ALSO_IN_ONE_FILE
        if symbol.kind is Kind.BACKEND:
            return not self._importers(path).isdisjoint(self._importers(by))
        return not _is_loose(symbol.text) or self._knows(path, by)

    def _knows(self, path: Path, other: Path) -> bool:
        """Whether one of two files is or imports the other."""
        return path == other or other in self._imported(path) or path in self._imported(other)

    def _imported(self, path: Path) -> set[Path]:
        """The files of the project that a file imports, directly or through others."""
        if path not in self._imports:
            found: set[Path] = set()
            waiting = [path]
            while waiting:
                following = set(self._imported_directly(waiting.pop())) - found
                found |= following
                waiting += following
            self._imports[path] = found
        return self._imports[path]

    def _importers(self, path: Path) -> set[Path]:
        """A file and those that import it, directly or through others."""
        if not self._importing:
            for one in self._facts:
                for other in self._imported_directly(one):
                    self._importing[other].append(one)
        if path not in self._imported_by:
            found, waiting = {path}, [path]
            while waiting:
                following = set(self._importing.get(waiting.pop(), ())) - found
                found |= following
                waiting += following
            self._imported_by[path] = found
        return self._imported_by[path]

    def _imported_directly(self, path: Path) -> list[Path]:
        if path not in self._direct:
            known = self._facts[path].outline
            found = [one for module in known.imports for one in self._files_of(path, module)]
            texts = (one for one in known.texts if one.names is not Names.SETTINGS)
            found += dict.fromkeys(file for text in texts for file, _ in self._named_by(path, text))
            self._direct[path] = found
        return self._direct[path]

    def _named_by(self, path: Path, text: Text) -> list[tuple[Path, str]]:
        """The files that a text of a file names, with the name in each; ``<module>`` for a whole file."""
        key = (path, text)
        if key not in self._meant:
            self._meant[key] = [one for one in self._find_named(path, text) if one[0] != path]
        return self._meant[key]

    def _find_named(self, path: Path, text: Text) -> Iterator[tuple[Path, str]]:
        if text.names is Names.NAME:
            owner, name = _parted(text.text)
            yield from self._givers(path, owner, name, _FEW_STEPS)
        elif text.names is Names.MODULE:
            for one in self._files_of(path, text.text):
                yield one, MODULE
                yield from self._given_by_package(one)
        elif text.names is Names.ANY:
            yield from ((one, MODULE) for one in self._imported_by_none)
            yield from self._named_by_settings
        elif text.names is Names.FILE:
            yield from self._configurations
        elif text.names is Names.PLUGIN:
            yield from self._entry_points
        elif text.names is Names.POINT:
            pass
        else:
            named = self._nearest(path, text)
            if text.names is Names.SETTINGS:
                yield from self._read_of(path, named) if named is not None else []
            else:
                yield from [(named, MODULE)] if named is not None else []

    def _given_by_package(self, path: Path) -> Iterator[tuple[Path, str]]:
        """What a package gives on to who looks for a name in it: names, modules, and all names of modules."""
        if path.name != "__init__.py":
            return
        for full in self._facts[path].outline.names.values():
            home = self._named(path, full)
            yield from [home] if home is not None else ((one, MODULE) for one in self._files_of(path, full))
        for one in self._imported_whole(path):
            yield from ((one, name) for name in self._facts[one].outline.defines)
        yield from self._given_on(path)

    def _read_of(self, path: Path, settings: Path) -> Iterator[tuple[Path, str]]:
        """The keys of a file of settings, and of those that it chooses, that a program reads."""
        files = (path, *self._imported(path))
        read = {name for one in files for name in self._facts[one].outline.settings}
        texts = self._facts[settings].outline.texts
        chosen = [self._nearest(settings, text) for text in texts if text.names is Names.SETTINGS]
        for file in (settings, *chosen):
            keys = self._placed.get(file, {}) if file is not None else ()
            yield from ((file, key) for key in keys if file is not None and ("*" in read or key in read))

    def _nearest(self, path: Path, text: Text) -> Path | None:
        return next((one for one in nearest(path, text.text) if one in self._facts), None)

    @cached_property
    def _named_by_settings(self) -> list[_Home]:
        """What files of settings name of the project: ``_target_: lib.model.Net``."""
        return [
            home
            for path, known in self._facts.items()
            if path.suffix in SUFFIXES
            for text in known.outline.texts
            if text.names is Names.NAME
            for home in self._named_by(path, text)
        ]

    @cached_property
    def _entry_points(self) -> list[_Home]:
        """What the project declares as entry points."""
        points = (
            (path, text.text)
            for path, known in self._facts.items()
            for text in known.outline.texts
            if text.names is Names.POINT
        )
        return [home for path, full in points for home in self._givers(path, *_parted(full), _FEW_STEPS)]

    @cached_property
    def _configurations(self) -> list[_Home]:
        """What the modules hold or use that no file imports, of which a program runs one by its path."""
        found = [(one, MODULE) for one in self._imported_by_none]
        for path in self._unimported:
            uses = (self._named(path, full) for full in self._facts[path].outline.uses)
            found += [home for home in uses if home is not None and home[1] in self._placed.get(home[0], {})]
        return found

    @cached_property
    def _imported_by_none(self) -> list[Path]:
        """Those of the modules which no file imports that have to do with a device."""
        return [path for path in self._unimported if path in self._placed]

    @cached_property
    def _unimported(self) -> list[Path]:
        """The modules that no file imports, so that only a name which is not known may lead to them.

        Scripts and tests are run by themselves. A package that gives on what it imports does not use it
        if no file imports the package.
        """
        imported: set[Path] = set()
        waiting = [path for path in self._facts if path.name != "__init__.py" or path in self._placed]
        while waiting:
            path = waiting.pop()
            modules = self._facts[path].outline.imports
            new = {file for module in modules for file in self._files_of(path, module)} - imported
            imported |= new
            waiting += (file for file in new if file.name == "__init__.py" and file not in self._placed)
        return [
            path
            for path, known in self._facts.items()
            if path not in imported
            and path.suffix == ".py"
            and not known.outline.is_script
            and not _RUN_BY_ITSELF.search(path.stem)
        ]

    def between(self, words: Callable[[Path], set[str]]) -> list[Path]:
        """The files of which only the outline is known, that import both what edits rely on and what stays.

        Files that import another library or start processes may give these what edits rely on. A function
        that gets a device may make a part of a text of it, also in a file that does not use torch.

        Args:
            words: gives the words of a file; those that import all names of a module may use any of these.
        """
        relied = [self._known(path, symbol) for path, one in self._facts.items() for symbol in one.relies]
        given = (one for one in relied if one is not None and one[0] is Kind.DEVICE and "(" in one[1])
        takers = {_owner(one).rpartition(":")[0] for one in given}
        stays, relied_on = (
            {_owner(meant) for meant in found if meant is not None and meant[0] not in TOGETHER} - {""}
            for found in (self._all_that_stays, relied)
        )
        last_names = {owner.rpartition(":")[2] for owner in stays | relied_on}
        found = []
        for path, known in self._facts.items() if relied_on else ():
            symbols = (*known.relies, *known.stays, *(first for first, _ in known.implies))
            if known.outline == Outline() or any(one.kind not in _OF_VALUES for one in symbols):
                continue
            if str(path) in takers:
                found.append(path)
                continue
            uses = (full for full in known.outline.uses if full.rpartition(".")[2] in last_names)
            named = {_owner((Kind.CODE, self._name(path, f"from:{full}"))) for full in uses}
            if known.outline.stars:
                own = words(path)
                named |= {owner for owner in stays | relied_on if owner.rpartition(":")[2] in own}
            one, other = named & relied_on, named & stays
            is_giving = one and not _OTHERS_KNOWN.issuperset(_packages(known.outline) - self._modules.keys())
            if is_giving or (one and other and len(one | other) > 1):
                found.append(path)
        return found

    def _files_of(self, path: Path, module: str) -> list[Path]:
        """The files that may be a module that a file imports; of several, those whose root is nearest."""
        key, files = (path.parent, module), self._lookups.files
        if key not in files:
            files[key] = self._find_files(path, module)
        return files[key]

    def _find_files(self, path: Path, module: str) -> list[Path]:
        wanted = _parts(path, module)
        if not wanted and not module.startswith("."):  # a folder that is a package, and in none
            return []
        name = wanted[-1] if wanted else ""
        if "*" in module:  # computed, in part
            alike = [
                one for known in self._modules if fnmatchcase(known, name) for one in self._modules[known]
            ]
            found = [one for one in alike if _is_like(_module(one).parts[-len(wanted) :], wanted)]
        else:
            held = self._modules.get(name, ())
            found = [one for one in held if _module(one).parts[-len(wanted) :] == wanted]
        # A module that imports one of its own name means another, if there is one.
        others = [one for one in found if one != path]
        is_script = path.parent / "__init__.py" not in self._facts
        found = others if others or module.startswith(".") or not is_script else found
        if not found or module.startswith("."):
            return found
        if wanted[0] in sys.stdlib_module_names:  # a script's folder comes first
            return [one for one in found if is_script and one.parent == path.parent]
        near = {one: _nearness(path.parent.parts, _module(one).parts[: -len(wanted)]) for one in found}
        # A module inside a package is found without the package's name only beside it, or below.
        roots = {one: Path(*_module(one).parts[: -len(wanted)]) for one in found}
        found = [one for one in found if near[one][1] or roots[one] / "__init__.py" not in self._facts]
        nearest_ones = [one for one in found if near[one] == max(near[other] for other in found)]
        return [self._inside_if_empty(one) for one in nearest_ones]

    def _inside_if_empty(self, path: Path) -> Path:
        """The module inside an empty package that has its name: the folder is a root of modules."""
        inside = path.parent / f"{path.parent.name}.py"
        is_empty = path.name == "__init__.py" and self._facts[path].outline == Outline()
        return inside if is_empty and inside in self._facts else path

    @cached_property
    def _all_that_stays(self) -> dict[_Known, dict[Path, _Place]]:
        """The symbols that stay, also those that others imply, with the places that do.

        The places are by the file that they are in, or in which an attribute of any object leads to them.
        """
        following: dict[_Known, dict[tuple[_Known, Path], None]] = defaultdict(dict)
        found: dict[_Known, dict[Path, _Place]] = defaultdict(dict)
        waiting: deque[tuple[_Known, Path, _Place, int]] = deque()
        for path, known in self._facts.items():
            for first, second in known.implies:
                one, other = self._known(path, first), self._known(path, second)
                if one is not None and other is not None:
                    following[one][other, path] = None
            pairs = (self._together(path), self._runs(path), self._ignored(path), self._reported(path))
            for one, other in (pair for found_pairs in pairs for pair in found_pairs):
                following[one][other, path] = None
            for symbol, line in known.stays.items():
                if (meant := self._known(path, symbol)) is not None:
                    waiting.append((meant, path, (path, line), 0))
        self._spread(waiting, following, found)
        for path, line in self._loads_of_cuda(found):
            for running in self._running(path, line):
                found[Kind.LOAD, self._made_by(running, MODULE)].setdefault(path, (path, line))
        for path in self._facts if Kind.IMPORT in self._kinds else ():
            if (place := self._needed(path)) is not None:
                found[Kind.IMPORT, self._made_by(path, MODULE)] = {place[0]: place}
        return found

    def _needed(self, path: Path) -> _Place | None:
        """The first place that needs CUDA among a file and those that are imported whenever it is."""
        symbol = Symbol(Kind.IMPORT, f"here:{MODULE}")
        # A script runs without the package that its folder may be.
        first = [path] if self._facts[path].outline.is_script else [path, *self._packages_of(path)]
        waiting, seen = deque(first), {*first}
        while waiting:
            at = waiting.popleft()
            stays = self._facts[at].stays
            if symbol in stays:
                return at, stays[symbol]
            following = self._run_first(at)
            waiting += [one for one in following if one not in seen]
            seen.update(following)
        return None

    def _packages_of(self, path: Path) -> list[Path]:
        """The files that run before a module when it is imported: those of the packages that it is in."""
        found: list[Path] = []
        for folder in path.parents:
            package = folder / "__init__.py"
            if package not in self._facts:
                break
            found.append(package)
        return found

    def _run_first(self, path: Path) -> list[Path]:
        """The files that run whenever a file is imported, as it imports them."""
        found = self._lookups.run_first
        if path not in found:
            always = self._facts[path].outline.always
            running = (one for module in always for one in self._run_by_import(path, module))
            found[path] = list(dict.fromkeys(running))
        return found[path]

    def _run_by_import(self, path: Path, module: str) -> Iterator[Path]:
        """The files that run when a module is imported: its packages and itself, if it is known which."""
        parts = module.split(".") if not module.startswith(".") else []
        names = [".".join(parts[: at + 1]) for at in range(len(parts))] or [module]
        for name in names:
            found = self._files_of(path, name)
            is_package = name is not names[-1]
            yield from (
                one for one in found if len(found) == 1 and (one.name == "__init__.py" or not is_package)
            )

    def _running(self, path: Path, line: int) -> set[Path]:
        """A file, and those whose code runs its function that a line is in, also through others."""
        homes = {name for at, name in self._facts[path].files.loads if at == line} - {MODULE}
        found, waiting = {path}, [(path, name) for name in homes]
        seen = set(waiting)
        while waiting:
            users = set(self._run_by.get(waiting.pop(), ())) - seen
            seen |= users
            found |= {file for file, _ in users}
            waiting += (one for one in users if one[1])
        return found

    @cached_property
    def _run_by(self) -> dict[_Home, list[_Home]]:
        """What runs each function or class: other functions, and the code of files, without a name."""
        found: dict[_Home, list[_Home]] = defaultdict(list)
        for path in self._facts:
            runs, imported = self._run_of(path)
            for name, home in runs:
                found[home].append((path, name))
            for home in imported if path.name != "__init__.py" else ():
                found[home].append((path, ""))
        return found

    def _loads_of_cuda(self, found: Mapping[_Known, object]) -> list[_Place]:
        """The loads without a device of checkpoints that no program of the project saves on another one."""
        saving = [(path, home) for path, known in self._facts.items() for home in known.files.saves]
        loads = []
        for path, known in self._facts.items():
            near = {one: _nearness(path.parent.parts, one[0].parent.parts)[0] for one in saving}
            nearest_ones = [one for one in saving if near[one] == max(near.values())]
            stays = any(self._is_of_program_that_stays(*one, found) for one in nearest_ones)
            if stays or not nearest_ones:
                loads += [(path, line) for line, _ in sorted(known.files.loads)]
        return loads

    def _is_of_program_that_stays(self, path: Path, name: str, found: Mapping[_Known, object]) -> bool:
        """Whether code is of a program whose device stays."""
        texts = (f"{path}:", f"{path}:{name}", f"{path}:{name}{_RUN_BY}", f"{path}:{MODULE}")
        return any((Kind.PLACE, text) in found for text in texts)

    def _spread(
        self,
        waiting: deque[tuple[_Known, Path, _Place, int]],
        following: Mapping[_Known, Mapping[tuple[_Known, Path], None]],
        found: dict[_Known, dict[Path, _Place]],
    ) -> None:
        """Follows what stays to what it implies."""
        while waiting:
            meant, path, place, far = waiting.popleft()
            places = found[meant]
            if path in places or (len(places) == _FEW and not _is_loose(meant[1])):
                continue
            places[path] = place
            if far < _FARTHEST.get(meant[0], _END):
                for one, through in following.get(meant, ()):
                    if not _is_loose(meant[1]) or self._knows(path, through):
                        # The file that leads there: another file may join two places of one file by a flag.
                        at = through if _is_loose(one[1]) or one[0] is Kind.FLAG else place[0]
                        waiting.append((one, at, place, far + 1))

    def _together(self, path: Path) -> Iterator[tuple[_Known, _Known]]:
        """Pairs of a file's program and each place in it: if one of them stays, so does the other.

        The program is what the file holds and what it imports by name. An ``__init__.py`` may only give on.
        A function or class that mentions a place, such as one that inherits from it, is a place too.
        """
        known = self._facts[path].outline
        held = [(path, name) for name in self._placed.get(path, {})]
        gives_on = path.name == "__init__.py" and not held
        for full in known.uses if not gives_on else ():
            owner, name = _parted(full)
            home = self._home(path, owner, name) if name in self._names_placed else None
            held += [home] if home is not None else []
        texts = [one for one in known.texts if one.names is not Names.PROCESS] if not gives_on else []
        meant = (one for text in texts for one in self._named_by(path, text))
        for file, name in dict.fromkeys(meant):
            held += [(file, one) for one in self._placed.get(file, {})] if name == MODULE else [(file, name)]
        for file in self._imported_whole(path) if not gives_on else ():
            held += [(file, name) for name in self._placed.get(file, {})]
        held += [*self._given_on(path), *self._built_outside(path)] if not gives_on else []
        for file, name in dict.fromkeys(held):
            for kind, is_cause in self._staying(file, name):
                program: _Known = (kind, f"{path}:")
                place: _Known = (kind, f"{file}:{name}" if is_cause else f"{file}:{name}(needs)")
                yield program, place
                if is_cause:
                    yield place, program
        yield from self._with_processes(path)
        for name, file, placed in self._naming[path]:
            for kind, is_cause in self._staying(file, placed):
                one: _Known = (kind, f"{path}:{name}" if is_cause else f"{path}:{name}(needs)")
                other: _Known = (kind, f"{file}:{placed}" if is_cause else f"{file}:{placed}(needs)")
                yield one, other
                if is_cause:
                    yield other, one

    def _staying(self, path: Path, name: str) -> list[tuple[Kind, bool]]:
        """The kinds of which a placed name is, and of which anything stays: no other can reach it."""
        return [one for one in self._placed.get(path, {}).get(name, {}) if one[0] in self._kinds]

    def _with_processes(self, path: Path) -> Iterator[tuple[_Known, _Known]]:
        """Pairs of the code of a file and each script that it starts as a process of its own.

        Two scripts that the same file starts are not joined by that.
        """
        started = (one for one in self._facts[path].outline.texts if one.names is Names.PROCESS)
        own = [
            (name, kind)
            for name, kinds in self._placed.get(path, {}).items()
            for kind, is_cause in kinds
            if is_cause
        ]
        for file, _ in dict.fromkeys(found for text in started for found in self._named_by(path, text)):
            for script, kinds in self._placed.get(file, {}).items():
                for kind, is_cause in kinds:
                    place: _Known = (kind, f"{file}:{script}" if is_cause else f"{file}:{script}(needs)")
                    yield from (((kind, f"{path}:{name}"), place) for name, one in own if one is kind)
                    if is_cause:
                        yield place, (kind, f"{path}:")

    def _runs(self, path: Path) -> Iterator[tuple[_Known, _Known]]:
        """Pairs of what runs, also through others, and what it is run by: functions, or a file's program.

        If code stays that a program runs, so does what chooses the device of the program; if a program stays,
        so does the code that it runs. Two programs that run the same function are not joined by that.
        """
        known = self._facts[path].outline
        runs, imported = self._run_of(path)
        gives_on = path.name == "__init__.py" and path not in self._placed
        imported = [] if gives_on else imported
        named = [one for text in known.texts for one in self._named_by(path, text)]
        looked_up = [
            (name, one)
            for name, held in known.looks_up.items()
            for text in held
            for one in self._named_by(path, text)
        ]
        for kind in (one for one in _FOLLOWED if one in self._kinds):
            program: _Known = (kind, f"{path}:")
            module: _Known = (kind, f"{path}:{MODULE}{_RUNS}")
            for name, kinds in self._placed.get(path, {}).items():
                if (kind, True) in kinds:
                    yield (kind, f"{path}:{name}"), (kind, f"{path}:{name}{_RUNS}")
                    yield (kind, f"{path}:{name}"), module
                    yield (kind, f"{path}:{name}{_RUN_BY}"), (kind, f"{path}:{name}")
            for name, (file, run) in runs:
                yield (kind, f"{file}:{run}{_RUNS}"), (kind, f"{path}:{name}{_RUNS}")
                yield (kind, f"{path}:{name}{_RUN_BY}"), (kind, f"{file}:{run}{_RUN_BY}")
            for file, run in imported:
                yield (kind, f"{file}:{run}{_RUNS}"), program
                yield program, (kind, f"{file}:{run}{_RUN_BY}")
                yield (kind, f"{file}:{run}{_RUNS}"), module
            for file in self._imported_directly(path):
                yield (kind, f"{file}:{MODULE}{_RUNS}"), module
                # The code of a module runs when it is imported, also by what the program imports.
                yield program, (kind, f"{file}:{MODULE}{_RUN_BY}")
                yield (kind, f"{path}:{MODULE}{_RUN_BY}"), (kind, f"{file}:{MODULE}{_RUN_BY}")
            for file, run in named:
                yield (kind, f"{file}:{run}{_RUNS}"), program
            for name, (file, run) in looked_up:
                yield (kind, f"{file}:{run}{_RUNS}"), (kind, f"{path}:{name}{_RUNS}")

    def _run_of(self, path: Path) -> tuple[list[tuple[str, _Home]], list[_Home]]:
        """What :meth:`_run_and_imported` finds, which is looked up once."""
        if path not in self._lookups.run:
            self._lookups.run[path] = self._run_and_imported(path)
        return self._lookups.run[path]

    def _run_and_imported(self, path: Path) -> tuple[list[tuple[str, _Home]], list[_Home]]:
        """What the functions of a file run, each with its name, and what the file imports by name."""
        known = self._facts[path].outline
        using: dict[str, set[str]] = {
            name: {*known.mentions.get(name, ()), *known.reads.get(name, ())}
            for name in dict.fromkeys((*known.mentions, *known.reads))
        }
        runs = [
            (name, home)
            for name, texts in using.items()
            for text in sorted(texts)
            if (home := self._named(path, text)) is not None
        ]
        imported = [home for full in sorted(known.uses) if (home := self._named(path, full)) is not None]
        return runs, [*imported, *self._given_on(path)]

    def _reported(self, path: Path) -> Iterator[tuple[_Known, _Known]]:
        """Pairs of a place that a file uses, also through others, and what the file tells of the device."""
        known = self._facts[path]
        if not any(symbol.kind is Kind.REPORT for symbol in (*known.relies, *known.stays)):
            return
        report: _Known = (Kind.REPORT, f"{path}:")
        kept: _Known = (Kind.REPORT, f"{path}:(stays)")
        for home, name in self._reached(path):
            if (Kind.PLACE, True) in self._placed.get(home, {}).get(name, {}):
                yield (Kind.PLACE, f"{home}:{name}"), report
                yield kept, (Kind.PLACE, f"{home}:{name}")

    def _reached(self, path: Path) -> set[tuple[Path, str]]:
        """The functions, classes and names of other files that a file uses, directly or through others."""
        found: set[tuple[Path, str]] = set()
        waiting = [(path, full) for full in self._facts[path].outline.uses]
        while waiting:
            at, text = waiting.pop()
            home = self._named(at, text)
            if home is None or home in found:
                continue
            found |= {home, (home[0], MODULE)}
            known = self._facts[home[0]].outline
            used = (*known.mentions.get(home[1], ()), *known.reads.get(home[1], ()))
            waiting += [(home[0], one) for one in used]
        return {one for one in found if one[0] != path}

    def _ignored(self, path: Path) -> Iterator[tuple[_Known, _Known]]:
        """Pairs of a guard of test files and each of these: if one of them stays, so does the other."""
        symbols = dict.fromkeys((*self._facts[path].relies, *self._facts[path].stays))
        for symbol in symbols:
            if symbol.kind is not Kind.TEST or not symbol.text.startswith("files:"):
                continue
            guard = (Kind.TEST, self._name_of_tests(path, symbol.text))
            pattern = symbol.text.partition(":")[2]
            below = [one for one in self._facts if one != path and one.is_relative_to(path.parent)]
            forms = (f"*/{pattern}", f"*/{pattern}/*", f"*/*{pattern}*.py")
            for one in below:
                name = f"/{one.relative_to(path.parent).as_posix()}"
                if any(fnmatchcase(name, form) for form in forms):
                    yield (Kind.TEST, self._name_of_tests(one, f"file:{WITHIN}")), guard
                    yield guard, (Kind.TEST, self._name_of_tests(one, "file:"))

    def _name_of_tests(self, path: Path, text: str) -> str:
        """The text of a symbol of tests, with the file if it is about files."""
        return f"{path}:{text}" if text.startswith("file") else text

    def _imported_whole(self, path: Path) -> set[Path]:
        """The files of which a file imports all names, directly or through others."""
        found: set[Path] = set()
        waiting = [path]
        while waiting:
            at = waiting.pop()
            stars = (one for star in self._facts[at].outline.stars for one in self._files_of(at, star))
            new = set(stars) - found
            found |= new
            waiting += new
        return found

    def _given_on(self, path: Path) -> list[tuple[Path, str]]:
        """What the modules give on whose names a file imports all: what they import by name."""
        fulls = (
            (one, full)
            for one in self._imported_whole(path)
            for full in self._facts[one].outline.names.values()
        )
        return [home for one, full in fulls if (home := self._named(one, full)) is not None]

    # -- names -------------------------------------------------------------------------------------------

    def _known(self, path: Path, symbol: Symbol) -> _Known | None:
        if symbol.kind is Kind.REPORT:
            return symbol.kind, f"{path}:{symbol.text.removeprefix('here:')}"
        if symbol.kind is Kind.TEST:
            return symbol.kind, self._name_of_tests(path, symbol.text)
        if symbol.kind in TOGETHER:
            return symbol.kind, f"{path}:{symbol.text.removeprefix('here:')}"
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
            return f"{self._made_by(path, name)}{end}"
        if kind == "any":
            return text
        if kind == "star":
            homes = (self._home(path, star, name) for star in self._facts[path].outline.stars)
            found = next((home for home in homes if home is not None), None)
            return f"{self._made_by(*found)}{end}" if found is not None else ""
        if not name:
            return ""
        owner, attribute = _parted(name)
        if kind == "self":
            return f"{self._family(f'{path}:{owner}')}.{attribute}{end}"
        if kind == "from" and (home := self._home(path, owner, attribute)) is not None:
            return f"{self._made_by(*home)}{end}"
        # A method of a class: `Config.device()`, also of one that is imported with its module.
        made = self._name(path, owner if kind == "of" else f"from:{owner}" if "." in owner.strip(".") else "")
        return f"{self._family(made)}.{attribute}{end}" if made else ""

    def _made_by(self, path: Path, name: str) -> str:
        """A function, or for a class its family: related classes give each other's constructors arguments."""
        return self._family(f"{path}:{name}")

    def _home(self, path: Path, module: str, name: str) -> tuple[Path, str] | None:
        """The file that defines a name which another imports from its module or its package, and the name."""
        found = self._givers(path, module, name, _FEW_STEPS)
        if len(found) > 1:
            found = {one for one in found if one[0].parent == path.parent}
        elif not found and module.startswith("."):  # the package around gives it on
            around = _folder(path, module)
            found = {(home, name) for home in self._homes.get(name, ()) if home.is_relative_to(around)}
        elif not found and (package := _parts(path, module)[:1]):
            found = {(home, name) for home in self._homes.get(name, ()) if package[0] in home.parts}
        return found.pop() if len(found) == 1 else None

    def _givers(self, path: Path, module: str, name: str, steps: int) -> set[tuple[Path, str]]:
        """The files that define a name of a module, which may import it from another, with its name there."""
        found: set[tuple[Path, str]] = set()
        for home in self._files_of(path, module) if steps else ():
            known = self._facts[home].outline
            if name in known.defines or known == Outline():
                found.add((home, name))
            elif name in known.names:
                found |= self._givers(home, *_parted(known.names[name]), steps - 1)
            else:
                found |= {one for star in known.stars for one in self._givers(home, star, name, steps - 1)}
        return found

    def _family(self, name: str) -> str:
        """The class that stands for a class and those that it is related to."""
        way = [name]
        while (above := self._parents.get(way[-1], way[-1])) != way[-1]:
            way.append(above)
        for one in way[:-1]:
            self._parents[one] = way[-1]
        return way[-1]


def _packages(outline: Outline) -> set[str]:
    """The first names of the modules that a file imports."""
    return {one.partition(".")[0] for one in outline.imports if not one.startswith(".")}


def _is_loose(text: str) -> bool:
    """Whether a symbol is an attribute of any object, which files share that know each other."""
    return text.startswith("any:")


def _owner(meant: _Known) -> str:
    """The function, class or name of a module in a symbol, with its file; ``""`` for a loose one."""
    home, _, name = meant[1].rpartition(":")
    return "" if _is_loose(meant[1]) or not home else f"{home}:{re.split('[.(]', name)[0]}"


def _parted(full: str) -> tuple[str, str]:
    """The module and the last name of a full name: ``.`` and ``cuda`` of ``.cuda``."""
    owner, _, name = full.rpartition(".")
    return (f"{owner}." if full.startswith(".") and not owner.strip(".") else owner), name


def _parts(path: Path, module: str) -> tuple[str, ...]:
    """The parts of a module's name; of a relative one, those of its path."""
    parts = tuple(part for part in module.split(".") if part)
    return (*_folder(path, module).parts, *parts) if module.startswith(".") else parts


def _folder(path: Path, module: str) -> Path:
    """The folder in which a file looks for a relative module."""
    level = len(module) - len(module.lstrip("."))
    return path.parents[level - 1] if level <= len(path.parents) else path.parent


def _shown(place: _Place) -> str:
    """A place in another file; without the line in a notebook, whose lines are counted by cell."""
    return str(place[0]) if place[0].suffix == ".ipynb" else f"{place[0]}:{place[1]}"


def _is_like(parts: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Whether the parts of a path are those of a module's name, of which some are computed."""
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _nearness(folder: tuple[str, ...], root: tuple[str, ...]) -> tuple[int, bool]:
    """How many folders two have in common, and whether the second one holds the first."""
    common = next((n for n, (one, other) in enumerate(zip(folder, root, strict=False)) if one != other), None)
    shared = min(len(folder), len(root)) if common is None else common
    return shared, shared == len(root)


def _module(path: Path) -> Path:
    """A file without its suffix; a package's folder in place of its ``__init__.py``."""
    return path.parent if path.name == "__init__.py" else path.with_suffix("")
