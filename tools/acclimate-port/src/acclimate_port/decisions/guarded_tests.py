"""Guards of a test suite that skip tests of other files: by the file's name, a mark or a fixture.

Such a guard and what it skips are one decision. A *guard* is ``collect_ignore`` and ``collect_ignore_glob``,
pytest's hooks on what it collects and runs, and a fixture that skips.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from acclimate_port.conditions.branches import uses_of_result
from acclimate_port.conditions.statements import decided_by
from acclimate_port.decisions.decision import Decisions, asks_for_device
from acclimate_port.decisions.symbols import Kind, Symbol
from acclimate_port.source.tree import Span, dotted, string_value, walk
from acclimate_port.source_file import SourceFile

WITHIN = "(within)"
"""The end of the text of what a guard would skip, before the guard is known."""
ALL_FILES = "*"
_LISTS = re.compile(r"\bcollect_ignore(_glob)?\b")
_HOOKS = {
    *("pytest_collection_modifyitems", "pytest_ignore_collect", "pytest_collect_file"),
    *("pytest_runtest_setup", "pytest_runtest_call", "pytest_itemcollected", "pytest_collection_finish"),
}
_SKIPS = re.compile(r"skip", re.IGNORECASE)


def guards(file: SourceFile, decisions: Decisions) -> Iterator[tuple[int, Symbol]]:
    """The decisions on tests of the device that skip tests of other files, each with what it skips."""
    for index, decision in enumerate(decisions):
        if not (decisions.counts(index) and asks_for_device(file, decision.finding)):
            continue
        node = decision.finding.node
        places = _decided(file, node)
        listing = [place for place in places if _LISTS.search(file.tree.source(place))]
        hook = next((one for one in _functions(file, node) if one.name.value in _HOOKS), None)
        if listing:
            # The list may be filled in a loop over another one, so that all texts beside it count.
            texts = _texts(file, places)
            patterns = [text for text in texts if "*" in text or text.endswith(".py")]
            folders = {} if not patterns else dict.fromkeys(_folders(file))
            found = [f"files:{text}" for text in texts if text not in folders] or [f"files:{ALL_FILES}"]
        elif hook is not None:
            texts = _texts(file, [file.span(hook)])
            found = [f"{kind}:{text}" for text in texts for kind in ("mark", "files")]
            found = found or [f"files:{ALL_FILES}"]
        else:
            found = [text for one in _functions(file, node) for text in _of_fixture(file, one)]
        yield from ((index, Symbol(Kind.TEST, text)) for text in found)


def guarded(file: SourceFile, decisions: Decisions) -> Iterator[tuple[int, Symbol]]:
    """The decisions in tests, each with what a guard in another file may skip them by."""
    if not any(one.name.value.startswith("test") for one in file.tree.of_type(cst.FunctionDef)):
        return
    of_module = [*_marks(file, file.tree.module.body)]
    for index, decision in enumerate(decisions):
        if not decisions.counts(index):
            continue
        texts = ["file:", *of_module]
        for one in file.tree.ancestors(decision.finding.node) if decision.finding.node is not None else ():
            if isinstance(one, (cst.FunctionDef, cst.ClassDef)):
                texts += _marks(file, one.decorators)
            if isinstance(one, cst.FunctionDef):
                texts += [f"fixture:{parameter.name.value}" for parameter in one.params.params]
        yield from ((index, Symbol(Kind.TEST, text)) for text in dict.fromkeys(texts))


def within(symbol: Symbol) -> Symbol:
    """What a guard skips, for what is known of the tests alone."""
    return Symbol(symbol.kind, f"{symbol.text}{WITHIN}")


def _functions(file: SourceFile, node: cst.CSTNode | None) -> list[cst.FunctionDef]:
    around = file.tree.ancestors(node) if node is not None else ()
    return [one for one in around if isinstance(one, cst.FunctionDef)]


def _decided(file: SourceFile, node: cst.CSTNode | None) -> list[Span]:
    """The statements that a test, or a use of its result, decides about, or that assign what it decides."""
    found: list[Span] = []
    for use in (node, *uses_of_result(file, node)) if node is not None else ():
        decided, statement = decided_by(file, use), file.tree.statement(use)
        found += [file.span(decided)] if isinstance(decided, cst.If) else []
        kinds = (cst.Assign, cst.AnnAssign, cst.AugAssign)
        found += [file.span(statement)] if isinstance(statement, kinds) else []
    return found


def _texts(file: SourceFile, places: list[Span]) -> list[str]:
    """The strings in some places, without messages and names of devices."""
    strings = (one for one in file.tree.of_type(cst.SimpleString) if _is_in(file.span(one), places))
    texts = (string_value(one) or "" for one in strings)
    return [*dict.fromkeys(text for text in texts if text and " " not in text)]


def _folders(file: SourceFile) -> Iterator[str]:
    """The strings that are folders of a path: ``Path("tests").glob("*_gpu.py")``, ``root / "tests"``."""
    for one in file.tree.of_type(cst.SimpleString):
        given, text = file.tree.given_to(one), string_value(one) or ""
        is_part = given is not None and given.name in ("Path", "PurePath", "join", "joinpath")
        is_part = is_part or isinstance(file.tree.parent(one), cst.BinaryOperation)
        yield from [text] if is_part and "*" not in text and not text.endswith(".py") else []


def _is_in(inner: Span, places: list[Span]) -> bool:
    return any(place.start <= inner.start and inner.end <= place.end for place in places)


def _of_fixture(file: SourceFile, function: cst.FunctionDef) -> list[str]:
    """What a fixture skips that asks for the device."""
    source = next((text for one in function.decorators if "fixture" in (text := file.tree.source(one))), "")
    if not source or not _SKIPS.search(file.tree.source(function.body)):
        return []
    return [f"files:{ALL_FILES}"] if "autouse" in source else [f"fixture:{function.name.value}"]


def _marks(file: SourceFile, nodes: object) -> Iterator[str]:
    """The marks of pytest in decorators, or in ``pytestmark`` among the statements of a module."""
    for one in nodes if isinstance(nodes, (list, tuple)) else ():
        is_decorator = isinstance(one, cst.Decorator)
        if not is_decorator and "pytestmark" not in file.tree.source(one)[: len("pytestmark")]:
            continue
        for node in walk(one):
            name = dotted(node) if isinstance(node, cst.Attribute) else ""
            if name.startswith("pytest.mark.") or name.startswith("mark."):
                yield f"mark:{name.rpartition('.')[2]}"
