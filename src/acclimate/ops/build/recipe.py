"""All that decides what an op's library is made of and how, and the cache key that follows from it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

STABLE_ABI = (2, 10)
"""The torch release whose stable ABI native source is compiled against: the oldest that acclimate runs on.
A library made for it runs on that release and on all later ones."""

_INCLUDE = re.compile(
    rb'^[ \t]*#[ \t]*include(?:_next)?[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\w+))', re.MULTILINE
)
_FORMAT = 1
# What every op is compiled with. NDEBUG: torch's headers check nothing twice; C++20: torch's own standard.
_COMMON_FLAGS = ("-O3", "-std=c++20", "-DNDEBUG")


@dataclass(frozen=True)
class Source:
    """One native source file of an op, with flags of its own."""

    path: str
    """Relative to the folder of the module that defines the op's builder."""
    flags: tuple[str, ...] = ()
    """Given to the compiler after all others, for this file only: ``("-mavx512f",)``."""


@dataclass(frozen=True)
class Unit:
    """One source file, found, and the program that compiles it."""

    label: str
    """The path that the builder gives, for people and for the key."""
    path: Path
    compiler: tuple[str, ...]
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """What one op's library is made of and how."""

    name: str
    """Of the op, and of the library's file."""
    base: Path
    """The folder that the names of headers in the key are relative to."""
    units: tuple[Unit, ...]
    include_paths: tuple[Path, ...]
    """Folders of the op's own headers."""
    system_paths: tuple[str, ...]
    """Folders of others' headers: the accelerator's; torch's come with ``stable_abi``."""
    linker: tuple[str, ...]
    link_flags: tuple[str, ...]
    stable_abi: bool
    """Whether the source keeps to torch's stable ABI; otherwise the library is for this torch only."""

    @cached_property
    def description(self) -> dict[str, Any]:
        """Everything that the library depends on except the compilers' versions, as JSON would have it.

        Paths of this machine are left out, so that equal installations in two places share a library.
        """
        contents = _included_headers((unit.path for unit in self.units), self.include_paths)
        headers = {os.path.relpath(path, self.base): _digest(data) for path, data in contents.items()}
        return {
            "format": _FORMAT,
            "op": self.name,
            "flags": [*_COMMON_FLAGS, *self._definitions()],
            "sources": [
                {"path": unit.label, "sha256": _digest(unit.path.read_bytes()), "flags": list(unit.flags)}
                for unit in self.units
            ],
            "headers": dict(sorted(headers.items())),
            "link_flags": list(self.link_flags),
            "abi": self.abi,
            "target": [sys.platform, platform.machine()],
        }

    @cached_property
    def source_key(self) -> str:
        """A digest of :attr:`description`."""
        return _digest(json.dumps(self.description, sort_keys=True).encode())[:16]

    @property
    def full_name(self) -> str:
        """The op's name with the source's key, for a library that is installed beside its builder."""
        return f"{self.name}_{self.source_key}"

    @property
    def compilers(self) -> list[tuple[str, ...]]:
        """The commands that compile and link, each once."""
        return list(dict.fromkeys([*(unit.compiler for unit in self.units), self.linker]))

    def key(self, versions: Sequence[str]) -> str:
        """The cache key: all the library depends on, including its compilers' versions.

        Args:
            versions: what each of :attr:`compilers` says of itself.
        """
        return f"{self.source_key}-{_digest(json.dumps(list(versions)).encode())[:8]}"

    @property
    def abi(self) -> dict[str, str]:
        """What of torch and Python the library depends on."""
        if self.stable_abi:
            return {"torch": "stable {}.{}".format(*STABLE_ABI)}
        return {
            "torch": str(torch.__version__),
            "cxx11": str(torch.compiled_with_cxx11_abi()),
            "python": str(sysconfig.get_config_var("SOABI")),
        }

    def compile_command(self, unit: Unit, output: Path) -> list[str]:
        """What compiles one source to an object file."""
        own = [f"-I{path}" for path in self.include_paths]
        others = [argument for path in self._system_paths() for argument in ("-isystem", path)]
        return [*unit.compiler, *_COMMON_FLAGS, *self._definitions(), *own, *others, *unit.flags,
                "-c", str(unit.path), "-o", str(output)]  # fmt: skip

    def link_command(self, objects: Sequence[Path], output: Path) -> list[str]:
        """What makes the library of the object files."""
        # torch has loaded its libraries before this one is, so no path to them is recorded in it.
        torch_libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu"]
        if not self.stable_abi:
            torch_libraries += ["-ltorch", "-lc10", "-ltorch_python"]
        if sys.platform == "darwin":
            torch_libraries.append("-Wl,-undefined,dynamic_lookup")
        return [*self.linker, "-shared", *map(str, objects), *torch_libraries, *self.link_flags,
                "-o", str(output)]  # fmt: skip

    def _system_paths(self) -> list[str]:
        include = Path(torch.__file__).parent / "include"
        paths = [str(include)]
        if not self.stable_abi:
            paths += [str(include / "torch/csrc/api/include"), sysconfig.get_path("include")]
        return [*paths, *self.system_paths]

    def _definitions(self) -> list[str]:
        if self.stable_abi:
            major, minor = STABLE_ABI
            return [f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#018x}"]
        return [
            f"-DTORCH_EXTENSION_NAME={self.name}",
            "-DTORCH_API_INCLUDE_EXTENSION_H",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _included_headers(sources: Iterable[Path], folders: Sequence[Path]) -> dict[Path, bytes]:
    """The content of each header that the sources include, directly or through another header.

    Looked for beside the including file and in ``folders``; what is in neither belongs to the system, the
    compiler or torch, whose versions count in other ways. Conditions are not evaluated, so a header that is
    left out on this machine counts too. Where a header's name is itself a macro, all files of ``folders``
    count.
    """
    found: dict[Path, bytes] = {}
    todo = [(path, path.read_bytes()) for path in sources]
    while todo:
        including, content = todo.pop()
        for quoted, angled, macro in _INCLUDE.findall(content):
            if macro:
                candidates = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
            else:
                name = (quoted or angled).decode(errors="replace")
                beside = [including.parent] if quoted else []
                places = (folder / name for folder in (*beside, *folders))
                candidates = [place for place in places if place.is_file()][:1]
            for header in (candidate.resolve() for candidate in candidates):
                if header not in found:
                    found[header] = header.read_bytes()
                    todo.append((header, found[header]))
    return found
