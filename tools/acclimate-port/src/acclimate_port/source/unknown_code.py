"""Where a program has code of which nothing shows that it follows torch's devices.

Such code are packages that no table knows, modules of the project that are compiled, and operators that it
registers for torch. What gives them a device, or a tensor or module on one, may fail on other accelerators,
and so may what moves an object that they made. Which of them gets what is not asked: lists of cases would not
end. Python's own parser reads the file.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from acclimate_port.source.calls_by_text import IMPORTING
from acclimate_port.source.known_packages import KNOWN
from acclimate_port.source.survey import Survey
from acclimate_port.source.tree import last_python_name, module_of, python_nodes

MODULE = "<module>"
_HOMES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NATIVE = re.compile(r"_C$|_ext$")
"""Names of compiled modules."""
_GENERATED = re.compile(r"version|_pb2(_grpc)?$")
"""Names of modules that are generated, and have nothing to do with devices."""
_STEPS = 4
"""How many steps lead from a text to its start."""
_OPERATORS_OF_TORCH = {
    *("aten", "prims", "prim", "quantized", "torchvision", "torchaudio", "higher_order", "inductor"),
    *("_c10d_functional", "c10d_functional", "c10d", "rngprims", "mkldnn", "fsdp", "symm_mem"),
}


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
    texts = _texts(module)
    homes = [(one.name if isinstance(one, _HOMES) else MODULE, one) for one in module.body]
    found: dict[str, list[int]] = defaultdict(list)
    for home, statement in homes:
        for node in python_nodes(statement):
            is_use = isinstance(node, ast.Name) and node.id in names
            if (
                is_use
                or _is_operator(node)
                or _imports_any(node, texts, known)
                or any(_unknown_names(node, known))
            ):
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
    if first and (first in known.built or first not in known.modules):
        return first in known.built or first not in KNOWN
    # A folder without code of its own holds modules only; a module may define any name.
    may_define = (not last or last in known.with_code) and not _NATIVE.search(name)
    return not may_define and name not in known.modules


def _texts(module: ast.Module) -> dict[str, ast.expr]:
    """The last value that the file gives each name."""
    assigned = (one for one in python_nodes(module) if isinstance(one, ast.Assign))
    return {
        target.id: one.value for one in assigned for target in one.targets if isinstance(target, ast.Name)
    }


def _imports_any(node: ast.AST, texts: dict[str, ast.expr], known: Survey) -> bool:
    """Whether a call imports a module whose name is computed, and may be of any package."""
    if not isinstance(node, ast.Call) or not node.args or last_python_name(node.func) not in IMPORTING[:2]:
        return False
    start: ast.AST = node.args[0]
    for _ in range(_STEPS):
        if isinstance(start, ast.Name):
            start = texts.get(start.id, start)
        elif isinstance(start, ast.JoinedStr):
            start = start.values[0]
        elif isinstance(start, ast.BinOp):
            start = start.left
        elif isinstance(start, ast.Call) and last_python_name(start.func) in ("format", "replace"):
            start = start.func.value if isinstance(start.func, ast.Attribute) else start
        elif isinstance(start, ast.FormattedValue):
            start = start.value
    text = start.value if isinstance(start, ast.Constant) else None
    if isinstance(text, str) and (text.startswith(".") or not _is_unknown(text.partition(".")[0], known)):
        return False
    return last_python_name(start) not in ("__name__", "__package__")


def _is_operator(node: ast.AST) -> bool:
    """Whether code names an operator that is not torch's: ``torch.ops.own.f``."""
    holder = node.value if isinstance(node, ast.Attribute) else None
    if not isinstance(node, ast.Attribute) or not isinstance(holder, ast.Attribute) or holder.attr != "ops":
        return False
    is_torchs = isinstance(holder.value, ast.Name) and holder.value.id == "torch"
    return is_torchs and node.attr not in _OPERATORS_OF_TORCH
