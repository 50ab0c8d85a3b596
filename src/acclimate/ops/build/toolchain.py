"""An accelerator's compilers and flags, and the compilers' versions."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from acclimate.cache.folder import check_folder, make_folder, read_file
from acclimate.errors import CompilerNotFoundError, OpBuildError
from acclimate.host.process_status import how_it_ended
from acclimate.ops.build.run_compilers import Compilers, build_timeout_s

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator

_VERSION_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Toolchain:
    """The compilers and flags with which an accelerator builds one op."""

    compilers: Mapping[str, tuple[str, ...]]
    """By suffix of the source: a program's path and its fixed arguments; empty if there is none."""
    flags: Mapping[str, tuple[str, ...]]
    """By suffix of the source: the accelerator's flags."""
    include_paths: tuple[str, ...]
    """The accelerator's folders of headers."""
    link_flags: tuple[str, ...]
    """The accelerator's flags for the linker, which is the C++ compiler."""
    missing: str | None
    """Why there is no compiler for one of the sources; ``None`` if there is one for each."""

    @classmethod
    def of(cls, accelerator: Accelerator, suffixes: Sequence[str]) -> Toolchain:
        """Returns the toolchain of an accelerator, for the devices present."""
        compilers: dict[str, tuple[str, ...]] = {}
        missing = None
        for suffix in suffixes:
            try:
                compilers[suffix] = tuple(accelerator.op_compiler(suffix))
            except CompilerNotFoundError as error:
                compilers[suffix] = ()
                missing = missing or str(error)
        return cls(
            compilers=compilers,
            flags={suffix: tuple(accelerator.op_compile_flags(suffix)) for suffix in suffixes},
            include_paths=tuple(accelerator.op_include_paths()),
            link_flags=tuple(accelerator.op_link_flags(suffixes)),
            missing=missing,
        )

    def portable(self, accelerator: Accelerator) -> Toolchain:
        """Returns the same with the flags for all devices of the accelerator's kind."""
        flags = {suffix: tuple(accelerator.op_compile_flags(suffix, True)) for suffix in self.flags}
        return replace(self, flags=flags)


# -- versions of compilers ---------------------------------------------------------------------------


def compiler_versions(commands: Sequence[tuple[str, ...]], memory: Path | None) -> list[str]:
    """Returns each compiler's output of ``--version``, run with its fixed arguments.

    Running ``--version`` takes longer than the rest of loading a cached op, so the output is stored until the
    program's file changes. Without a ``memory`` file that can be used, they are run each time.

    Raises:
        OpBuildError: a compiler cannot be run.
    """
    known = _remembered(memory) if memory is not None else {}
    versions, asked = [], {}
    for command in commands:
        identity = _identity(command)
        version = known.get(identity) if identity else None
        if version is None:
            version = _ask_version(command)
            if identity:
                asked[identity] = version
        versions.append(version)
    if asked and memory is not None:
        _remember(memory, known | asked)
    return versions


def _identity(command: tuple[str, ...]) -> str:
    """Identifies the program files of a command; "" for a script, which may start any compiler."""
    stamps = []
    for word in command:
        path = Path(os.path.realpath(shutil.which(word) or ""))
        if not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                if file.read(2) == b"#!":
                    return ""
        except OSError:  # executable, but not readable
            return ""
        status = path.stat()
        stamps.append(f"{path}:{status.st_size}:{status.st_mtime_ns}")
    return "|".join([shlex.join(command), *stamps])


def _ask_version(command: tuple[str, ...]) -> str:
    name = f"The compiler {shlex.join(command)}"
    limit_s = min(build_timeout_s() or _VERSION_TIMEOUT_S, _VERSION_TIMEOUT_S)
    try:
        with Compilers(limit_s) as compilers:
            code, answer = compilers.run([*command, "--version"])
    except OpBuildError as error:
        raise OpBuildError(f"{name} does not print its version: {error}.") from error
    if code != 0:
        raise OpBuildError(
            f"{name} cannot be run: with --version it {how_it_ended(code)}.\n{answer}".rstrip()
        )
    return answer.strip()


def _remembered(memory: Path) -> dict[str, str]:
    """Reads the stored outputs; none if the file is damaged or others could have written it."""
    try:
        check_folder(memory.parent)
        known = json.loads(read_file(memory))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {key: value for key, value in known.items() if isinstance(value, str)}


def _remember(memory: Path, versions: dict[str, str]) -> None:
    # Not by replace_file(), which writes through a link and into a pipe that somebody has put there.
    partial = memory.with_name(f".{memory.name}.{secrets.token_hex(4)}")
    # Without room or permission, the compilers are run again next time.
    with contextlib.suppress(OSError):
        make_folder(memory.parent)
        try:
            partial.write_text(json.dumps(versions, indent=1), encoding="utf-8")
            partial.chmod(0o644)
            partial.replace(memory)
        finally:
            partial.unlink(missing_ok=True)
