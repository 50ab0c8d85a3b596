"""What a file defines and imports, and the bases of its classes, by Python's own parser."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from acclimate_port.source.named_in_texts import NamedInTexts, Names, Text, settings_read
from acclimate_port.source.needed_extensions import always_imported
from acclimate_port.source.tree import (
    last_python_name,
    module_of,
    parse_as_python,
    python_nodes,
    text_of,
)

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_OWN_NAMES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NAMING = {ast.Name, ast.Attribute, ast.Subscript, ast.Call}
"""What names something, or looks it up."""
_ADD = {"append", "add", "setdefault", "insert"}
"""Methods that add their last argument to a list, a set or a dictionary."""
_OF_PYTHON = {*dir(builtins)}
_GENERATES = "pytest_generate_tests"
"""The function by which pytest asks a module for the parameters of tests."""
ALL_TESTS = "*"
"""The name of a fixture that all tests get."""
_MOST_IMPORTS = 4
"""The most imports of one name that are followed."""
_LOOK_UP = {"get", "build"}
"""Methods that look an entry of a table or of a registry up."""
REGISTERS = re.compile(r"(^|_)regist(er?|ry|ers)(_|$)")
"""Names of functions and methods that enter something in a table: ``@MODELS.register_module()``."""
NO_PROJECT = re.compile(r"(torch|numpy|os|sys|math|typing|logging|collections|functools|transformers)(\.|$)")
"""Packages that no project defines, so that the names in them need not be looked up."""
_ATTRIBUTES = re.compile(r"(?<![\w.])(\w+)((?:\.\w+){1,3})")

_IMPORT_STATEMENT = re.compile(
    r"^[ \t]*(from[ \t]+[\w.]+[ \t]+import[ \t]+(?:\([^)]*\)|[^\n]*)|import[ \t]+[^\n]*)", re.M
)

_DEFINITION = re.compile(
    r"^(?:class|(?:async[ \t]+)?def|cp?def(?=[ \t][^\n=]*[(:]))"
    r"[ \t]+(?:[\w.*]+[ \t]+)*?(\w+)(?=[ \t]*[\[(:])",
    re.M,
)
"""A function or class of Python or Cython: ``cpdef inline double area(x)``."""
_TOP_LINE = re.compile(r"^[^\s#)\]}]", re.M)
_CHAIN = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Outline:
    """The names of a file that others use, and the other files that it uses."""

    defines: frozenset[str] = frozenset()
    """The names that the module binds, other than by imports."""
    imports: frozenset[str] = frozenset()
    """The modules that it imports, with their dots if they are relative, and the names imported from them."""
    names: dict[str, str] = field(default_factory=dict)
    """The full name of each name that an import binds; of several imports of one name, the last."""
    stars: tuple[str, ...] = ()
    """The modules of which it imports all names."""
    uses: frozenset[str] = frozenset()
    """The full names of what it imports, and of the attributes of these: ``pkg.utils.f`` of ``utils.f()``."""
    mentions: dict[str, frozenset[str]] = field(default_factory=dict)
    """The names of the module that each function, class or assignment of it mentions, and those of imports.

    Of the imports that a function mentions, those alone that it looks an entry up in: ``MODELS[name]``.
    """
    reads: dict[str, frozenset[str]] = field(default_factory=dict)
    """The full names of all that each function mentions of imports."""
    registered: frozenset[tuple[str, str]] = frozenset()
    """Pairs of a function or class of the file, and the function or method that may register it.

    The second is of the module, or the full name of an import: ``register`` of ``@register("mean")``, and
    ``pkg.parts.MODELS.register`` of ``@MODELS.register("mean")``.
    """
    fills: frozenset[tuple[str, str]] = frozenset()
    """Pairs of a function that registers, and the table of a module that gets what the function is given."""
    bases: frozenset[tuple[str, str]] = frozenset()
    """Pairs of a class of the file and the text of a base: ``here:Base``, ``from:pkg.mod.Base``."""
    texts: frozenset[Text] = frozenset()
    """What it names in its texts, and imports or runs by them: ``"training.networks.Generator"``."""
    is_script: bool = False
    """Whether it does something when it runs, besides that it defines names."""
    looks_up: dict[str, frozenset[Text]] = field(default_factory=dict)
    """What each class and table names in texts, and the modules that each function imports by them.

    Also the modules that a table holds: ``{"nerf": nerf}``.
    """
    settings: frozenset[str] = frozenset()
    """The settings for a device or a backend that it reads; ``*`` for any."""
    fixtures: dict[str, str] = field(default_factory=dict)
    """The function that gives the value of each fixture of pytest, or of a parameter of tests."""
    takes: dict[str, frozenset[str]] = field(default_factory=dict)
    """The names of the fixtures that each test, class of tests and fixture may get."""
    always: tuple[str, ...] = ()
    """The modules that are imported whenever this one is, with the names that may be modules."""


def outline(source: str | bytes) -> Outline:
    """The outline of a file; an empty one if this Python cannot parse it."""
    module = module_of(source)
    if module is None:
        return Outline()
    bound: dict[str, dict[str, None]] = defaultdict(dict)
    modules: set[str] = set()
    stars: list[str] = []
    classes: list[ast.ClassDef] = []
    for statement in _statements(module):
        if isinstance(statement, ast.ClassDef):
            classes.append(statement)
        elif isinstance(statement, ast.Import):
            modules |= {alias.name for alias in statement.names}
            for alias in statement.names:
                first = alias.name.partition(".")[0]
                full = alias.name if alias.asname is not None else first
                bound[alias.asname or first][full] = None
        elif isinstance(statement, ast.ImportFrom):
            start = "." * statement.level + (statement.module or "")
            modules.add(start)
            for alias in statement.names:
                if alias.name == "*":
                    stars.append(start)
                else:
                    full = f"{start}{'' if start.endswith('.') else '.'}{alias.name}"
                    bound[alias.asname or alias.name][full] = None
    imported = {name: [*full] for name, full in bound.items()}
    # The branches of a program may import different things under one name: each of them counts.
    choices = [
        {name: held[min(at, len(held) - 1)] for name, held in imported.items()}
        for at in range(min(max(map(len, imported.values()), default=1), _MOST_IMPORTS))
    ]
    names = {name: held[-1] for name, held in imported.items()}
    statements = list(_of_module(module))
    defined = {name: [one] for one in statements for name in _bound_by(one)}
    bases = [(one.name, _text(base, by)) for one in classes for base in one.bases for by in choices]
    if stars:
        bases = [(name, _given_by_star(text, {*defined})) for name, text in bases]
    for one in statements:
        for name in _filled_by(one) & defined.keys():
            defined[name].append(one)
    has_own_imports = any(not NO_PROJECT.match(full) for full in names.values())
    walked = {id(one): python_nodes(one) for held in defined.values() for one in held}
    fills = {
        (name, names.get(table, table))
        for name, held in defined.items()
        for table in _filled_by_function(held[0], walked[id(held[0])])
        if table in defined or table in names
    }
    naming = {key: [one for one in nodes if type(one) in _NAMING] for key, nodes in walked.items()}
    projects = [{name: full for name, full in by.items() if not NO_PROJECT.match(full)} for by in choices]
    own = {*defined}
    # A name that nothing binds may come from `from settings import *`.
    free = _loaded(module) - names.keys() if stars else set()
    registers = {name for name, _ in fills}
    text = text_of(source)
    texts = NamedInTexts(text, module)
    searches = any(word in text for word in ("getattr(", "vars(", "__dict__", "eval("))
    tabled = {
        name: frozenset(text for one in held for text in _tabled(one, walked[id(one)], names, searches))
        for name, held in defined.items()
    }
    # What a module runs itself: `main(getattr(models, name))`.
    loose = [one for one in module.body if searches and not isinstance(one, _OWN_NAMES)]
    searched = [text for one in loose for text in _tabled(one, python_nodes(one), names, searches)]
    looks_up = texts.by_statement((name, one) for name, held in defined.items() for one in held)
    return Outline(
        frozenset(defined),
        frozenset((*modules, *(full for held in bound.values() for full in held))),
        names,
        tuple(stars),
        frozenset(full for by in choices for full in _uses(source, by)),
        {
            name: frozenset(
                text
                for one in held
                for by in projects
                for text in _mentioned(one, naming[id(one)], (own | free) - {name}, by, registers)
            )
            for name, held in defined.items()
        },
        {
            name: frozenset(
                text for by in projects for text in _read(held[0], naming[id(held[0])], by, registers)
            )
            for name, held in defined.items()
            if isinstance(held[0], (ast.FunctionDef, ast.AsyncFunctionDef)) and has_own_imports
        },
        frozenset(pair for one in statements for pair in _registered_by(one, own, names)),
        frozenset(fills),
        frozenset(pair for pair in bases if pair[1]),
        texts.all().union(*tabled.values(), _given_whole(module, names), searched),
        _is_script(statements, own),
        {name: looks_up.get(name, frozenset()) | held for name, held in tabled.items()},
        settings_read(text),
        _fixtures(module),
        _takes(module),
        tuple(dict.fromkeys(one for one in always_imported(module) if not NO_PROJECT.match(one))),
    )


def _fixtures(module: ast.Module) -> dict[str, str]:
    """The functions that are fixtures of pytest, or give tests their parameters, by the names of these."""
    found: dict[str, str] = {}
    for function in module.body:
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if function.name == _GENERATES:
            texts = (one.value for one in python_nodes(function) if isinstance(one, ast.Constant))
            found |= {
                name: function.name for text in texts if isinstance(text, str) for name in text.split(",")
            }
        for call in filter(_is_fixture, function.decorator_list):
            words = {one.arg: one.value for one in getattr(call, "keywords", ())}
            named = getattr(words.get("name"), "value", function.name)
            is_for_all = getattr(words.get("autouse"), "value", False)
            found[ALL_TESTS if is_for_all else str(named)] = function.name
    return found


def _takes(module: ast.Module) -> dict[str, frozenset[str]]:
    """The parameters of the tests and fixtures of a module, by the name of the function or its class."""
    found: dict[str, frozenset[str]] = {}
    for owner in (one for one in module.body if isinstance(one, _OWN_NAMES)):
        held = owner.body if isinstance(owner, ast.ClassDef) else [owner]
        for function in held:
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if function.name.startswith("test") or any(map(_is_fixture, function.decorator_list)):
                named = (one for call in function.decorator_list for one in _fixtures_named(call))
                names = frozenset((*(one.arg for one in function.args.args), *named)) - {"self"}
                found[owner.name] = found.get(owner.name, frozenset()) | names
    return found


def _is_fixture(decorator: ast.expr) -> bool:
    named = decorator.func if isinstance(decorator, ast.Call) else decorator
    return last_python_name(named) == "fixture"


def _fixtures_named(decorator: ast.expr) -> Iterator[str]:
    """The fixtures that a decorator gives a test: ``@pytest.mark.usefixtures("gpu")``."""
    if isinstance(decorator, ast.Call) and last_python_name(decorator.func) == "usefixtures":
        yield from (str(one.value) for one in decorator.args if isinstance(one, ast.Constant))


def outline_of_refused(source: str) -> Outline:
    """The outline of a file that Python cannot parse, by its text: its names, and uses of imports."""
    imports = []
    for found in _IMPORT_STATEMENT.finditer(source):
        try:
            parse_as_python(found[1])
        except (SyntaxError, ValueError):
            continue
        imports.append(found[1])
    named = (
        f"def {name}():\n    ({', '.join(sorted(_names_in(text)))},)"
        for name, text, _ in blocks_of_refused(source)
    )
    return outline("\n".join([*imports, *named, *(f"# {line}" for line in source.splitlines())]))


def blocks_of_refused(source: str) -> Iterator[tuple[str, str, int]]:
    """The functions and classes of a text that Python cannot parse: the name, the code, and its start."""
    found = [*_DEFINITION.finditer(source)]
    for one in found:
        next_line = _TOP_LINE.search(source, one.end())
        yield one[1], source[one.start() : next_line.start() if next_line is not None else None], one.start()


def _names_in(text: str) -> set[str]:
    """The names in a text, those of attributes with the whole chain, and one that is always there."""
    return {"None"} | {
        chain for chain in _CHAIN.findall(text) if not any(map(keyword.iskeyword, chain.split(".")))
    }


def _is_script(statements: list[ast.AST], own: set[str]) -> bool:
    """Whether a module has a loop, ``if __name__ == "__main__":``, or a call of a function of its own."""
    for one in statements:
        if isinstance(one, (ast.For, ast.While)) or (isinstance(one, ast.With) and not _reads_base(one)):
            return True
        if isinstance(one, ast.If) and "__name__" in {
            n.id for n in python_nodes(one.test) if isinstance(n, ast.Name)
        }:
            return True
        call = one.value if isinstance(one, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in own:
            return True
    return False


def _reads_base(statement: ast.With) -> bool:
    """Whether a statement imports the configurations that one is based on: ``with read_base():``."""
    called = statement.items[0].context_expr
    return isinstance(called, ast.Call) and last_python_name(called.func) == "read_base"


def _tabled(
    statement: ast.AST, nodes: list[ast.AST], names: dict[str, str], searches: bool
) -> Iterator[Text]:
    """The modules, among other things that are imported, that are entries of a table: ``{"nerf": nerf}``.

    The table may be one that a function makes for itself.
    """
    is_own = isinstance(statement, (ast.Assign, *_OWN_NAMES))
    tables = [one for one in nodes if isinstance(one, ast.Dict)] if is_own else []
    for value in (value for table in tables for value in table.values):
        if isinstance(value, ast.Name) and value.id in names and not NO_PROJECT.match(names[value.id]):
            yield Text(Names.MODULE, names[value.id])
    for node in nodes if searches else ():
        module = _searched(node)
        if module is not None and (full := _full_name(module, names)):
            yield Text(Names.MODULE, full)
        first, *inner = _evaluated(node)
        if first in names:
            yield Text(Names.MODULE, ".".join([names[first], *inner]))


def _given_whole(module: ast.Module, names: dict[str, str]) -> Iterator[Text]:
    """The modules, among other imported things, that code gives away: ``super().__init__(args, func)``.

    Whoever gets a module may run all that is in it.
    """
    own = {name: full for name, full in names.items() if not NO_PROJECT.match(full)}
    for call in python_nodes(module) if own else ():
        if type(call) is ast.Call:
            for value in (*call.args, *(one.value for one in call.keywords)):
                if type(value) is ast.Name and value.id in own:
                    yield Text(Names.MODULE, own[value.id])


def _searched(node: ast.AST) -> ast.Name | ast.Attribute | None:
    """The module in which code looks for a name that it computes: ``getattr(models, name)``.

    The same for ``vars(models)`` and ``models.__dict__``.
    """
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        held: ast.expr | None = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        is_known = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
        held = node.args[0] if node.func.id in ("getattr", "vars") and not is_known else None
    else:
        held = None
    return held if isinstance(held, (ast.Name, ast.Attribute)) else None


def _evaluated(node: ast.AST) -> list[str]:
    """The parts of the module's name in a text that code evaluates: ``eval("models." + name + ".build")``."""
    is_one = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "eval"
    at: ast.AST | None = node.args[0] if is_one and isinstance(node, ast.Call) and node.args else None
    while at is not None and not isinstance(at, ast.Constant):
        if isinstance(at, ast.BinOp):
            at = at.left
        elif isinstance(at, ast.JoinedStr):
            at = at.values[0] if at.values else None
        elif isinstance(at, ast.Call) and isinstance(at.func, ast.Attribute):  # `"models.{}".format(name)`
            at = at.func.value
        else:
            at = None
    text = at.value if isinstance(at, ast.Constant) and isinstance(at.value, str) else ""
    return re.split(r"[({%]", text)[0].split(".")[:-1] or [""]


def _uses(source: str | bytes, names: dict[str, str]) -> Iterator[str]:
    """The full names of imported names, and of their attributes."""
    own = {local: full for local, full in names.items() if not NO_PROJECT.match(full)}
    yield from own.values()
    text = text_of(source)
    for found in _ATTRIBUTES.finditer(text) if own else ():
        if full := own.get(found[1]):
            for attribute in found[2].split(".")[1:]:
                full = f"{full}{'' if full.endswith('.') else '.'}{attribute}"
                yield full


def _mentioned(
    statement: ast.AST, nodes: list[ast.AST], own: set[str], names: dict[str, str], registers: set[str]
) -> Iterator[str]:
    """The names of the module, and the full names of what it imports, that a statement of it mentions.

    What registers a function or class uses it, and not the other way round.

    Args:
        statement: the statement.
        nodes: the names, attributes, entries and calls that it holds.
        own: the names of the module, and those that it may get from `import *`.
        names: the full names of imports of what the project may define.
        registers: the functions that register.
    """
    is_function = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
    looked_up: set[int] = set()
    registering = [one for one in _decorators(statement) if _may_register(one, registers, names)]
    skipped = {id(node) for one in registering for node in python_nodes(one)}
    if is_function and any(map(_looks_through_module, nodes)):
        yield from own
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Subscript) and is_function:
            looked_up.add(id(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_function:
            looked_up |= {id(node.func.value)} if node.func.attr in _LOOK_UP else set()
        elif isinstance(node, ast.Name) and node.id in own:
            yield node.id
        if isinstance(node, (ast.Name, ast.Attribute)) and (not is_function or id(node) in looked_up):
            full = _full_name(node, names)
            yield from [full] if full else []


def _looks_through_module(node: ast.AST) -> bool:
    """Whether code looks for a name of its own module: ``globals()[name]``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "globals"


def _read(
    function: ast.AST, nodes: list[ast.AST], names: dict[str, str], registers: set[str]
) -> Iterator[str]:
    """The full names of what a function mentions of imports, each with all its attributes.

    What registers the function is not meant, see :func:`_mentioned`.
    """
    inner: set[int] = set()
    for one in _decorators(function):
        if _may_register(one, registers, names):
            inner |= {id(node) for node in python_nodes(one)}
    for node in nodes:
        kind = type(node)
        if kind is ast.Attribute or kind is ast.Name:
            inner.add(id(getattr(node, "value", None)))
            if id(node) not in inner and isinstance(node, (ast.Name, ast.Attribute)):
                full = _full_name(node, names)
                yield from [full] if full else []


def _full_name(node: ast.Name | ast.Attribute, names: dict[str, str]) -> str:
    """The full name of a name of an import, or of an attribute of it; ``""`` for others."""
    parts: list[str] = []
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    full = names.get(at.id, "") if isinstance(at, ast.Name) else ""
    if not full or NO_PROJECT.match(full):
        return ""
    below = ".".join(reversed(parts))
    return f"{full}{'.' if below and not full.endswith('.') else ''}{below}"


def _statements(block: ast.AST) -> Iterator[ast.AST]:
    """All statements in a block, also those in functions and classes."""
    waiting = [block]
    while waiting:
        at = waiting.pop()
        yield at
        for name in _BLOCKS:
            held = getattr(at, name, ())
            waiting += held if isinstance(held, list) else ()


def _of_module(block: ast.AST) -> Iterator[ast.AST]:
    """The statements that the module itself runs."""
    waiting = [block]
    while waiting:
        at = waiting.pop()
        yield at
        for name in _BLOCKS if not isinstance(at, _OWN_NAMES) else ():
            waiting += getattr(at, name, ())


def _filled_by(statement: ast.AST) -> set[str]:
    """The tables to which a statement adds an entry: ``TABLE["mean"] = Mean``."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    entries = (one.value for one in targets if isinstance(one, ast.Subscript))
    return {one.id for one in entries if isinstance(one, ast.Name)}


def _filled_by_function(statement: ast.AST, nodes: list[ast.AST]) -> Iterator[str]:
    """The tables to which a function adds what it is given: ``TABLE[name] = f``, ``TABLE.append(f)``."""
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    functions = [node for node in nodes if isinstance(node, _FUNCTIONS)]
    given = {one.arg for own in functions for one in (*own.args.posonlyargs, *own.args.args)}
    given |= {one.arg for own in functions for one in own.args.kwonlyargs}
    for node in nodes if given else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in given:
            yield from _filled_by(node) - given
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            table, last = node.func.value, node.args[-1]
            is_entered = isinstance(last, ast.Name) and last.id in given and node.func.attr in _ADD
            if is_entered and isinstance(table, ast.Name) and table.id not in given:
                yield table.id


def _registered_by(statement: ast.AST, own: set[str], names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The functions and classes that a statement defines or names, each with what may register it.

    ``@register("mean")``, ``@MODELS.register_module()``, ``MODELS.register_module("mean", Mean)``.
    """
    if isinstance(statement, _OWN_NAMES):
        pairs = [(statement.name, _called(one)) for one in statement.decorator_list]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        given = [*call.args, *(one.value for one in call.keywords)]
        pairs = [(one.id, _called(call)) for one in given if isinstance(one, ast.Name) and one.id in own]
    else:
        return
    for name, function in pairs:
        text = _text_of(function, names)
        root = ast.unparse(function).partition(".")[0]
        if text and (root in own or root in names) and not NO_PROJECT.match(text):
            yield name, text


def _decorators(statement: ast.AST) -> list[ast.expr]:
    return statement.decorator_list if isinstance(statement, _OWN_NAMES) else []


def _may_register(decorator: ast.expr, registers: set[str], names: dict[str, str]) -> bool:
    """Whether a decorator is one of some functions that register, or has the name of one."""
    text = _text_of(_called(decorator), names)
    return text in registers or REGISTERS.search(text.rpartition(".")[2]) is not None


def _text_of(function: ast.expr, names: dict[str, str]) -> str:
    """The full name of a function that an import binds, or its own text; ``""`` if it is no name."""
    if not isinstance(function, (ast.Name, ast.Attribute)):
        return ""
    return _full_name(function, names) or ast.unparse(function)


def _called(node: ast.expr) -> ast.expr:
    """The function that a decorator calls, or is: ``register`` of ``@register("mean")``."""
    while isinstance(node, ast.Call):
        node = node.func
    return node


def _loaded(module: ast.Module) -> set[str]:
    """The names that a module reads, other than Python's own."""
    named = (one for one in python_nodes(module) if isinstance(one, ast.Name))
    return {one.id for one in named if isinstance(one.ctx, ast.Load)} - _OF_PYTHON


def _given_by_star(base: str, defined: set[str]) -> str:
    """The text of a base in a module that imports all names of another."""
    kind, _, name = base.partition(":")
    return f"star:{name}" if kind == "here" and name not in defined | _OF_PYTHON else base


def _bound_by(statement: ast.AST) -> Iterator[str]:
    if isinstance(statement, _OWN_NAMES):
        yield statement.name
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        parts = [part for one in targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
        yield from (part.id for part in parts if isinstance(part, ast.Name))


def _text(base: ast.expr, imported: dict[str, str]) -> str:
    """The text of the symbol of a base, without the types that it is given: ``Base[str]``."""
    if isinstance(base, ast.Subscript):
        return _text(base.value, imported)
    if isinstance(base, ast.Attribute):
        owner = _text(base.value, imported)
        return f"{owner}.{base.attr}" if owner.startswith("from:") else ""
    if not isinstance(base, ast.Name):
        return ""
    return f"from:{imported[base.id]}" if base.id in imported else f"here:{base.id}"
