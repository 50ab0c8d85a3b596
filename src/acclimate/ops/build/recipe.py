"""Everything that determines an op's library, the cache key made of it, and the compilers' commands."""

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

# The torch release whose stable ABI native source is compiled against: the oldest that acclimate supports.
# The library runs on that release and all later ones.
_STABLE_ABI = (2, 10)

_INCLUDE = re.compile(
    rb'^[ \t]*#[ \t]*include(?:_next)?[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\w+))', re.MULTILINE
)
_FORMAT = 1
# For every op. NDEBUG removes the assertions in torch's headers; C++20 is torch's own standard.
_COMMON_FLAGS = ("-O3", "-std=c++20", "-DNDEBUG")


TARGET_VARIABLE = "ACCLIMATE_TARGET_MACHINE"
"""The environment variable with the kind of processor that a cross compiler in ``CXX`` compiles for."""

TORCH_LIBRARIES_VARIABLE = "ACCLIMATE_TORCH_LIBRARIES"
"""The environment variable with the folder of that machine's torch libraries, to link with."""


def target_machine() -> str:
    """Returns the kind of processor that libraries are for, as ``platform.machine()`` names it there."""
    return os.environ.get(TARGET_VARIABLE) or platform.machine()


@dataclass(frozen=True)
class Source:
    """One native source file of an op, with its own flags."""

    path: str
    """Relative to the folder of the module that defines the op's builder."""
    flags: tuple[str, ...] = ()
    """Flags for this file only, such as ``("-mavx512f",)``; they follow all others."""


@dataclass(frozen=True)
class Unit:
    """One existing source file and the command that compiles it."""

    label: str
    """The path as the builder gives it, for messages and the key."""
    path: Path
    compiler: tuple[str, ...]
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """How to make the library of one op."""

    name: str
    """The name of the op and of the library's file."""
    base: Path
    """The folder to which the headers' names in the key are relative."""
    units: tuple[Unit, ...]
    include_paths: tuple[Path, ...]
    """Folders of the op's own headers."""
    system_paths: tuple[str, ...]
    """The accelerator's folders of headers; torch's are added by ``stable_abi``."""
    linker: tuple[str, ...]
    link_flags: tuple[str, ...]
    stable_abi: bool
    """Whether the source uses torch's stable ABI; if not, the library is for this torch only."""

    @cached_property
    def description(self) -> dict[str, Any]:
        """Everything that the library depends on except the compilers' versions, for JSON.

        It has no absolute paths, so that equal installations in two places share a library.
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
            "target": [sys.platform, target_machine()],
        }

    @cached_property
    def source_key(self) -> str:
        """A digest of :attr:`description`."""
        return _digest(json.dumps(self.description, sort_keys=True).encode())[:16]

    @property
    def full_name(self) -> str:
        """The op's name and source key, which name a library installed beside its builder."""
        return f"{self.name}_{self.source_key}"

    @property
    def compilers(self) -> list[tuple[str, ...]]:
        """The compilers' commands, without duplicates."""
        return list(dict.fromkeys([*(unit.compiler for unit in self.units), self.linker]))

    def key(self, versions: Sequence[str]) -> str:
        """Returns the cache key of all that the library depends on; ``versions`` are the compilers'."""
        return f"{self.source_key}-{_digest(json.dumps(list(versions)).encode())[:8]}"

    @property
    def abi(self) -> dict[str, str]:
        """The parts of torch's and Python's ABI that the library depends on."""
        if self.stable_abi:
            return {"torch": "stable {}.{}".format(*_STABLE_ABI)}
        return {
            "torch": str(torch.__version__),
            "cxx11": str(torch.compiled_with_cxx11_abi()),
            "python": str(sysconfig.get_config_var("SOABI")),
        }

    def compile_command(self, unit: Unit, output: Path) -> list[str]:
        """Returns the command that compiles one source to an object file."""
        own = [f"-I{path}" for path in self.include_paths]
        others = [argument for path in self._system_paths() for argument in ("-isystem", path)]
        return [*unit.compiler, *_COMMON_FLAGS, *self._definitions(), *own, *others, *unit.flags,
                "-c", str(unit.path), "-o", str(output)]  # fmt: skip

    def link_command(self, objects: Sequence[Path], output: Path) -> list[str]:
        """Returns the command that links the object files to a library."""
        # torch's libraries are already loaded when this one is, so it needs no path to them.
        folder = os.environ.get(TORCH_LIBRARIES_VARIABLE) or str(Path(torch.__file__).parent / "lib")
        torch_libraries = [f"-L{folder}", "-ltorch_cpu"]
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
            major, minor = _STABLE_ABI
            return [f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#018x}"]
        return [
            f"-DTORCH_EXTENSION_NAME={self.name}",
            "-DTORCH_API_INCLUDE_EXTENSION_H",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _included_headers(sources: Iterable[Path], folders: Sequence[Path]) -> dict[Path, bytes]:
    """Returns the content of each header that the sources include, directly or through another header.

    Headers are looked up beside the including file and in ``folders``; others belong to the system, the
    compiler or torch, whose versions are in the key already. Conditions are not evaluated, so headers for
    other machines count too. If a macro names the header, all files in ``folders`` count.
    """
    found: dict[Path, bytes] = {}
    looked_up = set()
    todo = [(path, path.read_bytes()) for path in sources]
    while todo:
        including, content = todo.pop()
        for included in _INCLUDE.findall(content):
            if (including.parent, included) in looked_up:
                continue
            looked_up.add((including.parent, included))
            quoted, angled, macro = included
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
