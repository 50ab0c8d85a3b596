"""The modules, classes and scripts of a project that a file names in its texts, and imports or runs by them.

``import_module(f"models.{name}")``, ``construct(class_name="training.networks.Generator")`` and
``os.system("python train.py")`` use other files as an import does.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cached_property
from typing import NamedTuple, TypeGuard

from acclimate_port.source.calls_by_text import (
    FINDING,
    IMPORTING,
    RUNNING_FILES,
    STARTING,
    STARTING_WORDS,
)
from acclimate_port.source.tree import python_nodes


class Names(Enum):
    """What a text names."""

    NAME = "name"
    """A class, function or name of a module: ``training.networks.Generator``."""
    MODULE = "module"
    """Modules, with ``*`` for what is computed: ``models.*``, and ``.*`` for those beside the file."""
    SCRIPT = "script"
    """A file to run: ``train.py``."""
    PROCESS = "process"
    """One that a process of its own runs, as a command line does."""
    SETTINGS = "settings"
    """A file of settings: ``conf/config.yaml``."""
    ANY = "any"
    """A name that is not known: of a setting, a file of settings or a pickle."""
    FILE = "file"
    """A file of Python whose path is not known, and that the program runs: a configuration."""
    PLUGIN = "plugin"
    """The entry points that another file declares."""
    POINT = "point"
    """An entry point that a build script declares: ``main`` of ``"run = pkg.cli:main"``."""


class Text(NamedTuple):
    """A text, and what it names."""

    names: Names
    text: str


_DOTTED = re.compile(r"""["']((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*(?::[A-Za-z_]\w*)?)["']""")
_NO_NAME = re.compile(
    r"^(torch|numpy|os|sys|math|typing|logging|collections|functools|transformers)\."
    r"|\.(weight|bias|py|pth?|ckpt|bin|json|ya?ml|txt|csv|np[yz]|png|jpe?g|md|log|pkl|pickle|gz|zip|mp4|wav)$"
)
"""Texts with dots that name nothing of a project: of other packages, files, and entries of checkpoints."""
_IMPORTS = re.compile(rf"\b(?:{'|'.join(one for one in IMPORTING if one != 'locate')}|pydoc)\b")
_FINDS = re.compile(rf"\bhydra\b.*\binstantiate\b|\b(?:{'|'.join(FINDING[1:])})\b")
_LISTS = re.compile(r"\b(?:listdir|iter_modules|walk_packages|i?glob|iterdir|scandir)\(")
_RUNS = re.compile(
    rf"\bsubprocess\b|{STARTING}\(|\brunpy\b|\bPopen\(|\bspec_from_file_location\b|(?<![\w.])exec\("
)
_RUN_WORDS = (*STARTING_WORDS, "runpy", "exec(", "spec_from_file_location")
"""One of these is in each text that the pattern finds; looking for them takes a tenth of its time."""
_RUNS_FILES = re.compile(
    rf"\b(?:{'|'.join(RUNNING_FILES)})\b|(?<![\w.])exec\(|\b\w*Config\.fromfile\(|\bLazyConfig\.load\("
)
_FILE_WORDS = (*RUNNING_FILES, "exec(", "Config.fromfile(", "LazyConfig.load(")
"""One of these is in each text that the pattern finds."""
_CHOOSES = re.compile(r"cuda|device|gpu", re.IGNORECASE)
_IMPORT = re.compile(r"\s*(?:from|import)\s+([\w.*]+)")
_FINDS_PLUGINS = re.compile(r"\b(?:iter_)?entry_points\(|\bstevedore\b")
_POINT = re.compile(
    r"""["']?\s*[\w.-]+["']?\s*=\s*["']?\s*((?:\w+\.)*\w+):(\w+)[\w.]*\s*(?:\[[\w, ]*\]\s*)?["']?\s*$"""
)
_RUNS_HERE = re.compile(r"\brunpy\b|\bspec_from_file_location\b|(?<![\w.])exec\(")
"""Those that run a file in the same process."""
_SETTINGS = re.compile(r"""["']((?:[\w.-]+/)*[\w.-]+\.(?:ya?ml|json|toml))["']""")
_FOLDER = re.compile(r"""\b(?:config_path\s*=|hydra\.main\(|\binitialize\()\s*["']([\w./-]+)["']""")
_SETTINGS_NAME = re.compile(r"""\b(?:config_name\s*=|compose\()\s*["']([\w./-]+)["']""")
"""The folder and the name of hydra's settings, which may lack the suffix."""
_SCRIPT = re.compile(r"(?<![\w*{}])((?:[\w.-]+/)*\w[\w-]*\.py)(?![\w.])")
_RUN_MODULE = re.compile(r"-m[ =]([A-Za-z_][\w.]*)")
_WHOLE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*$")
_COMPUTED = re.compile(r"[A-Za-z_]\w*(?:\.[\w*]+)*\.[\w*]+$")
_FORMATS = re.compile(r"%\(?\w*\)?[sdr]|\{[^{}]*\}")
_MODULE_WORDS = ("name", "mod_name", "path")
"""The words for the first argument of functions that import a module by its name."""
_OWN_NAMES = ("__name__", "__package__")
_UNKNOWN = "*"
_HERE = "."
"""Stands for the package of the file itself."""
_MOST = 8
"""The most texts that one expression may give."""
_DEEPEST = 6


_WORDS = r"(\w*(?:device|backend|accelerator)\w*)"
_READ = re.compile(
    rf"""\b\w*(?:arg|cfg|conf|opt|param|setting)\w*(?:\.\w+|\[[^][]*\])*\.{_WORDS}\b|\[["']{_WORDS}["']\]"""
    rf"""|\bget(?:attr)?\((?:\w+,\s*)?["']{_WORDS}["']""",
    re.IGNORECASE,
)
_SETTINGS_WORDS = ("device", "backend", "accelerator")
_READS_ALL = re.compile(r"\*\*\w*(?:arg|cfg|conf|opt|param|setting)\w*", re.IGNORECASE)


def settings_read(text: str) -> frozenset[str]:
    """The settings for a device or a backend that a file reads; ``*`` if it may read any of them."""
    if not any(word in text for word in _SETTINGS_WORDS):
        return frozenset()
    lines = "\n".join(
        line for line in text.splitlines() if any(word in line.lower() for word in _SETTINGS_WORDS)
    )
    found = {name for read in _READ.finditer(lines) for name in read.groups() if name}
    return frozenset(found | ({_UNKNOWN} if _READS_ALL.search(text) else set()))


class NamedInTexts:
    """What a file names in its texts.

    Args:
        text: the file.
        module: its tree.
    """

    def __init__(self, text: str, module: ast.AST) -> None:
        self._text = text
        self._module = module
        self._starts: list[int] = []
        self._found: list[tuple[int, Text]] = []
        """The line of each text, and what it names."""
        is_likely = any(word in text for word in (*IMPORTING, *FINDING, "pydoc"))
        imports = is_likely and (_IMPORTS.search(text) is not None or _FINDS.search(text) is not None)
        for found in _DOTTED.finditer(text):
            if not _NO_NAME.search(found[1]):
                name = found[1].replace(":", ".")
                line = self._line(found.start())
                self._found.append((line, Text(Names.NAME, name)))
                self._found += [(line, Text(Names.MODULE, name))] if imports else []
        if imports:
            self._found += self._imported()
        if (
            (".py" in text or "-m" in text)
            and any(word in text for word in _RUN_WORDS)
            and _RUNS.search(text)
        ):
            self._found += self._run()
        is_build = "setuptools" in text or "distutils" in text  # it reads its version so
        if not is_build and any(word in text for word in _FILE_WORDS) and _RUNS_FILES.search(text):
            self._found += self._run_by_path()
        if _FINDS_PLUGINS.search(text) and ".load" in text:
            self._found.append((0, Text(Names.PLUGIN, _UNKNOWN)))
        if "entry_points" in text:
            self._found += [(0, one) for one in points_declared(text)]
        self._found += self._settings()

    def all(self) -> frozenset[Text]:
        """All that the file names."""
        return frozenset(found for _, found in self._found)

    def lines(self) -> list[tuple[int, Text]]:
        """All that the file names of code, with the line of each."""
        return [one for one in self._found if one[1].names in (Names.MODULE, Names.NAME, Names.ANY)]

    def by_statement(self, statements: Iterable[tuple[str, ast.AST]]) -> dict[str, frozenset[Text]]:
        """What classes, tables and functions name: of functions, the modules alone that they import.

        Args:
            statements: the statements of the module, each with the name that it binds.
        """
        held: dict[str, set[Text]] = defaultdict(set)
        for name, statement in statements if self._found else ():
            if not isinstance(statement, ast.stmt):
                continue
            is_function = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
            kinds = (Names.MODULE, Names.ANY, *([] if is_function else [Names.NAME]))
            last = statement.end_lineno or statement.lineno
            held[name] |= {
                one for line, one in self._found if statement.lineno <= line <= last and one.names in kinds
            }
        return {name: frozenset(texts) for name, texts in held.items() if texts}

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return python_nodes(self._module)

    @cached_property
    def _bound(self) -> dict[str, list[ast.expr]]:
        """The values that names of the file are given."""
        found: dict[str, list[ast.expr]] = defaultdict(list)
        for node in self._nodes:
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Name) and isinstance(node, ast.Assign):
                    found[target.id].append(node.value)
        return found

    def _line(self, at: int) -> int:
        if not self._starts:
            self._starts = [0, *(found.end() for found in re.finditer("\n", self._text))]
        return bisect_right(self._starts, at)

    def _imported(self) -> Iterator[tuple[int, Text]]:
        """The modules whose names are computed, and that are imported by them."""
        bound: dict[str, list[ast.expr]] = defaultdict(list)
        calls: list[tuple[ast.Call, ast.expr]] = []
        made: list[ast.expr] = []
        for node in self._nodes:
            if isinstance(node, (ast.JoinedStr, ast.BinOp)) or _is_format(node):
                made.append(node)
            named = _module_given(node) if isinstance(node, ast.Call) else None
            if isinstance(node, ast.Call) and named is not None and _name(node.func) in IMPORTING:
                calls.append((node, named))
            elif isinstance(node, ast.Call) and node.args and _name(node.func) in FINDING:
                yield node.lineno, Text(Names.ANY, _UNKNOWN)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        bound[target.id].append(node.value)
        lists = _LISTS.search(self._text) is not None
        given = [text for _, named in calls for text in _texts(named, bound, _DEEPEST)]
        for node in made if _UNKNOWN in given else ():  # a table may hold the texts
            texts = (text for text in _texts(node, bound, _DEEPEST) if _COMPUTED.match(text))
            yield from ((node.lineno, Text(Names.MODULE, text)) for text in texts)
        for call, module in calls:
            package = [one.value for one in call.keywords if one.arg == "package"] or call.args[1:2]
            for text in _texts(module, bound, _DEEPEST):
                whole = text.replace("/", ".")
                if whole.startswith(_HERE) and package:
                    base = package[0].value if isinstance(package[0], ast.Constant) else ""
                    whole = f"{base}{whole}" if isinstance(base, str) else whole
                if whole.startswith(_UNKNOWN) and lists:
                    whole = f"{_HERE}{_UNKNOWN}"
                if whole.strip(_HERE) and not whole.startswith(_UNKNOWN):
                    yield call.lineno, Text(Names.MODULE, whole)
                elif whole == _UNKNOWN:
                    yield call.lineno, Text(Names.ANY, whole)

    def _run_by_path(self) -> Iterator[tuple[int, Text]]:
        """The files of Python that run by a path, and the modules of imports that are put together."""
        for node in self._nodes:
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = _name(node.func)
            owner = _name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            is_runner = name in RUNNING_FILES or (name, owner) == ("load", "LazyConfig")
            is_runner = is_runner or (name == "fromfile" and owner.endswith("Config"))
            if name == "exec" and isinstance(node.func, ast.Name):
                found = [_IMPORT.match(one) for one in _texts(node.args[0], self._bound, _DEEPEST)]
                # A module that has nothing to do with devices takes one of several that choose their own.
                for one in found if _CHOOSES.search(self._text) else ():
                    yield from [(node.lineno, Text(Names.MODULE, one[1]))] if one is not None else []
                is_runner = not any(found)
            if is_runner and not any(_SCRIPT.search(text) for text in _constants(node)):
                yield node.lineno, Text(Names.FILE, _UNKNOWN)

    def _settings(self) -> Iterator[tuple[int, Text]]:
        """The files of settings."""
        for found in _SETTINGS.finditer(self._text):
            yield self._line(found.start()), Text(Names.SETTINGS, found[1])
        named = [*_SETTINGS_NAME.finditer(self._text)] if "hydra" in self._text else []
        folders = [found[1] for found in _FOLDER.finditer(self._text)] if named else []
        for found in named:
            name = found[1] if found[1].endswith((".yaml", ".yml")) else f"{found[1]}.yaml"
            for folder in folders or ["."]:
                yield self._line(found.start()), Text(Names.SETTINGS, f"{folder}/{name}")

    def _run(self) -> Iterator[tuple[int, Text]]:
        """The scripts and modules of command lines."""
        said = {
            id(node.value)
            for node in self._nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        kind = Names.SCRIPT if _RUNS_HERE.search(self._text) else Names.PROCESS
        for node in self._nodes:
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in said:
                continue
            for found in _SCRIPT.finditer(node.value):
                yield node.lineno, Text(kind, found[1])
            modules = [found[1] for found in _RUN_MODULE.finditer(node.value)]
            if "." in node.value and _WHOLE.match(node.value) and not _NO_NAME.search(node.value):
                modules.append(node.value)
            yield from ((node.lineno, Text(Names.MODULE, one)) for one in modules)


def _module_given(call: ast.Call) -> ast.expr | None:
    """The name of a module that a call gets: ``import_module(name=…)``."""
    named = [one.value for one in call.keywords if one.arg in _MODULE_WORDS]
    return next(iter((*call.args[:1], *named)), None)


def points_declared(text: str) -> Iterator[Text]:
    """The entry points that a build script, or a file of settings for it, declares."""
    for line in re.split(r"[\n,\[\]]", text):
        if found := _POINT.match(line.strip()):
            yield Text(Names.POINT, f"{found[1]}.{found[2]}")


def _constants(node: ast.AST) -> Iterator[str]:
    """The texts in an expression."""
    for one in python_nodes(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def _is_format(node: ast.AST) -> TypeGuard[ast.expr]:
    """Whether an expression is a call of a text's method ``format``."""
    return isinstance(node, ast.Call) and _name(node.func) == "format"


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _texts(node: ast.expr, bound: dict[str, list[ast.expr]], depth: int) -> list[str]:
    """The texts that an expression may give, with ``*`` for what is not known."""
    if not depth:
        return [_UNKNOWN]
    if isinstance(node, ast.Constant):
        return [node.value if isinstance(node.value, str) else _UNKNOWN]
    if isinstance(node, ast.Name):
        if node.id in _OWN_NAMES:
            return [""]
        values = bound.get(node.id, [])[:_MOST]
        return _few(text for value in values for text in _texts(value, bound, depth - 1)) or [_UNKNOWN]
    if isinstance(node, ast.JoinedStr):
        return _joined(
            [one.value if isinstance(one, ast.FormattedValue) else one for one in node.values], bound, depth
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined([node.left, node.right], bound, depth)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return [_FORMATS.sub(_UNKNOWN, one) for one in _texts(node.left, bound, depth - 1)]
    if isinstance(node, ast.IfExp):
        return _few(text for one in (node.body, node.orelse) for text in _texts(one, bound, depth - 1))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        receiver, name = node.func.value, node.func.attr
        if name == "format":
            return [_FORMATS.sub(_UNKNOWN, one) for one in _texts(receiver, bound, depth - 1)]
        if name in ("replace", "lower", "strip"):
            return _texts(receiver, bound, depth - 1)
        parts = node.args[0] if name == "join" and node.args else None
        if isinstance(parts, (ast.List, ast.Tuple)) and isinstance(receiver, ast.Constant):
            between = ast.Constant(str(receiver.value))
            return _joined([one for part in parts.elts for one in (between, part)][1:], bound, depth)
    return [_UNKNOWN]


def _joined(parts: list[ast.expr], bound: dict[str, list[ast.expr]], depth: int) -> list[str]:
    """The texts that parts give one after another."""
    found = [""]
    for part in parts:
        found = _few(f"{one}{text}" for one in found for text in _texts(part, bound, depth - 1))
    return found


def _few(texts: Iterable[str]) -> list[str]:
    return [*dict.fromkeys(texts)][:_MOST]
