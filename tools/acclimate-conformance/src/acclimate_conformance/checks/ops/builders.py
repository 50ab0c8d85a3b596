"""Checks of native ops: builders are found by name, and build; the toolchain works."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from acclimate.accelerator import Accelerator
from acclimate.errors import CompilerNotFoundError
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    exactly,
    refused,
    require,
)
from acclimate_conformance.checks.check import check

_OF_THE_HOST = {
    "AsyncIOBuilder": "aio_handle",
    "CPUAdagradBuilder": "create_adagrad",
    "CPUAdamBuilder": "create_adam",
    "CPULionBuilder": "create_lion",
}
"""The builders that every accelerator has, each with a function of its op."""
_SOURCE = """\
#include <cstdint>
extern "C" __attribute__((visibility("default"))) std::int64_t twice(std::int64_t number) {
    return 2 * number;
}
"""


@check(
    "op_builders", "get_op_builder", "create_op_builder", "op_builder_dir", "op_builder_package",
    promise="Every op builder is found by name, as a class and as an object; an unknown name gives None, "
    "and a warning with the nearest.",
)  # fmt: skip
def builders_found(accelerator: Accelerator) -> None:
    package = exactly(accelerator.op_builder_dir(), str, "op_builder_dir()")
    require(package == accelerator.op_builder_package, f"op_builder_dir() is {package!r}")
    home = importlib.import_module(package)
    held = [
        name
        for name, target in accelerator.op_builders.items()
        if hasattr(home, name) or target.partition(":")[0].startswith(f"{package}.")
    ]
    require(
        bool(held) or not accelerator.op_builders,
        f"op_builder_dir() is {package!r}, which contains none of its op builders",
    )
    left_out = [name for name in _OF_THE_HOST if name not in accelerator.op_builders]
    require(
        not left_out, f"op_builders lacks {', '.join(left_out)}, of the host, which every accelerator has"
    )
    for name in accelerator.op_builders:
        builder = accelerator.get_op_builder(name)
        require(isinstance(builder, type), f'get_op_builder("{name}") is {builder!r}, not a class')
        made = accelerator.create_op_builder(name)
        require(builder is not None and isinstance(made, builder), f'create_op_builder("{name}") is {made!r}')
        exactly(
            builder_of(accelerator, name).is_compatible(verbose=False), bool, f"is_compatible() of {name}"
        )
    names: dict[Any, str] = {}
    for name in _OF_THE_HOST:
        other = names.setdefault(accelerator.get_op_builder(name), name)
        require(other == name, f'get_op_builder("{name}") is the builder of {other}')
    near = {change for name in accelerator.op_builders for change in _near_misses(name)}
    for absent in ("NoSuchBuilder", "", *sorted(near - set(accelerator.op_builders))):
        for find in (accelerator.get_op_builder, accelerator.create_op_builder):
            found = find(absent)
            require(found is None, f'{find.__name__}("{absent}") is {found!r} and not None')
    for name in accelerator.op_builders:
        for absent in {name.lower(), name.removesuffix("Builder"), name[1:]} - set(accelerator.op_builders):
            with _warnings_noted() as told:
                accelerator.create_op_builder(absent)
            require(
                any(name in text for text in told),
                f'create_op_builder("{absent}") logs no warning with the nearest name, {name}, but {told}',
            )


@contextmanager
def _warnings_noted() -> Iterator[list[str]]:
    """A block that notes the texts of warnings that are logged, by any logger."""
    told: list[str] = []

    def note(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            told.append(record.getMessage())

    with mock.patch.object(logging.Logger, "handle", note):
        yield told


def _near_misses(name: str) -> tuple[str, ...]:
    """Names that differ a little from one."""
    return (
        name[:-1], name[1:], name.removesuffix("Builder"), f"{name}s", f"{name}.{name}", f" {name} ",
        name.lower(), name.upper(), name.swapcase(),
    )  # fmt: skip


@check(
    "toolkit_version",
    promise="toolkit_version returns the version of the vendor's software as one word, or None.",
)  # fmt: skip
def toolkit(accelerator: Accelerator) -> str:
    version = accelerator.toolkit_version()
    if version is None:
        raise NotOfferedError("toolkit_version() is None")
    exactly(version, str, "toolkit_version()")
    require(
        re.fullmatch(r"[A-Za-z]*[-_.]?\d[\w.+-]*", version) is not None,
        f"toolkit_version() is {version!r}, not one word that begins with a number",
    )
    return version


@check(
    "create_op_builder", "op_builders",
    promise="Every op that says it is compatible builds and loads.",
    timeout_s=600, once=True,
)  # fmt: skip
def builders_load(accelerator: Accelerator) -> str | None:
    if not accelerator.op_builders:
        raise NotOfferedError("it names no op builders")
    incompatible = []
    for name in accelerator.op_builders:
        builder = builder_of(accelerator, name)
        if builder.is_compatible(verbose=False):
            loaded = builder.load()
            require(loaded is not None, f"load() of {name} returns nothing")
            function = _OF_THE_HOST.get(name)
            has_it = function is None or hasattr(loaded, function)
            require(has_it, f"what load() of {name} returns has no {function}")
        else:
            why = getattr(builder, "incompatibility", lambda: None)()
            incompatible.append(f"{name} ({why})" if why else name)
    if len(incompatible) == len(accelerator.op_builders):
        raise NotOfferedError(f"none of its ops can be built here: {'; '.join(incompatible)}")
    return f"cannot be built here: {'; '.join(incompatible)}" if incompatible else None


@check(
    "op_compiler", "op_compile_flags", "op_include_paths", "op_link_flags",
    promise="op_compiler and the flags compile and link C++ source into a library that works.",
    timeout_s=240, once=True,
)  # fmt: skip
def toolchain(accelerator: Accelerator) -> None:
    for suffix in (".no such kind", ".txt", ".py", "", "cpp"):
        with refused(f'op_compiler("{suffix}")', CompilerNotFoundError):
            accelerator.op_compiler(suffix)
    try:
        compiler = accelerator.op_compiler()
    except CompilerNotFoundError as error:
        raise NotOfferedError(f"there is no compiler here: {error}") from error
    program = Path(compiler[0]) if compiler else Path()
    require(
        program.is_absolute() and os.access(program, os.X_OK),
        f"op_compiler() is {compiler!r}, whose first entry is not the full path of a program",
    )
    with suppress(CompilerNotFoundError):  # it compiles GPU code, which a plain C++ compiler does not
        of_gpus = accelerator.op_compiler(".cu")
        is_plain = of_gpus == compiler and program.name in ("c++", "g++", "clang++")
        require(not is_plain, f'op_compiler(".cu") is {of_gpus}, as for C++')
    flags, links = accelerator.op_compile_flags(), accelerator.op_link_flags()
    folders = accelerator.op_include_paths()
    named = {
        "op_compiler": compiler,
        "op_compile_flags": flags,
        "op_link_flags": links,
        "op_include_paths": folders,
        "op_compile_flags(portable=True)": accelerator.op_compile_flags(".cpp", portable=True),
        "op_link_flags([])": accelerator.op_link_flags([]),
    }
    for what, words in named.items():
        require(
            isinstance(words, list) and all(isinstance(word, str) for word in words), f"{what}() is {words!r}"
        )
    for kind, suffixes in {
        "a set": {".cpp"}, "a frozenset": frozenset((".cpp",)), "a list": [".cpp"], "a tuple": (".cpp",),
        "the keys of a dict": {".cpp": 1}.keys(),
    }.items():  # fmt: skip
        found = accelerator.op_link_flags(suffixes)
        require(found == links, f"op_link_flags() of {kind} is {found}, and {links} without an argument")
    for folder in folders:
        require(Path(folder).is_dir(), f"op_include_paths() has {folder!r}, which is not a folder")
    with tempfile.TemporaryDirectory() as temporary:
        source, library = Path(temporary) / "twice.cpp", Path(temporary) / "twice.so"
        source.write_text(_SOURCE)
        includes = [argument for path in folders for argument in ("-isystem", path)]
        command = [*compiler, *flags, *includes, "-shared", str(source), *links, "-o", str(library)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            plain = [compiler[0], "-fPIC", "-shared", str(source), "-o", str(library)]
            parts = {"op_include_paths": includes, "op_link_flags": links, "op_compile_flags": flags}
            alone = (name for name, part in parts.items() if _fails([*plain, *part]))
            raise BrokenPromiseError(
                f"{next(alone, 'op_compiler')}() fails in {shlex.join(command)}: {made.stderr[-400:]}"
            )
        twice = ctypes.CDLL(str(library)).twice
        twice.restype, twice.argtypes = ctypes.c_int64, [ctypes.c_int64]
        require(twice(21) == 42, f"a function that was compiled gives {twice(21)} instead of 42")


def _fails(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


_OF_THIS_MACHINE = ("native", "-xHost", "-xhost")
"""Words in compiler flags that mean the processor of the machine that compiles."""


@check(
    "op_compiler", "op_compile_flags",
    promise="op_compiler follows CXX at each call; flags for all devices name no processor of this machine.",
    once=True,
)  # fmt: skip
def toolchain_by_its_arguments(accelerator: Accelerator) -> None:
    for flag in accelerator.op_compile_flags(portable=True):
        bound = any(flag == word or flag.endswith(f"={word}") for word in _OF_THIS_MACHINE)
        require(
            not bound, f"op_compile_flags(portable=True) has {flag!r}, which means this machine's processor"
        )
    try:
        program = accelerator.op_compiler()[0]
    except CompilerNotFoundError as error:
        raise NotOfferedError(f"there is no compiler here: {error}") from error
    before = os.environ.get("CXX")
    commands = (
        [program], [program, "-DONE"], [program, "-DONE", "-DNAME=two words", "-I/no such folder"], [program],
    )  # fmt: skip
    try:
        for command in commands:
            os.environ["CXX"] = shlex.join(command)
            found = accelerator.op_compiler()
            require(found == command, f"with CXX={os.environ['CXX']} op_compiler() is {found}")
        os.environ["CXX"] = "/no/such/compiler"
        with refused("op_compiler() with CXX=/no/such/compiler", CompilerNotFoundError):
            accelerator.op_compiler()
        del os.environ["CXX"]
        _require_path_is_followed(accelerator)
    finally:
        os.environ.pop("CXX", None)
        if before is not None:
            os.environ["CXX"] = before


def _require_path_is_followed(accelerator: Accelerator) -> None:
    """Without CXX the program is taken from where PATH says, each time."""
    if Path(accelerator.op_compiler()[0]).name not in ("c++", "g++", "clang++"):
        return  # a vendor's own compiler
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "c++"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        with mock.patch.dict(os.environ, {"PATH": os.pathsep.join((folder, os.environ["PATH"]))}):
            found = accelerator.op_compiler()[0]
        require(found == str(program), f"op_compiler() is {found}, with c++ in the first folder of PATH")


@check(
    "build_extension", "op_builders",
    promise="build_extension returns a subclass of torch's setuptools command that builds an op's builder().",
    once=True,
)  # fmt: skip
def ahead_of_time(accelerator: Accelerator) -> None:
    from setuptools import Distribution
    from torch.utils.cpp_extension import BuildExtension

    command = accelerator.build_extension()
    require(
        isinstance(command, type) and issubclass(command, BuildExtension), f"build_extension() is {command!r}"
    )
    for name in accelerator.op_builders:
        builder = builder_of(accelerator, name)
        if not (hasattr(builder, "builder") and builder.is_compatible(verbose=False)):
            continue
        extension = builder.builder()
        if not hasattr(extension, "build_to"):
            continue  # one of torch's
        asked: list[Path] = []
        extension.build_to = lambda path, asked=asked: asked.append(Path(path))  # quicker than a compiler
        with tempfile.TemporaryDirectory() as folder:
            building = command(Distribution({"name": "ahead", "ext_modules": [extension]}))
            building.ensure_finalized()
            building.build_lib, building.build_temp = folder, folder
            building.inplace = False
            try:
                building.run()
            except Exception as error:
                raise BrokenPromiseError(
                    f"build_extension() cannot build builder() of {name}: {describe(error)}"
                ) from error
        require(len(asked) == 1, f"build_extension() does not call build_to() of {name}'s builder()")


def usable_builders(accelerator: Accelerator, names: Iterable[str], otherwise: str) -> list[str]:
    """Those of some op builders that the accelerator has and this machine can build.

    Raises:
        NotOfferedError: there are none; ``otherwise`` is the reason.
    """
    found = [name for name in names if name in accelerator.op_builders]
    usable = [name for name in found if builder_of(accelerator, name).is_compatible(verbose=False)]
    if not usable:
        raise NotOfferedError(otherwise)
    return usable


def builder_of(accelerator: Accelerator, name: str) -> Any:
    """The op builder with a name from ``op_builders``."""
    builder = accelerator.create_op_builder(name)
    if builder is None:
        raise BrokenPromiseError(f'op_builders has "{name}", but create_op_builder("{name}") is None')
    return builder
