"""Joins the fixtures of pytest's ``conftest.py`` files with the tests that get them, which import nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from acclimate_port.decisions.symbols import MODULE, Facts, Kind, Symbol
from acclimate_port.source.named_in_texts import Names, Text
from acclimate_port.source.outline import ALL_TESTS, Outline

_CONFTEST = "conftest.py"
_TEST = re.compile(r"^test_|_test$")
_HIDES = Symbol(Kind.PLACE, f"here:{MODULE}")
"""Says that a module itself chooses a device, or hides those of CUDA."""


def with_fixtures(facts: Mapping[Path, Facts]) -> Mapping[Path, Facts]:
    """The facts of the files, in which tests use the fixtures that they get as if they imported them."""
    given = {
        path.parent: one.outline.fixtures
        for path, one in facts.items()
        if path.name == _CONFTEST and one.outline.fixtures
    }
    facts = _below_hiding(facts)
    if not given:
        return facts
    found = {**facts}
    for path, one in facts.items():
        taken = {
            name: frozenset(_fixtures_of(path, parameters, given))
            for name, parameters in one.outline.takes.items()
        }
        if any(taken.values()):
            found[path] = replace(one, outline=_using(one.outline, taken))
    return found


def _below_hiding(facts: Mapping[Path, Facts]) -> Mapping[Path, Facts]:
    """The facts of the files, in which tests run with what the ``conftest.py`` files around them do."""
    hiding = [path for path, one in facts.items() if path.name == _CONFTEST and _HIDES in one.stays]
    if not hiding:
        return facts
    found = {**facts}
    for path, one in facts.items():
        texts = {
            Text(Names.MODULE, f"{'.' * (len(path.parts) - len(other.parts) + 1)}conftest")
            for other in hiding
            if other != path and path.is_relative_to(other.parent) and _TEST.search(path.stem)
        }
        if texts:
            found[path] = replace(one, outline=replace(one.outline, texts=one.outline.texts | texts))
    return found


def _fixtures_of(
    path: Path, parameters: frozenset[str], given: Mapping[Path, Mapping[str, str]]
) -> Iterator[str]:
    """The full names of the functions that give a file the values of some parameters.

    Of several fixtures of one name, the file gets the one that is nearest.
    """
    for parameter in (*sorted(parameters), ALL_TESTS):
        for level, folder in enumerate(path.parents):
            function = given.get(folder, {}).get(parameter, "")
            if function and folder / _CONFTEST == path:
                yield function
            elif function:
                yield f"{'.' * (level + 1)}conftest.{function}"
            if function and parameter is not ALL_TESTS:
                break


def _using(outline: Outline, taken: Mapping[str, frozenset[str]]) -> Outline:
    """An outline whose functions and classes read some more names, of which some are imported."""
    names = frozenset().union(*taken.values())
    imported = frozenset(name for name in names if name.startswith("."))
    own = {name: held for name, held in taken.items() if name != MODULE}
    return replace(
        outline,
        imports=outline.imports | {name.rpartition(".")[0] for name in imported},
        uses=outline.uses | imported,
        reads={**outline.reads, **{name: outline.reads.get(name, frozenset()) | own[name] for name in own}},
    )
