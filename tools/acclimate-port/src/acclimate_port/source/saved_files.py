"""Where a program loads files to the device that they were saved on, and where programs save such files."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from acclimate_port.source.tree import module_of, python_nodes, text_of

MODULE = "<module>"
_USES = re.compile(r"\b(torch|th|jit)\.(load|save)\(|\bfrom torch import\b")
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)


@dataclass(frozen=True)
class SavedFiles:
    """The files of a program that torch writes and reads."""

    loads: frozenset[tuple[int, str]] = frozenset()
    """The lines that load a file without ``map_location``, each with its function.

    ``<module>`` stands for code of the module and of classes.
    """
    saves: frozenset[str] = frozenset()
    """The functions and classes whose code saves a file."""


def saved_files(source: str | bytes) -> SavedFiles:
    """What a file loads and saves; nothing if this Python cannot parse it."""
    text = text_of(source)
    if not _USES.search(text):
        return SavedFiles()
    module = module_of(source)
    if module is None:
        return SavedFiles()
    torch, functions = _names_of_torch(module)
    loads: set[tuple[int, str]] = set()
    saves: set[str] = set()
    for statement in module.body:
        is_home = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        home = getattr(statement, "name", MODULE) if is_home else MODULE
        for node in python_nodes(statement):
            if not isinstance(node, _SIMPLE):
                continue
            for call in (one for one in python_nodes(node) if isinstance(one, ast.Call)):
                name = _called(call, torch, functions)
                if name == "save":
                    saves.add(home)
                elif name == "load" and _is_bare(call):
                    # A program that uses a class may never load: only a function is known to.
                    loads.add((call.lineno, MODULE if isinstance(statement, ast.ClassDef) else home))
    return SavedFiles(frozenset(loads), frozenset(saves))


def _is_bare(call: ast.Call) -> bool:
    """Whether a call loads a file to the device that it was saved on."""
    return len(call.args) < 2 and not any(one.arg in (None, "map_location") for one in call.keywords)


def _names_of_torch(module: ast.Module) -> tuple[set[str], dict[str, str]]:
    """The names of torch in a module, and of the functions that it imports from torch."""
    torch: set[str] = {"torch"}
    functions: dict[str, str] = {}
    for node in python_nodes(module):
        if isinstance(node, ast.Import):
            torch |= {one.asname for one in node.names if one.name == "torch" and one.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            functions.update((one.asname or one.name, one.name) for one in node.names)
    return torch, functions


def _called(call: ast.Call, torch: set[str], functions: dict[str, str]) -> str:
    """The function of torch that a call runs: ``load`` of ``torch.load(path)``."""
    if isinstance(call.func, ast.Attribute):
        owner = call.func.value
        if isinstance(owner, ast.Attribute) and owner.attr == "jit":  # `torch.jit.load(path)`
            owner = owner.value
        return call.func.attr if isinstance(owner, ast.Name) and owner.id in torch else ""
    return functions.get(call.func.id, "") if isinstance(call.func, ast.Name) else ""
