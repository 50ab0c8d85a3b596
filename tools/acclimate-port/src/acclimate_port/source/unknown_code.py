"""Where a program has code of which nothing shows that it follows torch's devices.

Such code are packages that no table knows, modules of the project that are compiled, operators that it
registers for torch, and what torch loads from elsewhere: from a hub, or compiled. What gives them a device,
or a tensor or module on one, may fail on other accelerators, and so may what moves an object that they made.
Which of them gets what is not asked: lists of cases would not end. Python's own parser reads the file.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from acclimate_port.source.calls_by_text import IMPORTING
from acclimate_port.source.known_packages import KNOWN
from acclimate_port.source.named_in_texts import NamedInTexts, Names
from acclimate_port.source.names_of_torch import names_of_torch
from acclimate_port.source.survey import Survey
from acclimate_port.source.tree import module_of, python_nodes, text_of

MODULE = "<module>"
_HOMES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NATIVE = re.compile(r"_C$|_ext$")
"""Names of compiled modules."""
_SETTINGS = re.compile(r"config|default|setting|cfg")
"""Modules of settings, of which some have such a name: ``_C``."""
_GENERATED = re.compile(r"version|_pb2(_grpc)?$")
"""Names of modules that are generated, and have nothing to do with devices."""
_OPERATORS_OF_TORCH = {
    *("aten", "prims", "prim", "quantized", "torchvision", "torchaudio", "higher_order", "inductor"),
    *("_c10d_functional", "c10d_functional", "c10d", "rngprims", "mkldnn", "fsdp", "symm_mem"),
}

_LOADING = {
    *("torch.hub.load", "torch.hub.load_local", "torch.jit.load", "torch.export.load"),
    *("torch._inductor.aoti_load_package", "torch.utils.cpp_extension.load"),
    "torch.utils.cpp_extension.load_inline",
}
"""Functions of torch that give code from elsewhere, or compiled code."""


def unknown_code(source: str | bytes, known: Survey) -> dict[str, int]:
    """The functions and classes that have such code, and the first line.

    ``<module>`` stands for code of the module; nothing if this Python cannot parse it.

    Args:
        source: the file.
        known: facts from all files of the project.
    """
    module = module_of(source)
    if module is None:
        return {}
    names = {name for node in python_nodes(module) for name in _unknown_names(node, known)}
    lines = _lines_of_texts(text_of(source), module, known)
    of_torch = names_of_torch(module)
    homes = [(one.name if isinstance(one, _HOMES) else MODULE, one) for one in module.body]
    found: dict[str, list[int]] = defaultdict(list)
    for home, statement in homes:
        for node in python_nodes(statement):
            is_use = isinstance(node, ast.Name) and node.id in names
            is_import = isinstance(node, ast.Call) and node.lineno in lines
            if is_use or is_import or _is_loaded(node, of_torch) or any(_unknown_names(node, known)):
                found[home].append(node.lineno)  # type: ignore[attr-defined]
    if "*" in names:  # any name may be one of them
        found |= {home: found[home] or [min(found[MODULE])] for home, _ in homes}
    return {home: min(lines) for home, lines in found.items()}


def _unknown_names(node: ast.AST, known: Survey) -> Iterator[str]:
    """The names that a statement binds to unknown code; ``*``: all names of a module."""
    if isinstance(node, ast.Import):
        for one in node.names:
            if _is_unknown(one.name, known):
                yield one.asname or one.name.partition(".")[0]
    elif isinstance(node, ast.ImportFrom):
        for one in node.names:
            if _is_unknown_part("." * node.level + (node.module or ""), one.name, known):
                yield one.asname or one.name


def _is_unknown(module: str, known: Survey) -> bool:
    package, _, _ = module.partition(".")
    last = module.rpartition(".")[2]
    if package in known.built:
        return True
    return package not in KNOWN and last not in known.modules and not _GENERATED.search(last)


def _is_unknown_part(module: str, name: str, known: Survey) -> bool:
    """Whether ``from module import name`` gets unknown code, also a compiled module of the project."""
    first, last = module.partition(".")[0], module.rpartition(".")[2]
    if _GENERATED.search(last) or _GENERATED.search(name):
        return False
    if first and (first in known.built or first in KNOWN or first not in known.modules):
        return first in known.built or first not in KNOWN
    # A folder without code of its own holds modules only; a module may define any name.
    is_native = _NATIVE.search(name) is not None and not _SETTINGS.search(last)
    may_define = (not last or last in known.with_code) and not is_native
    return not may_define and name not in known.modules


def _lines_of_texts(text: str, module: ast.Module, known: Survey) -> set[int]:
    """The lines that import a module by a text, which may be of an unknown package.

    Where nothing is known of the text, the file may have a table of the project's modules.
    """
    if not any(word in text for word in IMPORTING):
        return set()
    named = NamedInTexts(text, module).lines()
    is_own = any(
        one.names is not Names.ANY and one.text.partition(".")[0] in ("", *known.modules) for _, one in named
    )
    packages = KNOWN | known.modules | {""}
    return {
        line
        for line, one in named
        if (one.names is Names.ANY and not is_own)
        or (one.names is Names.MODULE and one.text.partition(".")[0] not in packages)
    }


def _is_loaded(node: ast.AST, names: dict[str, str]) -> bool:
    """Whether code names an operator that is not torch's, or loads code: ``torch.ops.own.f``."""
    if isinstance(node, ast.Call):
        if any(one.arg == "trust_remote_code" and ast.unparse(one.value) != "False" for one in node.keywords):
            return True
        full = _full_name(node.func, names)
        is_torchs = full == "torch.hub.load" and "pytorch/vision" in ast.unparse(node)
        return full in _LOADING and not is_torchs
    if not isinstance(node, ast.Attribute):
        return False
    owner, _, name = _full_name(node, names).rpartition(".")
    return (owner == "torch.ops" and name not in _OPERATORS_OF_TORCH) or owner == "torch.classes"


def _full_name(node: ast.AST, names: dict[str, str]) -> str:
    """The full name of an attribute of torch, or of what is imported of it; ``""`` for others."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    first = names.get(node.id) if isinstance(node, ast.Name) else None
    return ".".join([first, *reversed(parts)]) if first is not None else ""
