"""The scripts that build a project, and the files that they import: a build may have no other package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NAMES = ("setup.py", "setup_cuda.py")
_PROJECT_FILES = ("setup.py", "setup.cfg", "pyproject.toml")
_TOOLS = (b"setuptools", b"torch.utils.cpp_extension", b"torch.utils.ffi", b"distutils")
_FROM = re.compile(rb"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.M)
_IMPORT = re.compile(rb"^[ \t]*import[ \t]+([\w., \t]+)", re.M)
_WORD = re.compile(r"\w+")


def is_build_script(path: Path, source: bytes) -> bool:
    """Whether a file builds a project: by its name, and for ``build.py`` also by its place or its imports."""
    if path.name != "build.py":
        return path.name in _NAMES
    return any(tool in source for tool in _TOOLS) or any(
        (path.parent / name).is_file() for name in _PROJECT_FILES
    )


def files_imported(path: Path, source: bytes) -> Iterator[Path]:
    """The files of a project, without suffix, that a file imports itself."""
    for statement in _FROM.finditer(source):
        up = max(len(statement[1]) - 1, 0)
        module = _folder(path, up).joinpath(*statement[2].decode().split("."))
        names = _WORD.findall(statement[3].decode(errors="replace"))
        yield from (one for one in (module, *(module / name for name in names)) if _is_module(one))
    for statement in _IMPORT.finditer(source):
        for module_name in statement[1].decode().split(","):
            module = path.parent.joinpath(*module_name.strip().partition(" ")[0].split("."))
            yield from [module] if _is_module(module) else []


def _folder(path: Path, up: int) -> Path:
    return path.parents[up] if up < len(path.parents) else path.parent


def _is_module(path: Path) -> bool:
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
