"""What a module cannot be imported without: packages for NVIDIA GPUs, and extensions that a project builds.

An extension for CUDA is built by a script (``CUDAExtension("deform", …)``), or when a module that compiles it
is imported (``load("fused", sources=[…".cu"])``). Both raise where there is no CUDA toolkit.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from acclimate_port.source.calls_by_text import IMPORTING
from acclimate_port.source.cuda_packages import NEEDED
from acclimate_port.source.tree import last_python_name, module_of, python_nodes, text_of

_RUN_ON_HOSTS = {"bitsandbytes"}
"""Packages among those for NVIDIA GPUs that can be imported anywhere."""
_MAKES = re.compile(r"(?:^|[^\w.])(\w+)[ \t]*=[ \t]*(?:cpp_extension\.)?CUDAExtension\b(?!\()")
_NAMED = r"\b(?:{})\(\s*(?:name\s*=\s*)?(?:[\"'](?:\w+\.)*(\w+)[\"']|(\w+))"
_TEXT = r"^[ \t]*{}[ \t]*=[ \t]*[\"'](?:\w+\.)*(\w+)[\"']"
_MADE = re.compile(r"CUDAExtension\(\s*(?:name\s*=\s*)?(\w+)")
_FUNCTION = re.compile(r"^[ \t]*def[ \t]+(\w+)\([ \t\n]*(?:self,[ \t]*)?(\w+)", re.M)
_COMPILED = re.compile(r"(?:^_C|_C|_ext|_cuda(?:_(?:lib|kernels?|backend))?)$")
"""Names of compiled modules for CUDA, which code imports by a text."""
_IMPORT = re.compile(r"^[ \t]*from[ \t]+[\w.]+[ \t]+import[ \t]*(?:\([^)]*\)|[^\n]*)", re.M)
_REFUSES = re.compile(r"^[ \t]+raise\b[^\n]*cuda", re.M | re.IGNORECASE)
_LOADS = {"load", "load_inline"}
_BUILDS = "cpp_extension"
_BY_TEXT = IMPORTING[0]


def extensions_built(source: bytes) -> Iterator[tuple[str, bool]]:
    """The names of the extensions for CUDA that a script builds, and whether it needs CUDA for them.

    One that can make it for a host too (``CppExtension``), and raises nothing about CUDA, does not.
    """
    if b"CUDAExtension" not in source:
        return
    text = text_of(source)
    makers = {"CUDAExtension", *_MAKES.findall(text), *_helpers(text)}
    is_needed = "CppExtension" not in _IMPORT.sub("", text) or _REFUSES.search(text) is not None
    for name, variable in re.findall(_NAMED.format("|".join(sorted(makers))), text):
        names = [name] if name else re.findall(_TEXT.format(variable), text, re.M)
        yield from ((one, is_needed) for one in names)


def _helpers(text: str) -> Iterator[str]:
    """The functions that make an extension by the name that they get: ``def make(name, sources): …``."""
    functions = [*_FUNCTION.finditer(text)]
    for made in _MADE.finditer(text):
        around = next((one for one in reversed(functions) if one.end() < made.start()), None)
        if around is not None and around[2] == made[1]:
            yield around[1]


def line_that_needs_cuda(source: str | bytes, extensions: frozenset[str]) -> int:
    """The line by which a module cannot be imported without CUDA's toolkit; 0 if there is none.

    Args:
        source: the module.
        extensions: the extensions that the project builds with CUDA alone.
    """
    text = text_of(source)
    is_built = _BUILDS in text and ".cu" in text
    imports_texts = _BY_TEXT in text
    if not is_built and not imports_texts and not any(name in text for name in (*NEEDED, *extensions)):
        return 0
    module = module_of(source)
    by_call = is_built or imports_texts
    return 0 if module is None else _line_in(module.body, text if by_call else "", extensions)


def _line_in(block: list[ast.stmt], text: str, extensions: frozenset[str]) -> int:
    """The first line of a block that needs CUDA's toolkit; ``text`` is ``""`` if no call may need it."""
    for statement in _always_run(block):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            if _needs(statement, extensions):
                return statement.lineno
        elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)) and text:
            calls = [one for one in python_nodes(statement) if isinstance(one, ast.Call)]
            is_built = _BUILDS in text and ".cu" in text
            builds = any(last_python_name(one.func) in _LOADS and _names_kernels(one, text) for one in calls)
            if (is_built and builds) or any(_imports_extension(one, extensions) for one in calls):
                return statement.lineno
        elif isinstance(statement, ast.Try) and statement.handlers:
            # Another way to the extension: `except ImportError: import fused_cuda`.
            ways = [statement.body, *(one.body for one in statement.handlers if not _raises(one))]
            lines = [_line_in(one, text, extensions) for one in ways]
            if all(lines):
                return lines[0]
    return 0


def _imports_extension(call: ast.Call, extensions: frozenset[str]) -> bool:
    """Whether a call imports an extension by its name: ``importlib.import_module("fused_cuda")``."""
    named = call.args[0] if call.args and last_python_name(call.func) == _BY_TEXT else None
    full = named.value if isinstance(named, ast.Constant) and isinstance(named.value, str) else ""
    package, _, name = full.rpartition(".")
    return name in extensions or (not package and _COMPILED.search(name) is not None)


def _always_run(block: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a block, and those of a ``try`` in it whose errors end the program too."""
    for statement in block:
        is_try = isinstance(statement, ast.Try) and bool(statement.handlers)
        if isinstance(statement, ast.Try) and is_try and all(map(_raises, statement.handlers)):
            yield from _always_run(statement.body)
        else:
            yield statement


def _raises(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise)


def always_imported(module: ast.Module) -> Iterator[str]:
    """The modules that a module imports whenever it is imported, and the names that may be modules."""
    for statement in _always_run(module.body):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            start = "." * statement.level + (statement.module or "")
            yield start
            between = "" if start.endswith(".") else "."
            yield from (f"{start}{between}{alias.name}" for alias in statement.names if alias.name != "*")


def _needs(statement: ast.Import | ast.ImportFrom, extensions: frozenset[str]) -> bool:
    """Whether a statement imports a package for NVIDIA GPUs, or an extension of the project."""
    if isinstance(statement, ast.Import):
        names = [alias.name for alias in statement.names]
    else:
        names = [statement.module or "", *(alias.name for alias in statement.names)]
    firsts = {one.partition(".")[0] for one in (names if isinstance(statement, ast.Import) else names[:1])}
    is_own = isinstance(statement, ast.ImportFrom) and statement.level > 0
    is_of_nvidia = not is_own and not firsts.isdisjoint(NEEDED - _RUN_ON_HOSTS)
    return is_of_nvidia or any(one.rpartition(".")[2] in extensions for one in names)


def _names_kernels(call: ast.Call, text: str) -> bool:
    """Whether a call that compiles gets the files of kernels, which a name may hold."""
    parts = [one.value for one in python_nodes(call) if isinstance(one, ast.Constant)]
    said = [one for one in parts if isinstance(one, str)]
    sources = next((one.value for one in call.keywords if one.arg in ("sources", "cuda_sources")), None)
    is_held = isinstance(sources, ast.Name) and re.search(r"\.cu['\"]", text) is not None
    return is_held or any(one.endswith(".cu") for one in said) or last_python_name(call.func) == "load_inline"
